"""Everything that decides a training run, in one flat dataclass; the command line is made from it."""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import torch
import yaml

import scanl.tasks  # whose tasks are sources too  # noqa: F401
from scanl.data import Source, sources
from scanl.errors import CheckpointError, ConfigError, ScanlError
from scanl.learning.questions import Model, model_for
from scanl.models.block import CHANNEL_MIXERS, NORMS


@dataclass
class TrainConfig:
    """The options of `scanl train`; `config.yaml` of a run holds one."""

    data: Annotated[list[str], "files and folders, read as bytes; none: the standard library's source"] = field(
        default_factory=list
    )
    task: Annotated[str | None, "a synthetic task instead of text; `scanl tasks` lists them"] = None
    task_options: Annotated[dict[str, Any], "the task's options"] = field(default_factory=dict)
    out: Annotated[str | None, "run folder; none: runs/LAYER-N, or runs/TASK-LAYER-N"] = None
    init: Annotated[str | None, "run folder whose weights to start from: those of a shorter task, say"] = None
    layer: Annotated[str, "a registered layer, a repeating pattern (hawk,hawk,lru), or a preset (griffin)"] = "hawk"
    layer_options: Annotated[dict[str, Any], "the layer's options; for a pattern, by layer: {lru: {...}}"] = field(
        default_factory=dict
    )
    dim: Annotated[int, "model width"] = 256
    depth: Annotated[int, "number of blocks"] = 4
    channel_mixer: Annotated[str, f"what mixes channels between the layers: {', '.join(CHANNEL_MIXERS)}"] = "gated_mlp"
    channel_options: Annotated[dict[str, Any], "its options"] = field(default_factory=dict)
    norm: Annotated[str, f"normalisation before every mixer: {', '.join(NORMS)}"] = "rmsnorm"
    dropout: Annotated[float, "fraction of what a layer or mixer adds to the residual stream that is left out"] = 0.0
    tie_embeddings: Annotated[bool, "use one matrix for input and output"] = False
    sequence_length: Annotated[int, "bytes in a training sequence"] = 256
    batch_size: Annotated[int, "sequences in a step of one process"] = 8
    carry_state: Annotated[bool, "long texts: carry the state from chunk to chunk, cut from the graph"] = False
    held_out: Annotated[float, "fraction of the text, by file, that is never trained on"] = 0.05
    steps: Annotated[int | None, "optimiser steps; none: from minutes, or 1000"] = None
    minutes: Annotated[float | None, "instead of steps: as many as fit, revised on the way"] = None
    lr: Annotated[float, "peak learning rate of AdamW"] = 3e-3
    warmup: Annotated[int, "steps of linear warm-up, at most a tenth of all; a cosine to zero follows"] = 50
    weight_decay: Annotated[float, "on the weights of linear maps alone"] = 0.1
    clip: Annotated[float, "largest norm of the gradient"] = 1.0
    seed: Annotated[int, "of the weights, the data order and any dropout"] = 0
    eval_every: Annotated[int | None, "steps between two held-out measurements; none: a tenth of the run"] = None
    eval_bytes: Annotated[int, "held-out bytes in each of these measurements: a sample spread over all of them"] = 16384
    eval_examples: Annotated[int, "of a task: fresh examples in each of these measurements"] = 512
    until: Annotated[float | None, "of a task: stop when a measurement is this good"] = None
    patience: Annotated[
        int | None, "of text: stop after so many measurements without a better one, and keep the weights of the best"
    ] = None
    log_every: Annotated[int, "steps between two rows of metrics.csv"] = 10
    save_seconds: Annotated[float, "seconds between two checkpoints"] = 30.0
    tensorboard: Annotated[bool, "write the metrics for TensorBoard too, into the run folder"] = False
    accelerator: Annotated[str, "lightning's: auto, cpu, gpu, ..."] = "auto"
    devices: Annotated[int, "number of processes or devices"] = 1
    strategy: Annotated[str, "lightning's: auto, ddp, ..."] = "auto"
    precision: Annotated[str, "lightning's: 32-true, bf16-mixed, ...; auto: bf16-mixed where it is faster"] = "32-true"

    def check(self) -> None:
        """ConfigError for a number out of range, or for both steps and minutes."""
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"train: {f.name} is {value}, expected a finite number")
            if isinstance(value, int) and value >= 2**63:
                raise ConfigError(f"train: {f.name} is {value}, expected less than 2**63")
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(f"train: {name} is {getattr(self, name)}, expected at least 1")
        for name in ("lr", "clip", "steps", "minutes", "eval_every", "patience"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"train: {name} is {value}, expected above 0")
        for name in ("warmup", "weight_decay", "save_seconds", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"train: {name} is {getattr(self, name)}, expected at least 0")
        if self.steps is not None and self.minutes is not None:
            raise ConfigError("train: steps and minutes are both given, expected one of them")
        if not 0 < self.held_out < 1:
            raise ConfigError(f"train: held_out is {self.held_out}, expected between 0 and 1")
        self._refuse_idle()
        low, high = self.source().reachable()
        if self.until is not None and not low <= self.until <= high:
            bounds = f"from {low:g} to {high:g}" if high < math.inf else f"at least {low:g}"
            raise ConfigError(
                f"train: until is {self.until:g}, expected {bounds} because {self.source_name} is scored "
                f"by {self.source().metric}"
            )

    def _refuse_idle(self) -> None:
        """ConfigError for an option that the source does not read, when it is given."""
        own = sources.get(self.source_name)
        others = frozenset[str]().union(*(sources.get(each).reads() for each in sources.names()))
        for f in fields(self):
            if f.name in others - own.reads() and getattr(self, f.name) != getattr(type(self)(), f.name):
                hint = own.instead.get(f.name, f"leave out --{f.name.replace('_', '-')}")
                raise ConfigError(
                    f"train: {f.name} is {getattr(self, f.name)}, but {self.source_name} does not use it; {hint}"
                )

    @property
    def source_name(self) -> str:
        """The registered name of what to learn from."""
        return self.task or "text"

    def source(self) -> Source:
        """What to learn from; nothing is read yet. ConfigError for options that do not fit."""
        return sources.get(self.source_name).open({f.name: getattr(self, f.name) for f in fields(self)})

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    @classmethod
    def from_yaml(cls, path: Path) -> "TrainConfig":
        """Read a run's config.yaml; CheckpointError when it cannot be, ConfigError for what `check` refuses."""
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise CheckpointError(f"run: {path} cannot be read: {' '.join(str(error).split())}") from error
        return cls.from_values(values, path)

    @classmethod
    def from_values(cls, values: Any, path: Path) -> "TrainConfig":
        """Of what a file holds: CheckpointError for what is unknown or of another type, ConfigError as in `check`."""
        known = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or not set(values) <= set(known):
            odd = sorted(set(values) - set(known)) if isinstance(values, dict) else values
            raise CheckpointError(f"run: {path} is no configuration of a training run: {odd} is not known")
        config = cls(**{name: _typed(f"run: {path}: {name}", value, KINDS[name]) for name, value in values.items()})
        config.check()
        return config


def _typed(who: str, value: Any, kind: Any) -> Any:
    """The value, an integer as a float where one is expected; CheckpointError when it is of another type."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if float in kinds and (type(value) is int or isinstance(value, str)):
        value = _number(value)  # YAML takes 1e-3 for a text: it wants 1.0e-3
    if not any(_is(value, one) for one in kinds):
        names = ["null" if one is type(None) else one.__name__ for one in kinds]
        raise CheckpointError(f"{who} is {value!r}, expected {' or '.join(names)}")
    return value


def _is(value: Any, kind: Any) -> bool:
    """Whether a value that YAML has read is of a field's type."""
    if get_origin(kind) is list:
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    return type(value) is kind  # True is no int here


def _number(value: int | str) -> float | str:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return str(value)


KINDS = {name: get_args(hint)[0] for name, hint in get_type_hints(TrainConfig, include_extras=True).items()}


MODEL_FIELDS = (
    "layer",
    "layer_options",
    "dim",
    "depth",
    "channel_mixer",
    "channel_options",
    "norm",
    "dropout",
    "tie_embeddings",
)
COUNTS = ("dim", "depth", "sequence_length", "batch_size", "devices", "eval_bytes", "eval_examples", "log_every")


def fitting_precision(accelerator: str) -> str:
    """bfloat16 matrix products where the processor or the GPU has instructions for them, else float32."""
    if accelerator != "cpu" and torch.cuda.is_available():
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16-mixed" if fast else "32-true"


def layer_names(layer: str) -> list[str]:
    """The names in `hawk,lru`."""
    return [name.strip() for name in layer.split(",")]


def build_model(config: TrainConfig) -> Model:
    """The model of a configuration: of its options, and of what its source asks. ConfigError for what does not fit."""
    pattern = layer_names(config.layer)
    options = {name: getattr(config, name) for name in MODEL_FIELDS}
    options["layer"] = pattern if len(pattern) > 1 else pattern[0]
    question = config.source().question
    try:
        return model_for(question, options)
    except ScanlError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        # A layer's constructor met a value of a kind that it does not take: "width": "wide".
        given = {**config.layer_options, **config.channel_options}
        raise ConfigError(f"train: options {given} do not fit {config.layer}: {error}") from error


def seeded_model(config: TrainConfig) -> Model:
    """The model of a configuration with the initial weights of its seed."""
    torch.manual_seed(config.seed)
    return build_model(config)


def check_resumable(config: TrainConfig, wanted: TrainConfig, where: str = "the run to resume") -> None:
    """ConfigError when `wanted` would change what a run that has started computes; its text may have moved."""
    free = {"data", "devices", "batch_size", "strategy", "accelerator", "save_seconds", "out", "tensorboard"}
    pairs = {f.name: (getattr(config, f.name), getattr(wanted, f.name)) for f in fields(TrainConfig)}
    pairs = {name: pair for name, pair in pairs.items() if name not in free}
    pairs["batch_size * devices"] = (config.batch_size * config.devices, wanted.batch_size * wanted.devices)
    for name, (old, new) in pairs.items():
        if old != new:
            raise ConfigError(f"train: {name} is {new}, expected {old} because of {where}")
