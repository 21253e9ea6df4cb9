"""The base of inspectors: their registry, the form of their results, and the layers that they measure."""

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.layers.base import Layer
from scanl.layers.designation import label
from scanl.layers.state import flatten
from scanl.models import Backbone
from scanl.ops import backend
from scanl.registry import Functions

BLUE, LIGHT, GRAY, RED = "#08519c", "#9ecae1", "#636363", "#a63603"  # of the pictures of runs and forecasts
ROWS = 4  # sequences of white noise that a layer reads where the caller has none

P = ParamSpec("P")
R = TypeVar("R", bound="Inspection")
Drawing = Callable[[Any], None]  # draws on one matplotlib axes


class Inspection(ABC):
    """The result of an inspector. A subclass is a frozen dataclass of tensors. Abstract."""

    shared: bool = True  # whether the panels of several layers have the same axes

    @abstractmethod
    def figures(self) -> dict[str, float]:
        """Return the numbers of a line of the table, each under its name with its unit."""

    @abstractmethod
    def columns(self) -> dict[str, Sequence[Any]]:
        """Return the data as the columns of a CSV file, all of one length."""

    @abstractmethod
    def panels(self) -> dict[str, Drawing]:
        """Return the function that draws each panel of the picture, by the panel's title; "" for the only one."""


class Inspector(Generic[P, R]):
    """A function from a layer, and what it reads, to an `Inspection`. The registry has it under the function's name.

    title: what it shows.   equation: what it computes.   source: the paper.   takes: for which layers it is defined.
    own_signal: whether it feeds the layer a signal of its own, also where a model has the layer read something else.
    """

    def __init__(
        self, function: Callable[P, R], *, title: str, equation: str, source: str, takes: str, own_signal: bool
    ) -> None:
        functools.update_wrapper(self, function)
        self.name: str = function.__name__
        self.title, self.equation, self.source, self.takes = title, equation, source, takes
        self.own_signal = own_signal
        self._function = function

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with backend("parallel", "reference"):  # kernels for float64 would be compiled first, which takes a minute
            return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<inspector {self.name}>"


inspectors: Functions[Inspector[..., Any]] = Functions("inspector")


def inspector(
    *, title: str, equation: str, source: str, takes: str = "every layer", own_signal: bool = False
) -> Callable[[Callable[P, R]], Inspector[P, R]]:
    """Decorator: register a function as an inspector. Its first arguments are a layer and x (B, T, dim), None by
    default.
    """

    def register(function: Callable[P, R]) -> Inspector[P, R]:
        new = Inspector(function, title=title, equation=equation, source=source, takes=takes, own_signal=own_signal)
        return inspectors.add(function.__name__)(new)

    return register


def noise(rows: int, steps: int, dim: int) -> Tensor:
    """Return white noise of variance 1, (rows, steps, dim) in float64, the same in every call."""
    return torch.randn(rows, steps, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def prepared(who: str, layer: Layer, x: Tensor | None, steps: int, rows: int = ROWS) -> tuple[Layer, Tensor]:
    """Return a copy of the layer on the CPU in float64, in evaluation mode, and what it reads, (B, T, dim) in float64.

    who: the inspector, for messages.   x: None for white noise of `rows` rows and `steps` steps. Raises ConfigError for
    what is no layer, ShapeError for another shape of x.
    """
    if not isinstance(layer, Layer):
        raise ConfigError(f"{who}: layer is a {type(layer).__name__}, expected a scanl.layers.Layer")
    if x is None:
        x = noise(rows, steps, layer.dim)
    elif x.ndim != 3 or x.shape[2] != layer.dim or not x.numel():
        raise ShapeError(
            f"{who}: x has shape {tuple(x.shape)}, expected (B, T, {layer.dim}) of the layer, with B and T at least 1"
        )
    layer = copy.deepcopy(layer).cpu().double().eval().requires_grad_(False)
    return layer, x.detach().cpu().double()


def state_size(who: str, layer: Layer, limit: int) -> int:
    """Return e, the number of real numbers in the state of one sequence; integers, such as positions, do not count.

    Raises ConfigError for a layer that reads the whole sequence, for one without such numbers, for more than `limit`
    numbers, and for a state that grows.
    """
    if layer.bidirectional:
        raise ConfigError(
            f"{who}: layer is {label(layer)}, which reads the whole sequence, expected one that carries a state"
        )
    with torch.no_grad():
        first = layer.init_state(1)
        size = flatten(first).shape[1]
        after = flatten(layer.step(torch.zeros(1, layer.dim, dtype=torch.float64), first)[1]).shape[1]
    if size != after:
        raise ConfigError(
            f"{who}: the state of {label(layer)} grows from {size} numbers to {after} in a step, expected a state of "
            "constant size"
        )
    if not 1 <= size <= limit:
        raise ConfigError(
            f"{who}: the state of {label(layer)} has {size} numbers, expected 1 to {limit}"
            + ("; build the layer with a smaller dim" if size else "")
        )
    return size


@contextmanager
def readings(model: nn.Module) -> Iterator[dict[str, tuple[Layer, Tensor]]]:
    """Record the input x (B, T, D) of the first call of each layer that mixes steps, in the dict of the context.

    The names are the number of the layer in the model, from 0, and its name. Raises ConfigError for a model without
    such layers.

    >>> from scanl.models import Stack
    >>> stack = Stack(8, 2, "lru")
    >>> with readings(stack) as layers:
    ...     y, _ = stack(torch.zeros(1, 5, 8))
    >>> [(name, tuple(x.shape)) for name, (_, x) in layers.items()]
    [('0 lru', (1, 5, 8)), ('1 lru', (1, 5, 8))]
    """
    stacks = [module for module in model.modules() if isinstance(module, Backbone)]
    mixers = dict.fromkeys(mixer for stack in stacks for mixer in stack.mixers())
    if not mixers:
        raise ConfigError(f"readings: model is a {type(model).__name__}, expected one with a stack of layers")
    inputs: dict[str, tuple[Layer, Tensor]] = {}

    def remember(name: str, layer: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        assert isinstance(layer, Layer)
        inputs.setdefault(name, (layer, (args[0] if args else named["x"]).detach()))

    handles = [
        mixer.register_forward_pre_hook(functools.partial(remember, f"{index} {label(mixer)}"), with_kwargs=True)
        for index, mixer in enumerate(mixers)
    ]
    try:
        yield inputs
    finally:
        for handle in handles:
            handle.remove()
