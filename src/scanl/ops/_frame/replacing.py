"""Functions of torch that others stand in for while a context of any thread is open."""

import sys
import threading
from collections.abc import Callable
from typing import Any

_lock = threading.RLock()


def _traced_functions() -> Any:
    """Return torch.compile's table of the functions that it can trace, which it makes once; None before that."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    table = getattr(rules, "get_torch_obj_rule_map", None)
    return table if table is not None and table.cache_info().currsize else None


class Replacement:
    """A function of torch, and what stands in for it. Several contexts may have the same one open.

    owner, name: the attribute by which torch's function is called.   new: what is called instead. It asks the context
    of its thread whether to act, and else calls torch's own.
    """

    def __init__(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self.owner, self.name, self.new = owner, name, new
        self._open = 0  # contexts of all threads
        self._before: Any = None
        self._table: Any = None

    def open(self) -> None:
        with _lock:
            if self._open == 0:
                self._before, self._table = getattr(self.owner, self.name), _traced_functions()
                setattr(self.owner, self.name, self.new)
            self._open += 1

    def close(self) -> None:
        with _lock:
            self._open -= 1
            if self._open == 0 and getattr(self.owner, self.name) is self.new:  # else another program has replaced it
                setattr(self.owner, self.name, self._before)
                made = _traced_functions()
                if made is not None and self._table is None:  # made meanwhile, so it lacks torch's own function
                    made.cache_clear()
