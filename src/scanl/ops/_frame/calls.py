"""A record of the ops that a piece of code calls."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor


class OpCall(NamedTuple):
    """A call of an op: its operands by name, the state too, and its options."""

    op: Any
    operands: Mapping[str, Any]
    options: Mapping[str, Any]


class _Record(threading.local):
    calls: list[OpCall] | None = None


_record = _Record()


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
    outer, _record.calls = _record.calls, []
    try:
        yield _record.calls
    finally:
        _record.calls = outer


def note(
    op: Any,
    operands: Mapping[str, Any],
    options: Mapping[str, Any],
    reverse: bool,
    cu_seqlens: Tensor | None,
) -> None:
    """Add a call to the record, if there is one."""
    if _record.calls is not None:
        more = {**options, "reverse": reverse, "cu_seqlens": cu_seqlens}
        _record.calls.append(OpCall(op, dict(operands), more))
