"""Answers of yes and no at every step, by a labeler."""

from scanl.data.questions import Flags
from scanl.learning.questions.base import answers
from scanl.learning.questions.numbers import NumbersAnswerer


@answers(Flags)
class FlagsAnswerer(NumbersAnswerer):
    """Answers as for `Numbers`; the outputs are logits."""
