"""What an op is: one declaration, from which come the checks, the zero state, the choice of backend and the tests.

The decorated function is the reference: a plain loop over time, in any floating dtype. Other backends are added to it
with `backend`; those that are compiled kernels with `compiled` of compiled.py.
"""

import functools
import importlib.util
import inspect
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypedDict

import torch
from torch import Tensor
from torch.autograd import forward_ad

from scanl.errors import BackendError, ShapeError, unknown

P = ParamSpec("P")
ORDER = ("triton", "cpu", "parallel", "reference")  # what "auto" tries, first to last
HALF = (torch.bfloat16, torch.float16)
FLOATING = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


@dataclass(frozen=True)
class Operand:
    """One line of the declaration: a name and its axes, some of which may be shared by broadcasting."""

    name: str
    choices: tuple[tuple[str, ...], ...]
    broadcast: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return " or ".join("(" + ", ".join(axes) + ("," if len(axes) == 1 else "") + ")" for axes in self.choices)

    def time_axis(self, value: Tensor, ndim: int) -> int | None:
        """Which axis of `value` is time, if any; `ndim` axes has the first operand, which it may broadcast to."""
        if self.broadcast:
            axis = 1 - (ndim - value.ndim)
            return axis if axis >= 0 and value.shape[axis] != 1 else None
        axes = next((axes for axes in self.choices if len(axes) == value.ndim), self.choices[0])
        return 1 if "T" in axes else None


@dataclass(frozen=True)
class Sample:
    """Arguments that an op takes, as its laws try them."""

    operands: Mapping[str, Tensor]
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Backend:
    """One way to evaluate an op, and what it cannot do."""

    name: str
    run: Callable[..., tuple[Tensor, Any]]
    devices: tuple[str, ...] | None = None  # None: any
    dtypes: tuple[torch.dtype, ...] = FLOATING + COMPLEX  # narrower ones are widened first
    whole: bool = False  # takes reverse and cu_seqlens itself; else it sees forward time and one sequence a row
    package: str | None = None  # what it needs and is not installed
    needs: Callable[..., Sequence[str]] = lambda **sizes: ()  # reasons against sizes, options and `given`, the operands
    forward_mode: bool = True  # has derivatives in forward mode (torch.func.jvp, jacfwd, hessian)
    half_products: bool = False  # of operands in half precision it rounds to that what it multiplies; sums are float32

    def reasons(self, device: torch.device, dtype: torch.dtype, sizes: Mapping[str, Any], *, named: bool) -> list[str]:
        """Why it cannot run these arguments: nothing, when it can."""
        reasons = []
        emulated = named and self.name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        if self.devices is not None and device.type not in self.devices and not (emulated and device.type == "cpu"):
            reasons.append(f"device {device.type} (runs on {', '.join(self.devices)})")
        elif self.package is not None:
            reasons.append(f"package {self.package} is not installed")
        if not named and not self.forward_mode and _in_forward_mode():
            reasons.append("no derivative in forward mode, which is asked for here")
        if self.compute_dtype(dtype) not in self.dtypes:
            reasons.append(f"dtype {_short(dtype)} (takes {', '.join(map(_short, self.dtypes))})")
        reasons.extend(self.needs(**sizes))
        return reasons

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype in self.dtypes else _WIDER.get(dtype, dtype)


class Call(TypedDict, total=False):
    """What every op takes beside its operands and options; a reference declares it and never sees it."""

    reverse: bool
    cu_seqlens: Tensor | None
    backend: str


class Op(Generic[P]):
    """A pure function over tensors that evaluates one kind of transition; `(output, last state)` come back.

    Its declaration names the operands and their axes, and those of the output:
    `"x: B T *F, a: ~ B T *F, state: B *F -> B T *F"`. `*F` stands for any number of axes, `~` for broadcasting to the
    axes from the right, `|` between alternatives, `name?` for an operand that may be None. `state` comes last and may
    always be None (zeros, or `initial` of them); with `cu_seqlens` its first axis counts sequences. The options are the
    reference's keywords.
    """

    def __init__(
        self,
        reference: Callable[P, tuple[Tensor, Tensor]],
        declaration: str,
        *,
        id: str,
        equation: str,
        source: str,
        samples: Callable[[], Iterator[Sample]],
        errors: Callable[[], Iterator[tuple[Sample, str]]],
        neutral: Mapping[str, float],
        dtypes: tuple[torch.dtype, ...],
        divides: Mapping[str, str] | None = None,
        derived: Mapping[str, Callable[[Mapping[str, Any]], int]] | None = None,
        initial: Callable[[Tensor], Tensor] = lambda zeros: zeros,
        real: Sequence[str] = (),
        wide: Sequence[str] = (),
    ):
        functools.update_wrapper(self, reference)
        self.__signature__ = _signature(reference)
        self.name: str = reference.__name__
        declaration, output = declaration.split("->")
        self.operands = tuple(_parse(line) for line in declaration.split(","))
        self.output = tuple(output.split())
        self.options = {
            name: parameter
            for name, parameter in inspect.signature(reference).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        self.divides = divides or {}  # axes whose size divides another's: heads that others share
        self.derived = derived or {}  # axes of the state whose size follows from those of the operands
        self.initial = initial
        self.real = tuple(real)  # operands that stay real beside complex ones
        self.wide = tuple(wide)  # operands that may be float32 beside others in half precision, which they do not widen
        self.names = tuple(operand.name for operand in self.operands)
        self.id, self.equation, self.source = id, equation, source
        self.samples, self.errors = samples, errors
        self.neutral = neutral  # the operands of a step that leaves the state as it is
        self.dtypes = dtypes
        self.backends: dict[str, Backend] = {"reference": Backend("reference", reference)}
        self._plans: dict[tuple, tuple] = {}
        REGISTRY[self.name] = self

    def backend(self, name: str, *, package: str | None = None, **declared: Any) -> Callable[[Callable], Callable]:
        """Add a backend that needs `package`; `declared` as in `Backend`."""

        if package is not None and importlib.util.find_spec(package) is not None:
            package = None

        def add(run: Callable) -> Callable:
            self.backends[name] = Backend(name, run, package=package, **declared)
            return run

        return add

    def _call(
        self,
        *args: Tensor | None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        **more: Any,
    ) -> tuple[Tensor, Tensor]:
        operands, options = self._bind(args, more)
        wanted = (backend,) if backend != "auto" else _preferred.names
        check_offsets(self.name, cu_seqlens)
        first = operands[self.names[0]]
        symbolic = isinstance(first, Tensor) and any(type(size) is not int for size in first.shape)
        if symbolic or torch.compiler.is_compiling():
            plan = self._plan(operands, options, cu_seqlens, wanted)
        else:
            kinds = [(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else type(v) for v in operands.values()]
            packing = None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype)
            key = (wanted, _in_forward_mode(), packing, *options.values(), *kinds)
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plan(operands, options, cu_seqlens, wanted)
                if len(self._plans) > 4096:
                    self._plans.clear()
                self._plans[key] = plan
            if cu_seqlens is not None:
                assert first is not None
                self._check_packing(cu_seqlens, first.shape[1])
        chosen, dtype, compute, device, state_shape, y_shape = plan
        state = operands.pop("state")
        if state is None:
            state = self.initial(torch.zeros(state_shape, dtype=_WIDER.get(compute, compute), device=device))
        real = _REAL.get(compute, compute)
        values = [
            value if compute in HALF and name in self.wide else cast(value, real if name in self.real else compute)
            for name, value in operands.items()
        ]
        values.append(cast(state, _WIDER.get(compute, compute)))
        y, state = self.evaluate(chosen, values, y_shape, reverse=reverse, cu_seqlens=cu_seqlens, **options)
        return cast(y, dtype), state

    if TYPE_CHECKING:  # which sees the reference's parameters, as `inspect.signature` does

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Tensor, Tensor]: ...
    else:
        __call__ = _call

    def evaluate(
        self,
        name: str,
        values: Sequence[Tensor | None],
        y_shape: Sequence[int],
        *,
        reverse: bool,
        cu_seqlens: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """A backend over operands that are checked and cast; for a plain one time is turned and packing undone here."""
        chosen = self.backends[name]
        if chosen.whole:
            return chosen.run(*values, reverse=reverse, cu_seqlens=cu_seqlens, **options)
        first = values[0]
        assert first is not None
        if cu_seqlens is None:
            if not reverse:
                return chosen.run(*values, **options)
            turned = []
            for operand, value in zip(self.operands, values, strict=True):
                axis = None if value is None or operand.name == "state" else operand.time_axis(value, first.ndim)
                turned.append(value if value is None or axis is None else value.flip(axis))
            y, state = chosen.run(*turned, **options)
            return y.flip(1), state
        parts = []
        for n, (start, end) in enumerate(itertools.pairwise(offsets(cu_seqlens, first.shape[1], self.name))):
            alone = []
            for operand, value in zip(self.operands, values, strict=True):
                if value is not None and operand.name == "state":
                    value = value[n : n + 1]
                elif value is not None and (axis := operand.time_axis(value, first.ndim)) is not None:
                    value = value.narrow(axis, start, end - start)
                alone.append(value)
            shape = (y_shape[0], end - start, *y_shape[2:])
            parts.append(self.evaluate(name, alone, shape, reverse=reverse, cu_seqlens=None, **options))
        if not parts:
            state = values[-1]
            assert state is not None
            return first.new_zeros(y_shape), state.clone()
        return torch.cat([y for y, _ in parts], 1), torch.cat([state for _, state in parts])

    def _plan(
        self,
        operands: Mapping[str, Tensor | None],
        options: Mapping[str, Any],
        cu_seqlens: Tensor | None,
        wanted: tuple[str, ...],
    ) -> tuple[str, torch.dtype, torch.dtype, torch.device, tuple[int, ...], tuple[int, ...]]:
        """All that follows from shapes, dtypes and devices alone, checked: it is remembered from call to call.

        The backend's name, the dtypes of the output and of the computation, the device, the shapes of state and output.
        """
        sizes = self.sizes(operands, cu_seqlens)
        device, dtype, common = self._kind(operands)
        chosen = self._choose(wanted, device, common, {**sizes, **options, "given": _given(operands)})
        batch = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = (batch, *_full(self.operands[-1].choices[0][1:], sizes))
        return chosen.name, dtype, chosen.compute_dtype(common), device, shape, self.output_shape(sizes)

    def output_shape(self, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        return _full(self.output, sizes)

    def explain(self, *args: Tensor | None, cu_seqlens: Tensor | None = None, **more: Any) -> str:
        """A line for each backend: that it can run these arguments, or each reason why not. `auto` takes the first."""
        operands, options = self._bind(args, {k: v for k, v in more.items() if k not in ("reverse", "backend")})
        check_offsets(self.name, cu_seqlens)
        sizes = {**self.sizes(operands, cu_seqlens), **options, "given": _given(operands)}
        device, _, dtype = self._kind(operands)
        lines = []
        for name in self.preference():
            reasons = self.backends[name].reasons(device, dtype, sizes, named=False)
            lines.append(f"{name}: {'; '.join(reasons) or 'can run'}")
        return "\n".join(lines)

    def preference(self) -> list[str]:
        return [name for name in ORDER if name in self.backends]

    def _bind(self, args: tuple, more: dict[str, Any]) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        if len(args) > len(self.names):
            raise TypeError(f"{self.name}: got {len(args)} positional arguments, expected at most {len(self.names)}")
        operands: dict[str, Tensor | None] = dict(zip(self.names, args, strict=False))
        options = {name: option.default for name, option in self.options.items()}
        for key, value in more.items():
            if key in options:
                options[key] = value
            elif key not in self.names:
                known = [*self.names, *options, "reverse", "cu_seqlens", "backend"]
                raise TypeError(f"{self.name}: {unknown('argument', key, known)}")
            elif key in operands:
                raise TypeError(f"{self.name}: {key} is given twice")
            else:
                operands[key] = value
        return {name: operands.get(name) for name in self.names}, options

    def sizes(self, operands: Mapping[str, Tensor | None], cu_seqlens: Tensor | None) -> dict[str, Any]:
        """Every shape against the declaration; gives the sizes of the axes."""
        sizes: dict[str, Any] = {}
        origin: dict[str, str] = {}
        first: Tensor | None = None
        for operand in self.operands:
            value = operands[operand.name]
            if operand.name == "state":
                sizes.update({axis: derive(sizes) for axis, derive in self.derived.items()})
                origin.update(dict.fromkeys(self.derived, "the others"))
            if value is None:
                if operand.optional or operand.name == "state":
                    continue
                raise ShapeError(f"{self.name}: {operand.name} is missing, expected a tensor {operand}")
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise ShapeError(f"{self.name}: {operand.name} is a {kind}, expected a tensor {operand}")
            if operand.name == "state" and cu_seqlens is not None:
                sizes, kept = {**sizes, "B": cu_seqlens.shape[0] - 1}, sizes
                origin, kept_origin = {**origin, "B": "cu_seqlens"}, origin
                self._match(operand, value.shape, sizes, origin)
                sizes, origin = kept, kept_origin
            else:
                self._match(operand, value.shape, sizes, origin)
            if first is None:
                first = value
                if cu_seqlens is not None and value.shape[0] != 1:
                    raise ShapeError(
                        f"{self.name}: {operand.name} has a batch of {value.shape[0]}, expected 1 because of cu_seqlens"
                    )
            elif value.device != first.device:
                raise ShapeError(
                    f"{self.name}: {operand.name} is on {value.device}, expected {first.device} because of "
                    f"{self.names[0]}"
                )
        for axis, other in self.divides.items():
            if axis not in sizes:
                continue
            if sizes[other] % max(1, sizes[axis]) or (sizes[axis] == 0) != (sizes[other] == 0):
                raise ShapeError(
                    f"{self.name}: {origin[axis]} has {axis}={sizes[axis]}, expected a divisor of "
                    f"{other}={sizes[other]} from {origin[other]}"
                )
        return sizes

    def _match(self, operand: Operand, shape: torch.Size, sizes: dict[str, Any], origin: dict[str, str]) -> None:
        if operand.broadcast:
            full = _full(operand.choices[0], sizes)
            if len(shape) <= len(full) and all(a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)):
                return
            raise ShapeError(
                f"{self.name}: {operand.name} has shape {tuple(shape)}, expected one that broadcasts to {operand} = "
                f"{full} from {self.names[0]}"
            )
        for axes in operand.choices:
            found = _bind_axes(axes, shape, sizes)
            if found is not None:
                for axis in found.keys() - sizes.keys():
                    origin[axis] = operand.name
                sizes.update(found)
                return
        known = [
            f"{axis.lstrip('*')}={sizes[axis]} from {origin[axis]}"
            for axis in dict.fromkeys(axis for axes in operand.choices for axis in axes)
            if axis in sizes
        ]
        because = " with " + ", ".join(known) if known else ""
        raise ShapeError(f"{self.name}: {operand.name} has shape {tuple(shape)}, expected {operand}{because}")

    def _check_packing(self, cu_seqlens: Tensor, steps: int) -> None:
        """Its values, which a GPU has to be waited for: of one tensor but once."""
        if cu_seqlens.is_inference():
            offsets(cu_seqlens, steps, self.name)
            return
        now = (cu_seqlens._version, steps)
        if getattr(cu_seqlens, "_scanl_checked", None) != now:
            offsets(cu_seqlens, steps, self.name)
            cu_seqlens._scanl_checked = now  # pyright: ignore[reportAttributeAccessIssue]

    def _kind(self, operands: Mapping[str, Tensor | None]) -> tuple[torch.device, torch.dtype, torch.dtype]:
        """The device, the dtype of the output (the first operand's, complex if any is), and the one all promote to."""
        given = {name: value for name, value in operands.items() if value is not None}
        for name, value in given.items():
            if value.dtype not in self.dtypes:
                raise ShapeError(
                    f"{self.name}: {name} is {_short(value.dtype)}, expected {', '.join(map(_short, self.dtypes))}"
                )
            if name in self.real and value.is_complex():
                raise ShapeError(f"{self.name}: {name} is {_short(value.dtype)}, expected real numbers")
        given.pop("state", None)
        first = given[self.names[0]]
        common = functools.reduce(torch.promote_types, (v.dtype for k, v in given.items() if k not in self.wide))
        for name, value in given.items():
            if name in self.wide and not (common in HALF and value.dtype in (torch.float32, *HALF)):
                common = torch.promote_types(common, value.dtype)
        return first.device, common if common.is_complex and self.names[0] not in self.real else first.dtype, common

    def _choose(
        self, wanted: tuple[str, ...], device: torch.device, dtype: torch.dtype, sizes: Mapping[str, Any]
    ) -> Backend:
        """The first of the names that can run; of "auto", the first of all."""
        refusals = []
        for name in wanted:
            if name == "auto":
                for each in self.preference():
                    if not self.backends[each].reasons(device, dtype, sizes, named=False):
                        return self.backends[each]
            elif name not in self.backends:
                refusals.append(f"{self.name}: {unknown('backend', name, ['auto', *self.backends])}")
            else:
                reasons = self.backends[name].reasons(device, dtype, sizes, named=True)
                if not reasons:
                    return self.backends[name]
                refusals.append(f"{self.name}: backend {name!r} cannot run these arguments: {'; '.join(reasons)}")
        raise BackendError("; ".join(refusals))

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.preference())}>"


def _signature(reference: Callable[..., Any]) -> inspect.Signature:
    """The reference's, with what every op takes spelt out."""
    declared = inspect.signature(reference)
    own = [one for one in declared.parameters.values() if one.kind is not one.VAR_KEYWORD]
    every = inspect.signature(Op._call).parameters
    return declared.replace(parameters=[*own, *(every[name] for name in Call.__annotations__)])


def _given(operands: Mapping[str, Tensor | None]) -> frozenset[str]:
    return frozenset(name for name, value in operands.items() if value is not None)


def cast(value: Tensor | None, dtype: torch.dtype) -> Any:
    """As `value.to(dtype)`; where nothing changes, a tenth of its time."""
    return value if value is None or value.dtype is dtype else value.to(dtype)


class _Preferred(threading.local):
    names: tuple[str, ...] = ("auto",)


_preferred = _Preferred()


class backend:
    """A context in which "auto", as layers call ops, means these backends: of each op the first that can run.

    names: of "auto", "reference", "parallel", "cpu", "triton". An op for which none of them can run raises
    BackendError; "reference" always can. Contexts nest, the innermost counts, and each thread has its own. A backend
    that is named at a call is used as if there were no context. Raises BackendError for an unknown name.

    >>> from scanl.ops import linear_scan
    >>> with backend("parallel", "reference"):  # all in plain torch: for torch.func.jvp, for export
    ...     linear_scan(torch.ones(1, 3, 1), torch.ones(1))[0].flatten().tolist()
    [1.0, 2.0, 3.0]
    """

    def __init__(self, *names: str):
        known = ("auto", *reversed(ORDER))
        for name in names:
            if name not in known:
                raise BackendError(f"scanl.ops.backend: {unknown('backend', name, known)}")
        if not names:
            raise BackendError(f"scanl.ops.backend: no backend is named, expected some of {', '.join(known)}")
        self.names = names
        self.before: list[tuple[str, ...]] = []  # of each time that it was entered

    def __enter__(self) -> None:
        self.before.append(_preferred.names)
        _preferred.names = self.names

    def __exit__(self, *error: object) -> None:
        _preferred.names = self.before.pop()


REGISTRY: dict[str, Op[...]] = {}


def op(declaration: str, **declared: Any) -> Callable[[Callable[P, tuple[Tensor, Tensor]]], Op[P]]:
    """Declare the decorated reference an op; `declared` as in `Op`."""
    return lambda reference: Op(reference, declaration, **declared)


def _in_forward_mode() -> bool:
    return forward_ad._current_level >= 0


def transforming() -> bool:
    """Whether a transformation of torch.func is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]


def check_offsets(name: str, cu_seqlens: Tensor | None) -> None:
    """Refuse what is not a tensor of offsets; what they are, `offsets` looks at."""
    if cu_seqlens is None:
        return
    if not isinstance(cu_seqlens, Tensor):
        found = f"a {type(cu_seqlens).__name__}"
    elif cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        found = f"{_short(cu_seqlens.dtype)} of shape {tuple(cu_seqlens.shape)}"
    else:
        return
    raise ShapeError(f"{name}: cu_seqlens is {found}, expected a tensor of int32 or int64 of shape (N+1,)")


def offsets(cu_seqlens: Tensor, steps: int, name: str) -> tuple[int, ...]:
    """The offsets of packed sequences as numbers, checked: from 0 to `steps`, never falling."""
    bounds = tuple(cu_seqlens.tolist())
    if bounds[0] != 0 or bounds[-1] != steps or any(b < a for a, b in itertools.pairwise(bounds)):
        raise ShapeError(f"{name}: cu_seqlens is {list(bounds)}, expected offsets that rise from 0 to T={steps}")
    return bounds


def _parse(line: str) -> Operand:
    name, axes = line.split(":")
    broadcast = "~" in axes
    choices = tuple(tuple(choice.replace("~", " ").split()) for choice in axes.split("|"))
    return Operand(name.strip().rstrip("?"), choices, broadcast, name.strip().endswith("?"))


def _full(axes: Sequence[str], sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Their sizes; a number is its own."""
    full: list[int] = []
    for axis in axes:
        if axis[0] == "*":
            full.extend(sizes[axis])
        else:
            full.append(int(axis) if axis.isdigit() else sizes[axis])
    return tuple(full)


def _bind_axes(axes: Sequence[str], shape: torch.Size, sizes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sizes of the axes if the shape fits them and what is known, else None."""
    many = [i for i, axis in enumerate(axes) if axis[0] == "*"]
    extra = len(shape) - len(axes)
    if extra < -1 if many else extra != 0:
        return None
    found: dict[str, Any] = {}
    i = 0
    for axis in axes:
        if axis[0] == "*":
            size: Any = tuple(shape[i : i + extra + 1])
            i += extra + 1
        else:
            size = shape[i]
            i += 1
            if axis.isdigit():
                if size != int(axis):
                    return None
                continue
        if found.get(axis, sizes.get(axis, size)) != size:
            return None
        found[axis] = size
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
