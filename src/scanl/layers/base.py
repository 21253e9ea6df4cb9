"""The base class of layers."""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError, nearest
from scanl.layers.adapters import check_read
from scanl.layers.initial_state import Form, declare, initial, rows
from scanl.layers.module import Module
from scanl.layers.packing import restarted
from scanl.layers.parts.timespans import check_timespans
from scanl.layers.state import Device, DType, State, leaves
from scanl.ops.offsets import check_offsets, sequences
from scanl.ops.products.functions import large_products
from scanl.options import ConfiguredMeta, refuse, who


class Hint(NamedTuple):
    """Hint for the optimizer of a parameter.

    weight_decay: False for no weight decay.   lr: a learning rate, or the name of the layer's attribute that holds it.
    """

    weight_decay: bool = True
    lr: float | str | None = None


S = TypeVar("S")

UNDECAYED_HINT = Hint(weight_decay=False)

TAKEN_ARGUMENTS = {
    "timespans": "(B, T), the duration of each step in units of the usual one; it multiplies the step of the system",
    "memo": "a dict of tensors that the layers of a stack hand on in one pass, from the lowest up",
    "residual": "(B, T, D), what y is added to; x itself, unless a norm stands before the layer",
}
COMMON_ARGUMENTS = {"self", "x", "state", "cu_seqlens"}  # what every layer takes

if TYPE_CHECKING:
    Result_co = TypeVar("Result_co", covariant=True)

    class Runs(Protocol[Result_co]):
        def run(self, x: Tensor, *args: Any, **others: Any) -> Result_co: ...

    class TimedRun(Protocol[Result_co]):
        def run(
            self, x: Tensor, state: Any, cu_seqlens: Tensor | None, timespans: Tensor | None = None
        ) -> Result_co: ...


class Layer(Module, metaclass=ConfiguredMeta):
    """Base class of layers: maps (B, T, dim) and a state to (B, T, dim) and the next state.

    A subclass declares `state`, annotates the options of its constructor with ranges and meanings, and defines `run`.
    It describes itself in class variables, which `scanl show` prints and the tests read.
    """

    name: ClassVar[str] = ""  # set by `register` or `preset`
    aliases: ClassVar[tuple[str, ...]] = ()  # other names of the literature, by which the registry finds the class
    id: ClassVar[str] = ""  # a short name by which maintainers find a published model; it is never printed
    equation: ClassVar[str] = ""
    source: ClassVar[str] = ""
    op: ClassVar[str | None] = None
    # What carries the state where ranks divide a sequence: the "ops", through which all of it but counts of steps goes;
    # or the ranks, in "turns". None: ops where the class has an op.
    carried_by: ClassVar[Literal["ops", "turns"] | None] = None
    sample: ClassVar[Mapping[str, Any]] = {}  # small constructor options for the tests
    preset_of: ClassVar["type[Layer] | None"] = None  # set by `preset`: the layer that the preset configures
    preset_options: ClassVar[Mapping[str, Any]] = {}  # set by `preset`: the options
    own_path: ClassVar[bool] = False  # for a preset: its options run other code, so all layer tests run on it
    residual_out: ClassVar[str | None] = None  # name of the projection that writes into the residual stream
    residual_by_depth: ClassVar[bool] = False  # True: `enter_stack` sets its scale, so a stack does not
    # Further arguments of `run`, among `TAKEN_ARGUMENTS`. They are set for each subclass.
    takes: ClassVar[frozenset[str]] = frozenset()
    # Parameters that act on the state through several channels, where channels have recurrences of their own otherwise:
    # see `channelwise`. None: the channels have none.
    left_out: ClassVar[Sequence[str] | None] = None
    added: ClassVar[Mapping[str, Any]] = {}  # options of every subclass beside its own: name -> annotation
    state: ClassVar[Form | None] = None  # what the layer carries from step to step; None: `init_state` is overridden
    # How the work over T steps and the state grow with T. W is the size of a window, a segment or a chunk.
    cost: ClassVar[tuple[str, str]] = ("T", "1")
    # Facts of `scanl list --long` that its measurement does not see: "gated", ...
    kind: ClassVar[Mapping[str, bool]] = {}
    excused: ClassVar[Mapping[str, str]] = {}  # tests that cannot hold by definition: name -> reason
    # Modules inside whose weights the layer reads instead of calling them: path -> class. A path to a container stands
    # for the modules in it. A subclass adds to them.
    reads: ClassVar[Mapping[str, type[nn.Module]]] = {}

    hints: ClassVar[Mapping[str, Hint]] = {}  # by name of a parameter or of a module; a subclass adds to them

    dim: int
    config: dict[str, Any]  # the options by name, as the constructor got them, defaults filled in
    longest: int | None = None  # steps of the longest sequence that it reads; None: any
    bidirectional: bool = False  # True: reads future steps, so it is not causal and cannot stream

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.preset_of, cls.preset_options, cls.own_path = None, {}, vars(cls).get("own_path", False)
        if cls.state is not None:
            declare(cls.state)
        for argument in inspect.signature(cls.run).parameters.keys() - COMMON_ARGUMENTS - TAKEN_ARGUMENTS.keys():
            raise nearest(f"argument of run of {cls.__name__}", argument, TAKEN_ARGUMENTS)
        called = cls.run if cls.forward is Layer.forward else cls.forward
        cls.takes = frozenset(TAKEN_ARGUMENTS.keys() & inspect.signature(called).parameters.keys())
        cls.hints = {name: hint for base in reversed(cls.__mro__) for name, hint in vars(base).get("hints", {}).items()}
        cls.reads = {path: kind for base in reversed(cls.__mro__) for path, kind in vars(base).get("reads", {}).items()}

    @classmethod
    def sections(cls) -> list[str]:
        """Return the parts of the docstring that are made from declarations: options, further arguments and state."""
        takes = [f"Takes: {argument}, {TAKEN_ARGUMENTS[argument]}." for argument in sorted(cls.takes)]
        state = [] if cls.state is None else [f"State: {'; '.join(rows(cls.state))}."]
        return [*ConfiguredMeta.sections(cls), *takes, *state]

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        """Return the state before any input. device and dtype default to those of the parameters.

        Recurrent parts are float32 or wider for any dtype.
        """
        if self.state is None:
            raise NotImplementedError(f"{self._who()}: its class declares no state and defines no init_state")
        return initial(self, self.state, batch_size, device, dtype)

    def forward(
        self,
        x: Tensor,
        state: State = None,
        *,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, State]:
        """Map x (B, T, dim) to y (B, T, dim) and the state after the last step. state: None for `init_state`.

        cu_seqlens: (N+1,) offsets of N sequences packed over B == 1. Each sequence has its own row of the state.
        starts: (B, T) bool, True at steps before which the state begins anew, as at an episode's first step.
        others: arguments in `takes`.
        """
        self._check(x, state, cu_seqlens)
        for argument in others:
            if argument not in self.takes:
                hint = "; scanl.layers.padded(layer, x, mask) runs it over padded rows" if argument == "mask" else ""
                raise TypeError(f"{self._who()}: forward got {argument!r}, which the layer does not take{hint}")
        check_timespans(self._who(), others.get("timespans"), x)
        with large_products(x.shape[0] * x.shape[1]):
            if starts is None:
                return self.run(x, state, cu_seqlens, **others)
            return self._restarted(x, state, cu_seqlens, starts, others)

    def run(self, x: Tensor, state: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, State]:
        """Compute `forward` from checked x, state, cu_seqlens and, by name, the arguments in `takes`."""
        raise NotImplementedError

    if TYPE_CHECKING:  # a call has the type of `run`

        @overload
        def __call__(  # pyright: ignore[reportOverlappingOverload]
            self: "TimedRun[Result_co]",
            x: Tensor,
            state: State = None,
            *,
            cu_seqlens: Tensor | None = None,
            starts: Tensor | None = None,
            timespans: Tensor | None = None,
        ) -> "Result_co": ...
        @overload
        def __call__(
            self: "Runs[Result_co]",
            x: Tensor,
            state: State = None,
            *,
            cu_seqlens: Tensor | None = None,
            starts: Tensor | None = None,
        ) -> "Result_co": ...
        def __call__(self, *args: Any, **others: Any) -> Any: ...  # pyright: ignore[reportIncompatibleMethodOverride]

    @classmethod
    def at_places(
        cls, layers: "Sequence[Layer]", x: Tensor, states: Sequence[State], places: range
    ) -> tuple[Sequence[Tensor], Sequence[State]]:
        """Return what causal layers of this class give for one x (B, T, dim): outputs (B, E, dim) at `places` alone.

        The states are those after the last step. A class that can compute some outputs without the others does so.
        """
        pairs = [layer(x, state) for layer, state in zip(layers, states, strict=True)]
        return [y[:, places.start : places.stop : places.step] for y, _ in pairs], [state for _, state in pairs]

    def step(self, x: Tensor, state: State, *, starts: Tensor | None = None) -> tuple[Tensor, State]:
        """Run `forward` for one step: x (B, dim) to y (B, dim). Raises ConfigError for a bidirectional layer.

        starts: (B,) bool, True for rows whose state begins anew before the step.
        """
        if self.bidirectional:
            raise ConfigError(
                f"{self._who()}: step is called, expected forward over the whole sequence because the layer is "
                "bidirectional: each output depends on steps to come"
            )
        y, state = self(x[:, None], state) if starts is None else self(x[:, None], state, starts=starts[:, None])
        return y[:, 0], state

    def extra_repr(self) -> str:
        """Show the options, and the shapes of the layer's own parameters."""
        shown = {
            "dim": self.dim,
            **self.config,
            **{name: vars(self).get(name, self.config[name]) for name in self.config},
        }
        sizes = [f"{name}={value!r}" for name, value in shown.items() if isinstance(value, int | float | str)]
        return ", ".join(filter(None, [*sizes, super().extra_repr()]))

    def enter_stack(self, index: int, layers: Sequence["Layer"]) -> None:
        """Called once by a stack when all its layers are made. This layer is layers[index], counted from the lowest.

        layers: all mixers of the stack, of any class, or all its channel mixers. Here a layer sets initial values that
        depend on depth, and finds other layers whose parameters it uses.
        """

    def _who(self) -> str:
        """Return the name for messages: the registered name, or the class name of a user's subclass."""
        return who(type(self))

    def _refuse(self, option: str, value: object, expected: str) -> NoReturn:
        """Raise ConfigError for an option whose value does not fit the others."""
        refuse(type(self), option, value, expected)

    def _check(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> None:
        """Raise an error for a wrong input, or for a module that the layer cannot read, before any work is done."""
        self._check_reads()
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
        batch, of = sequences(x, cu_seqlens), "x" if cu_seqlens is None else "cu_seqlens"
        form = self._state_form()
        if form is None or _fits(state, form, batch):
            return
        shapes = {path: tuple(leaf.shape) for path, leaf in leaves(state)}
        usual = dict(leaves(self.init_state(batch, device="meta")))
        fitting = {path: tuple(leaf.shape) for path, leaf in usual.items()}
        if shapes != fitting:
            raise ShapeError(f"{self._who()}: state has {shapes}, expected {fitting} because of the layer and {of}")
        path, kind = next((at, leaf.dtype) for at, leaf in leaves(state) if not _readable(leaf.dtype, usual[at].dtype))
        raise ShapeError(f"{self._who()}: {path} is {kind}, expected {usual[path].dtype} because of the layer")

    def read_paths(self) -> list[str]:
        """Return the paths in `reads`, of this layer and of the layers inside it, that lead to a module or a tensor."""
        inside = {name: layer.reads for name, layer in self.named_modules() if isinstance(layer, Layer)}
        paths = [f"{name}.{path}".removeprefix(".") for name, reads in inside.items() for path in reads]
        modules = {name for name, _ in self.named_modules(remove_duplicate=False)}
        return [path for path in dict.fromkeys(paths) if path in modules]

    def read_modules(self) -> set[nn.Module]:
        """Return the modules on which the layer itself refuses hooks: those at the paths of `reads`, and on the way."""
        modules: set[nn.Module] = set()
        for path in self.reads:
            module: nn.Module | None = self
            for name in path.split("."):
                module = module._modules.get(name)
                if module is None:
                    break
                modules.add(module)
            else:
                modules.update(module.modules())
        return modules

    def _check_reads(self) -> None:
        """Raise ConfigError for a module of `reads` whose hooks or adapters would have no effect."""
        if self.reads:
            who = self._who()
            for path, kind in self.reads.items():
                check_read(who, self, path, kind)

    def _begin(self, x: Tensor, state: S | None, cu_seqlens: Tensor | None) -> S:
        """Return the state before the first step of x: `state`, or the initial one if it is None."""
        return cast(S, self.init_state(sequences(x, cu_seqlens))) if state is None else state

    def _restarted(
        self, x: Tensor, state: State, cu_seqlens: Tensor | None, starts: Tensor, others: dict[str, Any]
    ) -> tuple[Tensor, State]:
        """Compute `forward` with a state that begins anew at `starts`."""
        return restarted(self._who(), self.run, self.init_state, x, state, cu_seqlens, starts, **others)

    def _state_form(self) -> State:
        """Return an initial state of one row on the meta device; None if the layer does not know its form."""
        if "_form" not in vars(self):
            with torch.no_grad():  # a state that is learned has a graph, which a copy of the layer cannot have
                vars(self).update(_form=self.init_state(1, device="meta"))
        return vars(self)["_form"]

    def _zeros(self, *shape: int, device: Device, dtype: DType, at_least: DType = None) -> Tensor:
        """Make a zero part of the initial state, in `dtype` or `at_least`, whichever is wider."""
        return self._filled(0.0, shape, device, dtype, at_least)

    def _filled(self, value: float, shape: Sequence[int], device: Device, dtype: DType, at_least: DType) -> Tensor:
        """Make a part of the initial state, in `dtype` or `at_least`, whichever is wider; `at_least` if of integers."""
        weight = _any_parameter(self)
        if weight is not None:
            device, dtype = device or weight.device, dtype or weight.dtype
        dtype = dtype or torch.get_default_dtype()
        if at_least is not None:
            floating = at_least.is_floating_point or at_least.is_complex
            dtype = torch.promote_types(dtype, at_least) if floating else at_least
        return torch.full(tuple(shape), value, device=device, dtype=dtype)


def _any_parameter(module: nn.Module) -> Tensor | None:
    """Return any parameter of a submodule, or else of the module itself.

    Submodules come first because projections have the dtype that x should have; a layer's own parameters, such as
    decays, may be wider. This runs for every token and takes a tenth of the time of `next(module.parameters())`.
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
    if isinstance(form, dict):
        fitting = isinstance(state, dict) and state.keys() == form.keys()
        return fitting and all(_fits(state[name], form[name], batch) for name in form)
    return len(state) == len(form) and all(_fits(*pair, batch) for pair in zip(state, form, strict=True))


def _readable(source: torch.dtype, kind: torch.dtype) -> bool:
    """Whether a state of dtype `found` can be converted to `kind`: real to real, complex to complex.

    complex32 is not readable, because torch cannot compute with it.
    """
    if source is kind:
        return True
    if kind.is_complex:
        return source.is_complex and source is not torch.complex32
    return kind.is_floating_point and source.is_floating_point


def widen(x: Tensor) -> Tensor:
    """Return x in float32, or in its own dtype if that is wider. Recurrences are computed in this dtype."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_widened(x: Tensor) -> AbstractContextManager[Any]:
    """Switch autocast off on x's device, so that a recurrence is computed in the dtype of its operands."""
    on = x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()
