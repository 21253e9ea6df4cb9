"""Who runs the ops of this thread while a sequence is divided among processes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Thread(threading.local):
    divider: Callable[..., Any] | None = None


thread = _Thread()


@contextmanager
def divided_by(divider: Callable[..., Any] | None) -> Iterator[None]:
    """A context in which `divider(op, operands, options, **call)` runs the ops of this thread.

    With None they run as ever. The context stands here because an op must ask it, and what divides is above the ops.
    """
    outer, thread.divider = thread.divider, divider
    try:
        yield
    finally:
        thread.divider = outer
