r"""Elman network, LSTM and GRU, over the kernels of PyTorch (cuDNN on a GPU).

.. math::
   \text{Elman:} \quad & h_t = \phi(W x_t + U h_{t-1} + b) \\
   \text{LSTM:} \quad & c_t = f_t \odot c_{t-1} + i_t \odot \tanh(\hat g_t), \; h_t = o_t \odot \tanh(c_t) \\
   \text{GRU:} \quad & n_t = \tanh(W x_t + b + r_t \odot (U h_{t-1} + b')), \;
   h_t = (1 - z_t) \odot n_t + z_t \odot h_{t-1}
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.layers.base import Layer, as_widened, register, widen
from scanl.layers.packing import sequence_index
from scanl.layers.state import Device, DType, State
from scanl.ops._frame.opaque import opaque

KERNELS: dict[str, Callable[..., Any]] = {
    "gru": torch.gru,
    "lstm": torch.lstm,
    "rnn_relu": torch.rnn_relu,
    "rnn_tanh": torch.rnn_tanh,
}


def _given(states: list[Tensor]) -> Tensor | list[Tensor]:
    """The state as the kernel takes it: (1, B, D), or a list of such."""
    states = [each[None].contiguous() for each in states]
    return states if len(states) > 1 else states[0]


@opaque(
    "torch_cell(str kernel, Tensor x, Tensor[] before, Tensor[] weights, bool bias, bool training) -> Tensor[]",
    lambda kernel, x, before, *_: [torch.empty_like(x), *(torch.empty_like(each[None]) for each in before)],
)
def _whole(
    kernel: str, x: Tensor, before: list[Tensor], weights: list[Tensor], bias: bool, training: bool
) -> list[Tensor]:
    """All steps of x, and the states after them (1, B, D)."""
    with as_widened(x):
        return list(KERNELS[kernel](x, _given(before), weights, bias, 1, 0.0, training, False, True))


class TorchCell(Layer):
    """The common part of the three: parameters, and a call of PyTorch's kernel without padding."""

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
        """One of `KERNELS`."""
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
        # The kernel takes the first steps of all sequences, then the second ones: longest sequence first, none empty.
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


@register("elman")
class Elman(TorchCell):
    """Elman network: h = φ(W x + U h + b), with φ tanh or ReLU.

    Args:
        dim: D, inputs and state.
        nonlinearity: "tanh" or "relu".
        bias: two biases, as PyTorch has them.
        recurrent_init: of U, "uniform"; "identity", with biases 0 (the IRNN, meant for "relu"); or "orthogonal".

    Parameters as in `torch.nn.RNN`: weight_ih_l0, weight_hh_l0 (D, D), bias_ih_l0, bias_hh_l0 (D).
    Initialisation as there: U(±1/sqrt(D)).
    State: (B, D). The output is the state: no further readout.
    """

    id = "S-elman"
    equation = "h_t = phi(W x_t + U h_{t-1} + b)"
    source = (
        'Elman, "Finding structure in time", Cognitive Science 14, 1990; identity start: Le, Jaitly and Hinton, '
        "arXiv:1504.00941"
    )
    gates = 1

    def __init__(
        self, dim: int, nonlinearity: str = "tanh", bias: bool = True, recurrent_init: str = "uniform"
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise nearest("nonlinearity of elman", nonlinearity, ["tanh", "relu"])
        if recurrent_init not in ("uniform", "identity", "orthogonal"):
            raise nearest("recurrent_init of elman", recurrent_init, ["uniform", "identity", "orthogonal"])
        super().__init__(dim, bias)
        self.nonlinearity = nonlinearity
        if recurrent_init == "orthogonal":
            nn.init.orthogonal_(self.weight_hh_l0)
        elif recurrent_init == "identity":
            nn.init.eye_(self.weight_hh_l0)
            for vector in (self.bias_ih_l0, self.bias_hh_l0) if bias else ():
                nn.init.zeros_(vector)

    def _kernel(self) -> str:
        return f"rnn_{self.nonlinearity}"

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._initial(batch_size, device, dtype)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y, (h,) = self._scan(x, state, cu_seqlens)
        return y, h


class LSTMState(NamedTuple):
    """h and c, (B, D) each."""

    h: Tensor
    c: Tensor


@register("lstm")
class LSTM(TorchCell):
    """Long short-term memory, with a forget gate and without peepholes.

    Args:
        dim: D, inputs and state.
        bias: two biases, as PyTorch has them.
        forget_bias: what the two biases of the forget gate add up to at the start; None leaves PyTorch's own.
        t_max: instead, the chrono start for memories of up to T_max steps: b_f = ln U(1, T_max - 1), b_i = -b_f.

    Parameters as in `torch.nn.LSTM`, gates in the order i, f, g, o: weight_ih_l0, weight_hh_l0 (4D, D), bias_ih_l0,
    bias_hh_l0 (4D).
    Initialisation as there: U(±1/sqrt(D)).
    State: LSTMState, 2D numbers a row.
    """

    id = "S-lstm"
    equation = "c_t = f_t * c_{t-1} + i_t * tanh(g_t),  h_t = o_t * tanh(c_t)"
    source = (
        'Hochreiter and Schmidhuber, "Long short-term memory", Neural Computation 9, 1997; forget gate: Gers, '
        "Schmidhuber and Cummins, 2000; chrono start: Tallec and Ollivier, arXiv:1804.11188"
    )
    gates = 4

    def __init__(self, dim: int, bias: bool = True, forget_bias: float | None = None, t_max: int | None = None) -> None:
        if not bias and (forget_bias is not None or t_max is not None):
            raise ConfigError("lstm: bias is False, expected True because of forget_bias or t_max")
        if forget_bias is not None and t_max is not None:
            raise ConfigError(f"lstm: forget_bias is {forget_bias} and t_max is {t_max}, expected only one of them")
        if t_max is not None and t_max < 3:
            raise ConfigError(f"lstm: t_max is {t_max}, expected at least 3")
        super().__init__(dim, bias)
        if forget_bias is None and t_max is None:
            return
        with torch.no_grad():
            kept = (
                torch.full((dim,), forget_bias or 0.0)
                if t_max is None
                else torch.empty(dim).uniform_(1, t_max - 1).log()
            )
            self.bias_ih_l0[dim : 2 * dim] = kept
            self.bias_hh_l0[dim : 2 * dim] = 0
            if t_max is not None:
                self.bias_ih_l0[:dim] = -kept
                self.bias_hh_l0[:dim] = 0

    def _kernel(self) -> str:
        return "lstm"

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> LSTMState:
        return LSTMState(self._initial(batch_size, device, dtype), self._initial(batch_size, device, dtype))

    def forward(
        self, x: Tensor, state: LSTMState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LSTMState]:
        y, (h, c) = self._scan(x, state, cu_seqlens)
        return y, LSTMState(h, c)


@register("gru")
class GRU(TorchCell):
    """Gated recurrent unit, its reset gate after the recurrent product.

    Args:
        dim: D, inputs and state.
        bias: two biases, as PyTorch has them.

    Parameters as in `torch.nn.GRU`, gates in the order r, z, n: weight_ih_l0, weight_hh_l0 (3D, D), bias_ih_l0,
    bias_hh_l0 (3D).
    Initialisation as there: U(±1/sqrt(D)).
    State: (B, D).
    As in PyTorch, the reset gate multiplies U h (in the paper h itself), and z keeps the old state, as in eq. (7).
    """

    id = "S-gru"
    equation = "n_t = tanh(W x_t + b + r_t * (U h_{t-1} + b')),  h_t = (1 - z_t) * n_t + z_t * h_{t-1}"
    source = 'Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder", arXiv:1406.1078, eq. (5) to (8)'
    gates = 3

    def _kernel(self) -> str:
        return "gru"

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._initial(batch_size, device, dtype)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y, (h,) = self._scan(x, state, cu_seqlens)
        return y, h
