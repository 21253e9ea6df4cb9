"""Base class of Elman, LSTM and GRU: their parameters, and the choice between our cells and PyTorch's kernels."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.packing import restarted, sequence_index
from scanl.layers.parts.cell_layer import SolvedLayer
from scanl.layers.state import State
from scanl.ops._cpu._threads import threads
from scanl.ops._frame.context import exactly, plain, preferred, undirected
from scanl.ops._frame.opaque import opaque
from scanl.ops._recurrent.layer import one_layer, sizes_of
from scanl.ops.cell import Cell
from scanl.ops.offsets import check_starts, sequences

KERNELS: dict[str, Callable[..., Any]] = {
    "gru": torch.gru,
    "lstm": torch.lstm,
    "rnn_relu": torch.rnn_relu,
    "rnn_tanh": torch.rnn_tanh,
}


def _parts(state: State) -> list[Tensor]:
    """Return the tensors of a state: none, h, or h and c."""
    return [] if state is None else [state] if isinstance(state, Tensor) else list(state)


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
    """Layer that runs a kernel of the whole layer, a cell, or PyTorch's kernel, whichever is fastest.

    A subclass sets the cell and its gates. The kernel of the whole layer reads rows of float32 on a CPU, also where
    states begin anew. For packed sequences on a CPU the cell is several times as fast as PyTorch. On a GPU PyTorch
    calls cuDNN.
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

    def result(self, y: Tensor, after: list[Tensor]) -> tuple[Tensor, State]:
        """Return what the layer returns, from the outputs of all steps and the tensors of the last state."""
        return y, after[0]

    def _options(self) -> Mapping[str, Any]:
        """Return the options of the cell."""
        return {}

    def _runs_cell(self, x: Tensor, cu_seqlens: Tensor | None) -> bool:
        """Return whether the cell is faster than PyTorch's kernel."""
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

    def _restarted(
        self, x: Tensor, state: State, cu_seqlens: Tensor | None, starts: Tensor, others: dict[str, Any]
    ) -> tuple[Tensor, State]:
        check_starts(self._who(), starts, x)
        if cu_seqlens is None and self._has_kernel(x, state):
            return self.result(*self._by_kernel(x, state, starts))
        return super()._restarted(x, state, cu_seqlens, starts, others)

    def _has_kernel(self, x: Tensor, state: State) -> bool:
        """Return whether the kernel of the whole layer reads rows x (B, T, dim), and is the fastest."""
        tensors = [x, *_parts(state), *self.parameters(recurse=False)]
        if self.solver != "sequential" or exactly() or not (undirected() and plain(*tensors)) or not x.numel():
            return False
        if any(torch.promote_types(tensor.dtype, torch.float32) != torch.float32 for tensor in tensors) or x.is_neg():
            return False
        batch, steps, inputs = x.shape
        known = type(self).init_state is Layer.init_state  # that the state before any input is zero
        return known and not sizes_of(self.kernel.upper(), batch, steps, inputs, self.width, 1, threads()).idle

    def _by_kernel(self, x: Tensor, state: State, starts: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        before = [widen(tensor)[None] for tensor in _parts(state)]
        carries = None if starts is None or not starts.any() else (~starts).T.to(torch.int32).contiguous()

        def by_cell(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
            first = [tensor[0] for tensor in tensors[: len(before)]] or _parts(self.init_state(len(x)))
            weights = tensors[len(before) :]

            def run(x: Tensor, first: list[Tensor], cu_seqlens: Tensor | None) -> tuple[Tensor, list[Tensor]]:
                return self._by_cell(x, weights, first, cu_seqlens)

            if starts is None:
                y, last = run(x, first, None)
            else:
                y, last = restarted(
                    self._who(), run, lambda rows: _parts(self.init_state(rows)), x, first, None, starts
                )
            return y, *(tensor[None] for tensor in last)

        y, last = one_layer(self.kernel.upper(), by_cell, widen(x), before, self._weights(), carries)
        return y.to(x.dtype), [tensor[0] for tensor in last]

    def _by_cell(
        self, x: Tensor, weights: Sequence[Tensor], first: list[Tensor], cu_seqlens: Tensor | None
    ) -> tuple[Tensor, list[Tensor]]:
        start = first[0] if len(first) == 1 else torch.stack(first, 1)
        operands = self.operands(x, *weights)
        y, last = self.run_cell(self.cell, *operands, start, cu_seqlens=cu_seqlens, **self._options())
        return y, [last] if len(first) == 1 else list(last.unbind(1))

    def _scan(self, x: Tensor, state: State, cu_seqlens: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        if cu_seqlens is None and self._has_kernel(x, state):
            return self._by_kernel(x, state, None)
        rows = sequences(x, cu_seqlens)
        state = self.init_state(rows, device=x.device, dtype=x.dtype) if state is None else state
        wide = widen(x)
        first = [tensor.to(wide.dtype) for tensor in _parts(state)]
        weights = self._weights()
        named = preferred() != ("auto",)  # by a `backend` context, which says how the cell runs
        if self.solver != "sequential" or named or self._runs_cell(x, cu_seqlens):
            with as_widened(x):
                y, last = self._by_cell(wide, weights, first, cu_seqlens)
            return y.to(x.dtype), last
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
