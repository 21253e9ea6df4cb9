"""Make Triton's interpreter quick: types and shapes of blocks are made once, not for every operation on a block.

Its own Python, not numpy, takes most of its time. The numbers are the same.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from triton.language import core, semantic
from triton.runtime import interpreter


def each_way(names: str, cases: Iterable[Any], *, first: bool = False) -> pytest.MarkDecorator:
    """Parametrize a test by cases and by `reverse`: each case in one direction by turns, with --all in both.

    names: of the parameters of a case, as words.   first: whether the first case is in reverse.
    """
    several, found = names.split(), []
    for i, case in enumerate(cases):
        for reverse in (False, True):
            values = (case,) if len(several) == 1 else case
            found.append(pytest.param(*values, reverse, marks=[pytest.mark.long] * ((i + first + reverse) % 2)))
    return pytest.mark.parametrize((*several, "reverse"), found)


def quicken() -> None:
    # It patches triton's language for every call of a function from a kernel, and undoes it: once a module is enough,
    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    # and looks for overflows after every operation on integers: a third of its time.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    core._unwrap_if_constexpr = _unwrapped(core._unwrap_if_constexpr)
    core.block_type.__init__ = _made_once(core.block_type.__init__)
    core.tensor.__init__ = _sized_once(core.tensor.__init__)
    rules = semantic.TritonSemantic
    rules.broadcast_impl_value = _broadcast(rules.broadcast_impl_value)
    rules.binary_op_type_checking_impl = _alike(rules.binary_op_type_checking_impl)


def _once_a_module(patch):
    patched = set()

    def patch_once(function):
        if id(function.__globals__) not in patched:
            first = not patched
            patched.add(id(function.__globals__))
            patch(function)
            if first:
                _quicken_operators()
        return interpreter._LangPatchScope()

    return patch_once


def _by_name(of):
    """The dtype in numpy of a type, which its name tells."""
    found = {}

    def of_quickly(kind):
        if kind.name not in found:
            found[kind.name] = of(kind)
        return found[kind.name]

    return of_quickly


def _unwrapped(unwrap):
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

    def unwrap_quickly(value):
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    return unwrap_quickly


def _made_once(make):
    """Types of blocks: all that have one element type and shape share what is made of these."""
    made = {}

    def initialise(self, element_ty, shape):
        key = element_ty.name, *(size.value if type(size) is core.constexpr else size for size in shape)
        if key not in made:
            make(self, element_ty, shape)
            made[key] = self.__dict__.copy()
        self.__dict__.update(made[key])
        self.element_ty = element_ty

    return initialise


def _sized_once(make):
    """Tensors: those of one shape share it."""
    shapes = {}

    def initialise(self, handle, type):  # the interpreter's own name of the argument
        key = (*type.shape.values,) if type.is_block() else ()
        if key not in shapes:
            make(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.shape, self.numel = shapes[key]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return initialise


def _broadcast(broadcast):
    """Two tensors brought to one shape: at once if they have it, or differ only in axes of length 1."""

    def broadcast_quickly(self, lhs, rhs):
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if lhs.type.is_block() and rhs.type.is_block():
            left, right = lhs.type.shape.values, rhs.type.shape.values
            if len(left) == len(right) and all(m == n or 1 in (m, n) for m, n in zip(left, right, strict=True)):
                shape = [max(sizes) for sizes in zip(left, right, strict=True)]
                return tuple(
                    value
                    if value.type.shape.values == shape
                    else core.tensor(
                        self.builder.create_broadcast(value.handle, shape), core.block_type(value.type.scalar, shape)
                    )
                    for value in (lhs, rhs)
                )
        return broadcast(self, lhs, rhs)

    return broadcast_quickly


def _alike(convert):
    """The two operands of an operation in one dtype and shape: at once if they are."""
    dtypes = {"fp32", "fp64", "int32", "int64"}

    def convert_quickly(self, lhs, rhs, *flags, **more):
        tensors = type(lhs) is core.tensor and type(rhs) is core.tensor
        if tensors and lhs.shape is rhs.shape and lhs.dtype.name == rhs.dtype.name and lhs.dtype.name in dtypes:
            return lhs, rhs
        return convert(self, lhs, rhs, *flags, **more)

    return convert_quickly


ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
INTEGERS, FLOATS = {"int32": np.int32, "int64": np.int64}, {"fp32": np.float32, "fp64": np.float64}
NUMBERS = {**INTEGERS, **FLOATS}
TYPES = {name: getattr(core, number.__name__) for name, number in NUMBERS.items()}


def _quicken_operators():
    """Let numpy compute what it computes as triton does: its broadcasting, and the wider type of two of one kind."""
    tensor, rules = core.tensor, semantic.TritonSemantic
    for name, operate in ARITHMETIC.items():
        for method, turned in ((f"__{name}__", False), (f"__r{name}__", True)):
            setattr(tensor, method, _operator(getattr(tensor, method), operate, turned=turned))
    for name, operate in COMPARISONS.items():
        setattr(tensor, f"__{name}__", _operator(getattr(tensor, f"__{name}__"), operate, of=core.int1))
    tensor.__add__ = _offset(tensor.__add__)
    tensor.__and__ = _of_masks(tensor.__and__, np.logical_and)
    tensor.__or__ = _of_masks(tensor.__or__, np.logical_or)
    rules.cast = _cast(rules.cast)
    rules.where = _where(rules.where)


_alike_tensors: dict[tuple[str, tuple[int, ...] | None], dict[str, Any]] = {}


def _tensor(data, scalar, held, *, block):
    """A tensor of numbers of the type `scalar`, which the interpreter holds as `held`."""
    key = scalar.name, data.shape if block else None
    made, handle = core.tensor.__new__(core.tensor), interpreter.TensorHandle(data, held)
    if key not in _alike_tensors:
        made.__init__(handle, core.block_type(scalar, list(data.shape)) if block else scalar)
        _alike_tensors[key] = made.__dict__.copy()
    made.__dict__.update(_alike_tensors[key])
    made.handle, made.dtype = handle, scalar
    return made


def _is_block(tensor):
    return type(tensor.type) is core.block_type


def _common(left, right):
    """The type of what is computed of two others, by name; None if triton's rules are to say it."""
    if left == right:
        return left if left in NUMBERS else None
    of_one_kind = any(left in kind and right in kind for kind in (INTEGERS, FLOATS))
    return max(left, right) if of_one_kind else None  # the wider, whose name comes later


def _beside(name, value):
    """The number as one of the type of that name, beside which it stands; None if triton's rules are to say it."""
    fits = type(value) is int and -(2**31) <= value < 2**31
    return NUMBERS[name](value) if fits or (type(value) is float and name in FLOATS) else None


def _operator(slow, operate, *, turned=False, of=None):
    """of: the type of the result, if it is not that of the operands."""

    def operate_quickly(self, other):
        name, value = self.dtype.name, other.value if type(other) is core.constexpr else other
        if type(value) is core.tensor:
            name, right = _common(name, value.dtype.name), value.handle.data
            block = _is_block(self) or _is_block(value)
        else:
            right, block = _beside(name, value) if name in NUMBERS else None, _is_block(self)
        if name is None or right is None:
            return slow(self, other)
        left, dtype = self.handle.data, TYPES[name]
        return _tensor(operate(right, left) if turned else operate(left, right), of or dtype, dtype, block=block)

    return operate_quickly


def _offset(slow):
    """A pointer and a number of elements, added."""

    def add(self, other):
        if type(self.dtype) is core.pointer_type and type(other) is core.tensor and other.dtype.name in INTEGERS:
            size = max(1, self.dtype.element_ty.primitive_bitwidth // 8)
            data = self.handle.data + size * other.handle.data.astype(np.uint64)
            return _tensor(data, self.dtype, self.handle.dtype, block=_is_block(self) or _is_block(other))
        return slow(self, other)

    return add


def _is_mask(value):
    return type(value) is core.tensor and value.dtype.name == "int1" and value.handle.data.dtype == np.bool_


def _of_masks(slow, operate):
    def operate_quickly(self, other):
        if _is_mask(self) and _is_mask(other):
            data, block = operate(self.handle.data, other.handle.data), _is_block(self) or _is_block(other)
            return _tensor(data, core.int1, core.int1, block=block)
        return slow(self, other)

    return operate_quickly


def _cast(cast):
    def cast_quickly(self, input, dst_ty, *more):  # triton's own names of the arguments
        name = dst_ty.scalar.name
        if input.dtype.name == name:
            return input
        if name in NUMBERS and not more and (input.dtype.name in NUMBERS or _is_mask(input)):
            data, scalar = input.handle.data.astype(NUMBERS[name]), TYPES[name]
            return _tensor(data, scalar, scalar, block=_is_block(input))
        return cast(self, input, dst_ty, *more)

    return cast_quickly


def _where(where):
    def where_quickly(self, condition, x, y):
        if _is_mask(condition):
            dtypes = [value.dtype.name for value in (x, y) if type(value) is core.tensor]
            name = _common(dtypes[0], dtypes[-1]) if dtypes else None
            both = [
                value.handle.data if type(value) is core.tensor else name and _beside(name, value) for value in (x, y)
            ]
            if name is not None and both[0] is not None and both[1] is not None:
                block = any(type(value) is core.tensor and _is_block(value) for value in (condition, x, y))
                data = np.where(condition.handle.data, *both)
                return _tensor(data, TYPES[name], TYPES[name], block=block)
        return where(self, condition, x, y)

    return where_quickly
