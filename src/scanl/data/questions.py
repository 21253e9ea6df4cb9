"""Questions that a source asks a model: one class for each question, and the two forms of inputs.

`scanl.learning.questions` has a file for each question: its model, loss, answers and scores. A new question is one new
file, which holds its class and registers what learning does for it.

loss: of all questions, a name of `scanl.learning.losses`.   scores: names of `scanl.learning.scores`; the first is the
metric of the source.
"""

from dataclasses import dataclass
from typing import ClassVar, cast

Scales = tuple[tuple[float, float], ...]  # location, and scale above 0, of each channel


@dataclass(frozen=True)
class Vocabulary:
    """Inputs (N, T) that are tokens: integers from 0 to size - 1."""

    size: int

    @property
    def width(self) -> int:
        """Number of channels."""
        return 1


@dataclass(frozen=True)
class FeatureInputs:
    """Inputs (N, T, count) that are features.

    scales: the model standardises the channels by these; None if the source has standardised them. A source measures
    them on its training part alone.   missing: whether a NaN means that a number is missing.
    """

    count: int
    scales: Scales | None = None
    missing: bool = False

    @property
    def width(self) -> int:
        """Number of channels."""
        return self.count


Inputs = Vocabulary | FeatureInputs


class Question:
    """Question to a model. A subclass is a frozen dataclass with the fields that its model, loss and scores read.

    real: whether targets are real numbers; otherwise they are integers.
    """

    real: ClassVar[bool] = False

    def of_inputs(self) -> "tuple[Question, str] | None":
        """Return the question for the inputs alone, and the name of its score; None if this one asks for its inputs."""
        inputs: Inputs = self.inputs  # pyright: ignore[reportAttributeAccessIssue]: of all questions that ask for others
        if isinstance(inputs, Vocabulary):
            tokens = cast(FeatureInputs, inputs)  # which a labeler reads too
            return Label(tokens, inputs.size), "accuracy"
        return Numbers(inputs, inputs.count), "mean squared error"


@dataclass(frozen=True)
class NextToken(Question):
    """The next token at every step of tokens. targets: (N, T) integers, IGNORED where there is no target.

    tokens_per_word: of the text of an exam, for the score "word perplexity".
    """

    inputs: Vocabulary
    loss: str = "cross_entropy"
    scores: tuple[str, ...] = ("bits",)
    tokens_per_word: float = 1.0

    def of_inputs(self) -> None:
        return None


@dataclass(frozen=True)
class TokenLabel(Question):
    """A token of the vocabulary at some steps of tokens. targets: (N, T) integers, IGNORED at the other steps.

    written: scores of the text that a model writes in the place of a row's answers, if the tokens are bytes. The last
    answer of a row is the end of its text.
    """

    inputs: Vocabulary
    loss: str = "cross_entropy"
    scores: tuple[str, ...] = ("accuracy",)
    written: tuple[str, ...] = ()

    def of_inputs(self) -> tuple[Question, str]:
        return NextToken(self.inputs), "bits per token"


@dataclass(frozen=True)
class Label(Question):
    """One of `classes` at some steps of features. targets: (N, T) integers, IGNORED at the other steps."""

    inputs: FeatureInputs
    classes: int
    loss: str = "cross_entropy"
    scores: tuple[str, ...] = ("accuracy",)


@dataclass(frozen=True)
class Class(Question):
    """One of `classes` for the whole sequence. targets: (N,) integers."""

    inputs: Inputs
    classes: int
    loss: str = "cross_entropy"
    scores: tuple[str, ...] = ("accuracy",)


@dataclass(frozen=True)
class Number(Question):
    """A number for the whole sequence. targets: (N,).

    scale: location and scale of the number: a head predicts it in this unit; None for 0 and 1.
    distribution: a head, by name: "points", "quantiles", "gaussian", "student_t" or "negative_binomial". It has the
    loss.
    """

    real: ClassVar[bool] = True
    inputs: Inputs
    scale: tuple[float, float] | None = None
    distribution: str = "points"
    scores: tuple[str, ...] = ("squared error",)


@dataclass(frozen=True)
class Numbers(Question):
    """`count` numbers at every step of features. targets: (N, T, count) float32, NaN where there is no target."""

    real: ClassVar[bool] = True
    inputs: FeatureInputs
    count: int
    loss: str = "squared_error"
    scores: tuple[str, ...] = ("squared error",)


@dataclass(frozen=True)
class Flags(Question):
    """`count` answers of yes and no at every step of features; the model returns their logits.

    targets: (N, T, count) float32 of 1 and 0, NaN where no answer is wanted.
    """

    real: ClassVar[bool] = True
    inputs: FeatureInputs
    count: int
    loss: str = "binary_cross_entropy"
    scores: tuple[str, ...] = ("nats",)


@dataclass(frozen=True)
class ForecastQuestion(Question):
    """The numbers of the next `horizon` steps, at every step of `SeriesColumns`. targets: (N, T, horizon, target).

    NaN is a missing number, in the inputs and in the targets. In an exam the targets are `Outcomes` of the forecast
    after the last step.

    target, past, static, future: number of columns of each kind, as in `SeriesColumns`.   scales: of these columns, in
    this order; None if the source has standardised them.   timed: whether the steps have durations.   season: steps of
    a season. By default a forecast has a linear map of this many last values.   second: steps of a longer season; 1:
    none.   distribution: a head, by name, as in `Number`.
    """

    real: ClassVar[bool] = True
    horizon: int
    target: int = 1
    past: int = 0
    static: int = 0
    future: int = 0
    scales: Scales | None = None
    timed: bool = False
    season: int = 1
    second: int = 1
    distribution: str = "points"
    scores: tuple[str, ...] = ("CRPS", "MASE", "coverage")

    def of_inputs(self) -> None:
        return None
