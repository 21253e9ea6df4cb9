r"""A cell: a nonlinear recurrence, written once as a plain torch function of one step.

.. math:: y_t, s_t = f(x_t, \theta, s_{t-1})

From this step, scanl derives the loop over time, which is the reference, fused kernels for a CPU and for a GPU with
their backward passes, and Newton's method for all steps at once (`Cell.solve`).

    @cell("x: B T D, u: D D, state: B D -> B T D", equation="h_t = tanh(x_t + U h_{t-1})", source="Elman 1990")
    def elman(x, u, state):
        h = torch.tanh(x + state @ u.T)
        return h, h

    y, last = elman(x, u)  # x: (B, T, D), u: (D, D)

The declaration is as for every op: the operands with their axes, the state last, and the output's axes after the
arrow. An operand with an axis T is an input: the step gets one time step of it, here (B, D). An operand without B and T
is a parameter: the step gets it whole. Keyword-only arguments of the step are options. A state of several variables is
a NamedTuple: `state.y: B D, state.z: B D` declares its fields, and the step's annotation names it.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.errors import ConfigError, ShapeError
from scanl.ops._compiler.cells.constant import holding
from scanl.ops._compiler.cells.constant import products_hold_inputs as products_hold_inputs
from scanl.ops._compiler.cells.fields import JOINED_STATE, CellFields, fields
from scanl.ops._frame.compiled import Kernels, compiled
from scanl.ops._frame.context import context
from scanl.ops._frame.declaration import FLOATING, HALF_DTYPES, WIDER, Call, full_shape
from scanl.ops._frame.op import REGISTRY, Op, cast
from scanl.ops._newton import METHODS as METHODS
from scanl.ops._newton import Newton, Starts, Trajectory, previous, products
from scanl.ops.fixed_point import Convergence
from scanl.ops.offsets import check_kind, check_numbers

Step = Callable[..., tuple[Tensor, Any]]
_KINDS = {  # of kernels, by backend: module and class, device, package
    "cpu": ("scanl.ops._compiler.cells.kernels", "OnCpu", "cpu", "numba"),
    "triton": ("scanl.ops._compiler.cells.triton_kernels", "OnGpu", "cuda", "triton"),
}


class Cell(Op[..., Any]):
    """An op that is made from its step; the decorator `cell` makes it.

    step: the function of one step. It gets the inputs of the step, the parameters and the state, in the order of the
    declaration, and the options. It returns the output of the step and the next state. It treats every row of the batch
    independently.
    by_hand: the module of `scanl.ops._cpu` whose class KernelsByHand runs the step on a CPU.
    """

    def __init__(
        self, step: Step, declaration: str, *, static: Sequence[str] = (), by_hand: str | None = None, **declared: Any
    ):
        if not step.__name__.isidentifier():
            raise ConfigError(f"cell: the step's name is {step.__name__!r}, expected an identifier: operators bear it")
        self.step, self.static = step, frozenset(static)
        declaration, self.fields = fields(step, declaration)
        self._step = step if self.fields is None else self._packed(self.fields)
        self._sums = {} if self.fields is None or not self.fields.parts else {JOINED_STATE: self.fields.parts}
        if self.fields is not None:
            declared["derived"] = {**declared.get("derived", {}), **self.fields.derived()}
        defaults = {"id": None, "neutral": {}, "dtypes": HALF_DTYPES + FLOATING}
        super().__init__(self._loop(), declaration, **{**defaults, **declared})
        every = {axis for operand in self.operands for axes in operand.choices for axis in axes}
        self.axes = sorted({axis for axis in every if not axis.isdigit()} - {"B", "T"})
        self._kinds = {backend: (module, kind) for backend, (module, kind, *_) in _KINDS.items()}
        if by_hand is not None:
            self._kinds["cpu"] = f"scanl.ops._cpu.{by_hand}", "KernelsByHand"
        self._compiled: dict[tuple, list[Any]] = {}
        self._refused: dict[tuple, list[str]] = {}  # why kernels cannot run, by backend, options, operands and sizes
        self._jacobians: dict[
            tuple, Any
        ] = {}  # by dtype, options, operands and sizes; None where the step cannot be traced
        for backend, (_, _, device, package) in _KINDS.items():
            kernels = Kernels(
                functools.partial(self._forward, backend),
                functools.partial(self._backward, backend),
                functools.partial(self._numbers, backend),
            )
            compiled(
                self, backend, saves=(*self.names, "y", "kept"), kernels=kernels, devices=(device,),
                dtypes=FLOATING, package=package, needs=functools.partial(self._refusals, backend),
            )  # fmt: skip

    def _packed(self, state: CellFields) -> Step:
        """Return the step with its state in one tensor."""

        @functools.wraps(self.step)
        def step(*values: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
            sizes: dict[str, Any] = {}
            for operand, value in zip(self.operands[:-1], values, strict=False):
                for axes in operand.choices if value is not None else ():
                    there = [axis for axis in axes if axis != "T"]
                    if value is not None and len(there) == value.ndim:
                        sizes |= zip(there, value.shape, strict=True)
            *operands, packed = values
            assert packed is not None
            y, new = self.step(*operands, state.unpack(packed, sizes), **options)
            return y, state.pack(new)

        return step

    def _pack(
        self, operands: Mapping[str, Any], cu_seqlens: Tensor | None
    ) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
        """Return the operands with the state in one tensor, and the sizes. Raises ShapeError."""
        state = operands[self.state]
        if self.fields is None or state is None:
            return dict(operands), self.sizes(operands, cu_seqlens)
        sizes = self.sizes({**operands, self.state: None}, cu_seqlens)
        rows = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self.fields.check(f"{self.name}: {self.state}", state, rows, sizes)
        return {**operands, self.state: self.fields.pack(state)}, sizes

    def _call(self, *args: Any, cu_seqlens: Tensor | None = None, **more: Any) -> tuple[Tensor, Any]:
        if self.fields is None:
            return super()._call(*args, cu_seqlens=cu_seqlens, **more)
        call = {name: more.pop(name) for name in Call.__annotations__ if name in more}
        operands, options = self.bind(args, more)
        check_kind(self.name, cu_seqlens)
        operands, sizes = self._pack(operands, cu_seqlens)
        y, last = super()._call(cu_seqlens=cu_seqlens, **operands, **options, **call)
        return y, self._unpacked(last, sizes)

    if not TYPE_CHECKING:
        __call__ = _call

    def explain(self, *args: Any, cu_seqlens: Tensor | None = None, **more: Any) -> str:
        if self.fields is None:
            return super().explain(*args, cu_seqlens=cu_seqlens, **more)
        operands, options = self.bind(
            args, {k: v for k, v in more.items() if k not in ("reverse", "starts", "backend")}
        )
        check_kind(self.name, cu_seqlens)
        return super().explain(cu_seqlens=cu_seqlens, **self._pack(operands, cu_seqlens)[0], **options)

    def _unpacked(self, last: Tensor, sizes: Mapping[str, Any]) -> Any:
        """Return a state as the step has it: copies, because torch lets nobody change several views in place."""
        if self.fields is None:
            return last
        return self.fields.kind(*[tensor.clone() for tensor in self.fields.unpack(last, sizes)])

    def _loop(self) -> Callable[..., tuple[Tensor, Any]]:
        """Return the loop over time. Its signature is the step's, with `state=None` and the keywords of `Call`."""
        step = self._step

        @functools.wraps(step)
        def loop(*values: Any, **options: Any) -> tuple[Tensor, Any]:
            *operands, state = values
            steps = [
                value.unbind(1) if value is not None and "T" in operand.choices[0] else [value] * operands[0].shape[1]
                for operand, value in zip(self.operands, operands, strict=False)
            ]
            pairs = zip(self.operands, operands, strict=False)
            run = holding(step, [value for operand, value in pairs if "T" not in operand.choices[0]])
            ys = []
            for now in zip(*steps, strict=True):
                y, state = run(*now, state, **options)
                ys.append(y)
            if ys:  # a copy of the state: the backward pass may need the last step's, and callers may change this one
                return torch.stack(ys, 1), pytree.tree_map_only(Tensor, Tensor.clone, state)
            sizes = self.sizes(dict(zip(self.names, [*operands, None], strict=True)), None)
            return operands[0].new_zeros(self.output_shape(sizes)) + operands[0].sum(), state  # in the graph

        declared = inspect.signature(step)
        parameters = list(declared.parameters.values())
        state = max(i for i, parameter in enumerate(parameters) if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)
        if parameters[state].annotation is not inspect.Parameter.empty:
            parameters[state] = parameters[state].replace(annotation=parameters[state].annotation | None)
        for i in range(state, -1, -1):  # the state, and the optional operands just before it, may be left out
            if i < state and type(None) not in get_args(parameters[i].annotation):
                break
            parameters[i] = parameters[i].replace(default=None)
        call = [inspect.Parameter("call", inspect.Parameter.VAR_KEYWORD, annotation=Call)]
        loop.__signature__ = declared.replace(parameters=parameters + call)  # pyright: ignore[reportAttributeAccessIssue]
        return loop

    def _kernels(
        self, backend: str, sizes: Mapping[str, Any], options: Mapping[str, Any], present: frozenset[str]
    ) -> Any:
        """Return the kernels for these options and operands, traced at the first call. Raises UnsupportedOperation."""
        from scanl.ops._compiler.cells.compiled import generate

        # the hint of a symbolic size is its size in the call that is traced
        sizes = {
            name: sizes[name] if isinstance(sizes[name], int) else sizes[name].node.hint
            for name in self.axes
            if name in sizes
        }
        shapes, output = self._shapes(sizes, present)
        known = self._compiled.setdefault((backend, *shapes.values(), *options.values()), [])

        def kernels(*, frugal: bool) -> Any:
            match = next(
                (compiled for compiled in known if compiled.frugal == frugal and compiled.axes.fits(sizes)), None
            )
            if match is None:
                timed = frozenset(operand.name for operand in self.operands if "T" in operand.choices[0])
                fixed = self.static & set(sizes)
                module, kind = self._kinds[backend]
                kind = getattr(importlib.import_module(module), kind)
                match = generate(
                    kind, self.name, self._step, shapes, output, timed, sizes, fixed, options, self._sums, frugal=frugal
                )
                known.append(match)
            return match

        compiled = kernels(frugal=False)
        return compiled if compiled.within(compiled.sizes(sizes)) else kernels(frugal=True)

    def _shapes(
        self, sizes: Mapping[str, Any], names: frozenset[str]
    ) -> tuple[dict[str, tuple[str, ...] | None], tuple[str, ...]]:
        """Return the axes of every operand, None for an absent one, and of the output, all without time."""
        shapes: dict[str, tuple[str, ...] | None] = {}
        for operand in self.operands:
            there = (axes for axes in operand.choices if all(a in {"B", "T", *sizes} or a.isdigit() for a in axes))
            present = operand.name in names or operand.name == self.state
            shapes[operand.name] = tuple(axis for axis in next(there) if axis != "T") if present else None
        return shapes, tuple(axis for axis in self.output if axis != "T")

    def _of_call(
        self, backend: str, values: Sequence[Tensor | None], cu_seqlens: Tensor | None, options: Sequence[Any]
    ) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
        """Return the kernels, the operands that are not None, and the sizes of a call."""
        operands = dict(zip(self.names, values, strict=True))
        sizes = self.sizes(operands, cu_seqlens)
        present = {name: value for name, value in operands.items() if value is not None}
        compiled = self._kernels(backend, sizes, dict(zip(self.options, options, strict=True)), frozenset(present))
        return compiled, present, sizes

    def _forward(self, backend: str, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        count = len(self.names)
        reverse, cu_seqlens, *options, keep = args[count:]
        compiled, present, sizes = self._of_call(backend, args[:count], cu_seqlens, options)
        shape = self.output_shape(sizes)
        return compiled.forward(present, compiled.sizes(sizes), shape, reverse, cu_seqlens, keep, self.name)

    def _backward(self, backend: str, dy: Tensor, dlast: Tensor, *args: Any) -> list[Tensor]:
        count = len(self.names)
        y, residuals, reverse, cu_seqlens, *options = args[count:]
        compiled, present, sizes = self._of_call(backend, args[:count], cu_seqlens, options)
        return compiled.backward(
            dy, dlast, present, y, residuals, compiled.sizes(sizes), reverse, cu_seqlens, self.name
        )

    def _numbers(
        self, backend: str, values: Sequence[Tensor | None], cu_seqlens: Tensor | None, options: Sequence[Any]
    ) -> int:
        compiled, _, sizes = self._of_call(backend, values, cu_seqlens, options)
        return compiled.kept_numbers(compiled.sizes(sizes))

    def _refusals(self, backend: str, **reasoned: Any) -> Sequence[str]:
        """Return why the step cannot be compiled."""
        if torch.compiler.is_compiling():  # the kernels, when they run, refuse
            return []
        from scanl.ops._compiler.rules import UnsupportedOperation

        options = {name: reasoned[name] for name in self.options}
        key = (backend, reasoned["given"], *options.values(), *[reasoned.get(axis) for axis in self.axes])
        if key not in self._refused:
            self._refused[key] = []
            try:
                compiled = self._kernels(backend, reasoned, options, reasoned["given"] | {self.state})
                self._refused[key] = compiled.refusals(compiled.sizes(reasoned))
            except (ConfigError, ShapeError):
                del self._refused[key]
                raise
            except UnsupportedOperation as error:
                self._refused[key] = [f"its step uses {error}"]
            except Exception as error:  # whatever the step raises on tensors without values; the loop may still run
                what = next(iter(str(error).splitlines()), "")
                self._refused[key] = [f"its step cannot be traced: {type(error).__name__}: {what}"]
        return self._refused[key]

    # --- all steps at once

    def solve(
        self,
        method: str,
        /,
        *args: Tensor | None,
        tolerance: float | None = None,
        max_iterations: int = 100,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
        **more: Any,
    ) -> Trajectory:
        r"""Run the cell over time, all steps at once by Newton's method.

        .. math:: s^{k+1}_t = f(s^k_{t-1}, x_t) + J_t\,(s^{k+1}_{t-1} - s^k_{t-1})

        `nonlinear_scan` has the method, its source and its gradient. It equals backpropagation through time.

        method: "sequential", which is a call of the cell; "newton", with the full Jacobians J_t, E² numbers a step for
        a state of E; "quasi_newton", with the blocks of J_t that couple the variables of one channel, K E numbers a
        step. Axes of the state that are numbers count its K variables, and letters its channels: `state: B 2 D` has
        blocks 2 x 2. Where a cell treats each channel by itself, both methods are the same.
        args, more: operands and options, as in a call, with `reverse`, `cu_seqlens` and `starts`.
        tolerance, max_iterations: as in `nonlinear_scan`.

        Returns the outputs and the last state, as a call does. `.convergence` of the pair has the iterations, the
        residual and the tolerance. J comes from the operations of the step, at about E² numbers for each. A step that
        cannot be traced (`explain` says so) takes E vector-Jacobian products instead. Sequences of one step run
        sequentially. Raises ConvergenceError when the tolerance was not reached, ConfigError for an option out of
        range, and what a call raises. Second derivatives of the Newton methods raise RuntimeError.

        >>> from scanl.ops import indrnn
        >>> x, a = torch.tensor([[[1.0], [-3.0], [2.0]]]), torch.tensor([2.0])
        >>> result = indrnn.solve("newton", x, a)  # relu(1); relu(2·1 - 3); relu(2·0 + 2)
        >>> y, last = result
        >>> y.flatten().tolist(), last.tolist(), result.convergence.iterations
        ([1.0, 0.0, 2.0], [[2.0]], 1)
        """
        newton = Newton(f"{self.name}.solve", method, tolerance, max_iterations)
        if method != "sequential" and self.operands[-1].choices[0] == ("B",):
            raise ConfigError(
                f"{self.name}.solve: {self.state} has the axes (B), expected another axis because method {method!r} "
                "takes the numbers of a state from it; write `B 1`"
            )
        if method != "sequential" and (reason := self.excused.get("the gradients of the output")) is not None:
            raise ConfigError(f"{self.name}.solve: method is {method!r}, expected 'sequential' because {reason}")
        operands, options = self.bind(args, more)
        check_kind(self.name, cu_seqlens)
        if self.check is not None:
            self.check(operands, options, cu_seqlens)
        operands, sizes = self._pack(operands, cu_seqlens)
        pieces = None
        if starts is not None:
            pieces, operands = self._cut(operands, options, starts, cu_seqlens, reverse, context.backends)
            cu_seqlens, sizes = pieces.cu_seqlens, self.sizes(operands, pieces.cu_seqlens)
        y, last, convergence = self._solved(newton, operands, options, sizes, reverse, cu_seqlens)
        if pieces is not None:
            y, last = pieces.unpacked(y), pieces.leave(last)
        return Trajectory(y, self._unpacked(last, sizes), convergence)

    def _solved(
        self,
        newton: Newton,
        operands: dict[str, Tensor | None],
        options: Mapping[str, Any],
        sizes: Mapping[str, Any],
        reverse: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Convergence]:
        """Return the outputs, the last state in one tensor, and the convergence, of operands that `_pack` checked."""
        _, dtype, common = self.kinds(operands)
        compute, steps = WIDER.get(common, common), sizes["T"]
        if newton.method == "sequential" or steps <= 1 or not sizes["B"]:
            y, last = super()._call(reverse=reverse, cu_seqlens=cu_seqlens, **operands, **options)
            return y, last, Convergence(steps, 0.0, newton.limit(compute))
        first = operands[self.names[0]]
        assert first is not None
        rows = sizes["B"]
        if cu_seqlens is not None:
            check_numbers(self.name, cu_seqlens, steps)
            rows = cu_seqlens.shape[0] - 1
        state = operands.pop(self.state)
        if state is None:
            state = self.initial(torch.zeros((rows, *self.state_shape(sizes)), dtype=compute, device=first.device))
        for at, to in self._casts({**operands, self.state: None}, compute):
            operands[self.names[at]] = cast(operands[self.names[at]], to)
        present = {name: value for name, value in operands.items() if value is not None}
        timed = [operand.name for operand in self.operands if operand.name in present and "T" in operand.choices[0]]
        state = state.to(compute)
        if reverse:
            present |= {name: present[name].flip(1) for name in timed}
            if cu_seqlens is not None:
                state, cu_seqlens = state.flip(0), steps - cu_seqlens.flip(0)
        present |= {name: present[name].flatten(0, 1) for name in timed}
        starts, ends = None, None
        if cu_seqlens is not None:
            nonempty = (cu_seqlens.diff() > 0).nonzero()[:, 0]
            starts, ends = Starts(cu_seqlens[nonempty].long(), nonempty), cu_seqlens[nonempty + 1].long() - 1
        y, s, convergence = self._solve(newton, present, timed, state, steps, sizes, options, starts)
        if starts is not None and ends is not None:
            last = state.index_copy(0, starts.rows, s[0, ends])
            last = last.flip(0) if reverse else last
        else:
            last = s[:, -1]
        if reverse:
            y = y.flip(1)
        return cast(y, dtype), last, convergence

    def _solve(
        self,
        newton: Newton,
        present: Mapping[str, Tensor],
        timed: Sequence[str],
        state: Tensor,
        steps: int,
        sizes: Mapping[str, Any],
        options: Mapping[str, Any],
        starts: Starts | None,
    ) -> tuple[Tensor, Tensor, Convergence]:
        """Return the outputs and the states of all steps; the inputs are given with a row for every step."""
        operands = [present.get(name) for name in self.names[:-1]]
        full = newton.method == "newton"
        places = self._places(sizes).to(state.device)
        jacobian = self._jacobian(sizes, options, frozenset(present), places, state.dtype)
        fixed = {name: value.detach() for name, value in present.items()}
        rows = {name: fixed[name] for name in timed}
        constants = None

        def linearise(states: Tensor) -> tuple[Tensor, Tensor | None]:
            nonlocal constants
            if jacobian is None:
                values = [fixed.get(name) for name in self.names[:-1]]
                return products(lambda s: self._step(*values, s, **options)[1], states, None if full else places)
            constants = constants or jacobian.constants({**fixed, "state": states})
            return jacobian({**rows, "state": states}, constants, full=full)

        s, convergence = newton.solve(
            lambda states: self._step(*operands, states, **options)[1], state, steps, linearise, starts
        )
        y, _ = self._step(*operands, previous(s, state, starts), **options)
        return y.unflatten(0, s.shape[:2]), s, convergence

    def _places(self, sizes: Mapping[str, Any]) -> Tensor:
        """Return the places of each channel's variables in the flat state, (K, C)."""
        axes = next(axes for axes in self.operands[-1].choices if all(a in {"B", *sizes} or a.isdigit() for a in axes))
        shape = full_shape(axes[1:], sizes)
        order = sorted(range(len(shape)), key=lambda axis: not axes[1 + axis].isdigit())
        variables = prod(int(axis) for axis in axes if axis.isdigit())
        return torch.arange(prod(shape)).view(shape).permute(order).reshape(variables, -1)

    def _jacobian(
        self,
        sizes: Mapping[str, Any],
        options: Mapping[str, Any],
        present: frozenset[str],
        places: Tensor,
        dtype: torch.dtype,
    ) -> Any:
        """Return the `Jacobian` for operands of these sizes, traced at the first call; None if it cannot be traced."""
        from scanl.ops._compiler.cells.jacobian import Jacobian
        from scanl.ops._compiler.rules import UnsupportedOperation

        axis_sizes = {name: sizes[name] for name in self.axes if name in sizes}
        shapes, output = self._shapes(axis_sizes, present)
        key = (dtype, *shapes.values(), *axis_sizes.values(), *options.values())
        if key not in self._jacobians:
            try:
                self._jacobians[key] = Jacobian(self._step, shapes, output, axis_sizes, options, places, dtype)
            except (UnsupportedOperation, RuntimeError, ValueError):
                self._jacobians[key] = None
        return self._jacobians[key]


def cell(declaration: str, **declared: Any) -> Callable[[Step], Cell]:
    """Declare the decorated step as a cell and register it; `declared` as in `OpSpec`, with `equation` and `source`."""

    def register(step: Step) -> Cell:
        REGISTRY[step.__name__] = new_cell = Cell(step, declaration, **declared)
        return new_cell

    return register
