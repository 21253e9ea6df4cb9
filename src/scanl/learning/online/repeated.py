"""A function that is called again and again, and becomes a kernel."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scanl.layers.state import State, leaves, map_leaves
from scanl.ops._compiler.bound import BoundKernel
from scanl.ops._compiler.recorded import RecordedFunction
from scanl.ops._compiler.rules import UnsupportedOperation
from scanl.ops._frame.context import exactly

FORMS = 8  # of the inputs; an algorithm that always brings new ones gains nothing by kernels


class RepeatedFunction:
    """A function of inputs and a state that runs as one kernel of the CPU from its call `after` on.

    function: called as function(*inputs, state); returns a tuple of new tensors and the state after them.
    constants: returns what it depends on beside tensors, to be compared with `==`.

    Compiling takes the time of a hundred calls or more. So the first calls run operation by operation, and their number
    alone decides which call is the first of the kernel: a run that is resumed has the same numbers. None: never. The
    function may be one that no kernel can run; then `reason` says why, and it runs operation by operation. So it does
    under `exact`.

    A state that a kernel returned is overwritten by the second call after that.
    """

    def __init__(
        self, function: Callable[..., Any], after: int | None, constants: Callable[[], Any] = lambda: None
    ) -> None:
        self.function, self.after, self.constants = function, after, constants
        self.calls = 0
        self.reason: str | None = None
        self.kernels: dict[tuple[Any, ...], Callable[..., Any]] = {}  # by the form of the inputs
        self._constants: Any = None

    def __call__(self, *inputs: Tensor, state: State = None) -> Any:
        self.calls += 1
        if self.after is None or self.calls <= self.after or self.reason is not None or exactly():
            return self.function(*inputs, state)
        constants = self.constants()
        if constants != self._constants:
            self.kernels, self._constants = {}, constants
        form = tuple([(tensor.shape, tensor.dtype) for tensor in inputs])
        kernel = self.kernels.get(form)
        if kernel is None:
            try:
                if len(self.kernels) == FORMS:
                    raise UnsupportedOperation(f"its inputs had {FORMS} forms, and have another one")
                kernel = self.kernels[form] = _Carrying(self.function, inputs, state)
            except UnsupportedOperation as error:
                self.reason = str(error)
                return self.function(*inputs, state)
        return kernel(*inputs, state=state)


class _Carrying:
    """A kernel of a function of inputs and a state, which has two places in memory.

    A call reads the state in one of them and writes it in the other. So it makes no tensors for the state, and looks
    at none of it. A state from elsewhere is copied first.
    """

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...], state: State) -> None:
        self._states = [map_leaves(torch.empty_like, state) for _ in range(2)]
        places = [[leaf for _, leaf in leaves(room)] for room in self._states]
        count, size = len(inputs), len(places[0])

        def flat(*operands: Tensor) -> Any:
            members = iter(operands[count:])
            return function(*operands[:count], map_leaves(lambda _: next(members), state))

        recorded = RecordedFunction(flat, *map(torch.clone, inputs), *places[0])  # each in memory of its own
        if recorded.results[len(recorded.results) - size :] != recorded.inputs[count:]:
            raise UnsupportedOperation("the state that it returns has another form")
        self._kernels = [BoundKernel(recorded, *both) for both in (places, places[::-1])]

    def __call__(self, *inputs: Tensor, state: State) -> Any:
        at = int(state is self._states[1])
        if state is not self._states[at]:
            map_leaves(Tensor.copy_, self._states[at], state)
        return *self._kernels[at](*inputs), self._states[1 - at]
