"""What kernels of cells can compute: expressions of elementwise operations, reductions, and joins of parts."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ScanlError


class Unsupported(ScanlError):
    """A function uses what no kernel can run; the message names it."""


# {0}, {1}, ...: the arguments. Numbers are written c(...): they take the element type of the kernel.
_EXPRESSIONS: dict[str, str] = {
    "neg": "-{0}",
    "mul": "{0} * {1}",
    "reciprocal": "c(1) / {0}",
    "exp": "exp({0})",
    "log": "log({0})",
    "log1p": "log1p({0})",
    "expm1": "expm1({0})",
    "sqrt": "sqrt({0})",
    "rsqrt": "c(1) / sqrt({0})",
    "sin": "sin({0})",
    "cos": "cos({0})",
    "erf": "erf({0})",
    "abs": "abs({0})",
    "sign": "((c(1) if {0} > c(0) else (c(-1) if {0} < c(0) else c(0))) if {0} == {0} else {0})",
    "sgn": "((c(1) if {0} > c(0) else (c(-1) if {0} < c(0) else c(0))) if {0} == {0} else {0})",
    "sigmoid": "sigmoid({0})",
    "tanh": "tanh({0})",
    "relu": "(c(0) if {0} <= c(0) else {0})",
    "silu": "{0} * sigmoid({0})",
    "log_sigmoid_forward": "log_sigmoid({0})",
    "where": "({1} if {0} else {2})",
    "masked_fill": "({2} if {1} else {0})",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "logical_and": "{0} & {1}",
    "bitwise_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "bitwise_or": "{0} | {1}",
    "logical_not": "not {0}",
    "bitwise_not": "not {0}",
    "maximum": "({0} if ({0} > {1}) | ({0} != {0}) else {1})",
    "minimum": "({0} if ({0} < {1}) | ({0} != {0}) else {1})",
    "clamp_min": "({1} if {0} < {1} else {0})",
    "clamp_max": "({1} if {0} > {1} else {0})",
    "copy": "{1}",
    "clone": "{0}",
    "alias": "{0}",
    "detach": "{0}",
    "positive": "{0}",
    "_to_copy": "{0}",
    "sigmoid_backward": "{0} * ({1} * (c(1) - {1}))",
    "tanh_backward": "{0} * (c(1) - {1} * {1})",
    "threshold_backward": "(c(0) if {1} <= {2} else {0})",
    "silu_backward": "{0} * (sigmoid({1}) * (c(1) + {1} * (c(1) - sigmoid({1}))))",
    "log_sigmoid_backward": "{0} * sigmoid(-{1})",
}

# The results of these have the dtype of their arguments, integers too; other functions of integers are floating.
_OF_INTEGERS = {"neg", "mul", "add", "sub", "rsub", "pow", "abs", "sign", "sgn", "relu", "where", "masked_fill",
                "maximum", "minimum", "clamp", "clamp_min", "clamp_max", "copy", "positive", "_to_copy",
                "threshold_backward"}  # fmt: skip
# What these are of two truth values.
OF_TRUTHS = {"add": "logical_or", "mul": "logical_and", "maximum": "logical_or", "minimum": "logical_and"}
ELEMENTWISE = {*_EXPRESSIONS, "add", "sub", "rsub", "div", "pow", "clamp", "softplus", "softplus_backward"}
_TRUTHS = {"gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not"} | {
    f"bitwise_{name}" for name in ("and", "or", "not")
}
COPIES = {torch.ops.aten._conj.default: torch.ops.aten.conj_physical.default,  # of views that are computed when read
          torch.ops.aten._neg_view.default: torch.ops.aten.neg.default}  # fmt: skip
RETYPED = {"view_as_real", "view_as_complex"}  # views of the same memory in another dtype
REDUCTIONS = {"sum", "mean", "amax", "amin", "cumsum"}


def expression(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]] | None:
    """Return the expression of an operation and its arguments, tensors or numbers; None if there is none."""
    alpha = kwargs.get("alpha", 1)
    if name in ("add", "sub", "rsub"):
        a, b = (args[1], args[0]) if name == "rsub" else args[:2]
        sign = "+" if name == "add" else "-"
        return (f"{{0}} {sign} {{1}}", (a, b)) if alpha == 1 else (f"{{0}} {sign} {{2}} * {{1}}", (a, b, alpha))
    if name == "div":
        return ("{0} / {1}", tuple(args)) if kwargs.get("rounding_mode") is None else None
    if name == "pow":
        if not isinstance(args[1], int | float):
            return None
        simple = {2: "{0} * {0}", 3: "{0} * {0} * {0}", 0.5: "sqrt({0})", 1: "{0}", -1: "c(1) / {0}"}
        return (simple[args[1]], (args[0],)) if args[1] in simple else ("{0} ** {1}", tuple(args))
    if name == "clamp":
        least, highest = ([*args[1:], None, None])[:2]
        least, highest = kwargs.get("min", least), kwargs.get("max", highest)
        source = "{0}" if least is None else "({1} if {0} < {1} else {0})"
        if highest is None:
            return source, (args[0], least)
        capped = f"({{2}} if {source} > {{2}} else {source})"
        return capped, (args[0], 0.0 if least is None else least, highest)
    if name in ("softplus", "softplus_backward"):
        first = 1 if name == "softplus" else 2
        beta, threshold = ([*args[first:], *[1, 20][len(args) - first :]])[:2]
        if beta != 1:
            return None
        if name == "softplus":
            return "({0} if {0} > {1} else -log_sigmoid(-{0}))", (args[0], threshold)
        return "({0} if {1} > {2} else {0} * sigmoid({1}))", (args[0], args[1], threshold)
    if name in ("log_sigmoid_backward", "log_sigmoid_forward"):
        return _EXPRESSIONS[name], tuple(args[: 2 if name.endswith("backward") else 1])
    if name in ("clone", "_to_copy"):
        return _EXPRESSIONS[name], (args[0],)
    return _EXPRESSIONS[name], tuple(args)


def result(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return an empty result of an operation; None if torch has to make it.

    torch could make all of them. But for some operations it would first import its compiler, which takes seconds.
    """
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    shape: Sequence[int] | None = None
    dtype = tensors[0].dtype if tensors else None
    if name in ELEMENTWISE - {"alias", "detach", "clone"} and tensors:
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
    if name in _TRUTHS:
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


def constant(name: str, args: Sequence[Any]) -> float | None:
    """Return the number that an operation fills a new tensor with; None for another operation."""
    if name in ("zeros", "zeros_like", "new_zeros") or "empty" in name:
        return 0.0
    if name in ("ones", "ones_like", "new_ones"):
        return 1.0
    if name in ("full", "full_like"):
        return float(args[1])
    if name in ("new_full",):
        return float(args[2])
    return float(args[0]) if name == "scalar_tensor" else None


Part = tuple[Tensor, Tensor | float]


def _cat(out: Tensor, tensors: Sequence[Tensor], dim: int = 0) -> list[Part]:
    ends = [0]
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
    "var": lambda *args, **kwargs: _variance(*args, **kwargs),
    "std": lambda *args, **kwargs: torch.sqrt(_variance(*args, **kwargs)),
    "unbind": lambda x, dim=0: [x.select(dim, i) for i in range(x.shape[dim])],
    "contiguous": lambda x, **kwargs: x.clone(memory_format=torch.contiguous_format),
    "mv": lambda a, b: torch.mm(a, b[:, None])[:, 0],
}


def _variance(x: Tensor, dims: Any, correction: float | None = 1, keepdim: bool = False) -> Tensor:
    deviation = x - x.mean(dims, keepdim=True)
    squares = deviation * deviation
    if not correction:
        return squares.mean(dims, keepdim=keepdim)
    count = math.prod(x.shape[dim] for dim in ([dims] if isinstance(dims, int) else dims))
    return squares.sum(dims, keepdim=keepdim) / (count - correction)


def _times(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor


# The argument that is a condition; elsewhere a truth value counts as 0 or 1.
CHOICES = {_EXPRESSIONS["where"]: 0, _EXPRESSIONS["masked_fill"]: 1}
