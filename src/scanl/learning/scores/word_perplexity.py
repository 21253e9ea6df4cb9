r"""Perplexity of a word, whatever the tokens are.

.. math:: \mathrm{perplexity} = \exp\Big(\frac{\text{nats of all tokens}}{\text{words}}\Big)
    = 2^{\text{bits of a token} \cdot \text{tokens of a word}}

Source: Rae et al., "Compressive Transformers for Long-Range Sequence Modelling", arXiv:1911.05507, section 4.2, which
divides by the number of words of the original text, so that models with other tokens can be compared.
"""

from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from scanl.data.questions import NextToken
from scanl.learning.scores.base import Total, score
from scanl.learning.scores.bits import bits


@dataclass(frozen=True)
class Exponent(Total):
    """Bits of some words, as many as the tokens that they stand for make on average."""

    bits: float

    def __add__(self, other: Any) -> "Exponent":
        return Exponent(self.bits + other.bits)

    def __truediv__(self, count: int) -> float:
        return 2 ** (self.bits / count)


@score("word perplexity")
def word_perplexity(question: NextToken, outputs: Tensor, targets: Tensor) -> tuple[Exponent, int]:
    """Return the bits of tokens (n,) by logits (n, V), times the tokens of a word, and how many tokens there are."""
    total, count = bits(question, outputs, targets)
    return Exponent(cast(float, total) * question.tokens_per_word), count
