"""What kernels can compute: expressions of elementwise operations, reductions, and joins of parts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ScanlError
from scanl.ops._compiler.expressions import Expression, Name, Operation, equal, unequal, where


class UnsupportedOperation(ScanlError):
    """A function uses what no kernel can run; the message names it."""


Rule = Callable[..., Expression]  # of the numbers that an operation takes


def same(x: Expression) -> Expression:
    return x


def function(name: str) -> Rule:
    """Return the rule of a function that all languages have."""
    return lambda x: Operation(name, x)


_EXPRESSIONS: dict[str, Rule] = {
    **{name: function(name) for name in ("exp", "log", "log1p", "expm1", "sqrt", "sin", "cos", "erf", "abs", "sigmoid",
                                         "tanh")},
    "neg": lambda x: -x,
    "mul": lambda x, y: x * y,
    "reciprocal": lambda x: 1.0 / x,
    "rsqrt": lambda x: 1.0 / Operation("sqrt", x),
    **dict.fromkeys(("sign", "sgn"), lambda x: where(equal(x, x), where(x > 0.0, 1.0, where(x < 0.0, -1.0, 0.0)), x)),
    "relu": lambda x: where(x <= 0.0, 0.0, x),
    "silu": lambda x: x * Operation("sigmoid", x),
    "log_sigmoid_forward": function("log_sigmoid"),
    "where": where,
    "masked_fill": lambda x, truth, y: where(truth, y, x),
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "eq": equal,
    "ne": unequal,
    **dict.fromkeys(("logical_and", "bitwise_and"), lambda x, y: x & y),
    **dict.fromkeys(("logical_or", "bitwise_or"), lambda x, y: x | y),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda x: ~x),
    "maximum": lambda x, y: where((x > y) | unequal(x, x), x, y),
    "minimum": lambda x, y: where((x < y) | unequal(x, x), x, y),
    "clamp_min": lambda x, y: where(x < y, y, x),
    "clamp_max": lambda x, y: where(x > y, y, x),
    "copy": lambda x, y: y,
    **dict.fromkeys(("clone", "alias", "detach", "positive", "_to_copy"), same),
    "sigmoid_backward": lambda x, y: x * (y * (1.0 - y)),
    "tanh_backward": lambda x, y: x * (1.0 - y * y),
    "threshold_backward": lambda x, y, least: where(y <= least, 0.0, x),
    "silu_backward": lambda x, y: x * (Operation("sigmoid", y) * (1.0 + y * (1.0 - Operation("sigmoid", y)))),
    "log_sigmoid_backward": lambda x, y: x * Operation("sigmoid", -y),
}  # fmt: skip

# The results of these have the dtype of their arguments, integers too; other functions of integers are floating.
_OF_INTEGERS = {"neg", "mul", "add", "sub", "rsub", "pow", "abs", "sign", "sgn", "relu", "where", "masked_fill",
                "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "copy", "positive", "_to_copy",
                "threshold_backward"}  # fmt: skip
# The results of these are truths.
_OF_TRUTH = {name for name, of in _EXPRESSIONS.items() if of(*map(Name, "xyz"[: of.__code__.co_argcount])).truth}
_POWERS: dict[float, Rule] = {2: lambda x: x * x, 3: lambda x: x * x * x, 0.5: function("sqrt"), 1: same,
                              -1: lambda x: 1.0 / x}  # fmt: skip
# What these are of two truth values.
TRUTH_OPERATIONS = {"add": "logical_or", "mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and"}
ELEMENTWISE_OPERATIONS = {*_EXPRESSIONS, "add", "sub", "rsub", "div", "pow", "clamp", "softplus", "softplus_backward"}
COPIES = {torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,  # of views that are computed when read
          torch.ops.aten._neg_view.default: torch.ops.aten.neg.default}  # fmt: skip
RETYPING_VIEWS = {"view_as_real", "view_as_complex"}  # views of the same memory in another dtype
REDUCTIONS = {"sum", "mean", "amax", "amin", "cumsum"}


def rule(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Rule, tuple[Any, ...]] | None:
    """Return the rule of an operation and its arguments, tensors or numbers; None if there is none."""
    alpha = kwargs.get("alpha", 1)
    if name in ("add", "sub", "rsub"):
        a, b = (args[1], args[0]) if name == "rsub" else args[:2]
        if name == "add":
            return (lambda x, y: x + y, (a, b)) if alpha == 1 else (lambda x, y, n: x + n * y, (a, b, alpha))
        return (lambda x, y: x - y, (a, b)) if alpha == 1 else (lambda x, y, n: x - n * y, (a, b, alpha))
    if name == "div":
        return (lambda x, y: x / y, tuple(args)) if kwargs.get("rounding_mode") is None else None
    if name == "pow":
        if not isinstance(args[1], int | float):
            return None
        return (_POWERS[args[1]], (args[0],)) if args[1] in _POWERS else (lambda x, y: x**y, tuple(args))
    if name == "clamp":
        least, highest = ([*args[1:], None, None])[:2]
        least, highest = kwargs.get("min", least), kwargs.get("max", highest)
        if highest is None:
            return _EXPRESSIONS["clamp_min"], (args[0], least)
        if least is None:
            return _EXPRESSIONS["clamp_max"], (args[0], highest)
        raised = _EXPRESSIONS["clamp_min"]
        return lambda x, y, z: _EXPRESSIONS["clamp_max"](raised(x, y), z), (args[0], least, highest)
    if name in ("softplus", "softplus_backward"):
        first = 1 if name == "softplus" else 2
        beta, threshold = ([*args[first:], *[1, 20][len(args) - first :]])[:2]
        if beta != 1:
            return None
        if name == "softplus":
            return lambda x, y: where(x > y, x, -Operation("log_sigmoid", -x)), (args[0], threshold)
        return lambda x, y, z: where(y > z, x, x * Operation("sigmoid", y)), (args[0], args[1], threshold)
    known = _EXPRESSIONS[name]
    return known, tuple(args)[: known.__code__.co_argcount]


def result(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an empty result of an operation; None if torch has to make it.

    torch could make all of them. But for some operations it would first import its compiler, which takes seconds.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    shape: Sequence[int] | None = None
    dtype = tensors[0].dtype if tensors else None
    if name in ELEMENTWISE_OPERATIONS - {"alias", "detach", "clone"} and tensors:
        shape = _broadcast([tensor.shape for tensor in (tensors[:2] if name == "log_sigmoid_backward" else tensors)])
        dtype = kwargs.get("dtype") or _dtype(name, args)
    elif name in ("mm", "bmm"):
        shape = *args[0].shape[:-1], args[1].shape[-1]
    elif name in ("select_backward", "slice_backward"):
        shape = args[1]
    elif name in ("roll", "flip"):
        shape = args[0].shape
    elif name in ("cat", "stack"):
        parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
        shape, dtype = list(parts[0].shape), _promoted(parts)
        if name == "cat":
            shape[dim] = sum(tensor.shape[dim] for tensor in parts)
        else:
            shape.insert(dim % (len(shape) + 1), len(parts))
    if shape is None:
        return None
    out = torch.empty(shape, dtype=dtype, device="meta")
    return (out, out.new_empty(0)) if name == "log_sigmoid_forward" else out


def _dtype(name: str, args: Sequence[Any]) -> torch.dtype:
    """Return the dtype of an elementwise operation's result."""
    if name in _OF_TRUTH:
        return torch.bool
    values = args[:1] if name in ("masked_fill", "copy") else args[1:] if name == "where" else args
    values = args[:2] if name.startswith(("softplus", "log_sigmoid", "threshold")) else values
    dtype = _promoted([value for value in values if isinstance(value, Tensor | bool | int | float)])
    if dtype.is_floating_point or dtype.is_complex or name in _OF_INTEGERS:
        return dtype
    return torch.get_default_dtype()


def _promoted(values: Sequence[Any]) -> torch.dtype:
    """Return the dtype that torch promotes some values to."""
    first, *others = values
    dtype, wide = torch.result_type(first, first), isinstance(first, Tensor) and first.ndim > 0
    for value in others:
        dtype = torch.result_type(torch.empty((0,) * wide, dtype=dtype, device="meta"), value)
        wide = wide or (isinstance(value, Tensor) and value.ndim > 0)
    return dtype


def _broadcast(shapes: Sequence[Sequence[int]]) -> list[int]:
    sizes = [1] * max(map(len, shapes))
    for shape in shapes:
        for axis, size in enumerate(reversed(shape), 1):
            if sizes[-axis] not in (1, size) and size != 1:
                raise RuntimeError(f"shapes {tuple(map(tuple, shapes))} do not broadcast")
            sizes[-axis] = max(sizes[-axis], size)
    return sizes


def constant(name: str, args: Sequence[Any]) -> Any:
    """Return the number that an operation fills a new tensor with; None for another operation."""
    if name in ("zeros", "zeros_like", "new_zeros") or "empty" in name:
        return 0.0
    if name in ("ones", "ones_like", "new_ones"):
        return 1.0
    if name in ("full", "full_like"):
        return args[1]
    return {"new_full": args[2:], "scalar_tensor": args}.get(name, [None])[0]


Part = tuple[Tensor, Tensor | float]


def _cat(out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[Part]:
    tensors, ends = [tensor for tensor in tensors if tensor.shape != (0,)], [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.shape[dim])
    return [(out.narrow(dim, at, tensor.shape[dim]), tensor) for at, tensor in zip(ends, tensors, strict=False)]


def _stack(out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[Part]:
    return [(out.select(dim, i), tensor) for i, tensor in enumerate(tensors)]


def _select_backward(out: Tensor, grad: Tensor, sizes: Any, dim: int, index: int) -> list[Part]:
    return [(out, 0.0), (out.select(dim, index), grad)]


def _slice_backward(out: Tensor, grad: Tensor, sizes: Any, dim: int, start: int, end: int, step: int) -> list[Part]:
    end = min(end, out.shape[dim])
    return [(out, 0.0), (torch.ops.aten.slice.Tensor(out, dim, start, end, step), grad)]


def _roll(out: Tensor, x: Tensor, shifts: Any, dims: Any = ()) -> list[Part] | None:
    shifts, dims = ([value] if isinstance(value, int) else list(value) for value in (shifts, dims))
    if len(shifts) != len(dims):
        return None
    parts = [(out, x)]
    for shift, dim in zip(shifts, dims, strict=True):
        size = x.shape[dim]
        ends = [(0, shift % size), (shift % size, size)]  # of the parts in `out`
        parts = [
            (at.narrow(dim, start, end - start), value.narrow(dim, (start - shift) % size, end - start))
            for at, value in parts
            for start, end in ends
            if end > start
        ]
    return [*parts]


def _pad(out: Tensor, x: Tensor, pad: Sequence[int], value: float = 0) -> list[Part]:
    """A negative number takes away instead: the gradient of what is added."""
    inside = out
    for i in range(len(pad) // 2):
        dim, (begin, end) = x.ndim - 1 - i, pad[2 * i : 2 * i + 2]
        if begin < 0 or end < 0:
            x = x.narrow(dim, max(-begin, 0), x.shape[dim] - max(-begin, 0) - max(-end, 0))
        inside = inside.narrow(dim, max(begin, 0), x.shape[dim])
    if inside.shape == out.shape:
        return [(out, x)]
    return [(out, float(value)), *([(inside, x)] if x.numel() else [])]


JOINS: dict[str, Callable[..., list[Part] | None]] = {
    "cat": _cat,
    "stack": _stack,
    "select_backward": _select_backward,
    "slice_backward": _slice_backward,
    "roll": _roll,
    "constant_pad_nd": _pad,
}

OTHER_NAMES = {"__or__": "bitwise_or", "__and__": "bitwise_and", "true_divide": "div", "lift_fresh_copy": "lift_fresh"}

REWRITES: dict[str, Callable[..., Any]] = {
    "addmm": lambda bias, a, b, beta=1, alpha=1: torch.add(_times(torch.mm(a, b), alpha), _times(bias, beta)),
    "baddbmm": lambda bias, a, b, beta=1, alpha=1: torch.add(_times(torch.bmm(a, b), alpha), _times(bias, beta)),
    "addcmul": lambda x, a, b, value=1: torch.add(x, _times(a * b, value)),
    "addcdiv": lambda x, a, b, value=1: torch.add(x, _times(a / b, value)),
    "lerp": lambda a, b, weight: a + weight * (b - a),
    "hardtanh": lambda x, least=-1, highest=1: torch.clamp(x, least, highest),
    "var": lambda *args, **kwargs: var_mean(*args, **kwargs)[0],
    "std": lambda *args, **kwargs: torch.sqrt(var_mean(*args, **kwargs)[0]),
    "unbind": lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
    "contiguous": lambda x, **kwargs: x.clone(memory_format=torch.contiguous_format),
    "mv": lambda a, b: torch.mm(a, b[:, None])[:, 0],
}


def var_mean(
    x: Tensor, dims: Any = None, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    axes = list(range(x.ndim)) if dims is None else [dims] if isinstance(dims, int) else list(dims)
    mean = x.mean(axes, keepdim=True)
    deviation = x - mean
    squares, correction = deviation * deviation, 1 if correction is None else correction
    count = math.prod(x.shape[axis] for axis in axes) - correction
    of_squares = squares.sum(axes, keepdim=keepdim) / count if correction else squares.mean(axes, keepdim=keepdim)
    return of_squares, mean if keepdim else mean.squeeze(axes)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
