"""The layer protocol and the registry."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError, nearest
from scanl.layers.module import Module
from scanl.layers.state import Device, DType, State, leaves
from scanl.ops.offsets import check_offsets
from scanl.registry import Registry


class Hint(NamedTuple):
    """How an optimiser should train a parameter.

    weight_decay: False leaves weight decay out.   lr: the attribute of the layer that holds its learning rate.
    """

    weight_decay: bool = True
    lr: str | None = None


UNDECAYED = Hint(weight_decay=False)

TAKES = {
    "timespans": "(B, T), how long each step lasts",
    "memo": "a dict of tensors that the layers of a stack hand on in one pass, from the lowest up",
}


class Layer(Module):
    """A state, a transition and a readout: (B, T, dim) in, (B, T, dim) and the state out.

    A subclass defines `init_state` and `forward`, and declares itself in class variables, which `scanl show` prints
    and the tests read.
    """

    name: ClassVar[str] = ""  # set by `register` or `preset`
    id: ClassVar[str] = ""  # a short name by which maintainers find a published model: nothing prints it
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    op: ClassVar[str | None] = None
    sample: ClassVar[Mapping[str, Any]] = {}  # constructor options for the tests: small
    preset_of: ClassVar["type[Layer] | None"] = None  # set by `preset`: the layer that this one is, with other options
    preset_options: ClassVar[Mapping[str, Any]] = {}  # and which
    own_path: ClassVar[bool] = False  # of a preset: its options run other code, so every law of layers is run on it
    residual_out: ClassVar[str | None] = None  # the projection that writes into the residual stream
    residual_by_depth: ClassVar[bool] = False  # `enter_stack` gives it its published scale: a stack scales it no more
    takes: ClassVar[frozenset[str]] = frozenset()  # what `forward` takes beside x, the state and cu_seqlens: of `TAKES`
    excused: ClassVar[Mapping[str, str]] = {}  # laws of the tests that cannot hold by definition: law -> reason

    hints: ClassVar[Mapping[str, Hint]] = {}  # by parameter, or by module for all in it; a subclass adds to its bases'

    dim: int
    bidirectional: bool = False  # True: sees the future, so neither causal nor streamable

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.preset_of, cls.preset_options, cls.own_path = None, {}, vars(cls).get("own_path", False)
        for argument in cls.takes:
            if argument not in TAKES:
                raise nearest(f"argument in takes of {cls.__name__}", argument, TAKES)
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
        """`forward` at T = 1: x (B, dim) -> y (B, dim). ConfigError where the layer sees the future."""
        if self.bidirectional:
            raise ConfigError(
                f"{self._who()}: step is called, expected forward over the whole sequence because the layer is "
                "bidirectional: each output depends on steps to come"
            )
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def extra_repr(self) -> str:
        """The options that are attributes of the same name, and the shapes of the layer's own parameters."""
        options = [name for name in inspect.signature(type(self)).parameters if name != "dim"]
        kept = [(name, vars(self).get(name)) for name in ("dim", *options)]
        sizes = [f"{name}={value!r}" for name, value in kept if isinstance(value, int | float | str)]
        return ", ".join(filter(None, [*sizes, super().extra_repr()]))

    def init_decay(self, value: float) -> None:
        """Set the decay per step to `value`. MultiScale calls this; a layer without a single decay does nothing."""

    def enter_stack(self, index: int, layers: Sequence["Layer"]) -> None:
        """Called once by a stack, when all its layers are made: this one is layers[index], counted from the lowest.

        layers: every mixer of the stack, of whatever class, or every channel mixer. Here a layer sets the initial
        values that depend on depth, and finds the other layers whose parameters it uses.
        """

    def _who(self) -> str:
        """The name for messages: the registered one; of a user's subclass, the name of the class."""
        return vars(type(self)).get("name") or type(self).__name__

    def _check(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> None:
        """Refuse wrong input before any work."""
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ShapeError(f"{self._who()}: x has shape {tuple(x.shape)}, expected (B, T, {self.dim}) of the layer")
        weight = _any_parameter(self)
        if weight is None:
            weight = x
        if x.device != weight.device:
            raise ShapeError(
                f"{self._who()}: x is on {x.device}, expected {weight.device} of the parameters; move x or the layer"
            )
        if x.dtype != weight.dtype and (x.device.type == "meta" or not torch.is_autocast_enabled(x.device.type)):
            raise ShapeError(
                f"{self._who()}: x is {x.dtype}, expected {weight.dtype} of the parameters; cast x or the layer"
            )
        check_offsets(self._who(), cu_seqlens, x.shape[0], x.shape[1])
        if state is None or torch.compiler.is_compiling():
            return
        batch, of = (x.shape[0], "x") if cu_seqlens is None else (cu_seqlens.shape[0] - 1, "cu_seqlens")
        form = self._state_form()
        if form is None or _fits(state, form, batch):
            return
        found = {path: tuple(leaf.shape) for path, leaf in leaves(state)}
        own = dict(leaves(self.init_state(batch, device="meta")))
        fitting = {path: tuple(leaf.shape) for path, leaf in own.items()}
        if found != fitting:
            raise ShapeError(f"{self._who()}: state has {found}, expected {fitting} because of the layer and {of}")
        path, kind = next((at, leaf.dtype) for at, leaf in leaves(state) if not _readable(leaf.dtype, own[at].dtype))
        raise ShapeError(f"{self._who()}: {path} is {kind}, expected {own[path].dtype} because of the layer")

    def _state_form(self) -> State:
        """An initial state of one row on the meta device; None where the layer does not know its form."""
        if "_form" not in self.__dict__:
            self.__dict__["_form"] = self.init_state(1, device="meta")
        return self.__dict__["_form"]

    def _zeros(self, *shape: int, device: Device, dtype: DType, at_least: DType = None) -> Tensor:
        """A part of the initial state, in `dtype` or `at_least`, whichever is wider."""
        weight = _any_parameter(self)
        if weight is not None:
            device, dtype = device or weight.device, dtype or weight.dtype
        dtype = dtype or torch.get_default_dtype()
        dtype = dtype if at_least is None else torch.promote_types(dtype, at_least)
        return torch.zeros(shape, device=device, dtype=dtype)


def _any_parameter(module: nn.Module) -> Tensor | None:
    """Any parameter of the module; of a submodule if one has any.

    A layer's own parameters, such as decays, may be wider than its projections, which say what dtype x should have.
    This runs for every token, and costs a tenth of `next(module.parameters())`.
    """
    for child in module._modules.values():
        if child is not None and (parameter := _any_parameter(child)) is not None:
            return parameter
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    return None


def _fits(state: State, form: State, batch: int) -> bool:
    if isinstance(state, Tensor):
        fitting = isinstance(form, Tensor) and state.shape == (batch, *form.shape[1:])
        return fitting and _readable(state.dtype, form.dtype)
    if state is None or form is None or isinstance(form, Tensor):
        return state is form
    return len(state) == len(form) and all(_fits(*pair, batch) for pair in zip(state, form, strict=True))


def _readable(found: torch.dtype, kind: torch.dtype) -> bool:
    """Whether a state of dtype `found` can be converted to `kind`: real to real, complex to complex.

    torch computes nothing in complex32.
    """
    if found is kind:
        return True
    if kind.is_complex:
        return found.is_complex and found is not torch.complex32
    return kind.is_floating_point and found.is_floating_point


def widen(x: Tensor) -> Tensor:
    """x in float32, or in its own dtype if that is wider. Recurrences are computed in this dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_widened(x: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast on x's device: a recurrence is computed in the dtype of its operands."""
    on = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in float32 or wider: close to x where x is small, and always between -cap and cap."""
    return cap * torch.tanh(widen(x) / cap)


registry: Registry[Layer] = Registry("layer")
register, get = registry.add, registry.get

# What mixes features beside the layers that mix over time: `@channel_mixers.add("gated_mlp")`, in layers/channel/.
channel_mixers: Registry[Layer] = Registry("channel mixer")

L = TypeVar("L", bound=Layer)


def preset(name: str, **options: Any) -> Callable[[type[L]], type[L]]:
    """Register a published model that is another layer with options of its own.

    The decorated class subclasses that layer and has no code: a docstring, `equation` and `source`. Its constructor has
    these options as defaults, so a caller can override them.

    >>> from scanl.layers import LRU
    >>> @preset("slow_lru", r_min=0.99)
    ... class SlowLRU(LRU):
    ...     "An LRU that starts with a long memory."
    >>> SlowLRU(4).preset_options, build("slow_lru", 4, r_max=0.999).name
    ({'r_min': 0.99}, 'slow_lru')
    >>> registry.remove("slow_lru")
    """

    def add(cls: type[L]) -> type[L]:
        (base,) = cls.__bases__
        check_options(name, base, options)
        start: Any = base.__init__
        signature = inspect.signature(start)
        signature = signature.replace(
            parameters=[p.replace(default=options.get(p.name, p.default)) for p in signature.parameters.values()]
        )

        @functools.wraps(start)
        def __init__(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            start(*given.args, **given.kwargs)

        cls.preset_of, cls.preset_options = base, options
        vars(__init__)["__signature__"] = signature
        type.__setattr__(cls, "__init__", __init__)
        return register(name)(cls)

    return add


def names(presets: bool = True) -> list[str]:
    """Every registered name, sorted; without the presets where `presets` is False."""
    return [name for name in registry.names() if presets or get(name).preset_of is None]


def build(name: str, dim: int, **options: Any) -> Layer:
    """Make a registered layer: `build("lru", 256, r_min=0.9)`.

    Unknown names and options raise ConfigError with the nearest known one.
    """
    cls = get(name)
    check_options(name, cls, options)
    return cls(dim, **options)


def check_options(name: str, cls: type[Layer], options: Mapping[str, Any]) -> None:
    """Refuse options that the constructor does not have, and text where an option is a number."""
    known = [option for option in inspect.signature(cls).parameters if option != "dim"]
    hints = get_type_hints(cls.__init__)
    for option, value in options.items():
        if option not in known:
            raise nearest(f"option of {name}", option, known)
        kinds = [kind for kind in get_args(hints.get(option)) or (hints.get(option),) if kind in (int, float, bool)]
        if isinstance(value, str) and kinds and str not in get_args(hints[option]):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{name}: {option} is {value!r}, expected {expected}")
