"""Base class of Elman, LSTM and GRU: their parameters, and the choice between our cells and PyTorch's kernels."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers.base import as_widened, widen
from scanl.layers.packing import sequence_index
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.layers.state import State
from scanl.ops._frame.context import preferred
from scanl.ops._frame.opaque import opaque
from scanl.ops.cell import Cell
from scanl.ops.offsets import sequences

KERNELS: dict[str, Callable[..., Any]] = {
    "gru": torch.gru,
    "lstm": torch.lstm,
    "rnn_relu": torch.rnn_relu,
    "rnn_tanh": torch.rnn_tanh,
}


def _given(states: list[Tensor]) -> Tensor | list[Tensor]:
    """Return the state in the kernel's form: (1, B, D), or a list of such tensors."""
    states = [tensor[None].contiguous() for tensor in states]
    return states if len(states) > 1 else states[0]


@opaque(
    "torch_cell(str kernel, Tensor x, Tensor[] before, Tensor[] weights, bool bias, bool training) -> Tensor[]",
    lambda kernel, x, first, *_: [
        x.new_empty(*x.shape[:2], first[0].shape[1]),
        *(torch.empty_like(tensor[None]) for tensor in first),
    ],
)
def _whole(
    kernel: str, x: Tensor, first: list[Tensor], weights: list[Tensor], bias: bool, training: bool
) -> list[Tensor]:
    """Run all steps of x. Return the outputs and the states after the last step (1, B, D)."""
    with as_widened(x):
        return list(KERNELS[kernel](x, _given(first), weights, bias, 1, 0.0, training, False, True))


class TorchCell(SolvedLayer):
    """Layer that runs a cell or PyTorch's kernel of it, whichever is faster. A subclass sets the cell and its gates.

    On a CPU the cell is several times as fast as PyTorch for a GRU, an Elman network, and several packed sequences of
    an LSTM. On a GPU PyTorch calls cuDNN.
    """

    cell: ClassVar[Cell]
    gates: ClassVar[int]
    kernel: str  # the name of PyTorch's, one of `KERNELS`

    def __init__(self, dim: int, bias: bool, width: int) -> None:
        super().__init__()
        self.dim, self.width, self.bias = dim, width, bias
        limit = 1 / math.sqrt(width)
        self.weight_ih_l0 = nn.Parameter(torch.empty(self.gates * width, dim).uniform_(-limit, limit))
        self.weight_hh_l0 = nn.Parameter(torch.empty(self.gates * width, width).uniform_(-limit, limit))
        if bias:
            self.bias_ih_l0 = nn.Parameter(torch.empty(self.gates * width).uniform_(-limit, limit))
            self.bias_hh_l0 = nn.Parameter(torch.empty(self.gates * width).uniform_(-limit, limit))

    @staticmethod
    def operands(x: Tensor, w: Tensor, u: Tensor, *biases: Tensor) -> Sequence[Tensor | None]:
        """Return the operands of the cell, without the state, from the input and PyTorch's parameters."""
        raise NotImplementedError

    def _options(self) -> Mapping[str, Any]:
        """Return the options of the cell."""
        return {}

    def _runs_cell(self, x: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Return whether the cell is faster."""
        return x.device.type == "cpu"

    def _weights(self) -> list[Tensor]:
        weights = [self.weight_ih_l0, self.weight_hh_l0, *([self.bias_ih_l0, self.bias_hh_l0] if self.bias else [])]
        return [widen(weight) for weight in weights]

    def over_windows(self, x: Tensor, size: int) -> Tensor:
        """Return the last output (L - size + 1, width) over each window of rows of x (L, dim), L at least `size`.

        The windows begin with a zero state. A row is projected once for all of them, and none is copied. The output is
        float32 or wider.
        """
        with as_widened(x):
            drive, *others = self.operands(widen(x)[None], *self._weights())
            assert drive is not None
            windows = drive[0].unfold(0, size, 1).movedim(-1, 1)
            y, _ = self.run_cell(self.cell, windows, *others, None, cu_seqlens=None, **self._options())
        return y[:, -1]

    def _scan(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        rows = sequences(x, cu_seqlens)
        state = self.init_state(rows, device=x.device, dtype=x.dtype) if state is None else state
        wide = widen(x)
        first = [tensor.to(wide.dtype) for tensor in ([state] if isinstance(state, Tensor) else state)]
        weights = self._weights()
        named = preferred() != ("auto",)  # by a `backend` context, which says how the cell runs
        if self.solver != "sequential" or named or self._runs_cell(x, cu_seqlens):
            start = first[0] if len(first) == 1 else torch.stack(first, 1)
            with as_widened(x):
                operands = self.operands(wide, *weights)
                y, last = self.run_cell(self.cell, *operands, start, cu_seqlens=cu_seqlens, **self._options())
            return y.to(x.dtype), [last] if len(first) == 1 else list(last.unbind(1))
        if not x.numel():
            return x.new_zeros(*x.shape[:2], self.width), first
        if cu_seqlens is None:
            y, *after = _whole(self.kernel, wide, first, weights, self.bias, self.training)
            return y.to(x.dtype), [tensor[0] for tensor in after]
        # The kernel takes the first step of every sequence, then the second, and so on. Sequences are sorted by length,
        # longest first, and none is empty.
        lengths = cu_seqlens.diff()
        order = lengths.argsort(descending=True, stable=True)
        owner = sequence_index(cu_seqlens, x.shape[1])
        index = torch.arange(x.shape[1], device=x.device) - cu_seqlens[owner]
        steps = (index * rows + order.argsort()[owner]).argsort()
        batch_sizes = index.bincount().cpu()
        order = order[: int(batch_sizes[0])]
        start = _given([tensor[order] for tensor in first])
        options = self.bias, 1, 0.0, self.training, False  # biases, layers, dropout, training, bidirectional
        with as_widened(x):
            y, *after = KERNELS[self.kernel](wide[0, steps], batch_sizes, start, weights, *options)
        after = [old.index_copy(0, order, new[0]) for old, new in zip(first, after, strict=True)]
        return y[steps.argsort()][None].to(x.dtype), after
