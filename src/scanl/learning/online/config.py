"""The configuration of `scanl learn`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from scanl.errors import ConfigError
from scanl.learning.algorithms import algorithms
from scanl.learning.online.online import FADE, WAITING, Fade, Online, Waiting
from scanl.learning.run.config import StackConfig
from scanl.learning.run.configuration import Configuration
from scanl.models import Stack
from scanl.options import COLUMN, NAME, PATH, Placeholder, above, at_least, check_options, one_of, options

QUESTIONS = ("number", "class")
DETECTORS = ("adwin", "kswin")


@dataclass
class StreamConfig:
    """The stream, and how it is read."""

    topic = "stream"

    data: Annotated[
        str | None,
        Placeholder("-|FILE|NAME"),
        "-: lines of standard input; a file of CSV, JSON lines or numbers; the name of a stream; or river:NAME, a data "
        "set of river",
    ] = None
    data_options: Annotated[dict[str, Any], "options of the named stream"] = field(default_factory=dict)
    target: Annotated[str | None, COLUMN, "column of the truths; none: the only column of numbers"] = None
    question: Annotated[
        str | None, one_of(QUESTIONS), "number or class; none: a class if the first truth is text or a truth value"
    ] = None
    classes: Annotated[int, at_least(2), "largest number of classes"] = 10
    horizon: Annotated[
        int | None, at_least(1), "predict the target this many samples ahead; none: that of the same line, if there "
        "are other columns, else the next"
    ] = None  # fmt: skip
    leave_out: Annotated[list[str], COLUMN, "columns that are not read"] = field(default_factory=list)
    key: Annotated[
        str | None, COLUMN, "columns that name a sample, with commas: a later line of the same key may bring its truth"
    ] = None  # fmt: skip
    delay: Annotated[int, at_least(0), "samples after which the truth of a line becomes known"] = 0
    waiting: Waiting = WAITING
    feedback: Annotated[bool, "the last truth that is known is an input too"] = True
    follow: Annotated[bool, "wait for new lines at the end of the file"] = False
    samples: Annotated[int | None, above(0), "end after this many samples; none: with the stream"] = None
    on_error: Annotated[str, one_of(("skip", "stop")), "what to do at a line that cannot be read: skip or stop"] = (
        "stop"
    )


LEARNING = (  # options of `Online`
    *("algorithm", "algorithm_options", "optimizer", "lr", "weight_decay", "clip", "block", "compile_after", "span"),
)
IN_A_FILE: dict[str, tuple[Any, Callable[[Any], Any]]] = {  # other types that a file can hold, from the defaults
    "algorithm_options": (dict[str, Any], lambda _: {}),
    "lr": (list[float], lambda rate: [rate]),
}


def _learning_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield a field for each option of `LEARNING`: its name, its type with its meaning and ranges, and its default."""
    known = options(Online)
    for name in LEARNING:
        word = Placeholder(known[name].placeholder)
        kind, as_in_file = IN_A_FILE.get(name, (Annotated[known[name].type, word], lambda value: value))
        default = field(default_factory=partial(as_in_file, known[name].default))
        yield name, Annotated[(kind, *known[name].ranges, known[name].meaning)], default


LearningConfig = make_dataclass("LearningConfig", _learning_fields(), namespace={"topic": "learning"})
LearningConfig.__module__ = __name__
LearningConfig.__doc__ = "How the model learns: options of `Online`, as values that a file can hold."


@dataclass
class ScoringConfig:
    """How the answers are scored."""

    topic = "scoring"

    metrics: Annotated[list[str], NAME, "metrics of river; none: MAE and RMSE, or Accuracy and MacroF1"] = field(
        default_factory=list
    )
    window: Annotated[int, at_least(1), "answers in the sliding window"] = 1000
    fade: Fade = FADE
    drift: Annotated[str | None, one_of(DETECTORS), f"drift detector of river: {', '.join(DETECTORS)}"] = None
    score_every: Annotated[int, at_least(1), "scored answers between two rows of scores.csv"] = 1000


@dataclass
class OnlineRunConfig:
    """The folder of the run, and the process."""

    topic = "run"

    out: Annotated[str | None, PATH, "folder for predictions, scores and the checkpoint; none: no files"] = None
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
    topics: ClassVar = {
        "stream": "what is read, which column is the truth, and when it is known",
        "model": "the layers (`scanl list`; options of one: `scanl show LAYER`)",
        "learning": "how fast and by which algorithm it learns",
        "scoring": "how the answers are scored",
        "run": "the run folder and the process",
    }

    stack: Any = field(default_factory=_small)
    stream: StreamConfig = field(default_factory=StreamConfig)
    learning: Any = field(default_factory=LearningConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    run: OnlineRunConfig = field(default_factory=OnlineRunConfig)

    def check(self) -> None:
        """Raise ConfigError for a value out of range, and for options that exclude each other."""
        super().check()
        check_options("stack", Stack, vars(self.stack))
        chosen = algorithms.get(self.learning.algorithm)
        check_options(self.learning.algorithm, chosen, self.learning.algorithm_options)
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
