"""A snapshot holds until anything in it changes, whatever that is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scanl.ops._compiler.snapshot import Snapshot


class Contents:
    def __init__(self) -> None:
        self.items: dict[Any, Any] = {"unread": 1, "a": object(), "b": None, "unread too": 2, "c": "text"}
        self.empty: dict[Any, Any] = {}
        self.weight, self.other = nn.Parameter(torch.ones(3, 3)), torch.zeros(2, 5, dtype=torch.int8)

    def snapshot(self) -> Snapshot:
        return Snapshot([self.items, self.empty], [self.weight, self.other], {"unread", "unread too"})


def data(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Contents], None]:
    def apply(contents: Contents) -> None:
        tensor = getattr(contents, name)
        tensor.data = change(tensor.data)

    return apply


CHANGES: dict[str, Callable[[Contents], Any]] = {
    "another value": lambda c: c.items.update(a=object()),
    "an equal value": lambda c: c.items.update(c="".join(["te", "xt"])),
    "another key": lambda c: c.items.update(d=c.items.pop("c")),
    "one more": lambda c: c.empty.update(a=1),
    "one less": lambda c: c.items.pop("b"),
    "shape": data("weight", lambda x: x.view(9)),
    "strides": data("weight", lambda x: x.T),
    "dtype": data("other", lambda x: x.view(torch.uint8)),
    "less": lambda c: c.other.resize_(2, 4),
}
SAME_FORM: dict[str, Callable[[Contents], Any]] = {
    "address": data("weight", torch.clone),
    "offset": lambda c: c.other.set_(torch.zeros(3, 5, dtype=torch.int8)[1:]),
}


@pytest.mark.parametrize("name", [*CHANGES, *SAME_FORM])
def test_a_change_is_noticed(name: str) -> None:
    contents = Contents()
    before = contents.snapshot()
    assert before.holds()
    (CHANGES | SAME_FORM)[name](contents)
    assert not before.holds()
    after = contents.snapshot()
    assert after.holds()
    assert before.equals(after) is (name in SAME_FORM)


def test_what_is_not_looked_at_may_change() -> None:
    contents = Contents()
    before = contents.snapshot()
    contents.items["unread"] = 5
    with torch.no_grad():
        contents.weight.mul_(2)
    assert before.holds()


def test_another_kind_of_tensor_is_never_the_same() -> None:
    """What its numbers are cannot be seen."""

    class Other(Tensor):
        pass

    assert not Snapshot([], [torch.ones(3).as_subclass(Other)]).holds()
