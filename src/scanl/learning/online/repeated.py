"""A function that is called again and again, and becomes a kernel."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor

from scanl.layers.state import map_leaves
from scanl.ops._recorded import Recorded, Unsupported

FORMS = 8  # of the arguments; an algorithm that always brings new ones gains nothing by kernels

R = TypeVar("R")


class Repeated(Generic[R]):
    """A function of states that runs as one kernel of the CPU from its call `after` on.

    Compiling takes seconds. So the first calls run operation by operation, and their number alone decides which call is
    the first of the kernel: a run that is resumed has the same numbers. None: never.
    The function may be one that no kernel can run; then `reason` says why, and it runs operation by operation.
    """

    def __init__(self, function: Callable[..., R], after: int | None) -> None:
        self.function, self.after = function, after
        self.calls = 0
        self.reason: str | None = None
        self.kernels: dict[tuple[Any, ...], Recorded] = {}

    def __call__(self, *states: Any) -> R:
        self.calls += 1
        if self.after is None or self.calls <= self.after or self.reason is not None:
            return self.function(*states)
        tensors: list[Tensor] = []
        map_leaves(tensors.append, states)
        form = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        kernel = self.kernels.get(form)
        if kernel is None:
            kernel = self._record(states, tensors, form)
            if kernel is None:
                return self.function(*states)
        return kernel(*tensors)

    def _record(self, states: Any, tensors: list[Tensor], form: tuple[Any, ...]) -> Recorded | None:
        def flat(*values: Tensor) -> R:
            tensors = iter(values)
            return self.function(*map_leaves(lambda _: next(tensors), states))

        try:
            if len(self.kernels) == FORMS:
                raise Unsupported(f"its arguments had {FORMS} forms, and have another one")
            self.kernels[form] = Recorded(flat, *tensors)
        except Unsupported as error:
            self.reason = str(error)
            return None
        return self.kernels[form]
