"""Selective copying."""

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from scanl.data.batch import Batch
from scanl.options import Positive, at_least
from scanl.tasks.base import IGNORED, Task, draw_distinct, register

NOISE = 0


@register("selective_copy")
@dataclass(frozen=True)
class SelectiveCopying(Task):
    """Selective copying: repeat, in order, the symbols that were scattered among noise.

    The input is K symbols, each uniform in 1 ... V - 2, at random positions among n noise tokens (0), then K markers
    (V - 1). Any K of the n + K positions are equally likely. The answers at the markers are the symbols in order.
    T = n + 2K steps. Unlike in `copy`, the position of a symbol is not known, so the model has to decide by content
    what to keep. Gu and Dao do not say whether their length 4096 counts the symbols and the markers; here n counts the
    noise only.

    Args:
        length: n, number of noise tokens.
        num_symbols: K.
        vocab_size: V: noise, V - 2 symbols, marker.

    inputs, targets: (N, n + 2K) int64; scored at the last K steps.
    Chance: 1 of V - 2 symbols.
    """

    id = "B-selcopy"
    aliases = ("selective_copying",)
    source = (
        'Jing et al., "Gated Orthogonal Recurrent Units: On Learning to Forget", arXiv:1706.02761 ("denoise"); '
        'sizes of Gu and Dao, "Mamba", arXiv:2312.00752, section 4.1.1'
    )

    length: Annotated[int, at_least(0, "noise tokens")] = 4096
    num_symbols: Positive = 16
    vocab_size: Annotated[int, at_least(3, "because of the noise and the marker")] = 16

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 2)

    def _generate(self, count: int, random: np.random.Generator) -> Batch:
        size, marker = self.num_symbols, self.vocab_size - 1
        inputs = np.full((count, self.length + 2 * size), NOISE, np.int64)
        targets = np.full_like(inputs, IGNORED)
        symbols = random.integers(1, marker, (count, size))
        places = np.sort(draw_distinct(random, count, self.length + size, size), axis=1)
        np.put_along_axis(inputs, places, symbols, axis=1)
        inputs[:, -size:] = marker
        targets[:, -size:] = symbols
        return Batch(inputs, targets)

    def solve(self, inputs: NDArray[Any]) -> NDArray[Any]:
        answers = np.zeros_like(inputs)
        for sequence, answer in zip(inputs, answers, strict=True):
            symbols = [token for token in sequence if 0 < token < self.vocab_size - 1]
            steps = [t for t, token in enumerate(sequence) if token == self.vocab_size - 1]
            for t, token in zip(steps, symbols, strict=True):
                answer[t] = token
        return answers
