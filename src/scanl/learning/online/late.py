"""Truths that come later than their samples."""

from collections import deque
from typing import Any

Known = list[tuple[int, Any]]  # samples, by their index, and their truths, None for one that never comes


class LateTruths:
    """The samples and the truths that wait for each other.

    horizon: lines after which a line has the truth of a sample; None: its own line has it.   delay: samples after which
    a truth is known.   keyed: whether a truth that its line lacks comes in a later line of the same key.
    """

    def __init__(self, horizon: int | None, delay: int, keyed: bool) -> None:
        self.horizon, self.delay, self.keyed = horizon, delay, keyed
        self.ahead: deque[int] = deque()  # samples whose truth is the value of a later line
        self.hidden: deque[tuple[int, Any]] = deque()  # truths that are not known yet
        self.keys: dict[Any, int] = {}  # of samples that wait for their truth

    def before(self, truth: Any) -> Known:
        """Return the truths that are known before the sample of a line with this truth is answered."""
        return self._known(self.ahead.popleft(), truth) if len(self.ahead) == self.horizon else []

    def after(self, index: int, truth: Any, key: Any) -> Known:
        """Return the truths that are known once the sample `index` of this line is answered."""
        if self.horizon is not None:
            self.ahead.append(index)
        elif truth is None and self.keyed:
            self.keys[key] = index
        else:
            return self._known(index, truth)
        return []

    def _known(self, index: int, truth: Any) -> Known:
        self.hidden.append((index, truth))
        return [self.hidden.popleft()] if len(self.hidden) > self.delay else []

    def forget(self, first: int) -> None:
        """Forget the keys of samples before `first`, which were given up."""
        while self.keys and next(iter(self.keys.values())) < first:
            del self.keys[next(iter(self.keys))]

    def state_dict(self) -> dict[str, Any]:
        """Return the state in numbers, text and lists of them."""
        hidden = [[index, truth.tolist() if hasattr(truth, "tolist") else truth] for index, truth in self.hidden]
        return {"ahead": list(self.ahead), "hidden": hidden, "keys": list(self.keys.items())}
