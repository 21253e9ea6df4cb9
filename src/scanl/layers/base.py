"""The layer protocol and the registry."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError, nearest
from scanl.layers.packing import check_offsets
from scanl.layers.state import Device, DType, State, leaves, map_leaves
from scanl.registry import Registry


class Hint(NamedTuple):
    """How a parameter wants to be trained.

    weight_decay: False where it is not pulled to 0.   lr: the attribute of the layer that holds its learning rate.
    """

    weight_decay: bool = True
    lr: str | None = None


UNDECAYED = Hint(weight_decay=False)


class Layer(nn.Module):
    """A state, a transition and a readout: (B, T, dim) in, (B, T, dim) and the state out.

    A subclass gives `init_state` and `forward`. The class variables are what `scanl show` prints and the
    tests read.
    """

    name: ClassVar[str] = ""  # set by `register`
    id: ClassVar[str] = ""  # in the sheet of systems
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    op: ClassVar[str | None] = None
    sample: ClassVar[Mapping[str, Any]] = {}  # constructor options for the tests: small
    residual_out: ClassVar[str | None] = None  # the projection that writes into the residual stream
    residual_by_depth: ClassVar[bool] = False  # `enter_stack` gives it its published scale: a stack scales it no more
    takes_timespans: ClassVar[bool] = False  # `forward` takes `timespans` (B, T), how long each step lasts
    takes_memo: ClassVar[bool] = False  # `forward` takes `memo`, a dict that the layers of a stack share in one pass

    hints: ClassVar[Mapping[str, Hint]] = {}  # by parameter, or by module for all in it; a subclass adds to its bases'

    dim: int
    bidirectional: bool = False  # True: sees the future, so neither causal nor streamable

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.hints = {name: hint for base in reversed(cls.__mro__) for name, hint in vars(base).get("hints", {}).items()}

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        """The state before any input; device and dtype default to the parameters'.

        Recurrent parts are float32 or wider, whatever the dtype.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, state: State = None, *, cu_seqlens: Tensor | None = None) -> tuple[Tensor, State]:
        """x (B, T, dim) -> y (B, T, dim) and the state after the last step; state None is `init_state`.

        cu_seqlens (N+1,): N sequences end to end over B == 1, each with its own row of the state.
        """
        raise NotImplementedError

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """`forward` at T = 1: x (B, dim) -> y (B, dim)."""
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def init_decay(self, value: float) -> None:
        """Start with memory `value` per step, where the layer has one decay to set; MultiScale asks."""

    def enter_stack(self, index: int, layers: Sequence["Layer"]) -> None:
        """Take the place of layers[index], the lowest first; a stack calls this once, when all its layers are made.

        layers: every mixer of the stack, of whatever class, or every channel mixer. Here a layer sets what its start
        owes to depth, and learns with which others it shares parameters.
        """

    def _who(self) -> str:
        """The name for messages: a user's subclass of a registered layer goes by its own."""
        return vars(type(self)).get("name") or type(self).__name__

    def _check(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> None:
        """Refuse wrong input before any work."""
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ShapeError(f"{self._who()}: x has shape {tuple(x.shape)}, expected (B, T, {self.dim}) of the layer")
        weight = _any_parameter(self)
        if weight is None:
            weight = x
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ShapeError(f"{self._who()}: x is {x.dtype}, expected {weight.dtype} of the parameters")
        if x.device != weight.device:
            raise ShapeError(f"{self._who()}: x is on {x.device}, expected {weight.device} of the parameters")
        if cu_seqlens is not None:
            check_offsets(self._who(), cu_seqlens, x.shape[0], x.shape[1])
        if state is None or torch.compiler.is_compiling():
            return
        batch, of = (x.shape[0], "x") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "cu_seqlens")
        expected = self._state_shapes()
        if expected is not None and not _fits(state, expected, batch):
            found = {place: tuple(leaf.shape) for place, leaf in leaves(state)}
            fitting = {place: tuple(leaf.shape) for place, leaf in leaves(self.init_state(batch, device="meta"))}
            raise ShapeError(f"{self._who()}: state has {found}, expected {fitting} because of the layer and {of}")

    def _state_shapes(self) -> Any:
        """The state's form with shapes, less the batch, for leaves; None where the layer cannot know."""
        if "_shapes" not in self.__dict__:
            like = self.init_state(1, device="meta")
            self.__dict__["_shapes"] = map_leaves(lambda leaf: leaf.shape[1:], like)
        return self.__dict__["_shapes"]

    def _zeros(self, *shape: int, device: Device, dtype: DType, at_least: DType = None) -> Tensor:
        """A part of the initial state, in `dtype` or `at_least`, whichever is wider."""
        weight = _any_parameter(self)
        if weight is not None:
            device, dtype = device or weight.device, dtype or weight.dtype
        dtype = dtype or torch.get_default_dtype()
        dtype = dtype if at_least is None else torch.promote_types(dtype, at_least)
        return torch.zeros(shape, device=device, dtype=dtype)


def _any_parameter(module: nn.Module) -> Tensor | None:
    """Of a child, if there is one: a layer's own, decays and the like, may be kept wider than its projections.

    A tenth of the cost of `next(module.parameters())`: this runs for every token.
    """
    for child in module._modules.values():
        if child is not None and (parameter := _any_parameter(child)) is not None:
            return parameter
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    return None


def _fits(state: State, shapes: Any, batch: int) -> bool:
    if isinstance(state, Tensor):
        return isinstance(shapes, torch.Size) and state.shape == (batch, *shapes)
    if state is None or shapes is None or isinstance(shapes, torch.Size):
        return state is shapes
    return len(state) == len(shapes) and all(_fits(*pair, batch) for pair in zip(state, shapes, strict=True))


def widen(x: Tensor) -> Tensor:
    """In float32, or wider where it already is: what a recurrence is computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in float32 or wider: x where it is small, and never beyond cap."""
    return cap * torch.tanh(widen(x) / cap)


registry: Registry[Layer] = Registry("layer")
register, names, get = registry.add, registry.names, registry.get


def build(name: str, dim: int, **options: Any) -> Layer:
    """Make a registered layer: `build("lru", 256, r_min=0.9)`.

    Unknown names and options raise ConfigError with the nearest known one.
    """
    cls = get(name)
    check_options(name, cls, options)
    return cls(dim, **options)


def check_options(name: str, cls: type[Layer], options: Mapping[str, Any]) -> None:
    """Refuse options that the constructor does not take, and text, as a command line may give, where it takes none."""
    known = [option for option in inspect.signature(cls).parameters if option != "dim"]
    hints = get_type_hints(cls.__init__)
    for option, value in options.items():
        if option not in known:
            raise nearest(f"option of {name}", option, known)
        kinds = [kind for kind in get_args(hints.get(option)) or (hints.get(option),) if kind in (int, float, bool)]
        if isinstance(value, str) and kinds and str not in get_args(hints[option]):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{name}: {option} is {value!r}, expected {expected}")
