"""Functions of torch that others stand in for while a context of any thread is open."""

import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()


class Replacement:
    """A function of torch, and what stands in for it. Several contexts may have the same one open.

    owner, name: the attribute by which torch's function is called.   new: what is called instead. It asks the context
    of its thread whether to act, and else calls torch's own.
    """

    def __init__(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self.owner, self.name, self.new = owner, name, new
        self._open = 0  # contexts of all threads
        self._before: Any = None

    def open(self) -> None:
        with _lock:
            if self._open == 0:
                self._before = getattr(self.owner, self.name)
                setattr(self.owner, self.name, self.new)
            self._open += 1

    def close(self) -> None:
        with _lock:
            self._open -= 1
            if self._open == 0 and getattr(self.owner, self.name) is self.new:  # else another program has replaced it
                setattr(self.owner, self.name, self._before)
