"""The configuration of a training run, and what is made of it."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_args, get_origin

import torch

import scanl.tasks  # registers the tasks as sources  # noqa: F401
from scanl.data import Folders, OwnSignals, Question, ShardedText, Source, Table, Text, sources
from scanl.data.base import Entry
from scanl.data.inputs_alone import InputSource
from scanl.data.questions import ForecastQuestion
from scanl.data.series.columns import KINDS, ending
from scanl.data.series.table import ASKS, LongTable
from scanl.data.shards.listing import is_sharded
from scanl.errors import ConfigError, ScanlError
from scanl.files import PRETRAINED_NAME
from scanl.learning.algorithms import Algorithm, algorithms
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.questions import Model, answerer
from scanl.learning.questions.base import FilterOptions
from scanl.learning.questions.forecast import ForecastAnswerer, ForecastOptions
from scanl.learning.questions.next_token import TokenOptions
from scanl.learning.run.configuration import Configuration, options_of
from scanl.models import Stack
from scanl.models.heads.distributions import HEADS
from scanl.options import (
    COLUMN,
    NAME,
    PATH,
    Placeholder,
    above,
    at_least,
    below,
    check_options,
    one_of,
    options,
)

OF_FOLDERS: dict[str, type[Folders]] = {source.asks: source for source in (Folders, OwnSignals)}
OWN_SOURCES = (
    Text.name,
    Table.name,
    ShardedText.name,
    *(source.name for source in OF_FOLDERS.values()),
)  # sources of the user's own files


FSDP = "fsdp"  # the strategy that divides the model; it is torch's second FSDP, not lightning's of that name
DEFAULTS = {"dim": 256, "depth": 4}  # of arguments of `Stack` that have none


def _stack_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield a field for each argument of `Stack`: its name, its type with its meaning, and its default.

    A mapping is a dictionary in a file, and a layer is text.
    """
    for option in options(Stack).values():
        arms = get_args(option.type) or (option.type,)
        if any(get_origin(arm) is Mapping for arm in arms):
            yield option.name, Annotated[dict[str, Any], option.meaning], field(default_factory=dict)
        else:
            default = DEFAULTS.get(option.name, option.default)
            kind = Annotated[str, NAME] if str in arms else option.type
            yield option.name, Annotated[kind, option.meaning], field(default=default)


StackConfig = make_dataclass("StackConfig", _stack_fields(), namespace={"topic": "model"})
StackConfig.__module__ = __name__
StackConfig.__doc__ = "The arguments of `Stack`, as values that a file can hold. `layer` may be names with commas."


@dataclass
class HeadConfig(ForecastOptions, TokenOptions, FilterOptions):
    """Use of the stack's output by the model, except what the source's question determines."""


@dataclass
class SeriesForecastOptions:
    """Options of reading a table that is forecast."""

    topic = "forecast"

    horizon: Annotated[int, "steps to forecast; 1 to generate"] = 12
    season: Annotated[int | None, "steps of a season; none: of the calendar, or else of the numbers"] = None
    freq: Annotated[
        str | None, "how far a step is from the next, as pandas says it: h, D, B, ME; none: as inferred"
    ] = None
    past: Annotated[list[str], COLUMN, "columns that are known up to the present"] = field(default_factory=list)
    future: Annotated[list[str], COLUMN, "columns that are known ahead"] = field(default_factory=list)
    holidays: Annotated[
        str | None, Placeholder("COUNTRY"), "country whose holidays are known ahead: US, DE-BE, ..."
    ] = None
    origins: Annotated[
        int | None, "learn only the forecasts after this many last steps of a window; none: after all steps"
    ] = None
    distribution: Annotated[str, NAME, f"distribution of the answers: {', '.join(HEADS)}"] = "gaussian"


@dataclass
class SourceConfig(SeriesForecastOptions):
    """The training data, and the options of reading it."""

    topic = "data"

    data: Annotated[
        list[str],
        Placeholder("NAME_OR_PATH"),
        "files, folders, or the name of a task or a data set; of a text, read as bytes, or as documents if they are "
        "Parquet, JSON lines or tar, also by globs and URLs; with --question a table, or a folder of files; none: "
        "Python's library",
    ] = field(default_factory=list)
    data_options: Annotated[dict[str, Any], "options of the task or data set"] = field(default_factory=dict)
    question: Annotated[
        str | None, NAME, f"about a table: {', '.join(ASKS)}; about a folder of files: {', '.join(OF_FOLDERS)}"
    ] = None
    target: Annotated[str | None, COLUMN, "of a table: column of the answers; to forecast, several with commas"] = None
    time: Annotated[str | None, COLUMN, "of a table: column of the times"] = None
    series: Annotated[str | None, COLUMN, "of a table: columns of the series' names, with commas; none: one"] = None
    static: Annotated[list[str], COLUMN, "of a table: columns that are constant over a series"] = field(
        default_factory=list
    )
    gaps: Annotated[
        str | None,
        Placeholder("fill|durations"),
        "of a table: steps absent from regular times: fill or durations; none: fill if they are few",
    ] = None
    split: Annotated[str | None, Placeholder("time|series"), "of a table: split by time or by series"] = None
    validation: Annotated[float, "with --question: fraction that is measured while training"] = 0.1
    test: Annotated[float, "with --question: fraction that is measured at the end"] = 0.2
    held_out: Annotated[float, above(0), below(1), "fraction of the text, by file, that is never trained on"] = 0.05
    sequence_length: Annotated[int, at_least(1), "bytes in a training sequence"] = 256
    batch_size: Annotated[int, at_least(1), "sequences in a step of one process"] = 8
    carry_state: Annotated[bool, "long texts: carry the state from chunk to chunk, without its gradient"] = False
    inputs_alone: Annotated[bool, "learn to predict the inputs, and not the answers: what --pretrain does first"] = (
        False
    )
    eval_bytes: Annotated[
        int, at_least(1), "held-out bytes in each measurement while training: a sample spread over all"
    ] = 16384
    eval_examples: Annotated[int, at_least(1), "of a task: fresh examples in each of these measurements"] = 512


@dataclass
class TrainingConfig:
    """The optimizer, the length of training and the learning rate."""

    topic = "training"

    steps: Annotated[int | None, at_least(0), "optimizer steps; none: from minutes, or 1000"] = None
    minutes: Annotated[
        float | None,
        above(0),
        "minutes of training, instead of steps; as many steps as fit, revised during the run; of a forecast: of "
        "planned work",
    ] = None
    pretrain: Annotated[
        int | None,
        at_least(1),
        "self-pretraining: so many steps first, in the folder pretraining of the run, that predict the task's own "
        "inputs: the next one, or hidden ones for layers of both directions; none: no such steps",
    ] = None
    accumulate: Annotated[
        int, at_least(1), "updates for an optimizer step, which takes the mean of their gradients"
    ] = 1
    recompute: Annotated[bool, "keep only what enters each block in memory; the backward pass runs the block again"] = (
        False
    )
    algorithm: Annotated[
        str,
        NAME,
        "how the gradient is computed: a registered algorithm, such as bptt; `scanl algorithms` lists them",
    ] = "bptt"
    algorithm_options: Annotated[dict[str, Any], "options of the algorithm"] = field(default_factory=dict)
    block: Annotated[
        int | None, at_least(1), "steps of an update, of which a sequence has several; none: as the algorithm is "
        "defined, whole sequences for bptt and 1 for rtrl"
    ] = None  # fmt: skip
    optimizer: Annotated[str, one_of(OPTIMIZERS), f"how the weights change: {', '.join(OPTIMIZERS)}"] = "adamw"
    lr: Annotated[float, above(0), "peak learning rate"] = 3e-3
    warmup: Annotated[int, at_least(0), "steps of linear warm-up, at most a tenth; a cosine to zero follows"] = 50
    weight_decay: Annotated[float, at_least(0), "weight decay, only on the weights of linear maps"] = 0.1
    clip: Annotated[float, above(0), "largest norm of the gradient"] = 1.0
    clip_value: Annotated[
        float | None, above(0), "largest entry of the gradient, clipped before the norm; none: no limit"
    ] = None


@dataclass
class StoppingOptions:
    """Measurements while training, and early stopping."""

    topic = "training"

    eval_every: Annotated[int | None, above(0), "steps between two held-out measurements; none: a tenth of the run"] = (
        None
    )
    until: Annotated[float | None, "stop when a measurement is this good"] = None
    patience: Annotated[
        int | None, above(0), "stop after this many measurements without a better one, and keep the best weights"
    ] = None


@dataclass
class DeviceOptions:
    """Processors, GPUs and processes."""

    topic = "devices"

    accelerator: Annotated[str, NAME, "lightning's: auto, cpu, gpu, ..."] = "auto"
    devices: Annotated[int, at_least(1), "number of processes or devices; under torchrun, all that it has started"] = 1
    strategy: Annotated[
        str, NAME, "of several: ddp, each has the model; fsdp, each has a shard of it; or another of lightning's"
    ] = "auto"
    sequence_parallel: Annotated[int, at_least(1), "number of processes that divide each sequence"] = 1
    precision: Annotated[str, NAME, "lightning's: 32-true, bf16-mixed, ...; auto: bf16-mixed where it is faster"] = (
        "32-true"
    )


@dataclass
class RunConfig(DeviceOptions, StoppingOptions):
    """Devices, early stopping, and output files."""

    topic = "run"

    out: Annotated[str | None, PATH, "run folder; none: runs/LAYER-N, or runs/DATA-LAYER-N"] = None
    init: Annotated[
        str | None,
        Placeholder("RUN"),
        "run folder: start from its weights, for example those of a shorter task; to forecast, `pretrained`: tune the "
        "model in the package",
    ] = None
    seed: Annotated[int, at_least(0), "of the weights, the data order and any dropout"] = 0
    log_every: Annotated[int, at_least(1), "steps between two rows of metrics.csv"] = 10
    save_seconds: Annotated[float, at_least(0), "seconds between two checkpoints"] = 30.0
    tensorboard: Annotated[bool, "write the metrics for TensorBoard too, into the run folder"] = False


@dataclass
class TrainConfig(Configuration):
    """The options of `scanl train`, in five parts. The file `config.yaml` of a run holds one."""

    command = "train"
    noun = "training run"
    topics: ClassVar = {
        "data": "what is learned from (names: `scanl tasks`, `scanl data`)",
        "forecast": "how a table is forecast",
        "model": "the layers (`scanl list`; options of one: `scanl show LAYER`)",
        "training": "how long, how fast and by which algorithm it learns",
        "devices": "processors, GPUs, several processes",
        "run": "the run folder, and files of options",
    }

    source: SourceConfig = field(default_factory=SourceConfig)
    stack: Any = field(default_factory=StackConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        """Raise ConfigError for a value out of range, and for both steps and minutes."""
        super().check()
        check_options("stack", Stack, vars(self.stack))
        chosen = algorithms.get(self.training.algorithm)
        check_options(self.training.algorithm, chosen, self.training.algorithm_options)
        if self.training.steps is not None and self.training.minutes is not None:
            raise ConfigError("train: steps and minutes are both given, expected one of them; leave one out")
        if self.run.init == PRETRAINED_NAME and self.source.question != "forecast":
            raise ConfigError(
                f"train: init is {PRETRAINED_NAME}, expected a run folder because question is "
                f"{self.source.question or 'none'}; the model in the package forecasts a table: --question forecast"
            )
        self._check_sharing()
        reasons = {"inputs_alone": self.source.inputs_alone, "init": self.run.init, "devices": self.run.devices > 1}
        if self.training.pretrain is not None and (why := [name for name, given in reasons.items() if given]):
            raise ConfigError(f"train: pretrain is {self.training.pretrain}, expected none because {why[0]} is given")
        if self.training.steps == 0 and not self.head.start and not self.head.filters:
            raise ConfigError("train: steps is 0, expected at least 1 because start and filters are none")

    def _check_sharing(self) -> None:
        """Raise ConfigError for options that do not fit several processes."""
        run, algorithm = self.run, self.training.algorithm
        if run.devices % run.sequence_parallel:
            raise ConfigError(
                f"train: devices is {run.devices}, expected a multiple of {run.sequence_parallel} because of "
                "sequence_parallel"
            )
        reasons = {"strategy": run.strategy} if run.strategy == FSDP else {}
        reasons |= {"sequence_parallel": run.sequence_parallel} if run.sequence_parallel > 1 else {}
        for name, value in reasons.items():
            if not self.in_one_segment:
                raise ConfigError(
                    f"train: algorithm is {algorithm} with options {self.training.algorithm_options}, expected bptt in "
                    f"one segment because {name} is {value}"
                )
        chosen = algorithms.get(algorithm)
        if run.devices > 1 and not chosen.shares:
            raise ConfigError(
                f"train: devices is {run.devices}, expected 1 because {algorithm} learns from the rows of one process"
            )
        if run.sequence_parallel > 1 and self.source.carry_state:
            raise ConfigError(
                f"train: carry_state is True, expected False because sequence_parallel is {run.sequence_parallel}"
            )

    @property
    def in_one_segment(self) -> bool:
        """Whether an update is one call of the model on whole sequences."""
        training = self.training
        whole = training.algorithm_options.get("segments", 1) == 1 and training.block is None
        return training.algorithm == "bptt" and whole

    @property
    def entry(self) -> type[Entry]:
        """The class that `data` names, or that reads the user's own files. Raises ConfigError for an unknown name."""
        words, question = self.source.data, self.source.question
        if len(words) == 1:
            if name := named(words[0]):
                return sources.get(name)
            if question in OF_FOLDERS and ending(Path(words[0])) not in KINDS:
                return OF_FOLDERS[question]
        if names := [word for word in words if len(words) > 1 and named(word)]:
            raise ConfigError(f"train: data is {' '.join(words)}, expected {names[0]} alone, because it is no path")
        if question is None and any(map(is_sharded, words)):
            return ShardedText
        for word in words:
            if Path(word).name == word and not Path(word).suffix and not Path(word).exists():
                near = difflib.get_close_matches(
                    word, [name for name in sources.names() if name not in OWN_SOURCES], 1, 0.5
                )
                advice = f"did you mean {near[0]!r}?" if near else "`scanl tasks` and `scanl data` list the names"
                raise ConfigError(f"train: data is {word!r}, expected a file, a folder or a known name; {advice}")
        return Text if question is None else Table

    def open_source(self) -> Source:
        """Make the source, without reading files. Raises ConfigError for options that do not fit."""
        options = {**vars(self.source), "seed": self.run.seed}
        alone = options.pop("inputs_alone")
        entry = LongTable if self.run.init == PRETRAINED_NAME else self.entry
        source = entry.open(options)
        return InputSource(source, make_stack(self.stack).bidirectional, self.run.seed) if alone else source


OPTIONS = options_of(TrainConfig)


def named(word: str) -> str | None:
    """Return the registered name that a word of `--data` stands for, or None for a path.

    A registered name comes before a path, which may be spelt ./NAME. Another spelling of a name comes after it.
    """
    if Path(word).name != word or word in OWN_SOURCES:
        return None
    if word in sources.names():
        return word
    name = None if Path(word).exists() else sources.find(word)
    return None if name in OWN_SOURCES else name


def check_accelerator(name: str) -> None:
    """Raise ConfigError for an accelerator that torch does not find on this machine. Lightning checks other names."""
    gpus = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    there = {**gpus, "gpu": any(gpus.values()), "tpu": find_spec("torch_xla") is not None}
    if not there.get(name, True):
        raise ConfigError(f"train: accelerator is {name}, expected auto or cpu because this machine has none")


def fitting_precision(accelerator: str) -> str:
    """Choose bfloat16 matrix products if the processor or the GPU has instructions for them, else float32."""
    if accelerator != "cpu" and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if fast else "32-true"


def layer_names(layer: str) -> list[str]:
    """Split a list of names such as `hawk,lru`."""
    return [name.strip() for name in layer.split(",")]


def make_stack(config: Any) -> Stack:
    """Make the stack of a `StackConfig`. Raises ConfigError for options that do not fit."""
    pattern = layer_names(config.layer)
    try:
        return Stack(**{**vars(config), "layer": pattern if len(pattern) > 1 else pattern[0]})
    except ScanlError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        # A layer's constructor got a value of a wrong type, such as "width": "wide".
        options = {**config.layer_options, **config.channel_options}
        raise ConfigError(f"train: options {options} do not fit {config.layer}: {error}") from error


def check_reach(who: str, layer: str, longest: int | None, steps: int, why: str) -> None:
    """Raise ConfigError for layers that read `longest` steps at most, where more are to be read."""
    if longest is not None and steps > longest:
        raise ConfigError(
            f"{who}: max_length of {layer} is {longest}, expected at least {steps} because {why}; give "
            f"--layer-options.max_length {steps}"
        )


def fitting_stack(who: str, options: Mapping[str, Any], steps: int, why: str) -> Stack:
    """Return the stack of some options, by name. Raises ConfigError if there is none that reads so many steps."""
    stack = make_stack(StackConfig(**{name: options[name] for name in vars(StackConfig()) if name in options}))
    check_reach(who, options["layer"], stack.longest, steps, why)
    return stack


def build_model(config: TrainConfig, question: Question) -> Model:
    """Make the model that answers a question from the options. Raises ConfigError for options that do not fit."""
    if config.run.init == PRETRAINED_NAME:
        return ForecastAnswerer(cast(ForecastQuestion, question)).tuned()
    return answerer(question).model(make_stack(config.stack), vars(config.head))


def seeded_model(config: TrainConfig, question: Question) -> Model:
    """Make the model of a configuration, with the initial weights that its seed gives."""
    torch.manual_seed(config.run.seed)
    return build_model(config, question)


def make_algorithm(config: TrainConfig, source: Source) -> Algorithm:
    """Make the algorithm, for the question of a source."""
    training = config.training
    return algorithms.get(training.algorithm)(answerer(source.question).objective, **training.algorithm_options)


def update_steps(config: TrainConfig, algorithm: Algorithm) -> int | None:
    """Return the steps of an update; None for whole sequences."""
    return algorithm.update_steps if config.training.block is None else config.training.block


def rows_in_a_step(config: TrainConfig) -> int:
    """Return the number of sequences in a batch of all processes."""
    return config.source.batch_size * config.run.devices // config.run.sequence_parallel


def check_resumable(
    config: TrainConfig, wanted: TrainConfig, where: str = "the run to resume; leave the option out"
) -> None:
    """Raise ConfigError when `wanted` differs from `config` in an option that changes the results of a started run.

    The path of the data may differ. where: origin of `config` for the message, and what to do.
    """
    free = {
        "data", "devices", "batch_size", "strategy", "sequence_parallel", "recompute", "accelerator", "save_seconds",
        "out", "tensorboard",
    }  # fmt: skip
    stored, now = config.options(), wanted.options()
    pairs = {name: (stored[name], now[name]) for name in OPTIONS if name not in free}
    pairs["data"] = config.entry.name, wanted.entry.name
    divided = " / sequence_parallel" * (stored["sequence_parallel"] > 1 or now["sequence_parallel"] > 1)
    pairs[f"batch_size * devices{divided}"] = rows_in_a_step(config), rows_in_a_step(wanted)
    for name, (old, new) in pairs.items():
        if old != new:
            expected = "none" if old is None else old
            raise ConfigError(f"train: {name} is {new}, expected {expected} because of {where}")
