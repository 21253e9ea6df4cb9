r"""A cell: a nonlinear recurrence, written once as a plain torch function of one step.

.. math:: y_t, s_t = f(x_t, \theta, s_{t-1})

From this step, scanl derives the loop over time, which is the reference, and fused kernels for a CPU and for a GPU,
with their backward passes.

    @cell("x: B T D, u: D D, state: B D -> B T D", equation="h_t = tanh(x_t + U h_{t-1})", source="Elman 1990")
    def elman(x, u, state):
        h = torch.tanh(x + state @ u.T)
        return h, h

    y, last = elman(x, u)  # x: (B, T, D), u: (D, D)

The declaration is that of every op: the operands with their axes, the state last, and the output's axes after the
arrow. An operand with an axis T is an input: the step gets one time step of it, here (B, D). An operand without B and T
is a parameter: the step gets it whole. Keyword-only arguments of the step are options.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.ops._frame.compiled import Kernels, compiled
from scanl.ops._frame.declaration import FLOATING, HALF, Call
from scanl.ops._frame.op import REGISTRY, Op

Step = Callable[..., tuple[Tensor, Any]]
_KINDS = {  # of kernels, by backend: module and class, device, package
    "cpu": ("kernels", "OnCpu", "cpu", "numba"),
    "triton": ("triton_kernels", "OnGpu", "cuda", "triton"),
}


class Cell(Op[..., Any]):
    """An op that is made from its step; the decorator `cell` makes it.

    step: the function of one step. It gets the inputs of the step, the parameters and the state, in the order of the
    declaration, and the options. It returns the output of the step and the next state. It treats every row of the batch
    independently.
    """

    def __init__(self, step: Step, declaration: str, *, static: Sequence[str] = (), **declared: Any):
        self.step, self.static = step, frozenset(static)
        defaults = {"id": None, "neutral": {}, "dtypes": HALF + FLOATING}
        super().__init__(self._loop(), declaration, **{**defaults, **declared})
        every = {axis for operand in self.operands for axes in operand.choices for axis in axes}
        self.axes = sorted({axis for axis in every if not axis.isdigit()} - {"B", "T"})
        self._compiled: dict[tuple, list[Any]] = {}
        self._refused: dict[tuple, list[str]] = {}  # why kernels cannot run, by backend, options, operands and sizes
        for backend, (_, _, device, package) in _KINDS.items():
            own = functools.partial
            kernels = Kernels(own(self._forward, backend), own(self._backward, backend), own(self._numbers, backend))
            compiled(
                self, backend, saves=(*self.names, "y", "kept"), kernels=kernels, devices=(device,),
                dtypes=FLOATING, package=package, needs=own(self._refusals, backend),
            )  # fmt: skip

    def _loop(self) -> Callable[..., tuple[Tensor, Any]]:
        """Return the loop over time. Its signature is that of the step with `state=None` and the keywords of `Call`."""
        step = self.step

        @functools.wraps(step)
        def loop(*values: Any, **options: Any) -> tuple[Tensor, Any]:
            *operands, state = values
            steps = [
                value.unbind(1) if value is not None and "T" in operand.choices[0] else [value] * operands[0].shape[1]
                for operand, value in zip(self.operands, operands, strict=False)
            ]
            ys = []
            for now in zip(*steps, strict=True):
                y, state = step(*now, state, **options)
                ys.append(y)
            if ys:
                return torch.stack(ys, 1), state
            sizes = self.sizes(dict(zip(self.names, [*operands, None], strict=True)), None)
            return operands[0].new_zeros(self.output_shape(sizes)) + operands[0].sum(), state  # in the graph

        found = inspect.signature(step)
        own = list(found.parameters.values())
        state = max(i for i, one in enumerate(own) if one.kind is one.POSITIONAL_OR_KEYWORD)
        if own[state].annotation is not inspect.Parameter.empty:
            own[state] = own[state].replace(annotation=own[state].annotation | None)
        for i in range(state, -1, -1):  # the state, and the optional operands just before it, may be left out
            if i < state and type(None) not in get_args(own[i].annotation):
                break
            own[i] = own[i].replace(default=None)
        call = [inspect.Parameter("call", inspect.Parameter.VAR_KEYWORD, annotation=Call)]
        loop.__signature__ = found.replace(parameters=own + call)  # pyright: ignore[reportAttributeAccessIssue]
        return loop

    def _kernels(
        self, backend: str, sizes: Mapping[str, Any], options: Mapping[str, Any], given: frozenset[str]
    ) -> Any:
        """Return the kernels for these options and operands, traced when first asked for. Raises Unsupported."""
        from scanl.ops._cells.compiled import generate

        # the hint of a symbolic size is its size in the call that is traced
        sizes = {
            name: sizes[name] if isinstance(sizes[name], int) else sizes[name].node.hint
            for name in self.axes
            if name in sizes
        }
        shapes: dict[str, tuple[str, ...] | None] = {}
        for operand in self.operands:
            there = (axes for axes in operand.choices if all(a in {"B", "T", *sizes} or a.isdigit() for a in axes))
            present = operand.name in given or operand.name == self.state
            shapes[operand.name] = tuple(axis for axis in next(there) if axis != "T") if present else None
        known = self._compiled.setdefault((backend, *shapes.values(), *options.values()), [])
        found = next((each for each in known if each.axes.fits(sizes)), None)
        if found is None:
            timed = frozenset(operand.name for operand in self.operands if "T" in operand.choices[0])
            fixed = self.static & set(sizes)
            output = tuple(axis for axis in self.output if axis != "T")
            module, kind, *_ = _KINDS[backend]
            kind = getattr(importlib.import_module(f"scanl.ops._cells.{module}"), kind)
            found = generate(kind, self.name, self.step, shapes, output, timed, sizes, fixed, options)
            known.append(found)
        return found

    def _of_call(
        self, backend: str, values: Sequence[Tensor | None], cu_seqlens: Tensor | None, options: Sequence[Any]
    ) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
        """Return the kernels, the operands that are given, and the sizes of a call."""
        operands = dict(zip(self.names, values, strict=True))
        sizes = self.sizes(operands, cu_seqlens)
        given = {name: value for name, value in operands.items() if value is not None}
        found = self._kernels(backend, sizes, dict(zip(self.options, options, strict=True)), frozenset(given))
        return found, given, sizes

    def _forward(self, backend: str, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        count = len(self.names)
        reverse, cu_seqlens, *options, keep = args[count:]
        found, given, sizes = self._of_call(backend, args[:count], cu_seqlens, options)
        shape = self.output_shape(sizes)
        return found.forward(given, found.sizes(sizes), shape, reverse, cu_seqlens, keep, self.name)

    def _backward(self, backend: str, dy: Tensor, dlast: Tensor, *args: Any) -> list[Tensor]:
        count = len(self.names)
        y, kept, reverse, cu_seqlens, *options = args[count:]
        found, given, sizes = self._of_call(backend, args[:count], cu_seqlens, options)
        return found.backward(dy, dlast, given, y, kept, found.sizes(sizes), reverse, cu_seqlens, self.name)

    def _numbers(
        self, backend: str, values: Sequence[Tensor | None], cu_seqlens: Tensor | None, options: Sequence[Any]
    ) -> int:
        found, _, sizes = self._of_call(backend, values, cu_seqlens, options)
        return found.kept_numbers(found.sizes(sizes))

    def _refusals(self, backend: str, **given: Any) -> Sequence[str]:
        """Return why the step cannot be compiled."""
        if torch.compiler.is_compiling():  # the kernels, when they run, refuse
            return []
        from scanl.ops._cells.trace import Unsupported

        options = {name: given[name] for name in self.options}
        key = (backend, given["given"], *options.values(), *[given.get(axis) for axis in self.axes])
        if key not in self._refused:
            self._refused[key] = []
            try:
                found = self._kernels(backend, given, options, given["given"] | {self.state})
                self._refused[key] = found.refusals(found.sizes(given))
            except (ConfigError, ShapeError):
                del self._refused[key]
                raise
            except Unsupported as error:
                self._refused[key] = [f"its step uses {error}"]
            except Exception as error:  # whatever the step raises on tensors without values; the loop may still run
                what = next(iter(str(error).splitlines()), "")
                self._refused[key] = [f"its step cannot be traced: {type(error).__name__}: {what}"]
        return self._refused[key]


def cell(declaration: str, **declared: Any) -> Callable[[Step], Cell]:
    """Declare the decorated step as a cell and register it; `declared` as in `Op`, with `equation` and `source`."""

    def register(step: Step) -> Cell:
        REGISTRY[step.__name__] = made = Cell(step, declaration, **declared)
        return made

    return register
