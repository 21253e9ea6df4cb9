"""The declaration of an op: operands with their axes, dtypes and options; and the checks of a call against it.

    "x: B T *F, a: ~ B T *F, state: B *F -> B T *F"

This names each operand with its axes, and after the arrow the axes of the output. `*F` is any number of axes. `~` means
that the operand broadcasts to these axes, aligned from the right. A number is an axis of that size. `|` separates
alternatives. `name?` may be None. `name: bool B T` is a boolean operand. The state is last and may always be None; with
`cu_seqlens` its first axis is the number of sequences. `state: tree` is a state of several tensors, whose structure the
op's `form` defines.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

import torch
from torch import Tensor

from scanl.errors import ShapeError, unknown
from scanl.ops._frame.summary import Effect

HALF_DTYPES = (torch.bfloat16, torch.float16)
FLOATING = (torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
REAL_PART = {torch.complex64: torch.float32, torch.complex128: torch.float64}
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
C = TypeVar("C")


@dataclass(frozen=True)
class Operand:
    """One operand of the declaration: its name and its axes, or alternatives for its axes."""

    name: str
    choices: tuple[tuple[str, ...], ...]
    broadcast: bool = False
    optional: bool = False
    truth: bool = False  # its dtype is torch.bool; it is not cast and has no gradient
    tree: bool = field(init=False)  # a state of several tensors
    variadic: tuple[int | None, ...] = field(init=False)  # for each of the choices, the index of its axis `*F`

    def __post_init__(self):
        variadic = (next((i for i, axis in enumerate(axes) if axis[0] == "*"), None) for axes in self.choices)
        object.__setattr__(self, "tree", self.choices == (("tree",),))
        object.__setattr__(self, "variadic", tuple(variadic))

    def __str__(self) -> str:
        return " or ".join("(" + ", ".join(axes) + ("," if len(axes) == 1 else "") + ")" for axes in self.choices)

    def time_axis(self, value: Tensor, ndim: int) -> int | None:
        """Return the time axis of `value`, or None. ndim: the number of axes of the first operand, for broadcasting."""
        if self.broadcast:
            axis = 1 - (ndim - value.ndim)
            return axis if axis >= 0 and value.shape[axis] != 1 else None
        axes = next((axes for axes in self.choices if len(axes) == value.ndim), self.choices[0])
        return 1 if "T" in axes else None

    def every_step(self, value: Tensor, first: Tensor) -> Tensor | None:
        """Return `value` with all rows and steps of `first`, the first operand; None if it is the same for them all."""
        if self.broadcast and value.ndim >= first.ndim - 1:
            steps = value if value.ndim == first.ndim else value[None]
            return None if steps.shape[:2] == (1, 1) else steps.expand(*first.shape[:2], *steps.shape[2:])
        return None if self.time_axis(value, first.ndim) is None else value


@dataclass(frozen=True)
class OpSample:
    """Valid arguments of an op, for the tests."""

    operands: Mapping[str, Any]  # tensors; a state may be a structure of tensors
    options: Mapping[str, Any] = field(default_factory=dict)


class Cases(Generic[C]):
    """An iterable that runs a generator anew for each loop. `@op.samples` decorates the generator."""

    def __init__(self):
        self._generate: Callable[[], Iterator[C]] = lambda: iter(())

    def __call__(self, generate: Callable[[], Iterator[C]]) -> Callable[[], Iterator[C]]:
        self._generate = generate
        return generate

    def __iter__(self) -> Iterator[C]:
        return self._generate()


class Call(TypedDict, total=False):
    """Keywords that every op takes besides its operands and options. A reference declares them and never gets them."""

    reverse: bool
    cu_seqlens: Tensor | None
    starts: Tensor | None
    backend: str


@dataclass(frozen=True, kw_only=True)
class OpSpec:
    """The declaration of an op, without its reference and its operands.

    neutral: values of the operands for a step that does not change the state.   divides: pairs of axes; the size of the
    first must divide the size of the second (G divides H).   derived: state axes whose size is computed from the other
    sizes.   real: operands that must be real even if others are complex.   wide: operands that may be float32 when the
    others are half precision; they do not widen the others.   initial: the first state, from zeros.
    form: for a state of several tensors, a function `form(sizes, options, dtype, device)` that returns the empty state.
    A state passed in must match it; without a state, backends get None.   check: a function of the operands, the
    options and cu_seqlens that raises for arguments that fail further checks, before any work.   widens: whether
    half-precision operands are widened for the reference, as they are for a backend that does not declare their dtype.
    excused: tests that this op need not pass, each with the reason, which the tests report.   effect: how a piece of a
    sequence acts on the state; None if not linearly.   values: the operand whose steps the op mixes, as attention mixes
    values: from an empty state the output is linear in it. "" if there is none.
    """

    id: str | None
    equation: str
    source: str
    neutral: Mapping[str, float]
    dtypes: tuple[torch.dtype, ...]
    divides: Mapping[str, str] = field(default_factory=dict)
    derived: Mapping[str, Callable[[Mapping[str, Any]], int]] = field(default_factory=dict)
    real: Sequence[str] = ()
    wide: Sequence[str] = ()
    initial: Callable[[Tensor], Tensor] = lambda zeros: zeros
    form: Callable[[Mapping[str, Any], Mapping[str, Any], torch.dtype, torch.device], Any] | None = None
    check: Callable[..., None] | None = None
    widens: bool = True
    excused: Mapping[str, str] = field(default_factory=dict)
    effect: Effect | None = None
    values: str = ""


class Declaration:
    """The operands of an op, and the checks of a call against them.

    parameters: the reference's parameters. Its keywords that are not operands are the options.
    """

    def __init__(self, name: str, line: str, parameters: Mapping[str, inspect.Parameter], spec: OpSpec):
        self.name = name
        operands, output = line.split("->")
        self.operands = tuple(_parse(operand) for operand in operands.split(","))
        self.output = tuple(output.split())
        self.names = tuple(operand.name for operand in self.operands)
        self.state = self.names[-1]
        self.positional = tuple(
            name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        )
        self.options = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in self.names
        }
        self._absent: dict[str, Tensor | None] = dict.fromkeys(self.names)
        self._defaults = {name: option.default for name, option in self.options.items()}
        self.required = tuple(name for name, option in self.options.items() if option.default is option.empty)
        self.dtypes, self.divides, self.derived = spec.dtypes, spec.divides, spec.derived
        self.real, self.wide = tuple(spec.real), tuple(spec.wide)

    def bind(self, args: Sequence[Any], more: Mapping[str, Any]) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        """Return the operands and the options of a call, by name. Raises TypeError for unknown arguments."""
        if len(args) > len(self.positional):
            limit = len(self.positional)
            raise TypeError(f"{self.name}: got {len(args)} positional arguments, expected at most {limit}")
        operands = {**self._absent, **dict(zip(self.positional, args, strict=False))}
        if not more and not self.required:
            return operands, self._defaults
        options = dict(self._defaults)
        for key, value in more.items():
            if key in options:
                options[key] = value
            elif key not in self.names:
                known = [*self.names, *options, *Call.__annotations__]
                raise TypeError(f"{self.name}: {unknown('argument', key, known)}")
            elif key in self.positional[: len(args)]:
                raise TypeError(f"{self.name}: {key} is given twice")
            else:
                operands[key] = value
        for name in self.required:
            if name not in more:
                raise TypeError(f"{self.name}: {name} is missing")
        return operands, options

    def sizes(self, operands: Mapping[str, Tensor | None], cu_seqlens: Tensor | None) -> dict[str, Any]:
        """Return the size of every axis. Raises ShapeError for an operand with a wrong shape or device."""
        sizes: dict[str, Any] = {}
        origin: dict[str, str] = {}  # for each axis, the operand that it was first seen in
        first: Tensor | None = None
        for operand in self.operands:
            value = operands[operand.name]
            if operand.tree:
                continue
            if operand.name == self.state:
                sizes.update({axis: derive(sizes) for axis, derive in self.derived.items()})
                origin.update(dict.fromkeys(self.derived, "the others"))
            if value is None:
                if operand.optional or operand.name == self.state:
                    continue
                raise ShapeError(f"{self.name}: {operand.name} is missing, expected a tensor {operand}")
            if not isinstance(value, Tensor):
                kind = type(value).__name__
                raise ShapeError(f"{self.name}: {operand.name} is a {kind}, expected a tensor {operand}")
            if operand.name == self.state and cu_seqlens is not None:
                of_sequences = {**sizes, "B": cu_seqlens.shape[0] - 1}
                self._match(operand, value.shape, of_sequences, {**origin, "B": "cu_seqlens"})
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
        """Compare a shape with the known sizes, and add the sizes of new axes."""
        if operand.broadcast:
            full = full_shape(operand.choices[0], sizes)
            if len(shape) <= len(full) and all(a in (1, b) for a, b in zip(shape[::-1], full[::-1], strict=False)):
                return
            raise ShapeError(
                f"{self.name}: {operand.name} has shape {tuple(shape)}, expected one that broadcasts to {operand} = "
                f"{full} from {self.names[0]}"
            )
        for axes, variadic in zip(operand.choices, operand.variadic, strict=True):
            bound = _bind_axes(axes, variadic, shape, sizes)
            if bound is not None:
                for axis, size in bound.items():  # torch.compile traces a difference of sets for ten times as long
                    if axis not in sizes:
                        sizes[axis], origin[axis] = size, operand.name
                return
        known = [
            f"{axis.lstrip('*')}={sizes[axis]} from {origin[axis]}"
            for axis in dict.fromkeys(axis for axes in operand.choices for axis in axes)
            if axis in sizes
        ]
        because = " with " + ", ".join(known) if known else ""
        raise ShapeError(f"{self.name}: {operand.name} has shape {tuple(shape)}, expected {operand}{because}")

    def kinds(self, operands: Mapping[str, Tensor | None]) -> tuple[torch.device, torch.dtype, torch.dtype]:
        """Return the device, the output's dtype, and the dtype that all operands promote to.

        The output has the first operand's dtype, or the promoted one if that is complex.
        """
        present = {}
        for operand in self.operands:
            value = operands.get(operand.name)
            if operand.truth and value is not None and value.dtype != torch.bool:
                raise ShapeError(f"{self.name}: {operand.name} is {short(value.dtype)}, expected bool")
            if value is not None and not (operand.truth or operand.tree):
                present[operand.name] = value
        for name, value in present.items():
            if value.dtype not in self.dtypes:
                raise ShapeError(
                    f"{self.name}: {name} is {short(value.dtype)}, expected {', '.join(map(short, self.dtypes))}"
                )
            if name in self.real and value.is_complex():
                raise ShapeError(f"{self.name}: {name} is {short(value.dtype)}, expected real numbers")
        present.pop(self.state, None)
        first = present[self.names[0]]
        common = functools.reduce(torch.promote_types, (v.dtype for k, v in present.items() if k not in self.wide))
        for name, value in present.items():
            if name in self.wide and not (common in HALF_DTYPES and value.dtype in (torch.float32, *HALF_DTYPES)):
                common = torch.promote_types(common, value.dtype)
        return first.device, common if common.is_complex and self.names[0] not in self.real else first.dtype, common

    def output_shape(self, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        return full_shape(self.output, sizes)

    def state_shape(self, sizes: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the shape of the state of one sequence. Raises ShapeError if only a given state could tell it."""
        try:
            return full_shape(self.operands[-1].choices[0][1:], sizes)
        except KeyError as axis:
            raise ShapeError(
                f"{self.name}: {self.state} is missing, expected a tensor {self.operands[-1]} because no other operand "
                f"has the axis {axis.args[0]}"
            ) from None


def full_shape(axes: Sequence[str], sizes: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of these axes; an axis that is a number has that size."""
    full: list[int] = []
    for axis in axes:
        if axis[0] == "*":
            full.extend(sizes[axis])
        else:
            full.append(int(axis) if axis.isdigit() else sizes[axis])
    return tuple(full)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse(line: str) -> Operand:
    name, axes = line.split(":")
    broadcast = "~" in axes
    truth = axes.split()[0] == "bool"
    axes = axes.replace("~", " ").removeprefix(" bool")
    choices = tuple(tuple(choice.split()) for choice in axes.split("|"))
    return Operand(name.strip().rstrip("?"), choices, broadcast, name.strip().endswith("?"), truth)


def _bind_axes(
    axes: Sequence[str], variadic: int | None, shape: torch.Size, sizes: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the sizes of the axes, or None if the shape does not fit the axes or the known sizes.

    variadic: the index of the axis that stands for any number of axes.
    """
    values: Sequence[Any] = shape
    if variadic is not None:
        end = variadic + 1 + len(shape) - len(axes)
        if end < variadic:
            return None
        values = (*shape[:variadic], tuple(shape[variadic:end]), *shape[end:])
    if len(values) != len(axes):
        return None
    bound: dict[str, Any] = {}
    for axis, size in zip(axes, values, strict=True):
        if axis.isdigit():
            if size != int(axis):
                return None
        elif bound.get(axis, sizes.get(axis, size)) != size:
            return None
        else:
            bound[axis] = size
    return bound
