"""Pointers as arguments of functions inside a kernel, which the compiler may take as not overlapping."""

from typing import Any

import numba.extending
from llvmlite import ir
from numba import types  # pyright: ignore[reportPrivateImportUsage]
from numba.core import cgutils

intrinsic: Any = numba.extending.intrinsic  # kernels call its functions without their first parameter


@intrinsic
def pointer(typingctx, address, dtype):
    """Return the address as a pointer to elements of the dtype."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), codegen


@intrinsic
def address(typingctx, pointer):
    """Return the address in a pointer."""

    def codegen(context, builder, signature, args):
        return builder.ptrtoint(args[0], ir.IntType(64))

    return types.int64(pointer), codegen


@intrinsic
def at(typingctx, first, count):
    """Return the pointer to the element that is `count` elements after the first."""

    def codegen(context, builder, signature, args):
        return builder.gep(args[0], [args[1]])

    return first(first, types.int64), codegen


@intrinsic
def separate(typingctx):
    """Promise that no two pointer arguments of the function that calls this reach the same memory."""

    def codegen(context, builder, signature, args):
        for argument in builder.function.args[2:]:  # the first two are the result and the error
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def outlined(typingctx):
    """Keep the function that calls this a function of its own: LLVM would have its code at each of many calls."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def prefetch(typingctx, pointer):
    """Ask for the line of the cache at a pointer, which may reach outside of all arrays."""

    def codegen(context, builder, signature, args):
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [builder.bitcast(args[0], byte), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(pointer), codegen
