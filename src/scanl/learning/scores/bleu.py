r"""BLEU: how many pieces of one to four words the answers share with the right answers, in percent.

.. math:: \mathrm{BLEU} = 100 \min\big(1, e^{1 - r/c}\big) \prod_{n=1}^{4} p_n^{1/4}

p_n is the share of the pieces of n words that a right answer has too, c and r are the lengths of all answers and of all
right answers. It is computed by sacrebleu with its defaults: with capitals, tokens "13a", exponential smoothing.

Source: Papineni et al., "BLEU: a Method for Automatic Evaluation of Machine Translation", ACL 2002; Post, "A Call for
Clarity in Reporting BLEU Scores", arXiv:1804.08771.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scanl.errors import ConfigError
from scanl.learning.scores.base import Total, score


@dataclass(frozen=True)
class TextTotal(Total):
    """Answers and right answers."""

    answers: tuple[str, ...]
    right: tuple[str, ...]

    def __add__(self, other: Any) -> "TextTotal":
        return TextTotal(self.answers + other.answers, self.right + other.right)

    def __truediv__(self, count: int) -> float:
        try:
            from sacrebleu import corpus_bleu  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ConfigError("BLEU: sacrebleu is not installed; pip install 'scanl[bleu]'") from error
        return corpus_bleu(list(self.answers), [list(self.right)]).score


@score("BLEU")
def bleu(question: Any, outputs: Sequence[str], targets: Sequence[str]) -> tuple[TextTotal, int]:
    """Return the texts that a model has written, the right ones, and how many there are. Needs `scanl[bleu]`."""
    return TextTotal(tuple(outputs), tuple(targets)), len(targets)
