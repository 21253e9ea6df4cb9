"""A recorded function some of whose operands and results stay where they are from call to call."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scanl.ops._compiler.recorded import STORED_DTYPES, RecordedFunction, as_stored


class BoundKernel:
    """A recorded function that reads its last operands and writes its last results in memory that is known beforehand.

    A kernel of few numbers takes microseconds, and so does each tensor that Python makes or checks for it. Here that is
    done once, for all but the first operands and results, which a call gets and makes as `RecordedFunction` does.

    operands, results: contiguous, of the shapes and dtypes of the last ones.   One thread may call it at a time.
    """

    def __init__(self, recorded: RecordedFunction, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        sources, targets, scratch = _stored(operands), _stored(results), recorded.memory()
        self._inputs = recorded.inputs[: len(recorded.inputs) - len(operands)]
        outputs = recorded.results[: len(recorded.results) - len(results)]
        self._outputs = [(shape, STORED_DTYPES.get(dtype, dtype)) for shape, dtype in outputs]
        self._dtypes = [(at, dtype) for at, (_, dtype) in enumerate(outputs) if dtype in STORED_DTYPES]
        self._reading = [pair for pair in sources if pair[0] is not pair[1]]
        self._writing = [pair for pair in targets if pair[0] is not pair[1]]
        self._captured, self._starts = list(recorded.captured.values()), recorded.starts
        self._pointers = [tensor.data_ptr() for tensor in self._captured]
        self._kept = scratch, sources, targets  # the kernel has their addresses alone
        first = [recorded.team(1), *(tensor.data_ptr() for tensor in scratch)]
        inputs, first = len(first), first + [0] * len(self._inputs) + _addresses(sources)
        self._at = inputs, len(first), len(first) + len(self._captured)
        last = [0] * len(outputs) + _addresses(targets)
        self._kernel = recorded.kernel.prepared([*first, *self._places(), *last])

    def _places(self) -> list[int]:
        """Return the addresses of the tensors that are no operands."""
        return [pointer - start for pointer, start in zip(self._pointers, self._starts, strict=True)]

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Return the first results for these first operands."""
        kernel, operands = self._kernel, []
        first_input, first_captured, first_output = self._at
        pointers = [tensor.data_ptr() for tensor in self._captured]
        if pointers != self._pointers:
            self._pointers = pointers
            kernel.put(first_captured, self._places())
        for operand, (shape, dtype) in zip(inputs, self._inputs, strict=True):
            operands.append(as_stored(operand, shape, dtype))  # kept until the kernel has run
        kernel.put(first_input, list(map(Tensor.data_ptr, operands)))
        for tensor, stored in self._reading:
            stored.copy_(tensor)
        results = [torch.empty(shape, dtype=dtype) for shape, dtype in self._outputs]
        kernel.put(first_output, list(map(Tensor.data_ptr, results)))
        kernel()
        for tensor, stored in self._writing:
            tensor.copy_(stored)
        for at, dtype in self._dtypes:
            results[at] = results[at].to(dtype)
        return results


def _addresses(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    return [stored.data_ptr() for _, stored in pairs]


def _stored(tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return each tensor and what a kernel has in its place: itself, or floating numbers for whole ones and truths."""
    return [
        (
            tensor,
            torch.empty_like(tensor, dtype=STORED_DTYPES[tensor.dtype]) if tensor.dtype in STORED_DTYPES else tensor,
        )
        for tensor in tensors
    ]
