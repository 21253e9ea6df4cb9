"""The configuration of `scanl learn`."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from scanl.errors import ConfigError
from scanl.learning.algorithms import algorithms
from scanl.learning.online.build import COMPILE_AFTER, FADE, SPAN
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run.config import StackConfig
from scanl.learning.run.configuration import Configuration
from scanl.models import Stack
from scanl.options import above, at_least, between, check_options, one_of

QUESTIONS = ("number", "class")
DETECTORS = ("adwin", "kswin")


@dataclass
class StreamConfig:
    """The stream, and how it is read."""

    data: Annotated[
        str | None,
        "-: lines of standard input; a file of CSV, JSON lines or numbers; the name of a stream; or river:NAME, a data "
        "set of river",
    ] = None
    data_options: Annotated[dict[str, Any], "options of the named stream"] = field(default_factory=dict)
    target: Annotated[str | None, "column of the truths; none: the only column of numbers"] = None
    question: Annotated[
        str | None, one_of(QUESTIONS), "number or class; none: a class if the first truth is text or a truth value"
    ] = None
    classes: Annotated[int, at_least(2), "largest number of classes"] = 10
    horizon: Annotated[
        int | None, at_least(1), "predict the target this many samples ahead; none: that of the same line, if there "
        "are other columns, else the next"
    ] = None  # fmt: skip
    leave_out: Annotated[list[str], "columns that are not read"] = field(default_factory=list)
    key: Annotated[
        str | None, "column that names a sample: a later line of the same key may bring its truth"
    ] = None  # fmt: skip
    delay: Annotated[int, at_least(0), "samples after which the truth of a line becomes known"] = 0
    waiting: Annotated[int, at_least(1), "samples that may wait for their truth; the first one beyond is given up"] = (
        1000
    )
    feedback: Annotated[bool, "the last truth that is known is an input too"] = True
    follow: Annotated[bool, "wait for new lines at the end of the file"] = False
    samples: Annotated[int | None, above(0), "end after this many samples; none: with the stream"] = None
    on_error: Annotated[str, one_of(("skip", "stop")), "what to do at a line that cannot be read"] = "stop"


@dataclass
class LearningConfig:
    """How the model learns."""

    algorithm: Annotated[str, "how the gradient is computed: a registered algorithm, such as bptt"] = "bptt"
    algorithm_options: Annotated[dict[str, Any], "options of the algorithm"] = field(default_factory=dict)
    optimizer: Annotated[str, one_of(OPTIMIZERS), f"how the weights change: {', '.join(OPTIMIZERS)}"] = "adamw"
    lr: Annotated[list[float], "learning rate; of several, the best so far answers"] = field(
        default_factory=lambda: [1e-3]
    )
    weight_decay: Annotated[float, at_least(0), "weight decay, only on the weights of linear maps"] = 0.0
    clip: Annotated[float, above(0), "largest norm of the gradient"] = 1.0
    block: Annotated[int, at_least(1), "samples of an update"] = 1
    compile_after: Annotated[
        int | None, at_least(0), "answers, and updates, after which each runs as one kernel of the CPU, which takes "
        "about half a minute to compile for the first time; none: never"
    ] = COMPILE_AFTER  # fmt: skip
    span: Annotated[int, at_least(2), "numbers after which the past fades in the running means"] = SPAN


@dataclass
class ScoringConfig:
    """How the answers are scored."""

    metrics: Annotated[list[str], "metrics of river; none: MAE and RMSE, or Accuracy and MacroF1"] = field(
        default_factory=list
    )
    window: Annotated[int, at_least(1), "answers in the sliding window"] = 1000
    fade: Annotated[float, between(0, 1), "factor by which a score fades with each answer"] = FADE
    drift: Annotated[str | None, one_of(DETECTORS), f"drift detector of river: {', '.join(DETECTORS)}"] = None
    score_every: Annotated[int, at_least(1), "scored answers between two rows of scores.csv"] = 1000


@dataclass
class OnlineRunConfig:
    """The folder of the run, and the process."""

    out: Annotated[str | None, "folder for predictions, scores and the checkpoint; none: no files"] = None
    save_seconds: Annotated[float, at_least(0), "seconds between two checkpoints"] = 30.0
    replayed: Annotated[
        bool, "when resumed, the stream begins again, and what was read is passed over; false: it goes on"
    ] = True
    seed: Annotated[int, at_least(0), "of the weights, and of a generated stream"] = 0
    threads: Annotated[int, at_least(1), "of torch; small models are fastest with one"] = 1


def _small(**values: Any) -> Any:
    """Return the options of a stack that is small unless its options say otherwise."""
    return StackConfig(**{"layer": "lru", "dim": 64, "depth": 1, **values})


@dataclass
class LearnConfig(Configuration):
    """The options of `scanl learn`, in five parts. The file `config.yaml` of a run holds one."""

    command = "learn"
    noun = "run of scanl learn"

    stack: Any = field(default_factory=_small)
    stream: StreamConfig = field(default_factory=StreamConfig)
    learning: LearningConfig = field(default_factory=LearningConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    run: OnlineRunConfig = field(default_factory=OnlineRunConfig)

    def check(self) -> None:
        """Raise ConfigError for a value out of range, and for options that exclude each other."""
        super().check()
        check_options("stack", Stack, vars(self.stack))
        chosen = algorithms.get(self.learning.algorithm)
        check_options(self.learning.algorithm, chosen, self.learning.algorithm_options)
        if not self.learning.lr or any(not 0 <= rate < float("inf") for rate in self.learning.lr):
            raise ConfigError(f"learn: lr is {self.learning.lr}, expected rates of at least 0")
        stream = self.stream
        if stream.data is None:
            raise ConfigError("learn: data is none, expected a stream; for standard input give -")
        if stream.key is not None and (stream.horizon or stream.delay):
            raise ConfigError("learn: key is given with horizon or delay, expected one of them; leave one out")
        ahead = (stream.horizon or 1) + stream.delay
        if stream.key is None and ahead > stream.waiting:
            raise ConfigError(
                f"learn: waiting is {stream.waiting}, expected at least {ahead} because of horizon and delay; a truth "
                "that comes later is lost"
            )
        if stream.follow and (stream.data == "-" or stream.data.startswith("river:")):
            raise ConfigError(f"learn: follow is given with {stream.data}, expected a file; leave it out")

    def check_resumable(self, other: "LearnConfig") -> None:
        """Raise ConfigError when another configuration differs in an option that changes the results."""
        free = {"data", "follow", "samples", "on_error", "out", "save_seconds", "replayed"}
        old, new = self.options(), other.options()
        for name in old:
            if name not in free and old[name] != new[name]:
                raise ConfigError(
                    f"learn: {name} is {new[name]}, expected {old[name]} because of the run to resume; leave the "
                    "option out"
                )
