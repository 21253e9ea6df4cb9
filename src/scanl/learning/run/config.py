"""The configuration of a training run, in five parts. The command line is generated from their fields."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, make_dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

import torch
import yaml

import scanl.tasks  # registers the tasks as sources  # noqa: F401
from scanl.configured import check, options
from scanl.data import Folders, OwnSignals, Source, sources
from scanl.data.columns import KINDS
from scanl.data.table import ASKS
from scanl.errors import CheckpointError, ConfigError, ScanlError, nearest
from scanl.learning.questions import Model, model_for
from scanl.models import Stack
from scanl.models.heads import HEADS

OF_FOLDERS = {source.asks: source.name for source in (Folders, OwnSignals)}  # by the question


DEFAULTS = {"dim": 256, "depth": 4}  # of arguments of `Stack` that have none


def _kind(annotation: Any) -> Any:
    """Return the type of an argument on the command line: a mapping is a dictionary, and a layer is text."""
    kind = get_args(annotation)[0]
    arms = get_args(kind) or (kind,)
    if any(get_origin(arm) is Mapping for arm in arms):
        return dict[str, Any]
    return str if str in arms else kind


def _stack_fields() -> Iterator[tuple[str, Any, Any]]:
    """Yield a field for each argument of `Stack`: its name, its type with its meaning, and its default."""
    for option in options(Stack).values():
        kind = _kind(option.annotation)
        value = DEFAULTS.get(option.name, option.default)
        default = field(default_factory=dict) if get_origin(kind) is dict else field(default=value)
        yield option.name, Annotated[kind, option.meaning], default


StackConfig = make_dataclass("StackConfig", _stack_fields())
StackConfig.__module__ = __name__
StackConfig.__doc__ = "The arguments of `Stack`, as values that a file can hold. `layer` may be names with commas."


@dataclass
class HeadConfig:
    """What the model does with the output of its stack, except what the source's question determines."""

    tie_embeddings: Annotated[bool, "use one matrix for input and output"] = False
    recursive: Annotated[bool, "of a forecast: one step at a time, from the kept state; else all steps at once"] = False
    lags: Annotated[int | None, "of a forecast: how many last values a linear map adds to it; none: a season"] = None
    span: Annotated[
        float | None, "of a forecast: numbers after which the past fades in its normalisation; none: never"
    ] = None


@dataclass
class DataConfig:
    """The training data, and how it is read."""

    paths: Annotated[
        list[str],
        "files and folders, read as bytes; with --question a table, or a folder of files; none: Python's library",
    ] = field(default_factory=list)
    question: Annotated[str | None, f"of a table: {', '.join(ASKS)}; of a folder: {', '.join(OF_FOLDERS)}"] = None
    target: Annotated[str | None, "of a table: column of the answers; to forecast, several with commas"] = None
    time: Annotated[str | None, "of a table: column of the times"] = None
    series: Annotated[str | None, "of a table: column of the series' names; none: one series"] = None
    static: Annotated[list[str], "of a table: columns that are constant over a series"] = field(default_factory=list)
    past: Annotated[list[str], "of a table: columns that are known up to the present"] = field(default_factory=list)
    future: Annotated[list[str], "of a table: columns that are known ahead"] = field(default_factory=list)
    horizon: Annotated[int, "of a table: steps to forecast; 1 to generate"] = 12
    season: Annotated[int | None, "of a table: steps of a season; none: what the calendar says"] = None
    freq: Annotated[
        str | None, "of a table: how far a step is from the next, as pandas says it: h, D, B, ME; none: as inferred"
    ] = None
    distribution: Annotated[str, f"of a table: distribution of the answers: {', '.join(HEADS)}"] = "gaussian"
    origins: Annotated[
        int | None, "of a forecast: learn it only after this many last steps of a window; none: after all steps"
    ] = None
    gaps: Annotated[
        str | None, "of a table: steps absent from regular times: fill or durations; none: fill if they are few"
    ] = None
    split: Annotated[str | None, "of a table: split by time or by series"] = None
    validation: Annotated[float, "with --question: fraction that is measured while training"] = 0.1
    test: Annotated[float, "with --question: fraction that is measured at the end"] = 0.2
    task: Annotated[str | None, "a synthetic task instead of text; `scanl tasks` lists them"] = None
    task_options: Annotated[dict[str, Any], "the task's options"] = field(default_factory=dict)
    held_out: Annotated[float, "fraction of the text, by file, that is never trained on"] = 0.05
    sequence_length: Annotated[int, "bytes in a training sequence"] = 256
    batch_size: Annotated[int, "sequences in a step of one process"] = 8
    carry_state: Annotated[bool, "long texts: carry the state from chunk to chunk, without its gradient"] = False
    eval_bytes: Annotated[int, "held-out bytes in each measurement while training: a sample spread over all"] = 16384
    eval_examples: Annotated[int, "of a task: fresh examples in each of these measurements"] = 512


@dataclass
class OptimiserConfig:
    """The length of training and the learning rate."""

    steps: Annotated[int | None, "optimiser steps; none: from minutes, or 1000"] = None
    minutes: Annotated[float | None, "instead of steps: as many steps as fit, revised during the run"] = None
    accumulate: Annotated[int, "batches for an optimiser step, which takes the mean of their gradients"] = 1
    lr: Annotated[float, "peak learning rate of AdamW"] = 3e-3
    warmup: Annotated[int, "steps of linear warm-up, at most a tenth of all; a cosine to zero follows"] = 50
    weight_decay: Annotated[float, "weight decay, only on the weights of linear maps"] = 0.1
    clip: Annotated[float, "largest norm of the gradient"] = 1.0
    clip_value: Annotated[float | None, "largest entry of the gradient, clipped before the norm; none: no limit"] = None


@dataclass
class RunConfig:
    """Devices, early stopping, and output files."""

    out: Annotated[str | None, "run folder; none: runs/LAYER-N, or runs/TASK-LAYER-N"] = None
    init: Annotated[str | None, "run folder: start from its weights, for example those of a shorter task"] = None
    seed: Annotated[int, "of the weights, the data order and any dropout"] = 0
    eval_every: Annotated[int | None, "steps between two held-out measurements; none: a tenth of the run"] = None
    until: Annotated[float | None, "of a task: stop when a measurement is this good"] = None
    patience: Annotated[
        int | None, "of text: stop after this many measurements without a better one, and keep the best weights"
    ] = None
    log_every: Annotated[int, "steps between two rows of metrics.csv"] = 10
    save_seconds: Annotated[float, "seconds between two checkpoints"] = 30.0
    tensorboard: Annotated[bool, "write the metrics for TensorBoard too, into the run folder"] = False
    accelerator: Annotated[str, "lightning's: auto, cpu, gpu, ..."] = "auto"
    devices: Annotated[int, "number of processes or devices"] = 1
    strategy: Annotated[str, "lightning's: auto, ddp, ..."] = "auto"
    precision: Annotated[str, "lightning's: 32-true, bf16-mixed, ...; auto: bf16-mixed where it is faster"] = "32-true"


PARTS: dict[str, Any] = {
    "stack": StackConfig,
    "head": HeadConfig,
    "data": DataConfig,
    "optimiser": OptimiserConfig,
    "run": RunConfig,
}


class Option(NamedTuple):
    """An option of the command line: the part and field that hold its value, its type, and its help text."""

    part: str
    field: str
    kind: Any
    meaning: str


def _options() -> dict[str, Option]:
    found = {}
    for part, cls in PARTS.items():
        for name, hint in get_type_hints(cls, include_extras=True).items():
            found["data" if name == "paths" else name] = Option(part, name, *get_args(hint))
    return found


OPTIONS = _options()  # by the flat names of the command line: names of the fields, but `data` for `paths`
COUNTS = (
    "sequence_length",
    "batch_size",
    "devices",
    "eval_bytes",
    "eval_examples",
    "log_every",
    "accumulate",
)


@dataclass(init=False)
class TrainConfig:
    """The options of `scanl train`. The file `config.yaml` of a run holds one.

    The constructor takes parts, or options by their names on the command line: `TrainConfig(layer="lru", steps=100)`.
    Options given together with their part change a copy of the part.
    """

    stack: Any  # a `StackConfig`
    head: HeadConfig
    data: DataConfig
    optimiser: OptimiserConfig
    run: RunConfig

    def __init__(self, **given: Any) -> None:
        for name, cls in PARTS.items():
            part = given.pop(name) if isinstance(given.get(name), cls) else cls()
            own = {o.field: given.pop(flat) for flat, o in OPTIONS.items() if o.part == name and flat in given}
            setattr(self, name, replace(part, **own))
        for name in given:
            raise nearest("option of train", name, OPTIONS)

    def options(self) -> dict[str, Any]:
        """Return every value by its name on the command line."""
        return {name: getattr(getattr(self, option.part), option.field) for name, option in OPTIONS.items()}

    def check(self) -> None:
        """Raise ConfigError for a number out of range, for both steps and minutes, or for an option out of use."""
        options = self.options()
        for name, value in options.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"train: {name} is {value}, expected a finite number")
            if isinstance(value, int) and value >= 2**63:
                raise ConfigError(f"train: {name} is {value}, expected less than 2**63")
        check(Stack, vars(self.stack))
        for name in COUNTS:
            if options[name] < 1:
                raise ConfigError(f"train: {name} is {options[name]}, expected at least 1")
        for name in ("lr", "clip", "clip_value", "steps", "minutes", "eval_every", "patience"):
            if options[name] is not None and options[name] <= 0:
                raise ConfigError(f"train: {name} is {options[name]}, expected above 0")
        for name in ("warmup", "weight_decay", "save_seconds", "seed"):
            if options[name] < 0:
                raise ConfigError(f"train: {name} is {options[name]}, expected at least 0")
        if options["steps"] is not None and options["minutes"] is not None:
            raise ConfigError("train: steps and minutes are both given, expected one of them; leave one out")
        if not 0 < options["held_out"] < 1:
            raise ConfigError(f"train: held_out is {options['held_out']}, expected between 0 and 1")
        self._refuse_unused(options)
        self._refuse_unreachable(options["until"])

    def _refuse_unused(self, options: Mapping[str, Any]) -> None:
        """Raise ConfigError for an option that other sources use but this one does not."""
        own = sources.get(self.source_name)
        others = frozenset[str]().union(*(sources.get(name).reads() for name in sources.names()))
        for name, default in TrainConfig().options().items():
            if name in others - own.reads() and options[name] != default:
                hint = own.instead.get(name, f"leave out --{name.replace('_', '-')}")
                raise ConfigError(f"train: {name} is {options[name]}, but {self.source_name} does not use it; {hint}")

    def _refuse_unreachable(self, until: float | None) -> None:
        """Raise ConfigError for a score that the source can never reach."""
        source = self.source()
        low, high = source.reachable()
        if until is not None and not low <= until <= high:
            bounds = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
            because = f"{self.source_name} is scored by {source.metric}"
            raise ConfigError(f"train: until is {until:g}, expected {bounds} because {because}")

    @property
    def source_name(self) -> str:
        """Return the registered name of the source."""
        data = self.data
        own = "text" if data.question is None else "table"
        if len(data.paths) == 1 and Path(data.paths[0]).suffix.lower() not in KINDS:
            own = OF_FOLDERS.get(data.question or "", own)
        return sources.find(data.task) or data.task if data.task else own

    def source(self) -> Source:
        """Make the source, without reading files. Raises ConfigError for options that do not fit."""
        return sources.get(self.source_name).open(self.options())

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_yaml(cls, path: Path) -> "TrainConfig":
        """Read a run's config.yaml. Raises CheckpointError when that fails, and ConfigError as `check` does."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CheckpointError(f"run: {path} cannot be read: {' '.join(str(error).split())}") from error
        return cls.from_values(values, path)

    @classmethod
    def from_values(cls, values: Any, path: Path) -> "TrainConfig":
        """Make a configuration from the values of a file.

        Raises CheckpointError for an unknown name or a wrong type, and ConfigError as `check` does.
        """
        found = flattened(values)
        if not isinstance(found, dict) or not set(found) <= set(OPTIONS):
            odd = sorted(map(str, set(found) - set(OPTIONS))) if isinstance(found, dict) else found
            raise CheckpointError(
                f"run: {path} is no configuration of a training run: {odd} is not known; correct it, or go on with the "
                "version of scanl that wrote it"
            )
        typed = {name: _typed(f"run: {path}: {name}", value, OPTIONS[name].kind) for name, value in found.items()}
        config = cls(**typed)
        config.check()
        return config


def flattened(values: Any) -> Any:
    """Return the options of a file by their flat names on the command line.

    Files are written in parts. Flat files, as the first versions wrote them and users may write, are returned
    unchanged; so are unknown names and anything that is not a mapping.
    """
    if not isinstance(values, dict):
        return values
    names = {(option.part, option.field): name for name, option in OPTIONS.items()}
    found = {}
    for key, value in values.items():
        if key in PARTS and isinstance(value, dict):
            found |= {names.get((key, name), f"{key}.{name}"): inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def _typed(who: str, value: Any, kind: Any) -> Any:
    """Return the value; convert an integer where a float is expected. Raises CheckpointError for a wrong type."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if float in kinds and (type(value) is int or isinstance(value, str)):
        value = _number(value)  # YAML reads 1e-3 as a string; only 1.0e-3 is a number
    if not any(_is(value, one) for one in kinds):
        names = ["null" if one is type(None) else one.__name__ for one in kinds]
        raise CheckpointError(f"{who} is {value!r}, expected {' or '.join(names)}")
    return value


def _is(value: Any, kind: Any) -> bool:
    """Whether a value from YAML has the type of a field."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return type(value) is kind  # not isinstance: True is not an int here


def _number(value: int | str) -> float | str:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return str(value)


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


def build_model(config: TrainConfig) -> Model:
    """Make the model from the options and the source's question. Raises ConfigError for options that do not fit."""
    return model_for(config.source().question, make_stack(config.stack), vars(config.head))


def seeded_model(config: TrainConfig) -> Model:
    """Make the model of a configuration, with the initial weights that its seed gives."""
    torch.manual_seed(config.run.seed)
    return build_model(config)


def check_resumable(
    config: TrainConfig, wanted: TrainConfig, where: str = "the run to resume; leave the option out"
) -> None:
    """Raise ConfigError when `wanted` differs from `config` in an option that changes the results of a started run.

    The path of the data may differ. where: origin of `config` for the message, and what to do.
    """
    free = {"data", "devices", "batch_size", "strategy", "accelerator", "save_seconds", "out", "tensorboard"}
    before, now = config.options(), wanted.options()
    pairs = {name: (before[name], now[name]) for name in OPTIONS if name not in free}
    pairs["batch_size * devices"] = tuple(o["batch_size"] * o["devices"] for o in (before, now))
    for name, (old, new) in pairs.items():
        if old != new:
            expected = "none" if old is None else old
            raise ConfigError(f"train: {name} is {new}, expected {expected} because of {where}")
