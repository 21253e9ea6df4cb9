"""An op: its declaration gives the checks, the zero state, the choice of backend and the tests.

The decorated function is the reference: a plain loop over time, in any floating dtype. `Op.backend` adds other
backends; `compiled` in compiled.py adds compiled kernels.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.errors import ConfigError, ScanlError
from scanl.ops._frame import dispatch, packing, trees
from scanl.ops._frame.constant import constant, imitation, static_kinds
from scanl.ops._frame.context import OpCall, context
from scanl.ops._frame.declaration import (
    COMPLEX,
    FLOATING,
    HALF_DTYPES,
    REAL_PART,
    WIDER,
    Call,
    Cases,
    Declaration,
    OpSample,
    OpSpec,
)
from scanl.ops._frame.dispatch import Backend, in_forward_mode
from scanl.ops._frame.summary import Run, Summary
from scanl.ops.offsets import CutRows, check_kind, check_numbers, cut

P = ParamSpec("P")
S = TypeVar("S")


class CallPlan(NamedTuple):
    """How a call runs. It depends on shapes, dtypes and devices alone, and is kept for further calls.

    backend: its name.   dtype: of the output.   compute, wide: dtypes of the computation, and of the state.
    state, output: their shapes; or the form of the state.   casts: which operands to cast to which dtype.
    """

    backend: str
    dtype: torch.dtype
    compute: torch.dtype
    wide: torch.dtype
    device: torch.device
    state: Any
    output: tuple[int, ...]
    casts: list[tuple[int, torch.dtype]]

    def zeros(self) -> Tensor:
        """Return zeros of the form of the state."""
        return torch.zeros(self.state, dtype=self.wide, device=self.device)


class Op(Declaration, Generic[P, S]):
    """A pure function of tensors that evaluates one kind of recurrence and returns `(output, last state)`.

    declaration.py describes the declaration. A state of None is zeros, or `initial(zeros)`. The options are the
    reference's keywords. After the reference, `@NAME.samples` and `@NAME.errors` decorate generators of arguments for
    the tests, and `@NAME.backend` decorates other implementations. `declared` is as in `OpSpec`.
    """

    def __init__(self, reference: Callable[P, tuple[Tensor, S]], declaration: str, **declared: Any):
        spec = OpSpec(**declared)
        functools.update_wrapper(self, reference)
        self.__signature__ = _signature(reference)
        super().__init__(reference.__name__, declaration, inspect.signature(reference).parameters, spec)
        self.id, self.equation, self.source = spec.id, spec.equation, spec.source
        self.initial, self.form, self.check = spec.initial, spec.form, spec.check
        self.neutral, self.excused, self.effect = spec.neutral, spec.excused, spec.effect
        self.values = spec.values
        self.samples: Cases[OpSample] = Cases()
        self.errors: Cases[tuple[OpSample, str]] = Cases()  # invalid arguments, each with a part of the error message
        self.backends: dict[str, Backend] = {}
        self.backend("reference", dtypes=FLOATING + COMPLEX if spec.widens else spec.dtypes)(reference)
        self._plans: dict[tuple, CallPlan] = {}

    def backend(self, name: str, *, package: str | None = None, **declared: Any) -> Callable[[Callable], Callable]:
        """Add the decorated function as a backend that needs `package`; `declared` as in `Backend`."""

        if package is not None and importlib.util.find_spec(package) is not None:
            package = None

        def add(run: Callable) -> Callable:
            by_name = run if self.names == self.positional else _by_name(run, self.names)
            self.backends[name] = Backend(name, by_name, package=package, **declared)
            return run

        return add

    def _call(
        self,
        *args: Tensor | None,
        reverse: bool = False,
        cu_seqlens: Tensor | None = None,
        starts: Tensor | None = None,
        backend: str = "auto",
        **more: Any,
    ) -> tuple[Tensor, S]:
        operands, options = self.bind(args, more)
        if starts is not None:
            names = (backend,) if backend != "auto" else context.backends
            pieces, operands = self._cut(operands, options, starts, cu_seqlens, reverse, names)
            call = {"reverse": reverse, "cu_seqlens": pieces.cu_seqlens, "backend": backend}
            y, last = self._call(**operands, **options, **call)
            return pieces.unpacked(y), pytree.tree_map(pieces.leave, last)
        if context.calls is not None:
            more = {**options, "reverse": reverse, "cu_seqlens": cu_seqlens}
            context.calls.append(OpCall(self, dict(operands), more))
        if context.divider is not None:
            return context.divider(self, operands, options, reverse=reverse, cu_seqlens=cu_seqlens, backend=backend)
        names = (backend,) if backend != "auto" else context.backends
        check_kind(self.name, cu_seqlens)
        if self.check is not None:
            self.check(operands, options, cu_seqlens)
        first = operands[self.names[0]]
        if torch.compiler.is_compiling():
            tensors = [*operands.values(), cu_seqlens]
            kinds = static_kinds(tensors, options.values()) if self.form is None else None
            plan = None
            if kinds:
                plan = self._plan_of_kinds(names, in_forward_mode(), tuple(options.items()), kinds)
            plan = plan or self._plan(operands, options, cu_seqlens, names)
        elif isinstance(first, Tensor) and any(type(size) is not int for size in first.shape):
            plan = self._plan(operands, options, cu_seqlens, names)
        else:
            kinds = [(v.shape, v.dtype, v.device) if isinstance(v, Tensor) else type(v) for v in operands.values()]
            if self.form is not None:
                kinds.append(trees.key(operands[self.state]))
            packed = None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype)
            key = (names, in_forward_mode(), packed, *options.values(), *kinds)
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plan(operands, options, cu_seqlens, names)
                if len(self._plans) > 4096:
                    self._plans.clear()
                self._plans[key] = plan
            if cu_seqlens is not None:
                assert first is not None
                check_numbers(self.name, cu_seqlens, first.shape[1])
        state = operands.pop(self.state)
        if self.form is not None:
            state = None if state is None else trees.cast(state, plan.state)
        elif state is None:
            state = self.initial(plan.zeros())
        else:
            state = cast(state, plan.wide)
        values = [*operands.values(), state]
        for at, to in plan.casts:
            values[at] = values[at].to(to)
        y, state = self.evaluate(plan.backend, values, plan.output, reverse=reverse, cu_seqlens=cu_seqlens, **options)
        return cast(y, plan.dtype), state

    def _cut(
        self,
        operands: Mapping[str, Any],
        options: Mapping[str, Any],
        starts: Tensor,
        cu_seqlens: Tensor | None,
        reverse: bool,
        names: tuple[str, ...],
    ) -> tuple[CutRows, dict[str, Any]]:
        """Return the pieces of the rows or sequences that `starts` cuts, and the operands of a call of them."""
        if context.divider is not None:
            raise ConfigError(f"{self.name}: starts is given, expected none where ranks divide the sequence")
        check_kind(self.name, cu_seqlens)
        if self.check is not None:
            self.check(operands, options, starts)
        self._plan(operands, options, cu_seqlens, names)  # refuses operands that do not fit each other
        first = operands[self.names[0]]
        if cu_seqlens is not None:
            check_numbers(self.name, cu_seqlens, first.shape[1])
        pieces = cut(self.name, starts, first, cu_seqlens, reverse)
        packed = dict(operands)
        for operand in self.operands[:-1]:
            value = operands[operand.name]
            steps = None if value is None or pieces.entered is None else operand.every_step(value, first)
            packed[operand.name] = value if steps is None else pieces.packed(steps)
        stateless = {**packed, self.state: None}
        if operands[self.state] is not None and pieces.begins is not None:
            initial = self._empty(stateless, options, pieces.cu_seqlens, names)
            packed[self.state] = pytree.tree_map(pieces.enter, operands[self.state], initial)
        return pieces, packed

    if TYPE_CHECKING:  # a type checker sees the reference's parameters, as `inspect.signature` does

        def __call__(self, *args: P.args, **kwargs: P.kwargs) -> tuple[Tensor, S]: ...
    else:
        __call__ = _call

    def _casts(self, operands: Mapping[str, Tensor | None], compute: torch.dtype) -> list[tuple[int, torch.dtype]]:
        real, casts = REAL_PART.get(compute, compute), []
        for at, operand in enumerate(self.operands[:-1]):
            name, value = operand.name, operands[operand.name]
            to = real if name in self.real else compute
            keeps = operand.truth or (compute in HALF_DTYPES and name in self.wide)
            if value is not None and not keeps and value.dtype != to:
                casts.append((at, to))
        return casts

    def evaluate(
        self,
        name: str,
        values: Sequence[Tensor | None],
        y_shape: Sequence[int],
        /,
        *,
        reverse: bool,
        cu_seqlens: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """Run a backend on operands that are already checked and cast; the state is the last one."""
        chosen = self.backends[name]
        if chosen.whole:
            return chosen.run(*values, reverse=reverse, cu_seqlens=cu_seqlens, **options)
        more = {"reverse": reverse, "cu_seqlens": cu_seqlens, **options}
        return packing.evaluate(self.name, chosen.run, self.operands, values, y_shape, **more)

    def _plan(
        self,
        operands: Mapping[str, Tensor | None],
        options: Mapping[str, Any],
        cu_seqlens: Tensor | None,
        names: tuple[str, ...],
    ) -> CallPlan:
        """Check a call and plan it."""
        sizes = self.sizes(operands, cu_seqlens)
        device, dtype, common = self.kinds(operands)
        reasoned = {**sizes, **options, "given": _given(operands)}
        chosen = dispatch.choose(self.name, self.backends, names, device, common, reasoned)
        batch = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        compute = chosen.compute_dtype(common)
        if self.form is None:
            state = (batch, *self.state_shape(sizes))
        else:
            state = self.form({**sizes, "B": batch}, options, compute, torch.device("meta"))
            if operands[self.state] is not None:
                needed = [o.name for o in self.operands[:-1] if not o.optional] + list(self.required)
                because = ", ".join(needed if cu_seqlens is None else [*needed, "cu_seqlens"])
                trees.check(f"{self.name}: {self.state}", operands[self.state], state, device, because)
        casts = self._casts(operands, compute)
        wide = WIDER.get(compute, compute)
        return CallPlan(chosen.name, dtype, compute, wide, device, state, self.output_shape(sizes), casts)

    @constant
    def _plan_of_kinds(
        self,
        names: tuple[str, ...],
        forward_mode: bool,
        options: tuple[tuple[str, Any], ...],
        kinds: tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...],
    ) -> CallPlan | None:
        """Plan a call while torch.compile traces it, from the shape, dtype and device of each operand and cu_seqlens.

        The compiler runs it and takes the result as a constant. To trace the plan would take most of the time of a
        compilation. forward_mode: what `in_forward_mode` says, on which the plan depends too. The plan of a wrong call
        is None: the caller plans again, and the compiler sees which error that raises.
        """
        *operands, cu_seqlens = [imitation(*kind) if isinstance(kind, tuple) else kind for kind in kinds]
        try:
            return self._plan(dict(zip(self.names, operands, strict=True)), dict(options), cu_seqlens, names)
        except ScanlError:
            return None

    def empty(
        self, operands: Mapping[str, Tensor | None], options: Mapping[str, Any], cu_seqlens: Tensor | None
    ) -> Any:
        """Return the state before any input of a call, in the dtypes in which the call would compute it."""
        return self._empty(operands, options, cu_seqlens, context.backends)

    def _empty(
        self,
        operands: Mapping[str, Tensor | None],
        options: Mapping[str, Any],
        cu_seqlens: Tensor | None,
        names: tuple[str, ...],
    ) -> Any:
        plan = self._plan(operands, options, cu_seqlens, names)
        if self.form is None:
            return self.initial(plan.zeros())
        sizes = self.sizes(operands, cu_seqlens)
        batch = sizes["B"] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        return self.form({**sizes, "B": batch}, options, plan.compute, plan.device)

    def explain(self, *args: Tensor | None, cu_seqlens: Tensor | None = None, **more: Any) -> str:
        """Return one line per backend: that it can run these arguments, or why not. `auto` takes the first that can."""
        operands, options = self.bind(
            args, {k: v for k, v in more.items() if k not in ("reverse", "starts", "backend")}
        )
        check_kind(self.name, cu_seqlens)
        sizes = {**self.sizes(operands, cu_seqlens), **options, "given": _given(operands)}
        device, _, dtype = self.kinds(operands)
        return dispatch.explain(self.backends, device, dtype, sizes)

    def summary(self, *args: Tensor | None, **more: Any) -> Summary:
        """Return the effect of a piece of a sequence on the state. The arguments are as in a call, without a state.

        For pieces p and q, `op.summary(*p).after(state)` is the last state of `op(*p, state)`, and
        `op.summary(*p).then(op.summary(*q))` is the summary of p followed by q. In reverse, q is the earlier piece in
        time. With cu_seqlens the summary has one row per sequence. Raises ConfigError if the op is not linear in its
        state.
        """
        if self.effect is None:
            raise ConfigError(
                f"{self.name}: no summary of a piece is known, as one is for "
                f"{', '.join(sorted(op.name for op in REGISTRY.values() if op.effect is not None))}; "
                "run the pieces one after the other"
            )
        call = {name: more.pop(name) for name in Call.__annotations__ if name in more}
        operands, options = self.bind(args, more)
        if operands.pop("state") is not None:
            raise ConfigError(
                f"{self.name}: state is given, expected none because a summary holds for every state; "
                "ask `summary(...).after(state)`"
            )
        for name in self.effect.unless:
            if operands[name] is not None:
                raise ConfigError(
                    f"{self.name}: {name} is given, expected none because with it the state enters a nonlinearity"
                )
        run: Run = self._call  # pyright: ignore[reportAssignmentType]  # an op with an effect has a tensor as state
        _, last = run(**operands, **options, **call)
        return Summary(self.effect.carry(run, operands, last, **options, **call), last, self.effect)

    def preference(self) -> list[str]:
        """Return the names of its backends in the order in which "auto" tries them."""
        return dispatch.preference(self.backends)

    def __repr__(self) -> str:
        return f"<op {self.name}: {', '.join(self.preference())}>"


REGISTRY: dict[str, Op[..., Any]] = {}


def op(declaration: str, **declared: Any) -> Callable[[Callable[P, tuple[Tensor, S]]], Op[P, S]]:
    """Declare the decorated reference as an op and register it; `declared` as in `OpSpec`."""

    def register(reference: Callable[P, tuple[Tensor, S]]) -> Op[P, S]:
        REGISTRY[reference.__name__] = new_op = Op(reference, declaration, **declared)
        return new_op

    return register


def _signature(reference: Callable[..., Any]) -> inspect.Signature:
    """Return the reference's signature, with the keywords of `Call` written out."""
    declared = inspect.signature(reference)
    parameters = [
        parameter for parameter in declared.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
    ]
    every = inspect.signature(Op._call).parameters
    return declared.replace(parameters=[*parameters, *(every[name] for name in Call.__annotations__)])


def _by_name(run: Callable, names: Sequence[str]) -> Callable:
    """Wrap a function that takes some operands by keyword only, so that it takes all operands by position."""
    return lambda *values, **more: run(**dict(zip(names, values, strict=True)), **more)


def _given(operands: Mapping[str, Tensor | None]) -> frozenset[str]:
    return frozenset(name for name, value in operands.items() if value is not None)


def cast(value: Tensor | None, dtype: torch.dtype) -> Any:
    """Return `value.to(dtype)`. If the dtype is right already, skip torch's call, which takes ten times as long."""
    return value if value is None or value.dtype is dtype else value.to(dtype)
