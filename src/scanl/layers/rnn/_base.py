"""Base class of Elman, LSTM and GRU: their parameters, and the call of PyTorch's kernels (cuDNN on a GPU)."""

import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.packing import sequence_index
from scanl.layers.state import Device, DType, State
from scanl.ops._frame.opaque import opaque

KERNELS: dict[str, Callable[..., Any]] = {
    "gru": torch.gru,
    "lstm": torch.lstm,
    "rnn_relu": torch.rnn_relu,
    "rnn_tanh": torch.rnn_tanh,
}


def draws() -> Callable[..., Tensor]:
    """Return a function from sizes to normal numbers in float64, the same in each run, for the samples of a cell."""
    return functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _given(states: list[Tensor]) -> Tensor | list[Tensor]:
    """Return the state in the kernel's form: (1, B, D), or a list of such tensors."""
    states = [each[None].contiguous() for each in states]
    return states if len(states) > 1 else states[0]


@opaque(
    "torch_cell(str kernel, Tensor x, Tensor[] before, Tensor[] weights, bool bias, bool training) -> Tensor[]",
    lambda kernel, x, before, *_: [torch.empty_like(x), *(torch.empty_like(each[None]) for each in before)],
)
def _whole(
    kernel: str, x: Tensor, before: list[Tensor], weights: list[Tensor], bias: bool, training: bool
) -> list[Tensor]:
    """Run all steps of x. Return the outputs and the states after the last step (1, B, D)."""
    with as_widened(x):
        return list(KERNELS[kernel](x, _given(before), weights, bias, 1, 0.0, training, False, True))


class TorchCell(Layer):
    """Layer that runs a recurrent kernel of PyTorch. A subclass sets the number of gates and the kernel."""

    gates: ClassVar[int]
    sample: ClassVar = {}

    def __init__(self, dim: int, bias: bool = True) -> None:
        super().__init__()
        if dim < 1:
            raise ConfigError(f"{self.name}: dim is {dim}, expected at least 1")
        self.dim, self.bias = dim, bias
        limit = 1 / math.sqrt(dim)
        self.weight_ih_l0 = nn.Parameter(torch.empty(self.gates * dim, dim).uniform_(-limit, limit))
        self.weight_hh_l0 = nn.Parameter(torch.empty(self.gates * dim, dim).uniform_(-limit, limit))
        if bias:
            self.bias_ih_l0 = nn.Parameter(torch.empty(self.gates * dim).uniform_(-limit, limit))
            self.bias_hh_l0 = nn.Parameter(torch.empty(self.gates * dim).uniform_(-limit, limit))

    def _kernel(self) -> str:
        """Name of the kernel, one of `KERNELS`."""
        raise NotImplementedError

    def _initial(self, batch_size: int, device: Device, dtype: DType) -> Tensor:
        return self._zeros(batch_size, self.dim, device=device, dtype=dtype, at_least=torch.float32)

    def _scan(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        self._check(x, state, cu_seqlens)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        state = self.init_state(rows, device=x.device, dtype=x.dtype) if state is None else state
        wide = widen(x)
        before = [each.to(wide.dtype) for each in ([state] if isinstance(state, Tensor) else state)]
        if not x.numel():
            return x.clone(), before
        weights = [self.weight_ih_l0, self.weight_hh_l0, *([self.bias_ih_l0, self.bias_hh_l0] if self.bias else [])]
        weights = [widen(weight) for weight in weights]
        if cu_seqlens is None:
            y, *after = _whole(self._kernel(), wide, before, weights, self.bias, self.training)
            return y.to(x.dtype), [each[0] for each in after]
        # The kernel takes the first step of every sequence, then the second, and so on. Sequences are sorted by length,
        # longest first, and none is empty.
        lengths = cu_seqlens.diff()
        order = lengths.argsort(descending=True, stable=True)
        owner = sequence_index(cu_seqlens, x.shape[1])
        index = torch.arange(x.shape[1], device=x.device) - cu_seqlens[owner]
        steps = (index * rows + order.argsort()[owner]).argsort()
        batch_sizes = index.bincount().cpu()
        order = order[: int(batch_sizes[0])]
        given = _given([each[order] for each in before])
        options = self.bias, 1, 0.0, self.training, False  # biases, layers, dropout, training, bidirectional
        with as_widened(x):
            y, *after = KERNELS[self._kernel()](wide[0, steps], batch_sizes, given, weights, *options)
        after = [old.index_copy(0, order, new[0]) for old, new in zip(before, after, strict=True)]
        return y[steps.argsort()][None].to(x.dtype), after
