"""Register compiled kernels as operators of torch: `scanl::NAME_BACKEND` and `scanl::NAME_BACKEND_backward`.

torch sees one operator per call, with a schema, shapes for tracing, and a backward pass. The kernels are two functions
of the module scanl.ops._BACKEND.NAME, which the first call imports:

    forward(*operands, reverse, cu_seqlens, *options) -> y, last
    backward(dy, dlast, *saved, reverse, cu_seqlens, *options) -> the gradient of every operand that is not None
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from scanl.ops._frame.dispatch import transforming
from scanl.ops._frame.op import Op, cast

_LIBRARY = torch.library.Library("scanl", "DEF")
_NAMES: set[str] = set()  # the operators that are defined; torch cannot define one again
_PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str}
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", float | None: "float?", int | None: "int?"}


class Kernels(NamedTuple):
    """Kernels that are not functions of a module.

    forward(*operands, reverse, cu_seqlens, *options, keep) -> y, last, kept.   backward: as above; it may be given an
    empty `kept`.   numbers(operands, cu_seqlens, options): how many numbers of every step `kept` (B, T, N) has.
    """

    forward: Callable
    backward: Callable
    numbers: Callable[[Sequence[Tensor | None], Tensor | None, Sequence[Any]], int]


def compiled(
    op: Op,
    backend: str,
    *,
    saves: Sequence[str] | None = None,
    second: Callable | None = None,
    kernels: Kernels | None = None,
    **declared: Any,
) -> None:
    """Add the kernels of `backend` to `op`; `declared` as in `Op.backend`.

    saves: the operands (and "y", the output) that the backward pass gets; by default all operands. An operand that is
    not saved must have the shape of y.   second(forward, saved, cotangents, reverse, cu_seqlens): the derivative of the
    backward pass by dy, dlast and the saved tensors. By default the plain PyTorch form is differentiated, which needs
    all operands.   kernels: kernels that keep a third tensor for their backward pass, which `saves` calls "kept".
    """
    name = f"{op.name}_{backend}"
    if name in _NAMES:  # a cell that a user declares again, as in a notebook
        name = f"{name}_{len(_NAMES)}"
    _NAMES.add(name)
    saves = tuple(saves or op.names)
    optional = {operand.name for operand in op.operands if operand.optional}
    plain = "parallel" if "parallel" in op.backends else "reference"
    options = "".join(f", {_KINDS[_type(option)]} {key}" for key, option in op.options.items())
    common = f"bool reverse, Tensor? cu_seqlens{options}"
    count, kept = len(op.names), len(saves)
    more = [*op.options, "keep"] if kernels is not None else [*op.options]
    keep, third = ("", "") if kernels is None else (", bool keep", ", Tensor")

    def shapes(operands: Sequence[Tensor | None], cu_seqlens: Tensor | None) -> tuple[int, ...]:
        return op.output_shape(op.sizes(dict(zip(op.names, operands, strict=True)), cu_seqlens))

    def fake_forward(*args):
        first, state = args[0], args[count - 1]
        results = first.new_empty(shapes(args[:count], args[count + 1])), state.new_empty(state.shape)
        if kernels is None:
            return results
        numbers = 0
        if args[-1]:
            numbers = kernels.numbers(args[:count], args[count + 1], args[count + 2 : -1])
        return *results, first.new_empty((*first.shape[:2], numbers))

    def fake_backward(dy, dlast, *args):
        given = dict(zip(saves, args[:kept], strict=True))
        operands = [given.get(key, dy) for key in op.names]
        return [value.new_empty(value.shape) for value in operands if value is not None]

    def forward_context(ctx, inputs, output):
        values = dict(zip(op.names, inputs[:count], strict=True)) | dict(zip(("y", "", "kept"), output, strict=False))
        ctx.changes = None
        if kernels is not None and "y" in saves and _eager(output[0]):
            ctx.changes = _Changes(output[0])
            values["y"] = output[0].data  # torch would refuse the backward pass after a change of y in place
        ctx.save_for_backward(*[values[key] for key in saves], inputs[count + 1])
        ctx.reverse, ctx.options = inputs[count], inputs[count + 2 : count + 2 + len(op.options)]
        ctx.present = [value is not None for value in inputs[:count]]
        ctx.results = [(result.shape, result.dtype) for result in output[:2]]
        ctx.set_materialize_grads(False)  # else torch makes zeros for `kept`, which may be the largest tensor of all

    def forward_backward(ctx, dy, dlast, dkept=None):
        *saved, cu_seqlens = ctx.saved_tensors
        if ctx.changes is not None and ctx.changes.any():
            saved = again(saved, ctx.reverse, cu_seqlens, ctx.options)
        like = next(value for value in saved if value is not None)
        dy, dlast = (
            like.new_zeros(shape, dtype=dtype) if by is None else by
            for by, (shape, dtype) in zip((dy, dlast), ctx.results, strict=True)
        )
        grads = iter(backward(dy, dlast, *saved, ctx.reverse, cu_seqlens, *ctx.options))
        return *[next(grads) if present else None for present in ctx.present], None, None, *[None] * len(more)

    def again(saved, reverse, cu_seqlens, values):
        """Return the saved tensors with y and `kept` computed once more: the caller has changed y in place."""
        known = dict(zip(saves, saved, strict=True))
        with torch.no_grad():
            y, _, kept = forward(*[known[key] for key in op.names], reverse, cu_seqlens, *values, True)
        return list((known | {"y": y, "kept": kept}).values())

    def backward_context(ctx, inputs, output):
        tensors, (ctx.reverse, cu_seqlens, *ctx.options) = inputs[: kept + 2], inputs[kept + 2 :]
        ctx.save_for_backward(*tensors, *output, cu_seqlens)

    def backward_backward(ctx, *cotangents):
        if isinstance(cotangents[0], list):  # torch.library passes the cotangents of a list as a list
            (cotangents,) = cotangents
        *tensors, cu_seqlens = ctx.saved_tensors
        inputs, results = tensors[: kept + 2], tensors[kept + 2 :]
        cotangents = [torch.zeros_like(r) if c is None else c for c, r in zip(cotangents, results, strict=True)]
        if second is not None:
            found = second(forward, inputs, results, cotangents, ctx.reverse, cu_seqlens)
        else:
            found = through_plain(inputs, cotangents, ctx.reverse, cu_seqlens, ctx.options)
        return *found, None, None, *[None] * len(op.options)

    def through_plain(inputs, cotangents, reverse, cu_seqlens, values):
        names = ("dy", "dlast", *saves)
        given = {key: v for key, v in zip(names, inputs, strict=True) if v is not None and key not in ("y", "kept")}

        def gradients(given: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            wide = {key: cast(v, torch.promote_types(v.dtype, torch.float32)) for key, v in given.items()}
            present = {key: wide[key] for key in op.names if key in wide}

            def outputs(present: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
                operands = [present.get(key) for key in op.names]
                return op.evaluate(
                    plain,
                    operands,
                    shapes(operands, cu_seqlens),
                    reverse=reverse,
                    cu_seqlens=cu_seqlens,
                    **dict(zip(op.options, values, strict=True)),
                )

            return tuple(torch.func.vjp(outputs, present)[1]((wide["dy"], wide["dlast"]))[0].values())

        grads, pull, *_ = torch.func.vjp(gradients, given)
        (found,) = pull(tuple(by.to(grad.dtype) for grad, by in zip(grads, cotangents, strict=True)))
        return [found.get(key) for key in names]  # no gradient for y and kept: they depend on the operands

    def kinds(names: Sequence[str]) -> str:
        return ", ".join(f"Tensor{'?' if key in optional else ''} {key}" for key in names)

    if kernels is None:
        forward_kernel, backward_kernel = (_kernel(backend, op.name, function) for function in ("forward", "backward"))
    else:
        forward_kernel, backward_kernel = kernels.forward, kernels.backward

    # If the outputs and the last state are empty, no kernel runs, so kernels need not handle empty tensors.

    def results(*args):
        if args[count - 1].numel() == 0:
            empty = fake_forward(*args)
            if empty[0].numel() == 0:
                return empty
        return forward_kernel(*args)

    def gradients(dy, dlast, *args):
        if dy.numel() == 0 and dlast.numel() == 0:
            return [torch.zeros_like(value) for value in fake_backward(dy, dlast, *args)]
        return backward_kernel(dy, dlast, *args)

    forward = _opaque(
        name, f"({kinds(op.names)}, {common}{keep}) -> (Tensor, Tensor{third})", fake_forward, forward_context,
        forward_backward, results,
    )  # fmt: skip
    backward = _opaque(
        f"{name}_backward", f"({kinds(('dy', 'dlast', *saves))}, {common}) -> Tensor[]", fake_backward,
        backward_context, backward_backward, gradients,
    )  # fmt: skip

    def run(*operands, reverse=False, cu_seqlens=None, **given):
        values = [given[key] for key in op.options]
        wanted = torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in operands)
        wanted = wanted or transforming()
        more = () if kernels is None else (wanted,)
        y, last, *_ = forward(*operands, reverse, cu_seqlens, *values, *more)
        copied = "y" in saves and wanted and (kernels is None or transforming())
        return _copy(y) if copied else y, last

    op.backend(backend, whole=True, forward_mode=False, **declared)(run)


def _type(option: inspect.Parameter) -> Any:
    """Return the type of an option: its annotation, or the type of its default."""
    return type(option.default) if option.annotation is option.empty else option.annotation


def _kernel(backend: str, module: str, function: str) -> Callable:
    """Return a function of the kernels' module. Its first call imports the module."""
    found: list[Callable] = []

    def call(*args: Any) -> Any:
        if not found:
            found.append(getattr(importlib.import_module(f"scanl.ops._{backend}.{module}"), function))
        return found[0](*args)

    return call


def _opaque(
    name: str, schema: str, fake: Callable, context: Callable, backward: Callable, implementation: Callable
) -> Callable:
    _LIBRARY.define(name + schema)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"scanl::{name}", fake, lib=_LIBRARY)
    torch.library.register_autograd(f"scanl::{name}", backward, setup_context=context, lib=_LIBRARY)
    registered = getattr(torch.ops.scanl, name).default
    refusal = (
        f"scanl::{name} has no forward-mode derivative; backend='parallel' or 'reference' has one, and for layers "
        "`with scanl.ops.backend('parallel', 'reference'):`"
    )

    class Transformed(torch.autograd.Function):
        """The operator for torch.func, which cannot transform operators registered with torch.library."""

        @staticmethod
        def forward(*args):  # pyright: ignore[reportIncompatibleMethodOverride]
            return tuple(registered(*args))

        @staticmethod
        def setup_context(ctx, inputs, output):
            context(ctx, inputs, output)

        @staticmethod
        def backward(ctx, *cotangents):
            return backward(ctx, *cotangents)

        @staticmethod
        def jvp(ctx, *tangents):
            raise NotImplementedError(refusal)

        @staticmethod
        def vmap(info, in_dims, *args):
            calls = (
                run(*[v if d is None else v.select(d, i) for v, d in zip(args, in_dims, strict=True)])
                for i in range(info.batch_size)
            )
            outputs = tuple(torch.stack(each) for each in zip(*calls, strict=True))
            return outputs, (0,) * len(outputs)

    def run(*args):
        if not torch.compiler.is_compiling():
            if _nobody_watches(args):
                return implementation(*args)
            if forward_ad._current_level >= 0 and any(_has_tangent(value) for value in args):
                raise NotImplementedError(refusal)
            if transforming():
                return Transformed.apply(*args)
        return registered(*args)

    return run


def _nobody_watches(args: Sequence[Any]) -> bool:
    """Return whether a call may skip torch's dispatcher, which takes as long as the rest of a one-step call.

    It may not if autograd, a trace, a transformation or a subclass of Tensor must see the call. It may not if a tensor
    is lazily conjugated, lazily negated or a zero tensor without memory, because the dispatcher materialises these.
    """
    if (
        torch._C._len_torch_dispatch_stack() > 0
        or transforming()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    ):
        return False
    differentiating = torch.is_grad_enabled()
    for value in args:  # one pass: this runs for every token
        if isinstance(value, Tensor) and type(value) in _PLAIN:
            # lazily conjugated or negated, or a zero tensor without memory
            lazy = value.is_neg() or value.is_conj() or value._is_zerotensor()
            if lazy or (differentiating and value.requires_grad):
                return False
        elif type(value) not in _PLAIN:
            return False
    return True


# A caller may change y in place, as it may change what a loop in torch returns, although the backward pass needs y. The
# backward pass of a kernel that has all operands then computes y again. Otherwise the caller gets a copy.


class _Changes:
    """Tells whether a tensor was changed in place, without keeping its memory."""

    def __init__(self, value: Tensor) -> None:
        self._counter = value.detach()  # shares the counter of changes, also when it has other memory
        self._counter.data = value.new_empty(0)
        self._begin = self._counter._version

    def any(self) -> bool:
        return self._counter._version != self._begin


def _eager(value: Tensor) -> bool:
    """Return whether nothing traces or transforms this tensor. In a trace, changes in place are no longer such."""
    return (
        type(value) is Tensor
        and not torch.compiler.is_compiling()
        and not transforming()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._get_tracing_state() is None
    )


class _Copy(torch.autograd.Function):
    """A copy in memory that is used again: fresh memory takes longer than the copy."""

    @staticmethod
    def forward(ctx, y):  # pyright: ignore[reportIncompatibleMethodOverride]
        return importlib.import_module("scanl.ops._cpu._memory").empty(y.shape, y.dtype).copy_(y)

    @staticmethod
    def backward(ctx, dy):  # pyright: ignore[reportIncompatibleMethodOverride]
        return dy


def _copy(y: Tensor) -> Tensor:
    return _Copy.apply(y) if y.device.type == "cpu" and _eager(y) else y.clone()


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
