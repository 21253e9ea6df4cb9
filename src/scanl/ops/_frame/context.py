"""What holds for the ops of a thread: who runs and records them, which backends they take, whether bits are fixed."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.errors import BackendError, unknown
from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES
from scanl.ops._frame.dispatch import ORDER, in_forward_mode, transforming

_TENSORS = {Tensor, torch.nn.Parameter}
_NUMBERS = {*HALF_DTYPES, *FLOATING, *COMPLEX}


class OpCall(NamedTuple):
    """A call of an op: its operands by name, the state too, and its options."""

    op: Any
    operands: Mapping[str, Any]
    options: Mapping[str, Any]


class OpContext(threading.local):
    """What the open contexts of a thread say.

    calls: the record of calls.   conditions: those that a recorded function takes to hold.
    divider: runs each call in the place of the op.   backends: what "auto" stands for.
    outer: the backends at each entry, to restore at the exit.   exact, portable, large_products: how many of these
    contexts are open.   of_states: how many backward passes run that use no parameter's gradient.
    """

    calls: list[OpCall] | None = None
    conditions: list[Tensor] | None = None
    divider: Callable[..., Any] | None = None
    exact = 0
    portable = 0
    large_products = 0
    of_states = 0

    def __init__(self) -> None:
        self.backends: tuple[str, ...] = ("auto",)
        self.outer: list[tuple[str, ...]] = []


context = OpContext()


@contextmanager
def op_calls() -> Iterator[list[OpCall]]:
    """A context whose list has the calls of ops in this thread, in their order; an op before those that it calls.

    A cell is not in it where its state has several tensors. Contexts nest; the innermost one has the calls.

    >>> from scanl.ops import linear_scan
    >>> import torch
    >>> with op_calls() as calls:
    ...     y, _ = linear_scan(torch.ones(1, 3, 1), torch.ones(1))
    >>> [(call.op.name, sorted(call.operands)) for call in calls]
    [('linear_scan', ['a', 'state', 'x'])]
    """
    outer, context.calls = context.calls, []
    try:
        yield context.calls
    finally:
        context.calls = outer


@contextmanager
def conditions_recorded(conditions: list[Tensor]) -> Iterator[None]:
    """A context in which `conditions` gets those of `holds` in this thread. What is recorded takes them to be true."""
    outer, context.conditions = context.conditions, conditions
    try:
        yield
    finally:
        context.conditions = outer


def holds(condition: Tensor) -> bool:
    """Return whether a condition (B,) is true in all rows. Where it is recorded, each call looks at it first."""
    if context.conditions is None or type(condition) in _TENSORS:
        return bool(condition.all())
    context.conditions.append(condition)
    return True


@contextmanager
def divided_by(divider: Callable[..., Any] | None) -> Iterator[None]:
    """A context in which `divider(op, operands, options, **call)` runs the ops of this thread.

    With None they run as ever. The context stands here because an op must ask it, and what divides is above the ops.
    """
    outer, context.divider = context.divider, divider
    try:
        yield
    finally:
        context.divider = outer


def preferred() -> tuple[str, ...]:
    """Return the backends that "auto" stands for in this thread, from the innermost `backend` context."""
    return context.backends


def prefer(names: tuple[str, ...]) -> None:
    """Let "auto" stand for these backends in this thread, until `unprefer`."""
    context.outer.append(context.backends)
    context.backends = names


def unprefer() -> None:
    context.backends = context.outer.pop()


class backend:
    """A context that restricts "auto", which layers use, to these backends. Each op uses the first one that can run.

    names: any of "auto", "reference", "parallel", "cpu", "triton". An op that none of them can run raises
    BackendError; "reference" can always run. Contexts nest; the innermost applies. Each thread has its own. A call that
    names a backend ignores the context. Raises BackendError for an unknown name.

    >>> from scanl.ops import linear_scan
    >>> with backend("parallel", "reference"):  # all in plain torch: for torch.func.jvp, for export
    ...     linear_scan(torch.ones(1, 3, 1), torch.ones(1))[0].flatten().tolist()
    [1.0, 2.0, 3.0]
    """

    def __init__(self, *names: str):
        known = ("auto", *reversed(ORDER))
        for name in names:
            if name not in known:
                raise BackendError(f"scanl.ops.backend: {unknown('backend', name, known)}")
        if not names:
            raise BackendError(f"scanl.ops.backend: no backend is named, expected some of {', '.join(known)}")
        self.names = names

    def __enter__(self) -> None:
        prefer(self.names)

    def __exit__(self, *error: object) -> None:
        unprefer()


def exactly() -> bool:
    """Return whether an `exact` context is open in this thread. What is traced does not ask: it is as without."""
    return context.exact > 0 and not torch.compiler.is_compiling()


def portably() -> bool:
    """Return whether an `exact(portable=True)` context is open in this thread."""
    return context.portable > 0


def undirected() -> bool:
    """Return whether no context of this thread records calls, divides them or names backends."""
    return context.calls is None and context.divider is None and context.backends == ("auto",)


def late(owner: Any, name: str, **options: Any) -> Callable[..., Any]:
    """Return a function that looks up `owner.name` at each call: a context replaces functions of torch."""
    return lambda *args: getattr(owner, name)(*args, **options)


def times(a: Tensor, b: Tensor) -> Tensor:
    """Return a b. torch has other code for complex numbers at the end of a row; products of their parts have one."""
    if not (exactly() and a.is_complex() and b.is_complex()):
        return a * b
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def over(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b; the remark on `times` holds here too."""
    return times(a, b.reciprocal()) if exactly() and b.is_complex() else a / b


def traced() -> bool:
    """Return whether a program or a kernel is made of the call, so that no number may be looked at."""
    return torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())


def plain(*operands: Any) -> bool:
    """Return whether the operands are ordinary tensors of numbers on a CPU, and nothing traces the call."""
    for operand in operands:
        if type(operand) not in _TENSORS or not operand.is_cpu or operand.dtype not in _NUMBERS:
            return False
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._get_tracing_state() is not None
        or in_forward_mode()
        or transforming()
    )
