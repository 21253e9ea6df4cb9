"""The operations of torch as loops."""

from collections.abc import Callable
from typing import Any

import torch

from scanl.ops._compiler import rules
from scanl.ops._compiler.expressions import Expression, Operation, equal, unequal, where
from scanl.ops._compiler.rules import Rule, UnsupportedOperation, same
from scanl.ops._compiler.schedule import ComplexPair, PairRule, Schedule
from scanl.ops._compiler.views import View
from scanl.ops.products.quantized_linear import MIN_ROWS

LoopRule = Callable[[Schedule, View, list[Any], dict[str, Any]], None]
RULES: dict[str, LoopRule] = {}
OTHER_RULES: dict[str, Rule] = {  # rules that cells do not have
    "isnan": lambda x: unequal(x, x),
    "isinf": lambda x: equal(x, x) & unequal(x - x, x - x),
    "tan": lambda x: Operation("sin", x) / Operation("cos", x),
    **dict.fromkeys(("lift_fresh_copy", "conj_physical", "real"), same),
    "floor": lambda x: Operation("floor", x),
    "ceil": lambda x: -Operation("floor", -x),
    "trunc": lambda x: where(x < 0.0, -Operation("floor", -x), Operation("floor", x)),
    "round": lambda x: Operation("rint", x),
    "fmod": lambda x, y: Operation("fmod", x, y),
    "remainder": lambda x, y: _remainder(Operation("fmod", x, y), y),
    "log2": lambda x: Operation("log", x) * 1.4426950408889634,
    "exp2": lambda x: Operation("exp", x * 0.6931471805599453),
}
WHOLE_DTYPES = {torch.int64, torch.int32, torch.uint8}
GELU: dict[str, Rule] = {
    "none": lambda x: 0.5 * x * (1.0 + Operation("erf", x * 0.7071067811865476)),
    "tanh": lambda x: 0.5 * x * (1.0 + Operation("tanh", 0.7978845608028654 * (x + 0.044715 * x * x * x))),
}
COMPLEX: dict[str, PairRule] = {
    "neg": lambda x: (-x.re, -x.im),
    **dict.fromkeys(("conj_physical", "_conj_physical"), lambda x: (x.re, -x.im)),
    "add": lambda x, y: (x.re + y.re, x.im + y.im),
    "sub": lambda x, y: (x.re - y.re, x.im - y.im),
    "mul": lambda x, y: (x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re),
    "exp": lambda x: tuple(Operation("exp", x.re) * Operation(name, x.im) for name in ("cos", "sin")),
    "complex": lambda x, y: (x.re, y.re),
    "polar": lambda x, y: tuple(x.re * Operation(name, y.re) for name in ("cos", "sin")),
    "where": lambda truth, x, y: tuple(where(truth.re, *parts) for parts in zip(x, y, strict=True)),
    **dict.fromkeys(("clone", "_to_copy", "lift_fresh_copy"), lambda x: x),
    "copy": lambda x, y: y,
    "div": lambda x, y: (
        (x.re * y.re + x.im * y.im) / _square(y), (x.im * y.re - x.re * y.im) / _square(y),
    ),
    "reciprocal": lambda x: (x.re / _square(x), -x.im / _square(x)),
    "sgn": lambda x: tuple(
        where(unequal(x.re, 0.0) | unequal(x.im, 0.0), part / Operation("sqrt", _square(x)), 0.0) for part in x
    ),
}  # fmt: skip
OF_COMPLEX: dict[str, PairRule] = {
    "abs": lambda x: (Operation("sqrt", _square(x)),),
    "angle": lambda x: (Operation("atan2", x.im, x.re),),
}


def _remainder(rest: Expression, y: Expression) -> Expression:
    """Return the remainder with the sign of y. rest: that with the other number's sign."""
    return where(unequal(rest, 0.0) & unequal(where(rest < 0.0, 1.0, 0.0), where(y < 0.0, 1.0, 0.0)), rest + y, rest)


def _square(x: ComplexPair) -> Expression:
    return x.re * x.re + x.im * x.im


def add(schedule: Schedule, target: Any, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Add the loops of an operation. Raises UnsupportedOperation for one that has none."""
    name = target._schema.name.split("::")[1]
    name = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    value = rules.constant(name, args)
    if value is not None:
        if isinstance(value, View):
            schedule.copy(out, value.expanded(out.shape))
        elif out.form == "complex" and value != 0:
            schedule.copy(out, value)
        else:
            out.memory.fill = float(value.real)
        return
    if name == "fill":
        schedule.copy(out, args[1])
        return
    if name in RULES:  # their arguments have memory
        RULES[name](schedule, out, [schedule.written(arg) if isinstance(arg, View) else arg for arg in args], kwargs)
    elif out.form == "complex":
        _complex(schedule, name, out, args, kwargs)
    else:
        _real(schedule, name, out, args, kwargs)


def _real(schedule: Schedule, name: str, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    tensors = [arg for arg in args if isinstance(arg, View)]
    if any(value.form == "complex" for value in tensors):
        if name not in OF_COMPLEX:
            raise UnsupportedOperation(f"no kernel computes {name} of complex numbers")
        schedule.pairwise(out, args[:1], OF_COMPLEX[name])
        return
    if tensors and all(value.form == "truth" for value in tensors) and out.form == "truth":
        name = rules.TRUTH_OPERATIONS.get(name, name)
    if name == "div" and kwargs.get("rounding_mode") in ("floor", "trunc"):
        rounded = OTHER_RULES[kwargs["rounding_mode"]]
        formula, operands = lambda x, y: rounded(x / y), tuple(args)
    elif name == "_to_copy" and kwargs.get("dtype") == torch.bool:
        formula, operands = lambda x: unequal(x, 0.0), args[:1]
    elif name == "_to_copy" and kwargs.get("dtype") in WHOLE_DTYPES:
        formula, operands = OTHER_RULES["trunc"], args[:1]
    elif name == "floor_divide":
        formula, operands = lambda x, y: Operation("floor", x / y), tuple(args)
    elif name in OTHER_RULES:
        formula, operands = OTHER_RULES[name], args[: OTHER_RULES[name].__code__.co_argcount]
    elif name == "gelu":
        formula, operands = GELU[kwargs.get("approximate", "none")], (args[0],)
    elif name == "elu" and all(factor == 1 for factor in args[1:]):
        formula, operands = lambda x: where(x > 0.0, x, Operation("expm1", x)), (args[0],)
    elif name == "pow" and isinstance(args[1], View):
        formula, operands = lambda x, y: x**y, tuple(args)
    else:
        try:
            known = rules.rule(name, args, kwargs)
        except KeyError:
            known = None
        if known is None:
            raise UnsupportedOperation(f"no kernel computes {name}")
        formula, operands = known
    schedule.elementwise(out, operands, formula)


def _complex(schedule: Schedule, name: str, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    if name == "pow" and args[1] == 2:
        name, args = "mul", [args[0], args[0]]
    if name in ("add", "sub") and kwargs.get("alpha", 1) != 1:
        raise UnsupportedOperation(f"{name} of complex numbers with a factor")
    if name not in COMPLEX:
        raise UnsupportedOperation(f"no kernel computes {name} of complex numbers")
    count = COMPLEX[name].__code__.co_argcount
    schedule.pairwise(out, args[:count], COMPLEX[name])


def rule(*names: str) -> Callable[[LoopRule], LoopRule]:
    def put(function: LoopRule) -> LoopRule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return put


def _reduction(kind: str) -> LoopRule:
    def put(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
        source = args[0]
        axes = args[1] if len(args) > 1 and args[1] is not None else []
        axes = [axes] if isinstance(axes, int) else axes
        axes = sorted({axis % len(source.shape) for axis in axes} if axes else range(len(source.shape)))
        keepdim = (len(args) > 2 and args[2]) or kwargs.get("keepdim", False)
        if keepdim:
            for axis in reversed(axes):
                out = out.without(axis)
        schedule.reduce(out, source, axes, kind)

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


def _place_of(largest: bool) -> LoopRule:
    def put(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
        source, axis = args[0], args[1] if len(args) > 1 else None
        if axis is None:
            raise UnsupportedOperation("the place of the largest of all numbers")
        axis %= len(source.shape)
        keepdim = (len(args) > 2 and args[2]) or kwargs.get("keepdim", False)
        schedule.place_of(out.without(axis) if keepdim else out, source, axis, largest)

    return put


RULES |= {"argmax": _place_of(True), "argmin": _place_of(False)}


@rule("mm", "bmm")
def _mm(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    schedule.product(out, args[0], args[1])


@rule("addmm", "baddbmm")
def _addmm(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        raise UnsupportedOperation("addmm with factors")
    schedule.product(out, args[1], args[2], args[0])


@rule("quantized_linear")
def _quantized(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    x, packed, scale, groups, bias = args
    kinds = [value.memory.kind for value in (out, x, scale)]
    if kinds != [*2 * ["float32"], "int8"] and (kinds != 3 * ["float32"] or out.shape[1] < MIN_ROWS):
        raise UnsupportedOperation("a product by whole numbers that is not of float32, or has few columns")
    if packed.strides[-1] != 1 or (packed.shape[0] > 1 and packed.strides[0] != packed.shape[1]):
        raise UnsupportedOperation("a product by whole numbers whose rows do not lie one behind another")
    schedule.quantized(out, x, packed, scale, groups, bias)


@rule("arange")
def _arange(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    start, step = (0, 1) if len(args) == 1 else (args[0], args[2] if len(args) > 2 else 1)
    schedule.count(out, start, step)


@rule("flip")
def _flip(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    source = args[0]
    for axis in (axis % len(out.shape) for axis in args[1]):
        source = source.at(axis, out.shape[axis] - 1, out.shape[axis], -1)
    schedule.copy(out, source)


@rule("cumsum")
def _cumsum(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    source, axis = args[0], args[1] % len(out.shape)
    schedule.copy(out.at(axis, 0, 1), source.at(axis, 0, 1))
    for at in range(1, out.shape[axis]):
        schedule.elementwise(out.at(axis, at, 1), [out.at(axis, at - 1, 1), source.at(axis, at, 1)], lambda x, y: x + y)


@rule("gather")
def _gather(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    schedule.gather(out, args[0], args[1] % len(out.shape), args[2])


@rule("index")
def _index(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    source, indices = args[0], dict(enumerate(args[1]))
    axes = [axis for axis, index in indices.items() if index is not None]
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise UnsupportedOperation("indices of axes that are not adjacent")
    shape = torch.broadcast_shapes(*(indices[axis].shape for axis in axes))
    before, after = axes[0], len(source.shape) - axes[-1] - 1
    places = []
    for axis in axes:
        index = schedule.written(indices[axis]).expanded(shape)
        strides = (*[0] * before, *index.strides, *[0] * after)
        places.append((index._replace(shape=out.shape, strides=strides), source.strides[axis], source.shape[axis]))
    strides = (*source.strides[:before], *[0] * len(shape), *source.strides[axes[-1] + 1 :])
    schedule.read_at(out, source._replace(shape=out.shape, strides=strides), places)


@rule("index_select")
def _index_select(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    source, axis, index = args
    _index(schedule, out, [source, [*[None] * (axis % len(source.shape)), index]], kwargs)


@rule("embedding")
def _embedding(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    weight, index = args[:2]
    front = len(index.shape)
    source = weight._replace(shape=(*[1] * (front - 1), *weight.shape), strides=(*[0] * (front - 1), *weight.strides))
    schedule.gather(out, source, front - 1, index._replace(shape=out.shape, strides=(*index.strides, 0)))


@rule("scatter")
def _scatter(schedule: Schedule, out: View, args: list[Any], kwargs: dict[str, Any]) -> None:
    if kwargs:
        raise UnsupportedOperation("scatter with a reduction")
    schedule.copy(out, args[0])
    schedule.scatter(out, args[1] % len(out.shape), args[2], args[3])
