"""Trace a cell's step and its vector-Jacobian product into nodes.

torch runs the step, and the gradient of its results, once on tensors without memory. Every operation that torch
dispatches becomes a node. Views make no node: they are offsets and strides into the memory of a node. A node with a
batch axis is described for one row of the batch.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.graph import _engine_run_backward
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scanl.ops._compiler import rules
from scanl.ops._compiler.cells.sizes import TracedAxes
from scanl.ops._compiler.rules import UnsupportedOperation

_PAIR = pytree.tree_flatten(((0, 0), {}))[1]  # the form of two arguments
MAX_OPERATIONS = 1000  # operations; a step that loops over an axis would loop over its size in the trace


@dataclass(eq=False)
class TraceNode:
    """The memory of one value.

    kind: "operand"; with a batch axis "elementwise", "product", "reduce", "join"; without one "total" (a sum over rows
    and time), "outer" (a product of two values, summed over rows and time), "torch" (any function), "several" (the
    results of a function that has more than one), "literal".
    size: the numbers of one row.   step: the distance of two rows in the traced memory; 0 without a batch axis.
    what: the rule, the reduction, or the function.   args: views, numbers.   whole: the view of all of it.
    call: of an elementwise operation, torch's function, the form of its arguments, and these: views, numbers.
    dtype: as traced.
    """

    kind: str
    size: int
    step: int
    what: Any
    args: tuple[Any, ...]
    dtype: torch.dtype
    index: int
    whole: "Ref"
    call: tuple[Callable[..., Any], Any, tuple[Any, ...]] | None = None

    @property
    def batched(self) -> bool:
        return self.step > 0

    @property
    def truth(self) -> bool:
        return self.dtype == torch.bool


class Ref(NamedTuple):
    """A view of a node's memory; of one row, if the node has a batch axis."""

    node: TraceNode
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous array."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class Trace(TorchDispatchMode):
    """Records what torch dispatches. nodes: in the order of the computation.   dtype: that of the operands."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports torch.compile, which takes seconds

    def __init__(self, batch: int, dtype: torch.dtype):
        super().__init__()
        self.batch, self.dtype = batch, dtype  # batch: the size of the batch
        self.nodes: list[TraceNode] = []
        self._of: dict[int, TraceNode] = {}  # by the traced memory
        self._alive: list[Any] = []  # so that no memory is used twice
        self._retypes: set[TraceNode | None] = set()  # copies in place of views

    def batch_axis(self, shape: Sequence[int], what: object) -> int | None:
        """Return the axis that holds the batch, alone or as the outer part of a merged axis."""
        axes = [i for i, size in enumerate(shape) if size and size % self.batch == 0]
        if len(axes) > 1:
            raise UnsupportedOperation(f"{what} has the batch on two axes")
        return axes[0] if axes else None

    def new(self, kind: str, tensor: Tensor, what: Any = None, args: tuple[Any, ...] = ()) -> TraceNode:
        """Make the node of a tensor that has memory of its own."""
        axis = self.batch_axis(tensor.shape, kind)
        step = 0 if axis is None else max(tensor.stride(axis), 1) * (tensor.shape[axis] // self.batch)
        size = tensor.numel() // (1 if axis is None else self.batch)
        if step and tensor.dtype.is_complex:
            raise UnsupportedOperation("a complex value of the batch")
        if step and tensor.dtype.is_floating_point and tensor.dtype != self.dtype and kind != "constant":
            raise UnsupportedOperation(f"a value of the batch in {tensor.dtype}, which the operands need not have")
        kind = "elementwise" if kind == "constant" else kind
        node = TraceNode(kind, size, step, what, args, tensor.dtype, len(self.nodes), None)  # pyright: ignore[reportArgumentType]
        self._of[tensor.untyped_storage()._cdata] = node
        self._alive.append(tensor)
        node.whole = self.ref(tensor)
        self.nodes.append(node)
        if len(self.nodes) > MAX_OPERATIONS:
            raise RuntimeError(
                f"the step has more than {MAX_OPERATIONS} operations; does it loop over an axis? Name it in `static`"
            )
        return node

    def node(self, tensor: Tensor) -> TraceNode | None:
        return self._of.get(tensor.untyped_storage()._cdata)

    def ref(self, tensor: Tensor, like: Tensor | None = None) -> Ref:
        """Return the view that a tensor is, broadcast to the shape of `like`."""
        node = self.node(tensor)
        if node is None:
            raise UnsupportedOperation("a tensor that is neither an operand nor made in the step")
        if like is not None and tensor.shape != like.shape:
            tensor = tensor.expand(like.shape)
        shape, strides, offset = list(tensor.shape), list(tensor.stride()), tensor.storage_offset()
        axis = self.batch_axis(shape, node.kind)
        if axis is not None:
            rows = shape[axis] // self.batch
            if node.batched and rows * strides[axis] != node.step:
                raise UnsupportedOperation("a view that mixes the rows of the batch")
            shape[axis : axis + 1], strides[axis : axis + 1] = ([], []) if rows == 1 else ([rows], [strides[axis]])
        elif node.batched:
            raise UnsupportedOperation("one row of the batch, taken alone")
        if node.batched:  # the traced distances jump over the rows of the batch
            batch_stride = self.batch * node.step
            if offset % batch_stride >= node.step:
                raise UnsupportedOperation("some rows of the batch, taken alone")
            offset, *strides = [
                stride // batch_stride * node.step + stride % batch_stride for stride in (offset, *strides)
            ]
        return Ref(node, offset, tuple(shape), tuple(strides))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(rules.OTHER_NAMES.get(func._opname, func._opname))
        if name == "lift_fresh" and not args[0].is_meta and not args[0].ndim:  # torch.tensor(number) in the step
            self.new("literal", args[0], args[0].item())
            return args[0]
        if torch.Tag.inplace_view in func.tags:  # a view in the place of the tensor itself
            return func(*args, **kwargs)
        if name in rules.REWRITES:
            with self:
                return rules.REWRITES[name](*args, **kwargs)
        func = rules.COPIES.get(func, func)
        out = rules.result(name, args, kwargs)
        out = func(*args, **kwargs) if out is None else out
        if name in rules.RETYPING_VIEWS:
            return self._retyped(func, args, kwargs, out)
        if func._schema.is_mutable:
            name = name.removesuffix("_")
            target = self.node(args[0])
            retyped = target in self._retypes
            if target is None or target.kind == "operand" or retyped or self.ref(args[0]) != target.whole:
                raise UnsupportedOperation(f"{func}, which writes into an operand or a part of a tensor")
        outputs = [value for value in pytree.tree_leaves(out) if isinstance(value, Tensor)]
        if not func._schema.is_mutable and all(self.node(value) is not None for value in outputs):
            self._alive.extend(outputs)
            return out  # views
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        alone = not any(self.ref(tensor).node.batched for tensor in tensors)  # nothing here has a batch axis
        if len(outputs) > 1 and alone and not any(self.batch_axis(value.shape, name) is not None for value in outputs):
            self._several(func, args, kwargs, outputs)
            return out
        if (len(outputs) == 1 or name == "log_sigmoid_forward") and self._record(
            func, name, args, kwargs, outputs[0], alone=alone
        ):
            return out
        from torch._decomp import decomposition_table

        decomposition = decomposition_table.get(func)
        if decomposition is None:
            raise UnsupportedOperation(f"operation {func}")
        with self:
            return decomposition(*args, **kwargs)

    def _views(self, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Return the form of arguments, and these: views, numbers and whatever else there is."""
        flat, form = pytree.tree_flatten((args, kwargs))
        return form, tuple(self.ref(value) if isinstance(value, Tensor) else value for value in flat)

    def _several(self, func: Any, args: Any, kwargs: Any, outputs: Sequence[Tensor]) -> None:
        """Make the nodes of the results of a function without a batch axis."""
        form, views = self._views(args, kwargs)
        node = TraceNode("several", 0, 0, (func, form), views, self.dtype, len(self.nodes), None)  # pyright: ignore[reportArgumentType]
        self.nodes.append(node)
        for at, value in enumerate(outputs):
            self.new("torch", value, (operator.getitem, _PAIR), (Ref(node, 0, (), ()), at))

    def _retyped(self, func: Any, args: Any, kwargs: Any, view: Tensor) -> Tensor:
        """Return a copy in place of a view that reads memory as numbers of another kind; it has memory of its own."""
        if self.ref(args[0]).node.batched:
            raise UnsupportedOperation(f"operation {func}")
        out = torch.empty_like(view, memory_format=torch.contiguous_format)
        form, views = self._views(args, kwargs)
        self.new("torch", out, (func, form), views)
        self._retypes.add(self.nodes[-1])
        return out

    def _record(self, func: Any, name: str, args: Any, kwargs: Any, out: Tensor, *, alone: bool) -> bool:
        """Make the node of an operation. Return False if the operation has to be decomposed.

        alone: no argument has a batch axis.
        """
        value = rules.constant(name, args)
        if value is not None:
            value = float(value)
            if out.dtype.is_floating_point and out.dtype != self.dtype:  # rounded, as in the loop
                value = torch.tensor(value, dtype=out.dtype).item()
            if not out.ndim:
                self.new("literal", out, value)
            elif self.batch_axis(out.shape, name) is None:
                self.new("torch", out, torch.full, (value, *out.shape))
            else:
                self.new("constant", out, rules.same, (value,))
            return True
        if alone and self.batch_axis(out.shape, name) is None:
            form, views = self._views(args, kwargs)
            self.new("torch", out, (func, form), views)
            return True
        if alone and name not in rules.ELEMENTWISE_OPERATIONS and name not in rules.JOINS:
            raise UnsupportedOperation(
                f"operation {func}, which makes a value of the batch from operands without a batch"
            )
        if name == "_to_copy" and kwargs.get("dtype") not in (None, self.dtype, torch.bool):
            raise UnsupportedOperation(f"a cast to {kwargs['dtype']}")
        if name == "add" and self._joined(out, [arg for arg in args if isinstance(arg, Tensor)]):
            return True
        if name in rules.ELEMENTWISE_OPERATIONS:
            if out.dtype == torch.bool:
                name = rules.TRUTH_OPERATIONS.get(name, name)
                if name.startswith("logical") and not all(arg.dtype == torch.bool for arg in args):
                    raise UnsupportedOperation(f"{func} of numbers")
            rule = rules.rule(name, args, kwargs)
            if rule is None:
                return False

            def refs(values: Sequence[Any]) -> tuple[Any, ...]:  # a buffer that is not used has no node
                known = [isinstance(value, Tensor) and self.node(value) is not None for value in values]
                return tuple(
                    self.ref(v, like=out) if is_known else v for v, is_known in zip(values, known, strict=True)
                )

            if func._schema.is_mutable:
                func = getattr(getattr(torch.ops.aten, name), func._overloadname)
            elif func.namespace == "prims":  # of a decomposition; it has no gradient
                func = getattr(torch, name)
            flat, form = pytree.tree_flatten((args, kwargs))
            operands, call = refs(rule[1]), (func, form, refs(flat))
            self.new("elementwise", out, rule[0], operands).call = call
            return True
        if name in ("mm", "bmm"):
            return self._product(out, *args)
        if name in rules.REDUCTIONS:
            return self._reduction(name, out, *args, **kwargs)
        if name in ("flip", "rev"):
            source = self.ref(args[0], like=out)
            join = self.new("join", out)
            join.args = ((join.whole, self._reversed(source, args[0], args[1])),)
            return True
        if name in rules.JOINS:
            parts = rules.JOINS[name](out, *args, **kwargs)
            if parts is not None:
                self.new("join", out)
                filled = [(self.ref(at), self.ref(v, like=at) if isinstance(v, Tensor) else v) for at, v in parts]
                self.nodes[-1].args = tuple(filled)
            return parts is not None
        return False

    def _reversed(self, source: Ref, x: Tensor, dims: Sequence[int]) -> Ref:
        """Return the view that walks these axes of x backwards."""
        batch, offset, strides = self.batch_axis(x.shape, "flip"), source.offset, list(source.strides)
        for dim in dims:
            axis = dim % x.ndim
            if axis == batch or (batch is not None and x.shape[batch] != self.batch):
                raise UnsupportedOperation("flip over the batch")
            at = axis - (batch is not None and axis > batch)
            offset, strides[at] = offset + (source.shape[at] - 1) * strides[at], -strides[at]
        return Ref(source.node, offset, source.shape, tuple(strides))

    def _joined(self, out: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Add two joins that fill different parts of zeros: the gradient of a tensor whose parts were used."""
        sources = [self.node(tensor) for tensor in tensors]
        nodes = [node for node in sources if node is not None and node.kind == "join" and node.args[0][1] == 0.0]
        if len(nodes) != 2 or len(tensors) != 2:
            return False
        if any(self.ref(tensor, like=out) != node.args[0][0] for tensor, node in zip(tensors, nodes, strict=True)):
            return False
        parts = sorted((piece for node in nodes for piece in node.args[1:]), key=lambda piece: piece[0].offset)
        ends = [
            at.offset + 1 + sum((n - 1) * by for n, by in zip(at.shape, at.strides, strict=True)) for at, _ in parts
        ]
        if any(end > after.offset for end, (after, _) in zip(ends, parts[1:], strict=False)):
            return False
        join = self.new("join", out)
        filled = tuple((Ref(join, *at[1:]), value) for at, value in parts)
        full = sum(prod(at.shape) for at, _ in parts) == join.size
        join.args = filled if full else ((join.whole, 0.0), *filled)
        return True

    def _product(self, out: Tensor, a: Tensor, b: Tensor) -> bool:
        lhs, rhs = self.ref(a), self.ref(b)
        if lhs.node.batched and rhs.node.batched:
            if self.batch_axis(out.shape, "a product") is not None:
                raise UnsupportedOperation("a product of two values of the batch")
            self.new("outer", out, None, (lhs, rhs))
            return True
        turned = rhs.node.batched
        if turned:  # (a b)ᵀ = bᵀ aᵀ
            lhs, rhs = self.ref(b.mT), self.ref(a.mT)
        node = self.new("product", out, None, (lhs, rhs))
        node.what = self.ref(out.mT if turned else out)
        if node.what.strides[-1] != 1:  # a kernel writes it contiguous; a copy brings it into the traced layout
            shape = node.what.shape
            node.what = node.whole = Ref(node, 0, shape, contiguous(shape))
            order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2] if turned else range(len(shape))
            view = Ref(node, 0, *(tuple(numbers[i] for i in order) for numbers in node.whole[2:]))
            self.new("elementwise", out, rules.same, (view,))
        return True

    def _reduction(
        self, name: str, out: Tensor, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None
    ) -> bool:
        if dtype is not None:
            return False
        dims = range(x.ndim) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
        axes, batch = sorted(axis % x.ndim for axis in dims), self.batch_axis(x.shape, name)
        assert batch is not None
        if batch in axes:
            if name != "sum":
                raise UnsupportedOperation(f"{name} over the batch")
            if x.shape[batch] != self.batch:  # rows merged with another axis: split it, the batch first
                x = x.unflatten(batch, (self.batch, x.shape[batch] // self.batch))
                axes = [*[axis if axis <= batch else axis + 1 for axis in axes], batch + 1]
            other_axes = [axis for axis in axes if axis != batch]
            if other_axes:
                with self:
                    x = torch.sum(x, other_axes, keepdim=True)
            self.new("total", out, None, (self.ref(x),))
            return True
        view = self.ref(x)
        gone = 0 if x.shape[batch] != self.batch else 1
        inner = [axis - (gone if axis > batch else 0) for axis in axes]
        order = [axis for axis in range(len(view.shape)) if axis not in inner] + inner
        shape, strides = (tuple(numbers[axis] for axis in order) for numbers in (view.shape, view.strides))
        node = self.new("reduce", out, (name, len(inner)), (Ref(view.node, view.offset, shape, strides),))
        if name == "cumsum":
            traced = node.whole
            node.what = (name, 1, tuple(traced.strides[axis] for axis in order))
        return True


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Trace as if called at the top of a program, not within a trace, a transformation or inference mode.

    Hooks on tensors that are saved for a backward pass do not see the trace: `torch.utils.checkpoint` counts them.
    """
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        _disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        torch._C._DisablePythonDispatcher(),
        torch.inference_mode(False),
    ):
        yield


class ForwardTrace(NamedTuple):
    """A traced step. operands: those that are given, by name.   y, last: the output and the next state."""

    mode: Trace
    operands: dict[str, Tensor]
    y: Tensor
    last: Tensor


def trace_forward(
    step: Callable[..., Any],
    shapes: Mapping[str, tuple[str, ...] | None],
    output: tuple[str, ...],
    axes: TracedAxes,
    options: Mapping[str, Any],
    dtype: torch.dtype,
) -> ForwardTrace:
    """Trace a step. shapes: for every operand its axes without time, None if it is not given; the state comes last.

    output: the axes of the output, without time.   dtype: that of the operands.
    """
    sizes = {"B": axes.batch, **axes.traced}

    def tensor(names: Sequence[str]) -> Tensor:
        return torch.empty([int(n) if n.isdigit() else sizes[n] for n in names], dtype=dtype, device="meta")

    mode = Trace(axes.batch, dtype)
    values = {name: None if of is None else tensor(of).requires_grad_() for name, of in shapes.items()}
    present = {name: value for name, value in values.items() if value is not None}
    for name, value in present.items():
        mode.new("operand", value, name)
    with mode, torch.enable_grad():
        y, last = step(*values.values(), **options)
    for name, value, axes_of in (("output", y, output), ("next state", last, shapes["state"])):
        expected = [int(n) if n.isdigit() else sizes[n] for n in axes_of or ()]
        if list(value.shape) != expected:
            raise RuntimeError(f"the step's {name} has not the axes ({', '.join(axes_of or ())})")
    return ForwardTrace(mode, present, y, last)


@dataclass
class TracedStep:
    """A step and its vector-Jacobian product.

    operands: the view of every operand that is given, by name; for the gradient also "dy" and "dlast", the gradients of
    the output and of the next state.   y, last: the output and the next state.   gradients: by operand; None where the
    operand has no influence, but zeros for the state: they are carried.   forward: how many nodes the step has.
    """

    nodes: list[TraceNode]
    axes: TracedAxes
    operands: dict[str, Ref]
    y: Ref
    last: Ref
    gradients: dict[str, Ref | None]
    forward: int


def trace(
    step: Callable[..., Any],
    shapes: Mapping[str, tuple[str, ...] | None],
    output: tuple[str, ...],
    axes: TracedAxes,
    options: Mapping[str, Any],
    dtype: torch.dtype,
) -> TracedStep:
    """Trace a step and its vector-Jacobian product. The arguments are as in `trace_forward`."""
    mode, inputs, y, last = trace_forward(step, shapes, output, axes, options, dtype)
    forward = len(mode.nodes)
    seeds = [torch.empty(result.shape, dtype=result.dtype, device="meta") for result in (y, last)]
    for name, seed in zip(("dy", "dlast"), seeds, strict=True):
        mode.new("operand", seed, name)
    depend = [(result, seed) for result, seed in zip((y, last), seeds, strict=True) if result.requires_grad]
    by_input: Sequence[Tensor | None] = [None] * len(inputs)
    if depend:
        with mode:
            outputs, seeds_of_outputs = zip(*depend, strict=True)
            # torch.autograd.grad is this call, after checks whose imports take a second
            by_input = _engine_run_backward(
                outputs, seeds_of_outputs, True, True, tuple(inputs.values()), True, accumulate_grad=False
            )  # fmt: skip
    gradients = {name: None if g is None else mode.ref(g) for name, g in zip(inputs, by_input, strict=True)}
    if gradients["state"] is None:
        zero = mode.new("literal", torch.zeros(()), 0.0)
        shape = mode.ref(inputs["state"]).shape
        gradients["state"] = Ref(zero, 0, shape, (0,) * len(shape))
    return TracedStep(
        mode.nodes,
        axes,
        {name: mode.ref(value) for name, value in (*inputs.items(), ("dy", seeds[0]), ("dlast", seeds[1]))},
        mode.ref(y),
        mode.ref(last),
        gradients,
        forward,
    )
