"""Base classes of layouts and formats: they map the options and weights of a checkpoint to `LanguageModel`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from scanl.errors import CheckpointError, ConfigError
from scanl.layers import Layer
from scanl.layers.parts.norm import RMSNorm
from scanl.models import Block, LanguageModel, Stack
from scanl.options import fits
from scanl.registry import Registry

MAX_NUMBER = torch.finfo(torch.float32).max  # the largest number accepted in config.json


class CheckpointLayout(ABC):
    """Layout of the checkpoints of one kind of model: what their options and weights are called.

    A subclass defines `arguments` and `sizes`.
    """

    name: ClassVar[str] = ""  # set by `register`
    defaults: ClassVar[Mapping[str, Any]] = {}  # the entries of config.json that are read; a file may leave some out
    only: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # entries that scanl has no option for, with the allowed values
    unchecked: ClassVar[tuple[str, ...]] = ()  # entries of `defaults` that `read` does not check
    weights: ClassVar[Mapping[str, str]] = {}  # prefixes of names, ours -> theirs; * is the number of a block
    turned: ClassVar[Mapping[str, "Turn"]] = {}  # ends of our names of weights that are stored in another form
    ignored: ClassVar[tuple[str, ...]] = ()  # stored weights that may exist and that no model reads
    divided: ClassVar[Mapping[str, tuple[str, ...]]] = {}  # ends of names that some files have as one tensor
    depth_entry: ClassVar[str] = "num_hidden_layers"  # the entry with the number of blocks
    pickled: ClassVar[str | None] = None  # the file of torch.save where there is no safetensors file

    @classmethod
    @abstractmethod
    def arguments(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `LanguageModel`; "stack" has the arguments of its `Stack`.

        config has all keys of `defaults`.
        """

    @classmethod
    @abstractmethod
    def sizes(cls, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Return shapes of some weights by their stored names. Together they cover every size in config."""

    @classmethod
    def read(cls, config: Mapping[str, Any], who: str) -> dict[str, Any]:
        """Return all keys of `defaults` with the values in config. Raises CheckpointError for an unsupported option."""
        if config.get("quantization_config") is not None:
            raise CheckpointError(
                f"{who}: the weights are quantized, expected float ones; load an unquantized checkpoint"
            )
        for key, allowed in cls.only.items():
            value = _plain(config.get(key, allowed[0]))
            if value not in allowed:
                expected = " or ".join(map(repr, allowed))
                raise CheckpointError(f"{who}: {key} is {value!r}, expected {expected}: scanl has no other option")
        options = {key: config.get(key, default) for key, default in cls.defaults.items()}
        for key, default in cls.defaults.items():
            if key not in cls.unchecked and (expected := _expected(options[key], default)):
                raise CheckpointError(f"{who}: {key} is {options[key]!r}, expected {expected}")
        return options

    @staticmethod
    def build(arguments: Mapping[str, Any]) -> LanguageModel:
        """Make the model without initialising its weights."""
        with torch.device("meta"):
            return LanguageModel(**{**arguments, "stack": Stack(**arguments["stack"])})

    @classmethod
    def begin_of_blocks(cls) -> str:
        """Return the stored prefix of the blocks' weights, up to the block's number."""
        return next(stored_name.partition("*")[0] for stored_name in cls.weights.values() if "*" in stored_name)

    @classmethod
    def their_name(cls, name: str) -> str:
        """Return the stored name of one of our weights, such as stack.norm.weight."""
        parts = name.split(".")
        number = parts[2] if name.startswith("stack.blocks.") else ""
        for ours, stored_name in cls.weights.items():
            begin = ours.replace("*", number)
            if name.startswith(begin):
                return stored_name.replace("*", number) + name.removeprefix(begin)
        raise AssertionError(f"{cls.name}: no name for {name}")

    @classmethod
    def turn(cls, name: str) -> "Turn":
        """Return the stored form of one of our weights."""
        return next((turn for end, turn in cls.turned.items() if name.endswith(end)), STORED_TURN)


class Turn(NamedTuple):
    """The form in which a weight is stored.

    shape: the stored shape from ours.   tensor: our tensor from the stored one.
    """

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]
    tensor: Callable[[Tensor], Tensor]


STORED_TURN = Turn(lambda shape: shape, lambda tensor: tensor)
TRANSPOSED_TURN = Turn(lambda shape: shape[::-1], lambda tensor: tensor.T.contiguous())
VECTOR = Turn(lambda shape: shape[2:], lambda tensor: tensor[None, None])  # (D,) for our (1, 1, D)


class Format(CheckpointLayout):
    """Format of the checkpoints of one `model_type` of transformers, which scanl writes too.

    A subclass defines `arguments`, its inverse `entries`, and `sizes`.
    """

    architecture: ClassVar[str] = ""  # transformers' class
    new: ClassVar[Mapping[str, Any]] = {}  # entries of a new checkpoint that do not depend on the model
    mixers: ClassVar[tuple[type[Layer], ...]]
    channel: ClassVar[type[Layer] | None] = None
    norm: ClassVar[type[nn.Module]] = RMSNorm

    @staticmethod
    @abstractmethod
    def entries(model: LanguageModel) -> dict[str, Any]:
        """Return values for the keys of `defaults` from a model for which `holds` is true."""

    @classmethod
    def holds(cls, model: LanguageModel) -> bool:
        """Whether the blocks of the model have the mixer, channel mixer, norm and wiring of this format."""
        return bool(blocks(model)) and all(
            not (block.own_norm or block.two_hop)
            and type(block.mixer) in cls.mixers
            and (block.channel is None if cls.channel is None else type(block.channel) is cls.channel)
            and type(block.mixer_norm) is cls.norm
            for block in blocks(model)
        )


registry: Registry[Format] = Registry("model_type")
register, names, get = registry.add, registry.names, registry.get


def blocks(model: LanguageModel) -> list[Block]:
    """Return the blocks of the model's `Stack`. A stack of another class has none."""
    return cast(list[Block], list(model.stack.blocks)) if type(model.stack) is Stack else []


def in_float32(model: LanguageModel) -> bool:
    """Whether the residual stream of the model's `Stack` is kept in float32."""
    return isinstance(model.stack, Stack) and model.stack.residual_in_float32


def whole_ratio(numerator: int, denominator: int) -> float | int:
    """Return numerator / denominator, as an int if it is a whole number."""
    return numerator / denominator if numerator % denominator else numerator // denominator


def padding_of(config: Mapping[str, Any]) -> int | None:
    """Return the token whose row of the embedding gets no gradient from the input."""
    value, size = config["pad_token_id"], config["vocab_size"]
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and -size <= value < size):
        return value
    raise ConfigError(f"pad_token_id is {value!r}, expected null or {-size} to {size - 1} because of vocab_size")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_plain, value))
    return math.inf if value == {"__float__": "Infinity"} else value  # transformers' notation for infinity


def _expected(value: Any, default: Any) -> str:
    """Return the values that an entry with this default may have; "" for a value that is one of them."""
    if isinstance(default, bool):
        return "" if fits(value, bool) else "true or false"
    if isinstance(default, float):
        return "" if fits(value, float) and 0 <= value <= MAX_NUMBER else "a number of at least 0 that float32 holds"
    if value == default or (fits(value, int) and 0 < value < 2**63):  # where the default is None or "auto", a size too
        return ""
    return "an integer of at least 1 and below 2^63" + ("" if isinstance(default, int) else f" or {default!r}")
