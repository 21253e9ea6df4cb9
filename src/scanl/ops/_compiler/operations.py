"""What the operations of torch are as loops."""

from collections.abc import Callable
from typing import Any

from scanl.ops._compiler import rules
from scanl.ops._compiler.loops import Loops
from scanl.ops._compiler.rules import Unsupported
from scanl.ops._compiler.values import Value
from scanl.ops.fused.quantized_linear import MIN_ROWS

Rule = Callable[[Loops, Value, list[Any], dict[str, Any]], None]
RULES: dict[str, Rule] = {}
FILLS = {"full": 1, "new_full": 2, "full_like": 1, "scalar_tensor": 0}
ZEROS = {"zeros", "new_zeros", "zeros_like", "empty", "new_empty", "empty_like", "empty_permuted", "empty_strided"}
ONES = {"ones", "new_ones", "ones_like"}
CONDITIONS = {"where": (0,), "masked_fill": (1,), "logical_not": (0,), "bitwise_not": (0,), "logical_and": (0, 1),
              "bitwise_and": (0, 1), "logical_or": (0, 1), "bitwise_or": (0, 1)}  # fmt: skip
TRUTHS = {"gt", "ge", "lt", "le", "eq", "ne", "logical_not", "bitwise_not", "logical_and", "bitwise_and",
          "logical_or", "bitwise_or", "isnan", "isinf"}  # fmt: skip
MORE = {  # expressions that cells do not have
    "isnan": "{0} != {0}",
    "isinf": "({0} == {0}) & ({0} - {0} != {0} - {0})",
    "tan": "sin({0}) / cos({0})",
    "lift_fresh_copy": "{0}",
    "conj_physical": "{0}",
    "real": "{0}",
    "log2": "log({0}) * c(1.4426950408889634)",
    "exp2": "exp({0} * c(0.6931471805599453))",
    "hardshrink": "(c(0.0) if abs({0}) <= {1} else {0})",
}
COMPLEX = {
    "neg": ("-{0.re}", "-{0.im}"),
    "conj_physical": ("{0.re}", "-{0.im}"),
    "_conj_physical": ("{0.re}", "-{0.im}"),
    "add": ("{0.re} + {1.re}", "{0.im} + {1.im}"),
    "sub": ("{0.re} - {1.re}", "{0.im} - {1.im}"),
    "mul": ("{0.re} * {1.re} - {0.im} * {1.im}", "{0.re} * {1.im} + {0.im} * {1.re}"),
    "exp": ("exp({0.re}) * cos({0.im})", "exp({0.re}) * sin({0.im})"),
    "complex": ("{0}", "{1}"),
    "polar": ("{0} * cos({1})", "{0} * sin({1})"),
    "where": ("({1.re} if {0:truth} else {2.re})", "({1.im} if {0:truth} else {2.im})"),
    "clone": ("{0.re}", "{0.im}"),
    "_to_copy": ("{0.re}", "{0.im}"),
    "copy": ("{1.re}", "{1.im}"),
    "lift_fresh_copy": ("{0.re}", "{0.im}"),
    "div": (
        "({0.re} * {1.re} + {0.im} * {1.im}) / ({1.re} * {1.re} + {1.im} * {1.im})",
        "({0.im} * {1.re} - {0.re} * {1.im}) / ({1.re} * {1.re} + {1.im} * {1.im})",
    ),
    "reciprocal": (
        "{0.re} / ({0.re} * {0.re} + {0.im} * {0.im})", "-{0.im} / ({0.re} * {0.re} + {0.im} * {0.im})",
    ),
    "sgn": (
        "({0.re} / sqrt({0.re} * {0.re} + {0.im} * {0.im}) if ({0.re} != c(0.0)) | ({0.im} != c(0.0)) else c(0.0))",
        "({0.im} / sqrt({0.re} * {0.re} + {0.im} * {0.im}) if ({0.re} != c(0.0)) | ({0.im} != c(0.0)) else c(0.0))",
    ),
}  # fmt: skip
OF_COMPLEX = {"abs": "sqrt({0.re} * {0.re} + {0.im} * {0.im})", "angle": "atan2({0.im}, {0.re})"}


def add(loops: Loops, target: Any, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Add the loops of an operation. Raises Unsupported for one that has none."""
    name = target._schema.name.split("::")[1]
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    if name in FILLS or name in ZEROS or name in ONES:
        value = args[FILLS[name]] if name in FILLS else float(name in ONES)
        if isinstance(value, Value):
            loops.copy(out, value.expanded(out.shape))
        elif isinstance(value, complex) or out.form == "complex":
            _complex_fill(loops, out, complex(value))
        else:
            out.memory.fill = float(value)
        return
    if name == "fill":
        loops.copy(out, args[1])
        return
    args = [_needed(loops, arg) for arg in args] if name in RULES else args
    if name in RULES:
        RULES[name](loops, out, args, kwargs)
    elif out.form == "complex":
        _complex(loops, name, out, args, kwargs)
    else:
        _real(loops, name, out, args, kwargs)


def _needed(loops: Loops, arg: Any) -> Any:
    """Return an argument whose values have memory."""
    if isinstance(arg, list):
        return [_needed(loops, member) for member in arg]
    return loops.written(arg) if isinstance(arg, Value) else arg


def _complex_fill(loops: Loops, out: Value, value: complex) -> None:
    if value == 0:
        out.memory.fill = 0.0
        return
    loops.elementwise(out.part(0), [value.real], ["{0}"])
    loops.elementwise(out.part(1), [value.imag], ["{0}"])


def _real(loops: Loops, name: str, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    tensors = [arg for arg in args if isinstance(arg, Value)]
    if any(value.form == "complex" for value in tensors):
        if name not in OF_COMPLEX:
            raise Unsupported(f"no kernel computes {name} of complex numbers")
        loops.elementwise(out, args[:1], [OF_COMPLEX[name]])
        return
    if tensors and all(value.form == "truth" for value in tensors) and out.form == "truth":
        name = rules.OF_TRUTHS.get(name, name)
    if name in MORE:
        expression, operands = MORE[name], tuple(args)
    elif name == "gelu":
        tanh = kwargs.get("approximate", "none") == "tanh"
        inside = "tanh(c(0.7978845608028654) * ({0} + c(0.044715) * {0} * {0} * {0}))"
        expression = f"c(0.5) * {{0}} * (c(1.0) + {inside if tanh else 'erf({0} * c(0.7071067811865476))'})"
        operands = (args[0],)
    elif name == "elu" and all(factor == 1 for factor in args[1:]):
        expression, operands = "({0} if {0} > c(0.0) else expm1({0}))", (args[0],)
    elif name == "pow" and isinstance(args[1], Value):
        expression, operands = "{0} ** {1}", tuple(args)
    else:
        try:
            known = rules.expression(name, args, kwargs)
        except KeyError:
            known = None
        if known is None:
            raise Unsupported(f"no kernel computes {name}")
        expression, operands = known
    for at in CONDITIONS.get(name, ()):
        expression = expression.replace(f"{{{at}}}", f"{{{at}:truth}}")
    if name in TRUTHS:
        expression = f"(c(1.0) if {expression} else c(0.0))"
    loops.elementwise(out, [_scalar(operand) for operand in operands], [expression])


def _complex(loops: Loops, name: str, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    if name == "pow" and args[1] == 2:
        name, args = "mul", [args[0], args[0]]
    if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
        raise Unsupported(f"{name} of complex numbers with a factor")
    if name not in COMPLEX:
        raise Unsupported(f"no kernel computes {name} of complex numbers")
    count = 1 + max(int(digit) for text in COMPLEX[name] for digit in "012" if f"{{{digit}" in text)
    loops.elementwise(out, [_pair(arg) for arg in args[:count]], COMPLEX[name])


def _scalar(arg: Any) -> Any:
    if isinstance(arg, bool | int | float):
        return float(arg)
    return arg


def _pair(arg: Any) -> Any:
    return complex(arg) if isinstance(arg, bool | int | float) else arg


def rule(*names: str) -> Callable[[Rule], Rule]:
    def put(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return put


def _reduction(kind: str) -> Rule:
    def put(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
        source = args[0]
        axes = args[1] if len(args) > 1 and args[1] is not None else []
        axes = [axes] if isinstance(axes, int) else axes
        axes = sorted({axis % len(source.shape) for axis in axes} if axes else range(len(source.shape)))
        keepdim = (len(args) > 2 and args[2]) or kwargs.get("keepdim", False)
        if keepdim:
            for axis in reversed(axes):
                out = out.without(axis)
        loops.reduce(out, source, axes, kind)

    return put


for _name, _kind in {
    "sum": "sum",
    "mean": "mean",
    "amax": "amax",
    "amin": "amin",
    "any": "amax",
    "all": "amin",
}.items():
    RULES[_name] = _reduction(_kind)


@rule("mm", "bmm")
def _mm(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    loops.product(out, args[0], args[1])


@rule("addmm", "baddbmm")
def _addmm(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        raise Unsupported("addmm with factors")
    loops.product(out, args[1], args[2], args[0])


@rule("quantized_linear")
def _quantized(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    x, packed, scale, groups, bias = args
    if out.shape[1] < MIN_ROWS or any(value.memory.kind != "float32" for value in (out, x, scale)):
        raise Unsupported("a product by whole numbers that is not of float32, or has few columns")
    loops.quantized(out, x, packed, scale, groups, bias)


@rule("cat")
def _cat(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    axis = (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(out.shape)
    start = 0
    for member in args[0]:
        if member.shape == (0,):
            continue
        loops.copy(out.at(axis, start, member.shape[axis]), member)
        start += member.shape[axis]


@rule("select_backward")
def _select_backward(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    source, _, axis, index = args
    axis %= len(out.shape)
    loops.fill(out, 0.0)
    loops.copy(out.at(axis, index % out.shape[axis], 1).without(axis), source)


@rule("slice_backward")
def _slice_backward(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    source, _, axis, start, _, step = args
    axis %= len(out.shape)
    start = max(0, start + out.shape[axis]) if start < 0 else start
    loops.fill(out, 0.0)
    loops.copy(out.at(axis, start, source.shape[axis], step), source)


@rule("constant_pad_nd")
def _pad(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    source, pads, value = args[0], args[1], args[2] if len(args) > 2 else 0
    inside = out
    for at in range(len(pads) // 2):
        axis = len(out.shape) - 1 - at
        low = pads[2 * at]
        size = source.shape[axis]
        if low < 0 or pads[2 * at + 1] < 0:
            raise Unsupported("a negative padding")
        inside = inside.at(axis, low, size)
    loops.fill(out, float(value))
    loops.copy(inside, source)


@rule("arange")
def _arange(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    (size,) = out.shape
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    for at in range(size):
        loops.elementwise(out.at(0, at, 1), [float(start + at * step)], ["{0}"])


@rule("flip")
def _flip(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    source = args[0]
    for axis in (axis % len(out.shape) for axis in args[1]):
        source = source.at(axis, out.shape[axis] - 1, out.shape[axis], -1)
    loops.copy(out, source)


@rule("cumsum")
def _cumsum(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    source, axis = args[0], args[1] % len(out.shape)
    loops.copy(out.at(axis, 0, 1), source.at(axis, 0, 1))
    for at in range(1, out.shape[axis]):
        loops.elementwise(out.at(axis, at, 1), [out.at(axis, at - 1, 1), source.at(axis, at, 1)], ["{0} + {1}"])


@rule("gather")
def _gather(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    loops.gather(out, args[0], args[1] % len(out.shape), args[2])


@rule("embedding")
def _embedding(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    weight, index = args[:2]
    front = len(index.shape)
    source = weight._replace(shape=(*[1] * (front - 1), *weight.shape), strides=(*[0] * (front - 1), *weight.strides))
    loops.gather(out, source, front - 1, index._replace(shape=out.shape, strides=(*index.strides, 0)))


@rule("scatter")
def _scatter(loops: Loops, out: Value, args: list[Any], kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise Unsupported("scatter with a reduction")
    loops.copy(out, args[0])
    loops.scatter(out, args[1] % len(out.shape), args[2], args[3])
