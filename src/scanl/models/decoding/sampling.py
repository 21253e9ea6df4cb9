"""Sample the next token from logits, and check the options of sampling."""

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from scanl.errors import DivergenceError
from scanl.options import PositiveOrNone, Range, at_least, check, options
from scanl.whole import whole_number

TINY_NUMBER = torch.finfo(torch.float32).tiny


def distribution(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """Return probabilities (..., V) after temperature, top-k and top-p filtering, in this order, renormalised.

    temperature: divides the logits.   top_k: keep the k most likely tokens, and ties with the k-th.
    top_p: keep the smallest set of most likely tokens whose total probability reaches p, at least one token
    (Holtzman et al., arXiv:1904.09751).
    """
    if temperature != 1 or logits.dtype != torch.float32:
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        # Relative to the largest one, so that no quotient overflows but to -inf. A smaller temperature is 0 in float32.
        logits = (logits - logits.amax(-1, keepdim=True)) / max(temperature, TINY_NUMBER)
    logits = logits.float()
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        likelier = ordered.cumsum(-1) - ordered  # total probability of all likelier tokens
        ordered = ordered.masked_fill((likelier >= top_p) & (likelier > 0), 0)  # top_p may be 0 in float32
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


def sample(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw one token (B,) int64 for each row of logits (B, V). Temperature 0 takes the most likely token.

    Raises DivergenceError on the CPU, if it draws where a logit is NaN or the largest one is infinite.
    """
    if temperature == 0:
        return logits.argmax(-1)
    probabilities = distribution(logits, temperature, top_k, top_p)
    return winners(logits, probabilities, torch.empty_like(probabilities).exponential_(generator=generator))


def winners(logits: Tensor, probabilities: Tensor, numbers: Tensor) -> Tensor:
    """Return the tokens (B,) that exponential random numbers (B, V) choose by probabilities: that of these logits.

    What `torch.multinomial` draws by, in half of its time: it looks at all probabilities several times.
    """
    races, tokens = (probabilities / numbers).max(-1)
    if races.is_cpu and not math.isfinite(races.sum().item()):
        check_largest(float(logits.amax()))
    return tokens


def check_largest(largest: float) -> None:
    """Raise DivergenceError unless the largest logit of a row is finite. That of a row with a NaN is NaN."""
    if not math.isfinite(largest):
        raise DivergenceError(f"sample: the largest logit of the next token is {largest}, expected a finite number")


@dataclass
class Choice:
    """The rule by which a token is drawn: `sample` with its options. generator: None for torch's default one."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Draw one token (B,) for each row of logits (B, V)."""
        return sample(logits, self.temperature, self.top_k, self.top_p, self.generator)

    def ahead(self, device: torch.device) -> "Choice":
        """Return a choice that draws by the random numbers which come next here, and leaves them to be drawn here."""
        if self.temperature == 0:
            return self
        generator = _default_generator(device) if self.generator is None else self.generator
        return Choice(self.temperature, self.top_k, self.top_p, generator.clone_state())


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    return getattr(torch, device.type).default_generators[device.index or 0]


def check_options(
    who: str,
    temperature: Annotated[float, at_least(0)],
    top_k: PositiveOrNone = None,
    top_p: Annotated[float | None, Range("in (0, 1]", lambda share, _: 0 < share <= 1)] = None,
) -> None:
    """Raise ConfigError for sampling options out of range. who: the function, for the message."""
    check(who, options(check_options), {"temperature": temperature, "top_k": top_k, "top_p": top_p})


def as_generator(who: str, seed: Any, device: torch.device) -> torch.Generator | None:
    """Return the generator or None for a seed: a new generator for a whole number, a generator as it is, and None for
    None.

    Raises ConfigError for anything else.
    """
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    return torch.Generator(device).manual_seed(whole_number(who, "seed", seed))


def as_limit(who: str, name: str, limit: Any) -> int | None:
    """Return the greatest number of steps, None for no limit. Raises ConfigError unless it is a whole number."""
    return None if limit is None else whole_number(who, name, limit)
