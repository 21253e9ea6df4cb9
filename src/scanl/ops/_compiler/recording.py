"""The operations of torch that a function calls, as a graph: the function runs once.

`make_fx` of torch records the same, but imports torch.compile first, which takes more than a second.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import _core_aten_decompositions_post_autograd, get_decompositions
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from scanl.ops._compiler import rules
from scanl.ops._compiler.rules import UnsupportedOperation, var_mean
from scanl.ops.products.constants import Constants

aten = torch.ops.aten
_DEPENDENT_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # of the results on the numbers


class RecordedTensor(Tensor):
    """A tensor of a recording: no function can read its numbers.

    plain: the tensor with numbers.   node: the operation whose result it is.
    """

    plain: Tensor
    node: fx.Node

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore[reportAssignmentType]

    @staticmethod
    def __new__(cls, plain: Tensor, node: fx.Node) -> "RecordedTensor":
        made = Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), storage_offset=plain.storage_offset(), dtype=plain.dtype,
            device=plain.device,
        )  # fmt: skip
        made.plain, made.node = plain, node
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise UnsupportedOperation(f"{func} of a tensor of a recording that has ended")


class OperationRecorder(TorchDispatchMode):
    """Records what torch dispatches while it is the context. What is written to tensors from outside is not written.

    graph: the operations; `meta["val"]` of a node is its result.   read: tensors that are no operands, by the name of
    their nodes.   constants: what becomes of tensors that are no operands; None: they may have other numbers later.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports torch.compile

    def __init__(self, constants: Constants | None = None) -> None:
        super().__init__()
        self.graph, self._constants = fx.Graph(), constants
        self.read: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}  # by the tensor that is no operand
        self._outside = set[int]()  # the storages of these tensors

    def operand(self, example: Tensor) -> RecordedTensor:
        """Return an operand, with the numbers of the example."""
        return self._result(example.clone(), self.graph.placeholder(f"x{len(self.graph.nodes)}"))

    def outputs(self, tensors: Sequence[Tensor]) -> None:
        self.graph.output([self._node(tensor) for tensor in tensors])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, form = pytree.tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        if func.namespace == "profiler" or (tensors and all(tensor.is_meta for tensor in tensors)):
            return func(*args, **kwargs)  # an optimizer tells the profiler when it begins; the other asks for a form
        if _DEPENDENT_TAGS & set(func.tags) and not _by_whole_numbers(func, args):
            raise UnsupportedOperation(f"its operations depend on the numbers: {func}")
        if torch.Tag.nondeterministic_seeded in func.tags and not _without_dropout(func, args, kwargs):
            raise UnsupportedOperation(f"no kernel computes {func}, which draws numbers")
        if torch.Tag.inplace_view in func.tags:
            raise UnsupportedOperation(f"{func}, which makes a tensor a view of itself")
        if func is aten.lift_fresh.default:  # a tensor that the function makes of numbers
            func = aten.lift_fresh_copy.default
        if self._constants is not None and not func._schema.is_mutable:
            if tensors and not any(isinstance(tensor, RecordedTensor) for tensor in tensors):
                return self._constants.result(func, args, kwargs)
            with self:
                result = None if kwargs else self._constants.replaced(func, args, RecordedTensor)
            if result is not None:
                return result
        if not _has_rule(func, args, kwargs, tensors):
            with self:
                result = _decompositions().get(func, func.decompose)(*args, **kwargs)
            if result is not NotImplemented:
                return result
        inner_args, inner_kwargs = pytree.tree_unflatten([_inner(value) for value in flat], form)
        nodes = [self._node(value) if isinstance(value, Tensor) else value for value in flat]
        nodes = pytree.tree_unflatten(nodes, form)
        if func._schema.is_mutable:
            return self._write(func, args, (inner_args, inner_kwargs), nodes)
        result = func(*inner_args, **inner_kwargs)
        if func in _CONSTANTS or (isinstance(result, Tensor) and result.is_meta):
            return result  # a constant, or a form
        if not isinstance(result, Tensor | list | tuple):
            raise UnsupportedOperation(f"its operations depend on the numbers: {func}")
        node = self.graph.call_function(func, *nodes)
        node.meta["val"] = result
        if isinstance(result, Tensor):
            return self._result(result, node)
        return type(result)(
            self._result(value, self.graph.call_function(operator.getitem, (node, at)))
            for at, value in enumerate(result)
        )

    def _result(self, inner: Tensor, node: fx.Node) -> RecordedTensor:
        node.meta["val"] = inner
        return RecordedTensor(inner, node)

    def _write(self, func: Any, args: Any, inner: Any, nodes: Any) -> Tensor:
        """Record an operation that writes its first argument, and return that. A tensor from outside stays as it is."""
        target = args[0]
        if not isinstance(target, Tensor):
            raise UnsupportedOperation(f"{func}, which writes several tensors")
        if self._constants is not None and not isinstance(target, RecordedTensor):
            raise UnsupportedOperation(f"{func} of a tensor that is no operand")
        if _inner(target).untyped_storage()._cdata not in self._outside:
            func(*inner[0], **inner[1])
        node = self.graph.call_function(func, *nodes)
        node.meta["val"] = _inner(target)
        if isinstance(target, RecordedTensor):
            target.node = node
        return target

    def _node(self, tensor: Tensor) -> fx.Node:
        """Return the node of a tensor: of one that is no operand, a new one for each reading."""
        if isinstance(tensor, RecordedTensor):
            return tensor.node
        if id(tensor) not in self._names:
            if tensor.device.type != "cpu":
                raise UnsupportedOperation(f"a tensor on {tensor.device}")
            name = self._names[id(tensor)] = f"a{len(self.read)}"
            self.read[name] = tensor
            self._outside.add(tensor.untyped_storage()._cdata)
        node = self.graph.get_attr(self._names[id(tensor)])
        node.meta["val"] = tensor.detach()
        return node


def _by_whole_numbers(func: Any, args: Any) -> bool:
    """Return whether an operation reads numbers at indices, and not where a mask is true."""
    if func is not aten.index.Tensor:
        return False
    return all(index is None or index.dtype in (torch.int64, torch.int32) for index in args[1])


def _without_dropout(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operation is attention that draws no numbers."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return (args[at] if at < len(args) else kwargs.get("dropout_p", 0.0)) == 0
    return False


def _has_rule(func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> bool:
    """Return whether an operation is one expression of numbers. Torch's decomposition of it has several."""
    name = func._opname
    if name not in rules.ELEMENTWISE_OPERATIONS or name == "log_sigmoid_forward":
        return False
    return not any(tensor.is_complex() for tensor in tensors) and rules.rule(name, args, kwargs) is not None


def _inner(value: Any) -> Any:
    return value.plain if isinstance(value, RecordedTensor) else value


def record(
    function: Callable[..., Sequence[Tensor]], examples: Sequence[Tensor], constants: Constants | None = None
) -> OperationRecorder:
    """Record a function of tensors that returns tensors. Raises UnsupportedOperation if that is impossible."""
    recording = OperationRecorder(constants)
    with _disable_current_modes():
        operands = list(map(recording.operand, examples))
        with recording:
            results = function(*operands)
        recording.outputs(results)
    recording.graph.eliminate_dead_code(lambda node: writes(node) or node.is_impure())
    return recording


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@functools.cache
def _decompositions() -> dict[Any, Any]:
    simpler = get_decompositions([
        aten.native_group_norm, aten.linalg_vector_norm,
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten.native_layer_norm_backward, aten.native_group_norm_backward, aten._softmax_backward_data,
        aten._log_softmax_backward_data, aten.gelu_backward, aten.nll_loss_forward, aten.nll_loss_backward,
    ])  # fmt: skip
    table = {**_core_aten_decompositions_post_autograd(), **simpler}
    table |= {operation: lambda *args, **kwargs: NotImplemented for operation in _KEPT_OPERATIONS}
    table |= {
        aten.var_mean.correction: var_mean,
        aten.var.correction: lambda *args, **kwargs: var_mean(*args, **kwargs)[0],
        aten.native_layer_norm.default: _layer_norm,
        aten._softmax.default: _softmax,
        aten._log_softmax.default: _log_softmax,
        aten.addcmul.default: rules.REWRITES["addcmul"],
        aten.linalg_vector_norm.default: functools.partial(_vector_norm, table[aten.linalg_vector_norm.default]),
        aten.log_sigmoid_forward.default: lambda x: (-torch.nn.functional.softplus(-x), x.new_empty(0)),
        aten.baddbmm.default: _baddbmm,
        aten.convolution.default: _convolution,
        aten.max_pool2d_with_indices.default: _max_pool,
        aten.avg_pool2d.default: _avg_pool,
        aten.reflection_pad1d.default: _reflection_pad1d,
        aten.diag_embed.default: functools.partial(_diag_embed, table[aten.diag_embed.default]),
        aten._native_batch_norm_legit_no_training.default: _batch_norm,
        aten.repeat.default: _repeat,
        aten.roll.default: _roll,
        aten._foreach_add_.Scalar: _foreach_add_,
        aten._fused_adam_.default: functools.partial(_fused_adam_, decoupled=False),
        aten._fused_adamw_.default: functools.partial(_fused_adam_, decoupled=True),
    }
    # Views that are computed when they are read
    return {**table, aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}


# Torch's decompositions of these make more operations, or import torch.compile.
_KEPT_OPERATIONS = (
    aten.select_backward.default, aten.slice_backward.default, aten.stack.default, aten.unbind.int, aten.split.Tensor,
    aten.split_with_sizes.default, aten.eye.default, aten.full_like.default, aten.ones_like.default,
    aten.zeros_like.default, aten.zeros.default, aten.ones.default, aten.new_zeros.default, aten.new_ones.default,
    aten.new_full.default, aten.full.default, aten.index.Tensor,
)  # fmt: skip
_CONSTANTS = {aten.eye.default, aten.triu_indices.default, aten.tril_indices.default}  # they depend on no tensor


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    variance, mean = var_mean(x, list(range(x.ndim - len(shape), x.ndim)), 0, keepdim=True)
    factor = torch.rsqrt(variance + eps)
    y = (x - mean) * factor
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, mean, factor


def _batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    def along(values: Tensor) -> Tensor:
        return values.view(-1, *[1] * (x.ndim - 2))

    y = (x - along(mean)) * torch.rsqrt(along(variance) + eps)
    y = y if weight is None else y * along(weight)
    return y if bias is None else y + along(bias), x.new_empty(0), x.new_empty(0)


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    powers = torch.exp(x - x.amax(dim, keepdim=True))
    return powers / powers.sum(dim, keepdim=True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    shifted = x - x.amax(dim, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(dim, keepdim=True))


def _vector_norm(other: Callable[..., Tensor], x: Tensor, order: float = 2, *args: Any, **kwargs: Any) -> Tensor:
    """other: what computes another norm than the Euclidean one."""
    if order != 2 or kwargs or x.is_complex():
        return other(x, order, *args, **kwargs)
    return torch.sqrt((x * x).sum(*args))


def _baddbmm(*args: Any, **factors: float) -> Tensor:
    return rules.REWRITES["baddbmm"](*args, **factors) if factors else NotImplemented


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """Return a convolution as one product: the numbers that each place reads stand beside each other."""
    sizes = weight.shape[2:]
    if transposed:
        x, weight = _upsampled(x, stride), weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)
        weight = weight.flip(list(range(2, weight.ndim)))
        ends = [(size - 1) * gap - width for size, gap, width in zip(sizes, dilation, padding, strict=True)]
        widths = [(end, end + more) for end, more in zip(ends, output_padding, strict=True)]
        stride = [1] * len(sizes)
    else:
        widths = [(width, width) for width in padding]
    x = _padded(x, widths)
    counts = _places(x, sizes, stride, dilation)
    # (B, groups, places, channels x taps), in the order of the weight
    strides = [step * hop for step, hop in zip(x.stride()[2:], stride, strict=True)]
    gaps = [step * gap for step, gap in zip(x.stride()[2:], dilation, strict=True)]
    channels = x.shape[1] // groups
    rows = x.as_strided(
        (x.shape[0], groups, *counts, channels, *sizes),
        (x.stride(0), channels * x.stride(1), *strides, x.stride(1), *gaps),
    ).reshape(x.shape[0], groups, prod(counts), channels * prod(sizes))
    y = torch.matmul(rows, weight.reshape(groups, weight.shape[0] // groups, -1).mT).mT
    y = y.reshape(x.shape[0], weight.shape[0], *counts)
    return y if bias is None else y + bias.reshape(-1, *[1] * len(sizes))


def _padded(x: Tensor, widths: Sequence[tuple[int, int]], value: float = 0.0) -> Tensor:
    """Return x with entries of one value before and after its last axes."""
    flat = [width for pair in reversed(widths) for width in pair]
    return torch.constant_pad_nd(x, flat, value) if any(flat) else x


def _places(x: Tensor, sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the number of places of windows over each axis from 2 on."""
    return [
        (x.shape[2 + axis] - (size - 1) * gap - 1) // hop + 1
        for axis, (size, gap, hop) in enumerate(zip(sizes, dilation, stride, strict=True))
    ]


def _taps(x: Tensor, sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[Tensor]:
    """Return what all windows over the axes from 2 on read at each of their places."""
    counts, taps = _places(x, sizes, stride, dilation), []
    for at in itertools.product(*map(range, sizes)):
        read = x
        for axis, (place, gap, hop, count) in enumerate(zip(at, dilation, stride, counts, strict=True), 2):
            start = place * gap
            read = aten.slice.Tensor(read, axis, start, start + (count - 1) * hop + 1, hop)
        taps.append(read)
    return taps


def _upsampled(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Return x with zeros between its entries."""
    for axis, hop in enumerate(stride, 2):
        if hop > 1:
            count = (x.shape[axis] - 1) * hop + 1
            x = torch.stack([x, *[torch.zeros_like(x)] * (hop - 1)], axis + 1).flatten(axis, axis + 1)
            x = aten.slice.Tensor(x, axis, 0, count)
    return x


def _max_pool(
    x: Tensor,
    sizes: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the largest number of each window, and again in place of its index: no step asks for that."""
    if ceil_mode:
        return NotImplemented
    y = functools.reduce(torch.maximum, _pooled(x, sizes, stride, padding, dilation, -inf))
    y = y if x.ndim == 4 else y[0]
    return y, y


def _avg_pool(
    x: Tensor,
    sizes: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    if ceil_mode or (any(padding) and not count_include_pad):
        return NotImplemented
    taps = _pooled(x, sizes, stride, padding, (1,), 0.0)
    y = functools.reduce(torch.add, taps) / (divisor_override or len(taps))
    return y if x.ndim == 4 else y[0]


def _pooled(
    x: Tensor,
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    value: float,
) -> list[Tensor]:
    """Return what the windows of a pooling over the last two axes of x read. value: of what stands around x."""
    sizes, stride, padding, dilation = (
        list(values) * (2 // len(values)) for values in (sizes, stride or sizes, padding, dilation)
    )
    rows = _padded(x if x.ndim == 4 else x[None], [(width, width) for width in padding], value)
    return _taps(rows, sizes, stride, dilation)


def _reflection_pad1d(x: Tensor, pad: Sequence[int]) -> Tensor:
    before, after = pad
    ends = [x[..., 1 : before + 1].flip(-1), x, x[..., x.shape[-1] - 1 - after : -1].flip(-1)]
    return torch.cat([end for end in ends if end.shape[-1]], -1)


def _diag_embed(other: Callable[..., Tensor], x: Tensor, *places: int) -> Tensor:
    if places:
        return other(x, *places)
    out = x.new_zeros(*x.shape, x.shape[-1])
    out.diagonal(0, -2, -1).copy_(x)
    return out


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Tensor:
    return NotImplemented if dims else x.flatten().roll(shifts[0], 0).view(x.shape)


def _repeat(x: Tensor, counts: Sequence[int]) -> Tensor:
    x = x.reshape(*[1] * (len(counts) - x.ndim), *x.shape)
    sizes = [size * count for size, count in zip(x.shape, counts, strict=True)]
    for axis, count in enumerate(counts):
        x = x.unsqueeze(2 * axis).expand(*x.shape[: 2 * axis], count, *x.shape[2 * axis :])
    return x.reshape(sizes)


def _foreach_add_(tensors: Sequence[Tensor], number: float) -> None:
    for tensor in tensors:
        tensor.copy_(tensor + number)


def _fused_adam_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    largest: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Make a step of Adam, or of AdamW if the weight decay is decoupled, as torch's operation does."""
    if amsgrad or maximize or grad_scale is not None or found_inf is not None:
        raise UnsupportedOperation("a fused step of Adam with options")
    for parameter, gradient, mean, square, step in zip(parameters, gradients, means, squares, steps, strict=True):
        count = step.double()
        root = (1 - beta2**count).sqrt()
        rate, least = (lr / (1 - beta1**count) * root).to(mean.dtype), (eps * root).to(mean.dtype)
        value = parameter * (1 - lr * weight_decay) if decoupled and weight_decay else parameter
        if weight_decay and not decoupled:
            gradient = gradient + weight_decay * parameter
        first = mean + (1 - beta1) * (gradient - mean)
        second = beta2 * square + (1 - beta2) * gradient * gradient
        mean.copy_(first)
        square.copy_(second)
        parameter.copy_(value - rate * (first / (second.sqrt() + least)))
