"""Megalodon: gated attention within chunks, over a complex moving average and timestep normalisation."""

import math
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import InnerState, StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.blocks import Blocks, attend
from scanl.layers.parts.norm import ZeroCenteredRMSNorm
from scanl.layers.parts.rotary import rotate_pairs
from scanl.layers.parts.timestep_norm import TimestepNorm, TimestepNormState
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.ssm.cema import ComplexEMA
from scanl.ops.fused.gated import gated
from scanl.ops.offsets import row_ends
from scanl.options import divides


class MegalodonState(NamedTuple):
    """State of `Megalodon`. Keys and values are those of the present chunk, zeros where it has no steps."""

    norm: Annotated[TimestepNormState, TimestepNormState]
    average: Annotated[Tensor, InnerState("cema")]
    keys: Annotated[Tensor, StateAxes("chunk_size, num_heads, z_dim // num_heads", "keys of the present chunk")]
    values: Annotated[Tensor, StateAxes("chunk_size, num_heads, hidden_dim // num_heads", "its values")]


@registry.register("megalodon")
class Megalodon(Layer):
    """Gated attention of Megalodon: softmax attention within chunks, whose queries and keys read a moving average.

    x_hat is the timestep norm of the input. Queries and keys are made of one normed vector z with two gains and two
    biases, and turned by their position in the chunk. Norm and moving average pass from chunk to chunk.

    Megalodon adds y to its input: x + y is the released block without its channel mixer. In a stack of this library a
    norm stands before the layer. Differs: the released model adds the channel mixer to the input x of the block, and
    not to x + y. Also, a call may end anywhere in a chunk, because the state holds the present chunk.

    Parameters as in the released code: timenorm.weight, timenorm.bias (D); cema as in `cema`; rmsnorm.weight (D); wv,
    wr (V, D), wz (Z, D), wh1 (D, D) with biases; wh2 (D, V) without; gamma, beta (2, Z).
    Initialisation as in that code: linear weights normal with deviation 1/sqrt(3 fan_in), biases as in PyTorch; norms,
    gamma and beta 0, which stands for a factor of 1.
    """

    id = "S-megalodon"
    cost = ("T W", "W")
    equation = (
        "x_hat = TimestepNorm(x),  m = RMSNorm(CEMA(x_hat)),  z = RMSNorm(W_z m),  "
        "q, k = z * (1 + gamma_{1,2}) / sqrt(Z/H) + beta_{1,2},  "
        "y_t = W_h m + U (SiLU(W_r m) * sum_j softmax_j(R_t q_t . R_j k_j) SiLU(W_v x_hat_j))"
    )
    source = ComplexEMA.source.replace("sec. 3.1", "sec. 3")
    op = "segment_attention"
    carried_by = "turns"
    excused: ClassVar = BY_CONVOLUTION
    state: ClassVar = MegalodonState
    sample: ClassVar = {
        "z_dim": 4, "hidden_dim": 6, "num_heads": 2, "state_dim": 2, "chunk_size": 3, "num_groups": 2,
    }  # fmt: skip

    def __init__(
        self,
        dim: options.Dim,
        z_dim: Annotated[
            options.KeyDim | None,
            "Z, channels of queries and keys, a multiple of 2 H; by default D / 4, rounded up to one",
        ] = None,
        hidden_dim: Annotated[
            options.HiddenDim | None, "V, channels of values, a multiple of H; by default 2 D"
        ] = None,
        num_heads: options.FreeHeads = 1,
        state_dim: Annotated[options.StateDim, "N, leaky sums of each channel in the moving average"] = 16,
        chunk_size: Annotated[options.ChunkSize, "W, steps of a chunk"] = 2048,
        num_groups: Annotated[
            options.Groups | None,
            divides("dim"),
            "groups of the timestep norm; by default groups of 32 channels, or one where 32 does not divide D",
        ] = None,
    ) -> None:
        super().__init__()
        hidden_dim = 2 * dim if hidden_dim is None else hidden_dim
        z_dim = -(-dim // (8 * num_heads)) * 2 * num_heads if z_dim is None else z_dim
        if z_dim % (2 * num_heads):
            self._refuse("z_dim", z_dim, f"a multiple of 2 num_heads={2 * num_heads}")
        if hidden_dim % num_heads:
            self._refuse("hidden_dim", hidden_dim, f"a multiple of num_heads={num_heads}")
        self.dim, self.z_dim, self.hidden_dim = dim, z_dim, hidden_dim
        self.num_heads, self.chunk_size = num_heads, chunk_size
        self.num_groups = num_groups or (1 if dim % 32 else dim // 32)
        self.timenorm = TimestepNorm(dim, self.num_groups)
        self.cema = ComplexEMA(dim, state_dim)
        self.rmsnorm = ZeroCenteredRMSNorm(dim, eps=1e-5)
        self.wv, self.wr = (nn.Linear(dim, hidden_dim) for _ in range(2))
        self.wz = nn.Linear(dim, z_dim)
        self.wh1, self.wh2 = nn.Linear(dim, dim), nn.Linear(hidden_dim, dim, bias=False)
        for project in (self.wv, self.wr, self.wz, self.wh1, self.wh2):
            nn.init.kaiming_normal_(project.weight, a=math.sqrt(5))
        self.gamma, self.beta = (nn.Parameter(torch.zeros(2, z_dim)) for _ in range(2))

    def run(self, x: Tensor, state: MegalodonState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MegalodonState]:
        if cu_seqlens is not None and row_ends(cu_seqlens) is not None:
            return each_alone(self.forward, x, state, cu_seqlens)  # pyright: ignore[reportReturnType]
        norm, average, keys, values = state or (None, None, None, None)
        blocks = Blocks(x, None if norm is None else norm.steps, self.chunk_size, cu_seqlens)
        normed, norm = self.timenorm(x, norm, cu_seqlens)
        normed = normed.to(x.dtype)
        averaged, average = self.cema(normed, average, cu_seqlens=cu_seqlens)
        m = self.rmsnorm(averaged)
        z = widen(self.wz(m)).unflatten(-1, (self.num_heads, -1))
        z = F.rms_norm(z, z.shape[-1:], eps=1e-5) / math.sqrt(z.shape[-1])
        gains, biases = (tensor.unflatten(-1, z.shape[-2:]) for tensor in (1 + widen(self.gamma), widen(self.beta)))
        rates = 10000.0 ** (-torch.arange(0, z.shape[-1], 2, device=x.device, dtype=torch.float64) / z.shape[-1])
        angles = blocks.steps[..., None, None] * rates
        q, k = (rotate_pairs(z * gain + bias, angles) for gain, bias in zip(gains, biases, strict=True))
        v = widen(F.silu(self.wv(normed))).unflatten(-1, (self.num_heads, -1))
        k, v = blocks.keys(k, keys), blocks.keys(v, values)
        read_out = attend(q, k, v, blocks, 1.0).flatten(-2).to(x.dtype)
        y = self.wh1(m) + self.wh2(gated(self.wr(m), read_out))
        return y, MegalodonState(norm, average, blocks.kept(k), blocks.kept(v))
