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
OPERATORS: dict[str, Op] = {}  # the op of each operator that is defined; torch cannot define one again
_PLAIN_TYPES = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str}
_KINDS = {bool: "bool", int: "int", float: "float", str: "str", float | None: "float?", int | None: "int?"}


class Kernels(NamedTuple):
    """Kernels that are not functions of a module.

    forward(*operands, reverse, cu_seqlens, *options, keep) -> y, last, kept.   backward: as above; it may be given an
    empty `kept`.   numbers(operands, cu_seqlens, options): how many numbers of every step `kept` (B, T, N) has.
    """

    forward: Callable
    backward: Callable
    numbers: Callable[[Sequence[Tensor | None], Tensor | None, Sequence[Any]], int]


class Registration:
    """The two operators of torch for an op's kernels of one backend.

    saves: the operands (and "y", the output) that the backward pass gets; by default all operands. An operand that is
    not saved must have the shape of y.   second(forward, saved, results, cotangents, reverse, cu_seqlens): the
    derivative of the backward pass by dy, dlast and the saved tensors. By default the plain PyTorch form is
    differentiated, which needs all operands.   kernels: kernels that keep a third tensor for their backward pass, which
    `saves` calls "kept".

    The arguments of the operators are the operands (or dy, dlast and what was saved), then `reverse`, `cu_seqlens`, the
    options and, with `kernels`, whether to keep the third tensor.
    """

    def __init__(
        self, op: Op, backend: str, saves: Sequence[str] | None, second: Callable | None, kernels: Kernels | None
    ) -> None:
        self.op, self.second, self.kernels = op, second, kernels
        self.saves = tuple(saves or op.names)
        self.plain = "parallel" if "parallel" in op.backends else "reference"
        self.count = len(op.names)
        if kernels is None:
            self.kernel_forward, self.kernel_backward = (
                _kernel(backend, op.name, function) for function in ("forward", "backward")
            )
        else:
            self.kernel_forward, self.kernel_backward = kernels.forward, kernels.backward
        name = f"{op.name}_{backend}"
        if name in OPERATORS:  # a cell that a user declares again, as in a notebook
            name = f"{name}_{len(OPERATORS)}"
        OPERATORS[name] = op
        options = "".join(f", {_KINDS[_type(option)]} {key}" for key, option in op.options.items())
        common = f"bool reverse, Tensor? cu_seqlens{options}"
        keep, third = ("", "") if kernels is None else (", bool keep", ", Tensor")
        self.operator = _opaque(
            name, f"({self._tensors(op.names)}, {common}{keep}) -> (Tensor, Tensor{third})", self.meta,
            self.setup_context, self.differentiate, self.forward,
        )  # fmt: skip
        self.backward_operator = _opaque(
            f"{name}_backward", f"({self._tensors(('dy', 'dlast', *self.saves))}, {common}) -> Tensor[]",
            self.backward_meta, self.backward_setup_context, self.backward_differentiate, self.backward,
        )  # fmt: skip

    def _tensors(self, names: Sequence[str]) -> str:
        """Return the tensors of a schema."""
        optional = {operand.name for operand in self.op.operands if operand.optional}
        return ", ".join(f"Tensor{'?' if name in optional else ''} {name}" for name in names)

    # If the outputs and the last state are empty, no kernel runs, so kernels need not handle empty tensors.

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        """Run the forward kernel."""
        if args[self.count - 1].numel() == 0:
            empty = self.meta(*args)
            if empty[0].numel() == 0:
                return empty
        return self.kernel_forward(*args)

    def backward(self, dy: Tensor, dlast: Tensor, *args: Any) -> list[Tensor]:
        """Run the backward kernel: return the gradients of the operands that are not None."""
        if dy.numel() == 0 and dlast.numel() == 0:
            return [torch.zeros_like(value) for value in self.backward_meta(dy, dlast, *args)]
        return self.kernel_backward(dy, dlast, *args)

    # Shapes, for tracing

    def output_shape(self, operands: Sequence[Tensor | None], cu_seqlens: Tensor | None) -> tuple[int, ...]:
        """Return the shape of y."""
        sizes = self.op.sizes(dict(zip(self.op.names, operands, strict=True)), cu_seqlens)
        return self.op.output_shape(sizes)

    def meta(self, *args: Any) -> tuple[Tensor, ...]:
        """Return empty results of `forward`."""
        count, first, state = self.count, args[0], args[self.count - 1]
        shape = self.output_shape(args[:count], args[count + 1])
        results = first.new_empty(shape), state.new_empty(state.shape)
        if self.kernels is None:
            return results
        numbers = 0
        if args[-1]:
            numbers = self.kernels.numbers(args[:count], args[count + 1], args[count + 2 : -1])
        return *results, first.new_empty((*first.shape[:2], numbers))

    def backward_meta(self, dy: Tensor, dlast: Tensor, *args: Any) -> list[Tensor]:
        """Return empty results of `backward`."""
        saved = dict(zip(self.saves, args[: len(self.saves)], strict=True))
        operands = [saved.get(name, dy) for name in self.op.names]
        return [value.new_empty(value.shape) for value in operands if value is not None]

    # First derivatives

    def setup_context(self, ctx: Any, inputs: tuple, output: tuple) -> None:
        """Save the backward kernel's inputs for `differentiate`."""
        count = self.count
        values = dict(zip(self.op.names, inputs[:count], strict=True))
        values |= dict(zip(("y", "", "kept"), output, strict=False))
        ctx.changes = None
        if self.kernels is not None and "y" in self.saves and _is_eager(output[0]):
            ctx.changes = _Changes(output[0])
            values["y"] = output[0].data  # torch would refuse the backward pass after a change of y in place
        ctx.save_for_backward(*[values[name] for name in self.saves], inputs[count + 1])
        ctx.reverse, ctx.options = inputs[count], inputs[count + 2 : count + 2 + len(self.op.options)]
        ctx.present = [value is not None for value in inputs[:count]]
        ctx.results = [(result.shape, result.dtype) for result in output[:2]]
        ctx.set_materialize_grads(False)  # else torch makes zeros for `kept`, which may be the largest tensor of all

    def differentiate(self, ctx: Any, dy: Tensor | None, dlast: Tensor | None, dkept: None = None) -> tuple:
        """Return the gradients of the inputs of `forward`."""
        *saved, cu_seqlens = ctx.saved_tensors
        if ctx.changes is not None and ctx.changes.any():
            saved = self._again(saved, ctx.reverse, cu_seqlens, ctx.options)
        like = next(value for value in saved if value is not None)
        dy, dlast = (
            like.new_zeros(shape, dtype=dtype) if by is None else by
            for by, (shape, dtype) in zip((dy, dlast), ctx.results, strict=True)
        )
        gradients = iter(self.backward_operator(dy, dlast, *saved, ctx.reverse, cu_seqlens, *ctx.options))
        others = 2 + len(self.op.options) + (self.kernels is not None)
        return *[next(gradients) if present else None for present in ctx.present], *[None] * others

    def _again(
        self, saved: Sequence[Tensor], reverse: bool, cu_seqlens: Tensor | None, options: Sequence[Any]
    ) -> list[Tensor]:
        """Return the saved tensors with y and `kept` computed once more: the caller has changed y in place."""
        known = dict(zip(self.saves, saved, strict=True))
        with torch.no_grad():
            operands = [known[name] for name in self.op.names]
            y, _, residuals = self.operator(*operands, reverse, cu_seqlens, *options, True)
        return list((known | {"y": y, "kept": residuals}).values())

    # Second derivatives

    def backward_setup_context(self, ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
        """Save for `backward_differentiate` the tensors of a backward pass."""
        end = len(self.saves) + 2
        tensors, (ctx.reverse, cu_seqlens, *ctx.options) = inputs[:end], inputs[end:]
        ctx.save_for_backward(*tensors, *output, cu_seqlens)

    def backward_differentiate(self, ctx: Any, *cotangents: Any) -> tuple:
        """Return the gradients of the inputs of `backward`."""
        if isinstance(cotangents[0], list):  # torch.library passes the cotangents of a list as a list
            (cotangents,) = cotangents
        *tensors, cu_seqlens = ctx.saved_tensors
        end = len(self.saves) + 2
        inputs, results = tensors[:end], tensors[end:]
        by = [torch.zeros_like(r) if c is None else c for c, r in zip(cotangents, results, strict=True)]
        if self.second is not None:
            gradients = self.second(self.operator, inputs, results, by, ctx.reverse, cu_seqlens)
        else:
            gradients = self._through_plain(inputs, by, ctx.reverse, cu_seqlens, ctx.options)
        return *gradients, None, None, *[None] * len(self.op.options)

    def _through_plain(
        self,
        inputs: Sequence[Tensor | None],
        cotangents: Sequence[Tensor],
        reverse: bool,
        cu_seqlens: Tensor | None,
        options: Sequence[Any],
    ) -> list[Tensor | None]:
        """Differentiate the gradients of the plain PyTorch form."""
        op, names = self.op, ("dy", "dlast", *self.saves)
        tensors = {
            name: value
            for name, value in zip(names, inputs, strict=True)
            if value is not None and name not in ("y", "kept")
        }

        def gradients(tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            wide = {name: cast(v, torch.promote_types(v.dtype, torch.float32)) for name, v in tensors.items()}
            present = {name: wide[name] for name in op.names if name in wide}

            def outputs(present: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
                operands = [present.get(name) for name in op.names]
                return op.evaluate(
                    self.plain,
                    operands,
                    self.output_shape(operands, cu_seqlens),
                    reverse=reverse,
                    cu_seqlens=cu_seqlens,
                    **dict(zip(op.options, options, strict=True)),
                )

            return tuple(torch.func.vjp(outputs, present)[1]((wide["dy"], wide["dlast"]))[0].values())

        first, pull, *_ = torch.func.vjp(gradients, tensors)
        (second,) = pull(tuple(by.to(gradient.dtype) for gradient, by in zip(first, cotangents, strict=True)))
        return [second.get(name) for name in names]  # no gradient for y and kept: they depend on the operands

    def run(
        self, *operands: Tensor | None, reverse: bool = False, cu_seqlens: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return y and the last state, as every backend does."""
        values = [options[name] for name in self.op.options]
        differentiated = torch.is_grad_enabled() and any(
            value is not None and value.requires_grad for value in operands
        )
        differentiated = differentiated or transforming()
        keep = () if self.kernels is None else (differentiated,)
        y, last, *_ = self.operator(*operands, reverse, cu_seqlens, *values, *keep)
        copied = "y" in self.saves and differentiated and (self.kernels is None or transforming())
        return _copy(y) if copied else y, last


def compiled(
    op: Op,
    backend: str,
    *,
    saves: Sequence[str] | None = None,
    second: Callable | None = None,
    kernels: Kernels | None = None,
    **declared: Any,
) -> None:
    """Add the kernels of `backend` to `op`. saves, second, kernels: as in `Registration`; declared: as in `Backend`."""
    registration = Registration(op, backend, saves, second, kernels)
    op.backend(backend, whole=True, forward_mode=False, **declared)(registration.run)


def _type(option: inspect.Parameter) -> Any:
    """Return the type of an option: its annotation, or the type of its default."""
    return type(option.default) if option.annotation is option.empty else option.annotation


def _kernel(backend: str, module: str, function: str) -> Callable:
    """Return a function of the kernels' module. Its first call imports the module."""
    loaded: list[Callable] = []

    def call(*args: Any) -> Any:
        if not loaded:
            loaded.append(getattr(importlib.import_module(f"scanl.ops._{backend}.{module}"), function))
        return loaded[0](*args)

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

    class TransformedOperator(torch.autograd.Function):
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
            outputs = tuple(torch.stack(rows) for rows in zip(*calls, strict=True))
            return outputs, (0,) * len(outputs)

    def run(*args):
        if not torch.compiler.is_compiling():
            if _is_untraced(args):
                return implementation(*args)
            if forward_ad._current_level >= 0 and any(_has_tangent(value) for value in args):
                raise NotImplementedError(refusal)
            if transforming():
                return TransformedOperator.apply(*args)
        return registered(*args)

    return run


def _is_untraced(args: Sequence[Any]) -> bool:
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
        if isinstance(value, Tensor) and type(value) in _PLAIN_TYPES:
            # lazily conjugated or negated, or a zero tensor without memory
            lazy = value.is_neg() or value.is_conj() or value._is_zerotensor()
            if lazy or (differentiating and value.requires_grad):
                return False
        elif type(value) not in _PLAIN_TYPES:
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


def _is_eager(value: Tensor) -> bool:
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
    return _Copy.apply(y) if y.device.type == "cpu" and _is_eager(y) else y.clone()


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None
