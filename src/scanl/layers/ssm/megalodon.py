r"""Megalodon: gated attention within chunks, over a complex moving average and timestep normalisation.

.. math:: h_t = q \odot h_{t-1} + p\, x_t, \quad \mathrm{CEMA}(x)_t = \mathrm{Re} \tfrac{1}{\sqrt N} \sum_n \gamma_n
          h_{t,n} + \omega x_t, \quad q_n = (1 - \sigma(\alpha)\, \sigma(\delta))\, e^{2 \pi i n \sigma(\theta) / N}
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register, widen
from scanl.layers.parts.blocks import Blocks, attend
from scanl.layers.parts.diagonal_ssm import diagonal_ssm
from scanl.layers.parts.norm import ZeroCenteredRMSNorm
from scanl.layers.parts.rotary import rotate_pairs
from scanl.layers.parts.timestep_norm import TimestepNorm, TimestepNormState
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.state import Device, DType


@register("cema")
class ComplexEMA(Layer):
    """Complex moving average of Megalodon: N leaky sums per channel, which rotate and are added with complex weights.

    The sums of a channel rotate by multiples of one angle. As in the released code, p is real. In the paper p x is
    rotated, too.

    Args:
        dim: D, channels.
        ndim: N, leaky sums of each channel.

    Parameters as in the released code: alpha, delta (D, N, 1), the logits of the step p and of the damping; theta
    (D, 1, 1); gamma (D, N, 2), real and imaginary part; omega (D, 1).
    Initialisation as there: alpha, delta N(0, 0.2²); sigmoid(theta) = D^(-j/D), j = 1 to D in random order; gamma
    N(0, 1), its imaginary part 0; omega normal with deviation 0.25, cut off at 1.
    State: (B, D, N), complex.
    """

    id = "S-megalodon"
    equation = (
        "h_t = q * h_{t-1} + p x_t,  p = sigmoid(alpha),  q_n = (1 - p sigmoid(delta)) "
        "exp(2 pi i n sigmoid(theta) / N),  y_t = Re sum_n gamma_n h_{t,n} / sqrt(N) + omega x_t"
    )
    source = (
        'Ma et al., "Megalodon: Efficient LLM Pretraining and Inference with Unlimited Context Length", '
        "arXiv:2404.08801, sec. 3.1, and its code"
    )
    op = "linear_scan"
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"ndim": 3}

    def __init__(self, dim: int, ndim: int = 16) -> None:
        super().__init__()
        if ndim < 1:
            raise ConfigError(f"cema: ndim is {ndim}, expected at least 1")
        self.dim, self.ndim = dim, ndim
        self.alpha, self.delta = (nn.Parameter(0.2 * torch.randn(dim, ndim, 1)) for _ in range(2))
        turns = torch.exp(-(1 + torch.randperm(dim)) * math.log(dim) / dim)
        self.theta = nn.Parameter(torch.logit(turns, 1e-6).view(dim, 1, 1))  # of one channel the logit is not finite
        self.gamma = nn.Parameter(torch.stack([torch.randn(dim, ndim), torch.zeros(dim, ndim)], -1))
        self.omega = nn.Parameter(nn.init.trunc_normal_(torch.empty(dim, 1), std=0.25, a=-1.0, b=1.0))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor:
        return self._zeros(batch_size, self.dim, self.ndim, device=device, dtype=dtype, at_least=torch.complex64)

    def forward(
        self, x: Tensor, state: Tensor | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        self._check(x, state, cu_seqlens)
        p = widen(self.alpha)[..., 0].sigmoid()
        turn = torch.arange(1, self.ndim + 1, device=x.device) * widen(self.theta)[..., 0].sigmoid()
        A = torch.complex(torch.log1p(-p * widen(self.delta)[..., 0].sigmoid()), turn * (2 * math.pi / self.ndim))
        C = torch.view_as_complex(widen(self.gamma)) / (2 * math.sqrt(self.ndim))  # `diagonal_ssm` reads 2 Re C h
        u = widen(x)
        average, last = diagonal_ssm(
            u, A, p.to(A.dtype), C, torch.ones_like(p[:, 0]), state, discretization="dirac", cu_seqlens=cu_seqlens
        )
        return torch.addcmul(average, u, widen(self.omega)[:, 0]).to(x.dtype), last


class MegalodonState(NamedTuple):
    """State of `Megalodon`.

    norm: of the timestep norm.   average: of the moving average (B, D, N).   keys (B, W, H, Z / H), values (B, W, H,
    V / H): those of the present chunk, zeros where it has no steps.
    """

    norm: TimestepNormState
    average: Tensor
    keys: Tensor
    values: Tensor


@register("megalodon")
class Megalodon(Layer):
    """Gated attention of Megalodon: softmax attention within chunks, whose queries and keys read a moving average.

    x_hat is the timestep norm of the input. Queries and keys are made of one normed vector z with two gains and two
    biases, and turned by their position in the chunk. Norm and moving average pass from chunk to chunk.

    Megalodon adds y to its input: x + y is the released block without its channel mixer. In a stack of this library a
    norm stands before the layer. Differs: the released model adds the channel mixer to the input x of the block, and
    not to x + y. Also, a call may end anywhere in a chunk, because the state holds the present chunk.

    Args:
        dim: D, model width.
        z_dim: Z, channels of queries and keys; by default D / 4, rounded up to a multiple of 2 H.
        hidden: V, channels of values; by default 2 D.
        num_heads: H; each has Z / H channels of queries, an even number, and V / H of values.
        ndim: N, leaky sums of each channel in the moving average.
        chunk_size: W, steps of a chunk.
        norm_groups: groups of the timestep norm; by default groups of 32 channels, or one where 32 does not divide D.

    Parameters as in the released code: timenorm.weight, timenorm.bias (D); cema as in `cema`; rmsnorm.weight (D); wv,
    wr (V, D), wz (Z, D), wh1 (D, D) with biases; wh2 (D, V) without; gamma, beta (2, Z).
    Initialisation as there: linear weights normal with deviation 1/sqrt(3 fan_in), biases as in PyTorch; norms, gamma
    and beta 0, which stands for a factor of 1.
    State: MegalodonState.
    """

    id = "S-megalodon"
    equation = (
        "x_hat = TimestepNorm(x),  m = RMSNorm(CEMA(x_hat)),  z = RMSNorm(W_z m),  "
        "q, k = z * (1 + gamma_{1,2}) / sqrt(Z/H) + beta_{1,2},  "
        "y_t = W_h m + U (SiLU(W_r m) * sum_j softmax_j(R_t q_t . R_j k_j) SiLU(W_v x_hat_j))"
    )
    source = ComplexEMA.source.replace("sec. 3.1", "sec. 3")
    op = "segment_attention"
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"z_dim": 4, "hidden": 6, "num_heads": 2, "ndim": 2, "chunk_size": 3, "norm_groups": 2}

    def __init__(
        self,
        dim: int,
        z_dim: int | None = None,
        hidden: int | None = None,
        num_heads: int = 1,
        ndim: int = 16,
        chunk_size: int = 2048,
        norm_groups: int | None = None,
    ) -> None:
        super().__init__()
        hidden = 2 * dim if hidden is None else hidden
        if z_dim is None:
            z_dim = -(-dim // (8 * max(1, num_heads))) * 2 * num_heads
        if num_heads < 1 or z_dim < 1 or z_dim % (2 * num_heads):
            raise ConfigError(f"megalodon: z_dim is {z_dim}, expected a multiple of 2 num_heads={2 * num_heads}")
        if hidden < 1 or hidden % num_heads:
            raise ConfigError(f"megalodon: hidden is {hidden}, expected a multiple of num_heads={num_heads}")
        if chunk_size < 1:
            raise ConfigError(f"megalodon: chunk_size is {chunk_size}, expected at least 1")
        self.dim, self.z_dim, self.hidden, self.num_heads, self.chunk_size = dim, z_dim, hidden, num_heads, chunk_size
        groups = norm_groups or (1 if dim % 32 else dim // 32)
        self.timenorm = TimestepNorm(dim, groups)
        self.cema = ComplexEMA(dim, ndim)
        self.rmsnorm = ZeroCenteredRMSNorm(dim, eps=1e-5)
        self.wv, self.wr = (nn.Linear(dim, hidden) for _ in range(2))
        self.wz = nn.Linear(dim, z_dim)
        self.wh1, self.wh2 = nn.Linear(dim, dim), nn.Linear(hidden, dim, bias=False)
        for project in (self.wv, self.wr, self.wz, self.wh1, self.wh2):
            nn.init.kaiming_normal_(project.weight, a=math.sqrt(5))
        self.gamma, self.beta = (nn.Parameter(torch.zeros(2, z_dim)) for _ in range(2))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> MegalodonState:
        kind = {"device": device, "dtype": dtype}
        keys, values = (
            self._zeros(batch_size, self.chunk_size, self.num_heads, width // self.num_heads, **kind,
                        at_least=torch.float32)
            for width in (self.z_dim, self.hidden)
        )  # fmt: skip
        sums, rest = (
            self._zeros(batch_size, 2, self.timenorm.groups, **kind, at_least=torch.float32) for _ in range(2)
        )
        norm = TimestepNormState(self._zeros(batch_size, 1, device=device, dtype=torch.int64), sums, rest)
        return MegalodonState(norm, self.cema.init_state(batch_size, **kind), keys, values)

    def forward(
        self, x: Tensor, state: MegalodonState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MegalodonState]:
        self._check(x, state, cu_seqlens)
        norm, average, keys, values = (None, None, None, None) if state is None else state
        blocks = Blocks(x, None if norm is None else norm.steps, self.chunk_size, cu_seqlens)
        normed, norm = self.timenorm(x, norm, cu_seqlens)
        normed = normed.to(x.dtype)
        averaged, average = self.cema(normed, average, cu_seqlens=cu_seqlens)
        m = self.rmsnorm(averaged)
        z = widen(self.wz(m)).unflatten(-1, (self.num_heads, -1))
        z = F.rms_norm(z, z.shape[-1:], eps=1e-5) / math.sqrt(z.shape[-1])
        gains, biases = (each.unflatten(-1, z.shape[-2:]) for each in (1 + widen(self.gamma), widen(self.beta)))
        rates = 10000.0 ** (-torch.arange(0, z.shape[-1], 2, device=x.device, dtype=torch.float64) / z.shape[-1])
        angles = blocks.steps[..., None, None] * rates
        q, k = (rotate_pairs(z * gain + bias, angles) for gain, bias in zip(gains, biases, strict=True))
        v = widen(F.silu(self.wv(normed))).unflatten(-1, (self.num_heads, -1))
        k, v = blocks.keys(k, keys), blocks.keys(v, values)
        read_out = attend(q, k, v, blocks, 1.0).flatten(-2).to(x.dtype)
        y = self.wh1(m) + self.wh2(read_out * F.silu(self.wr(m)))
        return y, MegalodonState(norm, average, blocks.kept(k), blocks.kept(v))
