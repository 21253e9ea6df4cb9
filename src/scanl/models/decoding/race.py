"""The draw of tokens by one kernel: four calls of torch take as long as a third of a small step."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scanl.models.decoding.sampling import TINY_NUMBER, Choice, distribution, winners

if TYPE_CHECKING:
    from scanl.ops._compiler.recorded import RecordedFunction

# By how much races may differ from those of `sample`: an exponent that is not 0 in float32 is at most 104, and is
# rounded twice on both sides; exponential, quotient and sum are rounded too.
MARGIN = 512 * torch.finfo(torch.float32).eps
MAX_LOGITS = 1 << 16  # logits of all rows; with more, torch's threads make up for its calls


class Race:
    """Draws one token for each row of logits (B, V) of float32 that stay where they are.

    A token is the one that `sample` draws by the same random numbers. Where the two best of a row are so close that
    rounding could decide, and where logits are not finite, `sample` decides.

    targets: (B,) int64, the places for the tokens.
    """

    def __init__(self, logits: Tensor, targets: Sequence[Tensor]) -> None:
        self._logits, self._targets = logits, targets
        self._numbers, self._temperature = torch.ones_like(logits), torch.ones((), device="cpu")
        self._certain = torch.zeros((), dtype=torch.bool, device="cpu")
        operands = [logits, self._numbers, self._temperature]
        recorded = _recorded(*logits.shape)
        self._calls = [recorded.bound(operands, [target, self._certain]) for target in targets]
        self._greedy, self._heat = True, 1.0

    @staticmethod
    def runs(choice: Choice, logits: Tensor) -> bool:
        """Return whether it can draw what a choice draws from these logits."""
        plain = choice.top_k is None and choice.top_p is None
        return plain and logits.dtype == torch.float32 and 0 < logits.numel() <= MAX_LOGITS

    def draw(self, choice: Choice, at: int) -> None:
        """Write the tokens that a choice draws to a target."""
        greedy = choice.temperature == 0
        heat = 1.0 if greedy else max(choice.temperature, TINY_NUMBER)
        if heat != self._heat:
            self._temperature.fill_(heat)
            self._heat = heat
        if not greedy:
            self._numbers.exponential_(generator=choice.generator)
        elif not self._greedy:
            self._numbers.fill_(1)
        self._greedy = greedy
        self._calls[at]()
        if not self._certain.item():
            self._targets[at].copy_(self._by_torch(choice))

    def _by_torch(self, choice: Choice) -> Tensor:
        if choice.temperature == 0:
            return choice(self._logits)
        return winners(self._logits, distribution(self._logits, choice.temperature), self._numbers)


def race(logits: Tensor, numbers: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Return the token of each row that wins, and whether rounding decides in no row."""
    largest = logits.amax(-1, keepdim=True)
    races = ((logits - largest) / temperature).exp() / numbers
    best = races.amax(-1, keepdim=True)
    near = (races >= best * (1 - MARGIN)).float().sum(-1)
    finite = (logits <= largest).all(-1) & (best < torch.inf).squeeze(-1)  # no NaN is less or equal
    return races.argmax(-1), ((near == 1) & finite).all()


@functools.lru_cache(maxsize=16)
def _recorded(rows: int, vocabulary: int) -> "RecordedFunction":
    from scanl.ops._compiler.recorded import RecordedFunction

    examples = [torch.zeros(rows, vocabulary, device="cpu", dtype=torch.float32) for _ in range(2)]
    with torch.no_grad():
        return RecordedFunction(race, *examples, torch.ones((), device="cpu", dtype=torch.float32))
