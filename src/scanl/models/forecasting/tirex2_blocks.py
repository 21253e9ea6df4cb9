"""Blocks of TiRex-2: an xLSTM reads each series over time, then attention mixes the series of a group."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.channel.gated_mlp import GatedMLP
from scanl.layers.memory.mlstm_large import MLSTMLarge
from scanl.layers.parts.block_diagonal import BlockDiagonalMap
from scanl.layers.parts.norm import HeadNorm, RMSNorm
from scanl.layers.state import State
from scanl.ops import slstm

EPS = 1e-6
EXPANSION, MULTIPLE = 2.6667, 64  # of the hidden numbers of the gated map after an xLSTM
ATTENTION_EXPANSION = 4  # of those of the map after the attention

ACTIVATIONS = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu, "tanh": torch.tanh}


class TiRexSLSTM(nn.Module):
    """An sLSTM without a convolution. Its state is (N, 4, H, K).

    Parameters: fgate, igate, zgate, ogate.weight (H, K, K), where fgate feeds i and igate feeds f; _recurrent_kernel_
    (4, H, K, K), outputs before inputs; _bias_ (H, 4, K); group_norm.weight (H K). Gates are in the order i,
    f, z, o.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        width = dim // heads
        self.fgate, self.igate, self.zgate, self.ogate = (BlockDiagonalMap(dim, heads, dim**-0.5) for _ in range(4))
        self._recurrent_kernel_ = nn.Parameter(torch.randn(4, heads, width, width) / dim**0.5)
        self._bias_ = nn.Parameter(torch.zeros(heads, 4, width))
        self.group_norm = HeadNorm(dim, EPS, zero_centered=False)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        gates = torch.stack([gate(x) for gate in (self.fgate, self.igate, self.zgate, self.ogate)], 2)
        bias = self._bias_.transpose(0, 1)
        h, after = slstm(gates.unflatten(-1, bias.shape[1:]) + bias, self._recurrent_kernel_, state)
        return self.group_norm(h).to(x.dtype), after


class TiRexTimeMixer(nn.Module):
    """An xLSTM and a gated map of the channels, each after a norm and with a residual connection.

    Rows whose future is known are read backwards too, by the same xLSTM, and `combination` maps both outputs to one.
    """

    kinds: ClassVar = {"slstm": TiRexSLSTM, "mlstm": lambda dim, heads: MLSTMLarge(dim, heads, norm_eps=EPS)}

    def __init__(self, dim: int, kind: str, heads: int) -> None:
        super().__init__()
        self.norm_lstm, self.norm_ffn = RMSNorm(dim, EPS), RMSNorm(dim, EPS)
        self.cell = self.kinds[kind](dim, heads)
        self.combination = nn.Linear(2 * dim, dim, bias=False)
        self.ffn = GatedMLP(dim, EXPANSION, multiple_of=MULTIPLE)

    def forward(self, x: Tensor, state: State, end: int, first: int, backwards: Tensor | None) -> tuple[Tensor, State]:
        """Map x (N, L, D) to y of the tokens from `first` on, and the state after the first `end` tokens.

        backwards: the numbers of the rows that are read backwards too; None for none.
        """
        z = self.norm_lstm(x)
        y, state = self.cell(z[:, :end], state)
        if end < x.shape[1]:
            y = torch.cat([y, self.cell(z[:, end:], state)[0]], 1)
        if backwards is not None and len(backwards):
            back, _ = self.cell(z[backwards].flip(1), None)
            y = y.index_copy(0, backwards, self.combination(torch.cat([y[backwards], back.flip(1)], -1)))
        y = x[:, first:] + y[:, first:]
        return y + self.ffn(self.norm_ffn(y))[0], state


class TiRexAttention(nn.Module):
    """Attention among the variates of a group at each token, with keys and queries of unit length if `unit`."""

    def __init__(self, dim: int, heads: int, unit: bool) -> None:
        super().__init__()
        self.heads, self.unit = heads, unit
        self.WK, self.WQ, self.WV, self.WO = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Map x (G, V, L, D). mask: (V, V), True where a variate reads another one; None for all."""
        q, k, v = (linear(x).unflatten(-1, (self.heads, -1)) for linear in (self.WQ, self.WK, self.WV))
        if self.unit:
            q, k = (F.rms_norm(part, part.shape[-1:]) for part in (q, k))
        # variates stand where torch has time
        q, k, v = (part.permute(0, 2, 3, 1, 4).flatten(0, 1) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.WO(y.unflatten(0, (x.shape[0], x.shape[2])).permute(0, 3, 1, 2, 4).flatten(3))


class TiRexVariateMixer(nn.Module):
    """Attention among variates and a map of the channels, each after a norm and with a residual connection."""

    def __init__(self, dim: int, heads: int, unit: bool, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.norm_attn, self.norm_ffn = RMSNorm(dim, EPS), RMSNorm(dim, EPS)
        self.attn = TiRexAttention(dim, heads, unit)
        self.wi = nn.Linear(dim, ATTENTION_EXPANSION * dim, bias=False)
        self.wo = nn.Linear(ATTENTION_EXPANSION * dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attn(self.norm_attn(x), mask)
        return x + self.wo(self.activation(self.wi(self.norm_ffn(x))))


class TiRexBlock(nn.Module):
    """A time mixer, and among several variates a variate mixer."""

    def __init__(self, dim: int, kind: str, heads: int, attention_heads: int, unit: bool, activation: str) -> None:
        super().__init__()
        self.time_mixer = TiRexTimeMixer(dim, kind, heads)
        self.variate_mixer = TiRexVariateMixer(dim, attention_heads, unit, activation)

    def forward(self, x: Tensor, state: State, mask: Tensor | None, **places: Any) -> tuple[Tensor, State]:
        """Map x (G, V, L, D), and return the state. mask: as of `TiRexAttention`.   places: as of `TiRexTimeMixer`."""
        y, state = self.time_mixer(x.flatten(0, 1), state, **places)
        y = y.unflatten(0, x.shape[:2])
        if x.shape[1] > 1:
            y = self.variate_mixer(y, mask)
        return y, state


class TiRexMap(nn.Module):
    """W2 f(W1 x + b1) + b2 + W3 x + b3."""

    def __init__(self, dim: int, hidden: int, out: int, activation: str) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.hidden_layer, self.output_layer = nn.Linear(dim, hidden), nn.Linear(hidden, out)
        self.residual_layer = nn.Linear(dim, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_layer(self.activation(self.hidden_layer(x))) + self.residual_layer(x)
