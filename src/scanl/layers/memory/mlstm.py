r"""mLSTM: a matrix memory with exponential gates.

.. math:: C_t = f_t C_{t-1} + i_t k_t v_t^\top, \; n_t = f_t n_{t-1} + i_t k_t, \quad
          h_t = \frac{C_t^\top q_t}{\max(|n_t^\top q_t|, 1)}, \quad
          i_t = e^{\tilde\imath_t}, \; f_t = \sigma(\tilde f_t)
"""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register, widen
from scanl.layers.module import Module
from scanl.layers.packing import sequence_index
from scanl.layers.parts.block_diagonal import BlockDiagonal
from scanl.layers.parts.norm import HeadNorm
from scanl.layers.parts.short_convolution import ShortConvolution
from scanl.layers.state import Device, DType
from scanl.ops import associative_scan, linear_attention
from scanl.ops._frame.opaque import opaque


class MLSTMCell(Module):
    """Gates and norm. The gates read queries, keys and values; `forward` returns ĩ and ln f, (B, T, H) each."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.igate, self.fgate = nn.Linear(3 * width, num_heads), nn.Linear(3 * width, num_heads)
        self.outnorm = HeadNorm(width)
        for gate in (self.igate, self.fgate):
            nn.init.zeros_(gate.weight)
        nn.init.normal_(self.igate.bias, std=0.1)
        with torch.no_grad():
            self.fgate.bias.copy_(torch.linspace(3, 6, num_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        qkv = torch.cat([q, k, v], -1)
        return widen(self.igate(qkv)), F.logsigmoid(widen(self.fgate(qkv)))


class MLSTMState(NamedTuple):
    """State of `MLSTM`.

    memory: e^-m C, with e^-m n in the last column, (B, H, P, P+1).   m: the stabiliser (B, H).
    conv: the last W-1 inputs of the convolution (B, W-1, width).
    """

    memory: Tensor
    m: Tensor
    conv: Tensor


@register("mlstm")
class MLSTM(Layer):
    """mLSTM with the projections of its block: up, convolution, heads, skip and gate, down.

    To keep the exponential gates from overflow, the memory is stored with the factor e^-m, where
    m_t = max(ln f_t + m_{t-1}, ĩ_t). The denominator is max(|n·q|, e^-m) + 1e-6. Both are as in the released code.

    Args:
        dim: D, model width.
        num_heads: H.
        proj_factor: all heads together have proj_factor * D channels, rounded up; each has P.
        round_proj_up_to_multiple_of: the number of these channels is rounded up to a multiple of this.
        conv1d_kernel_size: W, window of the convolution.
        qkv_proj_blocksize: size of the diagonal blocks of the projections to q, k and v.
        bias: biases in the projections.
        num_blocks: L, for the initialisation; by default the number of layers in the stack, or 1 outside a stack.

    Parameters as in xlstm's mLSTMLayer: proj_up (2 width, D); q_proj, k_proj, v_proj.weight (width / size, size, size);
    conv1d.conv.weight (width, 1, W) and its bias; mlstm_cell.igate and .fgate (H, 3 width) with biases;
    mlstm_cell.outnorm.weight, learnable_skip (width); proj_down (D, width).
    Initialisation: proj_up, q, k and v N(0, 2/(5D)); proj_down N(0, (2/L)²/D); the gates' weights 0, their
    biases N(0, 0.1²) for i and linspace(3, 6) over the heads for f; the skip 1; the convolution as in PyTorch.
    State: see MLSTMState; zeros.
    """

    id = "S-mlstm"
    equation = (
        "C_t = f_t C_{t-1} + i_t k_t v_t^T,  n_t = f_t n_{t-1} + i_t k_t,  h_t = C_t^T q_t / max(|n_t . q_t|, 1),  "
        "i_t = exp(w_i . x),  f_t = sigmoid(w_f . x)"
    )
    source = 'Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517, eq. (19) to (27)'
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 2, "proj_factor": 1.0, "round_proj_up_to_multiple_of": 4}
    residual_out = "proj_down"
    residual_by_depth = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 4,
        proj_factor: float = 2.0,
        round_proj_up_to_multiple_of: int = 64,
        conv1d_kernel_size: int = 4,
        qkv_proj_blocksize: int = 4,
        bias: bool = False,
        num_blocks: int | None = None,
    ) -> None:
        super().__init__()
        blocks = 1 if num_blocks is None else num_blocks
        if min(dim, round_proj_up_to_multiple_of, conv1d_kernel_size, blocks) < 1 or not proj_factor > 0:
            raise ConfigError(
                f"mlstm: proj_factor is {proj_factor}, round_proj_up_to_multiple_of is {round_proj_up_to_multiple_of}, "
                f"conv1d_kernel_size is {conv1d_kernel_size} and num_blocks is {num_blocks}, expected positive numbers"
            )
        width = math.ceil(proj_factor * dim / round_proj_up_to_multiple_of) * round_proj_up_to_multiple_of
        for option, divisor in (("num_heads", num_heads), ("qkv_proj_blocksize", qkv_proj_blocksize)):
            if divisor < 1 or width % divisor:
                raise ConfigError(
                    f"mlstm: {option} is {divisor}, expected a divisor of {width} channels because of proj_factor"
                )
        self.dim, self.num_heads, self.width, self.num_blocks = dim, num_heads, width, num_blocks
        small = math.sqrt(2 / (5 * dim))
        self.proj_up = nn.Linear(dim, 2 * width, bias=bias)
        self.q_proj, self.k_proj, self.v_proj = (
            BlockDiagonal(width, width // qkv_proj_blocksize, small, bias) for _ in range(3)
        )
        self.conv1d = ShortConvolution(width, conv1d_kernel_size)
        self.mlstm_cell = MLSTMCell(width, num_heads)
        self.learnable_skip = nn.Parameter(torch.ones(width))
        self.proj_down = nn.Linear(width, dim, bias=bias)
        nn.init.normal_(self.proj_up.weight, std=small)
        if bias:
            nn.init.zeros_(self.proj_up.bias)
            nn.init.zeros_(self.proj_down.bias)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        nn.init.normal_(self.proj_down.weight, std=2 / (self.num_blocks or len(layers)) / math.sqrt(self.dim))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MLSTMState:
        size = self.width // self.num_heads
        return MLSTMState(
            self._zeros(batch_size, self.num_heads, size, size + 1, device=device, dtype=dtype, at_least=torch.float32),
            self._zeros(batch_size, self.num_heads, device=device, dtype=dtype, at_least=torch.float32),
            self.conv1d.init_state(batch_size, device=device, dtype=dtype),
        )

    def forward(
        self, x: Tensor, state: MLSTMState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MLSTMState]:
        memory, m, window = self._begin(x, state, cu_seqlens)
        inner, z = self.proj_up(x).chunk(2, -1)
        conv, window = self.conv1d(inner, window, cu_seqlens=cu_seqlens)
        conv = F.silu(conv)
        q, k, v = self.q_proj(conv), self.k_proj(conv), self.v_proj(inner)
        i, log_f = self.mlstm_cell(q, k, v)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in (q, k, v))
        h, memory, m = remember(q, k, v, i, log_f, memory, m, cu_seqlens)
        h = self.mlstm_cell.outnorm(h).to(x.dtype) + self.learnable_skip * conv
        return self.proj_down(h * F.silu(z)), MLSTMState(memory, m, window)


def remember(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    log_f: Tensor,
    memory: Tensor,
    m: Tensor,
    cu_seqlens: Tensor | None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the memory. Return h (B, T, H, V), and the memory and m after the last step, as in MLSTMState.

    q, k: (B, T, H, K).   v: (B, T, H, V).   i, log_f: ĩ and ln f (B, T, H).
    """
    now, before, m = stabiliser(i, log_f, m.to(i.dtype), cu_seqlens)
    k = k * ((i - now).exp() / math.sqrt(k.shape[-1]))[..., None]
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    h, memory = linear_attention(widen(q), k, v, log_f + before - now, state=memory, scale=1.0, cu_seqlens=cu_seqlens)
    return h[..., :-1] / (torch.maximum(h[..., -1].abs(), (-now).exp()) + eps)[..., None], memory, m


def stabiliser(i: Tensor, log_f: Tensor, m: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return m_t = max(ln f_t + m_{t-1}, ĩ_t) at each step and before each step (B, T, H), and at the end (B, H).

    A step is the map m -> max(m + a, b). The composition of two such maps is another one, so a scan computes them all.
    A sum of ln f from the start would lose digits on long streams.
    """
    length = i.shape[1]
    if length == 0:
        return i, i, m
    steps = torch.arange(length, device=i.device)
    if cu_seqlens is None:
        start, first = steps == 0, m[:, None]
    else:
        owner = sequence_index(cu_seqlens, length)
        start, first = steps == cu_seqlens[owner], m[owner][None]
    start = start[:, None]
    forget = log_f.masked_fill(start, -torch.inf)  # `first` includes the effect of earlier steps
    enter = torch.where(start, torch.maximum(log_f + first, i), i)
    (now,) = _running(forget, enter, start[None].expand(i.shape[0], -1, -1))
    before = torch.where(start, first, F.pad(now, (0, 0, 1, 0))[:, :-1])
    if cu_seqlens is None:
        return now, before, now[:, -1]
    ends = (cu_seqlens[1:] - 1).clamp(min=0)
    return now, before, torch.where((cu_seqlens.diff() > 0)[:, None], now[0, ends], m)


@opaque(
    "running_stabiliser(Tensor forget, Tensor enter, Tensor start) -> Tensor[]",
    lambda forget, enter, start: [torch.empty_like(enter)],
)
def _running(forget: Tensor, enter: Tensor, start: Tensor) -> list[Tensor]:
    return [associative_scan(_compose, (forget, enter, start))[1]]


def _compose(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Compose two maps m -> max(m + a, b). The start of a sequence drops everything before it, even NaN."""
    (a, b, begun), (c, d, begins) = left, right
    a, b = a.masked_fill(begins, -torch.inf), b.masked_fill(begins, -torch.inf)
    return a + c, torch.maximum(b + c, d), begun | begins
