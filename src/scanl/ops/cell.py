r"""A cell: a nonlinear recurrence, written once as a plain torch function of one step.

.. math:: y_t, s_t = f(x_t, \theta, s_{t-1})

From this step, scanl derives the loop over time, which is the reference, and a fused kernel for a CPU with its backward
pass.

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
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.ops._frame.compiled import Kernels, compiled
from scanl.ops._frame.declaration import FLOATING, HALF, Call
from scanl.ops._frame.op import REGISTRY, Op

Step = Callable[..., tuple[Tensor, Any]]


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
        saves = (*self.names, "y", "kept")
        kernels = Kernels(self._forward, self._backward, self._numbers)
        compiled(
            self, "cpu", saves=saves, kernels=kernels, devices=("cpu",), dtypes=FLOATING, package="numba",
            needs=self._refusals,
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
            return operands[0].new_zeros(self.output_shape(sizes)), state

        found = inspect.signature(step)
        last = [name for name, one in found.parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD][-1]
        own = [one.replace(default=None) if name == last else one for name, one in found.parameters.items()]
        call = [inspect.Parameter("call", inspect.Parameter.VAR_KEYWORD, annotation=Call)]
        loop.__signature__ = found.replace(parameters=own + call)  # pyright: ignore[reportAttributeAccessIssue]
        return loop

    def _kernels(self, sizes: Mapping[str, Any], options: Mapping[str, Any], given: frozenset[str]) -> Any:
        """Return the kernels for these options and operands, traced when first asked for. Raises Unsupported."""
        from scanl.ops._cells.kernels import compiled

        sizes = {name: sizes[name] for name in self.axes if name in sizes}
        shapes: dict[str, tuple[str, ...] | None] = {}
        for operand in self.operands:
            there = (axes for axes in operand.choices if all(a in {"B", "T", *sizes} or a.isdigit() for a in axes))
            present = operand.name in given or operand.name == self.state
            shapes[operand.name] = tuple(axis for axis in next(there) if axis != "T") if present else None
        known = self._compiled.setdefault((*shapes.values(), *options.values()), [])
        found = next((each for each in known if each.axes.fits(sizes)), None)
        if found is None:
            timed = frozenset(operand.name for operand in self.operands if "T" in operand.choices[0])
            fixed = self.static & set(sizes)
            output = tuple(axis for axis in self.output if axis != "T")
            found = compiled(self.name, self.step, shapes, output, timed, sizes, fixed, options)
            known.append(found)
        return found

    def _of_call(self, operands: Mapping[str, Tensor | None], options: Sequence[Any]) -> tuple[Any, Any]:
        """Return the kernels and the sizes of a call."""
        sizes: dict[str, int] = {}
        for operand in self.operands:
            value = operands[operand.name]
            if value is not None:
                axes = next(axes for axes in operand.choices if len(axes) == value.ndim)
                sizes.update(zip(axes, value.shape, strict=True))
        given = frozenset(name for name, value in operands.items() if value is not None)
        found = self._kernels(sizes, dict(zip(self.options, options, strict=True)), given)
        return found, found.sizes(sizes)

    def _forward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        count = len(self.names)
        operands, (reverse, cu_seqlens, *options, keep) = dict(zip(self.names, args[:count], strict=True)), args[count:]
        found, sizes = self._of_call(operands, options)
        shape = self.output_shape(self.sizes(operands, cu_seqlens))
        values = {name: value for name, value in operands.items() if value is not None}
        return found.forward(values, sizes, shape, reverse, cu_seqlens, keep, self.name)

    def _backward(self, dy: Tensor, dlast: Tensor, *args: Any) -> list[Tensor]:
        count = len(self.names)
        operands = dict(zip(self.names, args[:count], strict=True))
        y, kept, reverse, cu_seqlens, *options = args[count:]
        found, sizes = self._of_call(operands, options)
        values = {name: value for name, value in operands.items() if value is not None}
        return found.backward(dy, dlast, values, y, kept, sizes, reverse, cu_seqlens, self.name)

    def _numbers(self, operands: Mapping[str, Tensor | None], options: Sequence[Any]) -> int:
        found, sizes = self._of_call(operands, options)
        return found.kept_numbers(sizes)

    def _refusals(self, **given: Any) -> Sequence[str]:
        """Return why the step cannot be compiled."""
        if torch.compiler.is_compiling():  # the kernels, when they run, refuse
            return []
        from scanl.ops._cells.trace import Unsupported

        options = {name: given[name] for name in self.options}
        try:
            self._kernels(given, options, given["given"] | {self.state})
        except (ConfigError, ShapeError):
            raise
        except Unsupported as error:
            return [f"its step uses {error}"]
        except Exception as error:  # whatever the step raises on tensors without values; the loop may still run
            return [f"its step cannot be traced: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"]
        return []


def cell(declaration: str, **declared: Any) -> Callable[[Step], Cell]:
    """Declare the decorated step as a cell and register it; `declared` as in `Op`, with `equation` and `source`."""

    def register(step: Step) -> Cell:
        REGISTRY[step.__name__] = made = Cell(step, declaration, **declared)
        return made

    return register
