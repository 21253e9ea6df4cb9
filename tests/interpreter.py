"""Make Triton's interpreter quick: types and shapes of blocks are made once, not for every operation on a block.

Its own Python, not numpy, takes most of its time. The numbers are the same.
"""

from collections.abc import Iterable
from typing import Any

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
            patched.add(id(function.__globals__))
            patch(function)
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
                    else self.make_tensor(
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
