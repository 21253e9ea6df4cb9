"""The Jacobian of a cell's next state by its state, for many rows at once, from the operations of the step.

Every operation of the traced step runs once, on all rows. Each value has its derivative by the state, (rows,
directions, numbers of a row). There are two forms of it:

- *by channel*: every number depends on the state in one channel only. The directions are the variables of a channel,
  and `channels` names the channel of each number. The state itself has this form.
- *dense*: the directions are all numbers of the state.

A derivative that is the same in every row, as for a product of the state with a matrix, has one row. Views and
joins act on a derivative as on its value. Elementwise operations multiply it by the partial derivatives, which autograd
gives. Products multiply it by the matrix. A derivative becomes dense where numbers of different channels meet.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.ops._compiler.cells.sizes import TracedAxes
from scanl.ops._compiler.cells.trace import Ref, TraceNode, alone, contiguous, trace_forward
from scanl.ops._compiler.cells.values import Sizes, Values
from scanl.ops._compiler.rules import UnsupportedOperation

BUDGET = 2**20  # numbers of one dense derivative; more rows than this allows are taken in parts


class Derivative(NamedTuple):
    """A derivative by the state. channels: the channel of each number, -1 if it depends on none; None if dense."""

    rows: Tensor
    channels: Tensor | None


class Jacobian:
    """The derivative of the next state by the state, of a step for operands of one size and dtype.

    shapes: for every operand its axes without time, None if it is not given; the state comes last.   places: where in
    the flat state the K variables of each of C channels are, (K, C). Raises UnsupportedOperation if the step uses what
    cannot be traced.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        shapes: Mapping[str, tuple[str, ...] | None],
        output: tuple[str, ...],
        sizes: Mapping[str, int],
        options: Mapping[str, Any],
        places: Tensor,
        dtype: torch.dtype,
    ):
        axes = TracedAxes(sizes, frozenset(sizes), {}, 0)
        with alone():
            mode, operands, _, last = trace_forward(step, shapes, output, axes, options, dtype)
            self._last = mode.ref(last)
            self._state = mode.ref(operands["state"]).node
        self._sizes, self._places, self._dtype = Sizes(axes, sizes), places, dtype
        needed = {self._last.node}
        for node in reversed(mode.nodes):
            if node in needed:
                needed.update(ref.node for ref in _reads(node))
        self._nodes = [node for node in mode.nodes if node in needed and node.batched]
        if any(node.kind in ("total", "outer") for node in self._nodes):
            raise UnsupportedOperation("a sum over the batch")
        self._free: dict[TraceNode, list[TraceNode]] = {
            node: [] for node in self._nodes
        }  # what a node is the last to read
        for source, reader in {ref.node: node for node in self._nodes for ref in _reads(node)}.items():
            if source is not self._last.node:
                self._free[reader].append(source)
        self._widest = max(node.size for node in (*self._nodes, self._state))
        self._directions = places.numel()  # of the widest derivative; fewer, once it is known to be by channel

    def constants(self, operands: Mapping[str, Tensor]) -> Values:
        """Return the values without a batch axis, for all calls with the same operands."""
        return Values(operands, self._sizes, self._dtype)

    def __call__(self, rows: Mapping[str, Tensor], constants: Values, *, full: bool) -> tuple[Tensor, Tensor | None]:
        """Return J of every row: (N, E, E) and None, or its blocks (N, C, K, K) and the places of their variables.

        rows: the operands with a batch axis, all with N rows.   full: blocks only if nothing of J is outside of them.
        """
        places, count, start, parts = self._places.to(rows["state"].device), len(rows["state"]), 0, []
        exact = False
        while start < count:
            size = max(64, BUDGET // (self._directions * self._widest))
            chunk = {name: value[start : start + size] for name, value in rows.items()}
            derivative = _Pass(chunk, constants, places, self._state).run(self._nodes, self._free, self._last)
            if derivative.channels is not None:
                self._directions = len(places)
                channels = derivative.channels[places]
                exact = bool(
                    ((channels == torch.arange(places.shape[1], device=channels.device)) | (channels < 0)).all()
                )
            jacobian = _dense(derivative, places).mT if full and not exact else _blocks(derivative, places)
            parts.append(jacobian.expand(len(chunk["state"]), *jacobian.shape[1:]))
            start += size
        return torch.cat(parts), None if full and not exact else places


def _dense(derivative: Derivative, places: Tensor) -> Tensor:
    """Return a derivative by all numbers of the state."""
    rows, channels = derivative
    if channels is None:
        return rows
    flat = rows.flatten(2) if rows.ndim > 2 else rows[..., None]
    out = flat.new_zeros(len(flat), places.numel(), flat.shape[2])
    at = places[:, channels.reshape(-1).clamp(min=0)]
    out[:, at, torch.arange(flat.shape[2], device=flat.device)] = flat
    return out.view(*out.shape[:2], *rows.shape[2:])


def _blocks(derivative: Derivative, places: Tensor) -> Tensor:
    """Return the blocks (rows, C, K, K) on the diagonal: variables of the next state by variables of the state."""
    if derivative.channels is None:
        blocks = derivative.rows[:, places[:, None], places[None]]
    else:
        diagonal = derivative.channels[places] == torch.arange(places.shape[1], device=places.device)
        blocks = torch.where(diagonal, derivative.rows[:, :, places], 0)
    return blocks.permute(0, 3, 2, 1)


class _Pass:
    """One pass through the step: the values and the derivatives of the nodes with a batch axis."""

    def __init__(self, rows: Mapping[str, Tensor], constants: Values, places: Tensor, state: TraceNode):
        self.rows, self.constants, self.places, self.state = rows, constants, places, state
        self.like = rows["state"]
        self.values: dict[TraceNode, Tensor] = {}
        self.derivatives: dict[TraceNode, Derivative] = {}

    def run(self, nodes: Sequence[TraceNode], free: Mapping[TraceNode, Sequence[TraceNode]], last: Ref) -> Derivative:
        with torch.no_grad():
            for node in nodes:
                getattr(self, f"_{node.kind}")(node)
                for done in free[node]:
                    self.values.pop(done, None)
                    self.derivatives.pop(done, None)
            derivative = self._derivative(last)
        if derivative is None:
            count, numbers = self.places.shape[0], self.places.numel()
            return Derivative(
                self.like.new_zeros(1, count, numbers), torch.full((numbers,), -1, device=self.like.device)
            )
        channels = None if derivative.channels is None else derivative.channels.reshape(-1)
        return Derivative(derivative.rows.flatten(2), channels)

    # --- values and derivatives in memory

    def _value(self, ref: Ref) -> Tensor:
        """Return a view's value, (rows, *shape); one row if it is the same in every row."""
        return _at(self.values[ref.node], ref) if ref.node.batched else self.constants.view(ref)[None]

    def _derivative(self, ref: Ref) -> Derivative | None:
        derivative = self.derivatives.get(ref.node)
        if derivative is None:
            return None
        return Derivative(
            _at(derivative.rows, ref), None if derivative.channels is None else _at(derivative.channels, ref)
        )

    def _keep(
        self, node: TraceNode, value: Tensor, derivative: Derivative | None = None, ref: Ref | None = None
    ) -> None:
        """Store a value and its derivative, given with the axes of `ref`, as the trace has laid them out."""
        ref = ref or node.whole
        self.values[node] = _with_layout(value, ref)
        if derivative is not None:
            channels = None if derivative.channels is None else _with_layout(derivative.channels, ref)
            self.derivatives[node] = Derivative(_with_layout(derivative.rows, ref), channels)

    def _alike(self, derivatives: Sequence[Derivative]) -> tuple[list[Tensor], Tensor | None]:
        """Bring derivatives of one shape into one form: by channel if all are and agree, else dense."""
        every = [derivative.channels for derivative in derivatives if derivative.channels is not None]
        if len(every) == len(derivatives):
            merged = every[0]
            for channels in every[1:]:
                merged = torch.maximum(merged, channels)
            if all(bool(((channels == merged) | (channels < 0)).all()) for channels in every):
                return [derivative.rows for derivative in derivatives], merged
        return [_dense(derivative, self.places) for derivative in derivatives], None

    # --- operations

    def _operand(self, node: TraceNode) -> None:
        self.values[node] = self.rows[node.what].flatten(1) if self.rows[node.what].ndim > 1 else self.rows[node.what]
        if node is self.state:
            count, numbers = self.places.shape[0], self.places.numel()
            rows, channels = self.like.new_zeros(1, count, numbers), self.places.new_empty(numbers)
            for variable, at in enumerate(self.places):
                rows[0, variable, at] = 1
                channels[at] = torch.arange(len(at), device=at.device)
            self.derivatives[node] = Derivative(rows, channels)

    def _elementwise(self, node: TraceNode) -> None:
        if node.call is None:  # a constant, or a copy into another layout
            (source,) = node.args
            if isinstance(source, Ref):
                self._keep(node, self._value(source), self._derivative(source))
            else:
                self.values[node] = self.like.new_full((1, node.size), source)
            return
        function, form, arguments = node.call
        values = [self._value(arg) if isinstance(arg, Ref) else self._plain(arg) for arg in arguments]
        derivatives = [self._derivative(arg) if isinstance(arg, Ref) else None for arg in arguments]
        active = [
            i for i, derivative in enumerate(derivatives) if derivative is not None and values[i].is_floating_point()
        ]
        count = max((len(value) for value in values if isinstance(value, Tensor)), default=1)
        for i in active:  # of all rows, or the gradient would be summed over them
            values[i] = values[i].expand(count, *node.whole.shape).detach().requires_grad_()
        args, kwargs = pytree.tree_unflatten(values, form)
        with torch.enable_grad():
            out = function(*args, **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            out = out.expand(len(out), *node.whole.shape)
        if not out.requires_grad:
            self._keep(node, out)
            return
        one = out.new_ones(()).expand(out.shape)
        partials = torch.autograd.grad(out, [values[i] for i in active], one, allow_unused=True)
        pairs = [(p, derivatives[i]) for p, i in zip(partials, active, strict=True) if p is not None]
        rows, channels = self._alike([derivative for _, derivative in pairs if derivative is not None])
        total = None
        for (partial, _), factor in zip(pairs, rows, strict=True):
            if not any(partial.stride()):  # `one` itself, so a sum
                total = factor if total is None else total + factor
            elif total is None:
                total = partial[:, None] * factor
            else:
                total = torch.addcmul(total, partial[:, None], factor)
        self._keep(node, out.detach(), None if total is None else Derivative(total, channels))

    def _plain(self, value: Any) -> Any:
        return self.like.device if isinstance(value, torch.device) else value

    def _product(self, node: TraceNode) -> None:
        lhs, rhs = node.args
        matrix, derivative = self.constants.view(rhs), self._derivative(lhs)
        value = _times(self._value(lhs), matrix, len(lhs.shape))
        if derivative is not None:
            by_row = derivative.channels is not None and matrix.ndim == 2 and len(lhs.shape) == 1
            rows = (
                self._spread(derivative, matrix)
                if by_row
                else _times(_dense(derivative, self.places), matrix, len(lhs.shape))
            )
            derivative = Derivative(rows, None)
        self._keep(node, value, derivative, node.what)

    def _spread(self, derivative: Derivative, matrix: Tensor) -> Tensor:
        """Multiply a derivative by channel: each number of the left factor adds one row of the matrix."""
        assert derivative.channels is not None
        terms = derivative.rows[..., None] * matrix  # (rows, K, numbers, columns)
        out = terms.new_zeros(len(terms), self.places.numel(), matrix.shape[1])
        at = self.places[:, derivative.channels.clamp(min=0)]
        return out.index_add_(1, at.flatten(), terms.flatten(1, 2))

    def _reduce(self, node: TraceNode) -> None:
        (source,), (name, count, *layout) = node.args, node.what
        inner = tuple(range(-count, 0))
        value, derivative = self._value(source).to(self.like.dtype), self._derivative(source)
        if name == "cumsum":
            ref = Ref(node, 0, source.shape, layout[0])
            rows = None if derivative is None else Derivative(_dense(derivative, self.places).cumsum(-1), None)
            self._keep(node, value.cumsum(-1), rows, ref)
            return
        outer = source.shape[:-count]
        ref, channels = Ref(node, 0, outer, contiguous(outer)), None
        reduce = getattr(torch, name)
        if derivative is None:
            self._keep(node, reduce(value, inner), None, ref)
            return
        rows = derivative.rows
        if derivative.channels is not None:
            channels = derivative.channels.amax(inner)
            if not ((derivative.channels == channels[(..., *[None] * count)]) | (derivative.channels < 0)).all():
                rows, channels = _dense(derivative, self.places), None
        value = value.detach().requires_grad_()
        with torch.enable_grad():
            out = reduce(value, inner)
        (partial,) = torch.autograd.grad(out, value, torch.ones_like(out))
        self._keep(node, out.detach(), Derivative((partial[:, None] * rows).sum(inner), channels), ref)

    def _join(self, node: TraceNode) -> None:
        parts = [(at, value, self._derivative(value) if isinstance(value, Ref) else None) for at, value in node.args]
        values = [self._value(value) if isinstance(value, Ref) else value for _, value, _ in parts]
        out = self.like.new_zeros(max((len(v) for v in values if isinstance(v, Tensor)), default=1), node.size)
        for (at, _, _), value in zip(parts, values, strict=True):
            _at(out, at)[...] = value
        self.values[node] = out
        some = [derivative for _, _, derivative in parts if derivative is not None]
        if not some:
            return
        dense = any(derivative.channels is None for derivative in some)
        directions = self.places.numel() if dense else len(self.places)
        rows = self.like.new_zeros(max(len(derivative.rows) for derivative in some), directions, node.size)
        channels = self.places.new_full((node.size,), -1)
        for at, _, derivative in parts:
            _at(rows, at)[...] = (
                0 if derivative is None else _dense(derivative, self.places) if dense else derivative.rows
            )
            if not dense:
                _at(channels, at)[...] = (
                    -1 if derivative is None or derivative.channels is None else derivative.channels
                )
        self.derivatives[node] = Derivative(rows, None if dense else channels)


def _reads(node: TraceNode) -> list[Ref]:
    """Return the views that a node reads."""
    if node.kind == "join":
        return [value for _, value in node.args if isinstance(value, Ref)]
    args = node.args if node.call is None else node.call[2]
    return [arg for arg in args if isinstance(arg, Ref)]


def _at(memory: Tensor, ref: Ref) -> Tensor:
    """Return a view of memory (..., numbers of a row), with its axes in place of the last one."""
    if any(stride < 0 for stride in ref.strides):  # torch has no view that walks backwards
        index = torch.full((), ref.offset, device=memory.device)
        for size, stride in zip(ref.shape, ref.strides, strict=True):
            index = index[..., None] + stride * torch.arange(size, device=memory.device)
        return memory[..., index]
    memory = memory if memory.stride(-1) == 1 else memory.contiguous()
    shape, strides = (*memory.shape[:-1], *ref.shape), (*memory.stride()[:-1], *ref.strides)
    return memory.as_strided(shape, strides, memory.storage_offset() + ref.offset)


def _with_layout(value: Tensor, ref: Ref) -> Tensor:
    """Lay out the last axes of a value, which are the axes of `ref`, as one axis of memory."""
    lead = value.ndim - len(ref.shape)
    order = sorted(range(len(ref.shape)), key=lambda axis: -ref.strides[axis])
    if order != list(range(len(order))):
        value = value.permute(*range(lead), *(lead + axis for axis in order))
    return value.reshape(*value.shape[:lead], prod(ref.shape))


def _times(value: Tensor, matrix: Tensor, axes: int) -> Tensor:
    """Multiply (..., columns), (..., rows, columns), each perhaps with groups before, with ([groups,] columns, out).

    axes: how many axes the left factor has besides `...`.
    """
    if matrix.ndim == 3 and axes == 2:
        return torch.einsum("...gk,gkm->...gm", value, matrix)
    return value @ matrix
