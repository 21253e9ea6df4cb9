r"""Log-linear gated DeltaNet: gated DeltaNets over O(log T) blocks of the past, each read with a weight of its own.

.. math:: o_t = \sum_l \lambda_t^{(l)} S_t^{(l)\top} q_t / \sqrt{K}, \quad
          \lambda_t^{(l)} = \mathrm{softplus}(L_l (W_\lambda x_t)_l)
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import UNDECAYED, register, widen
from scanl.layers.memory.gated_deltanet import GatedDeltaNet
from scanl.layers.parts.levels import count_levels, levels
from scanl.layers.parts.positions import check_length, positions
from scanl.layers.parts.query_key_value import Windows
from scanl.layers.state import Device, DType
from scanl.ops import delta_rule
from scanl.ops._frame.nonfinite import readable
from scanl.ops.delta_rule import unit
from scanl.ops.offsets import sequences


class LevelsState(NamedTuple):
    """State of `LogLinearGatedDeltaNet`.

    recurrent: S of levels 1 to L - 1 (B, H, L - 1, K, V), and the steps read (B, 1).   conv: the last inputs of each
    convolution.
    """

    recurrent: tuple[Tensor, Tensor]
    conv: Windows


@register("log_linear_gated_deltanet")
class LogLinearGatedDeltaNet(GatedDeltaNet):
    """Log-linear attention over gated DeltaNet: each step corrects and decays every level, and writes into the lowest.

    As in `log_linear_mamba2`, the blocks are the nodes of a Fenwick tree, and the L - 1 levels are heads of one
    `delta_rule`. A level that does not take a step's value is corrected towards zero at the step's key. A sequence
    longer than `max_length` raises an error.

    Args:
        dim: D, model width.
        expand_v, head_dim, num_heads, num_v_heads: V = expand_v * head_dim, K, and the heads, as of `gated_deltanet`.
        use_gate: a SiLU gate after the norm of the output.
        use_short_conv: convolutions over q, k and v.
        max_length: length of the longest sequence; it takes L = ⌈log2 max_length⌉ + 1 levels.
        conv_size, conv_bias: W, the window of the convolutions, and their bias.
        norm_eps: ε of the norm.

    Parameters as of `gated_deltanet`; l_proj (H L, D); L (H, L), without weight decay.
    Initialisation: as of `gated_deltanet`; l_proj N(0, 0.02²), L 1.
    State: S of each level (B, H, L - 1, K, V), zeros, the position (B, 1), and the last inputs of the convolutions.
    """

    id = "S-loglinear"
    equation = (
        "o_t = sum_l lambda_t^l (S_t^l)^T q_t / sqrt(K),  S_t^l = (I - beta_t k_t k_t^T) alpha_t S_{t-1}^l, with "
        "beta_t k_t v_t^T in level 0,  lambda_t^l = softplus(L_l (W_l x_t));  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Guo et al., "Log-Linear Attention", arXiv:2506.04761'
    sample: ClassVar = {"head_dim": 3, "num_heads": 2, "num_v_heads": 4, "max_length": 80}
    hints: ClassVar = {"L": UNDECAYED}

    def __init__(
        self,
        dim: int,
        expand_v: float = 2.0,
        head_dim: int | None = None,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        use_gate: bool = True,
        use_short_conv: bool = True,
        max_length: int = 16384,
        conv_size: int = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        if max_length < 1:
            raise ConfigError(f"{self._who()}: max_length is {max_length}, expected at least 1")
        super().__init__(
            dim,
            expand_v,
            head_dim,
            num_heads,
            num_v_heads,
            use_gate=use_gate,
            use_short_conv=use_short_conv,
            conv_size=conv_size,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
        )
        self.max_length, self.levels = max_length, count_levels(max_length)
        self.memory = (self.num_v_heads, self.levels - 1, self.head_dim, self.head_v_dim)
        self.l_proj = nn.Linear(dim, self.num_v_heads * self.levels, bias=False)
        nn.init.normal_(self.l_proj.weight, std=0.02)
        self.L = nn.Parameter(torch.ones(self.num_v_heads, self.levels))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> LevelsState:  # type: ignore[override]
        memories, conv = super().init_state(batch_size, device=device, dtype=dtype)
        return LevelsState((memories, torch.zeros(batch_size, 1, dtype=torch.int64, device=memories.device)), conv)

    def forward(  # type: ignore[override]
        self, x: Tensor, state: LevelsState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, LevelsState]:
        count = self.levels
        if state is None:
            state = self.init_state(sequences(x, cu_seqlens))
            if readable(x):  # no step reads a level above these; all above hold the same, for which the last one stands
                count = min(count, max(0, x.shape[1] - 1).bit_length() + 2)
        qkv, (memories, read), conv = self._read(x, state, cu_seqlens)
        check_length(self._who(), x, read, cu_seqlens, self.max_length)
        q, k = (unit(widen(part).unflatten(-1, (self.num_heads, -1)), 1e-6) for part in qkv[:2])
        v = widen(qkv[2]).unflatten(-1, (self.num_v_heads, -1))
        beta, g = widen(self.b_proj(x)).sigmoid(), self._log_decay(x)
        assert g is not None
        weights = F.softplus(widen(self.L) * widen(self.l_proj(x)).unflatten(-1, (self.num_v_heads, self.levels)))
        places, position = positions(read, x.shape[1], cu_seqlens)
        at = levels(places, count)
        g = g[..., None].masked_fill(at.begins[:, :, None], -torch.inf)
        values = torch.where(at.writes[:, :, None, :, None], v[:, :, :, None], 0)
        strengths = beta[..., None].expand(g.shape)
        o, memories = delta_rule(
            q,
            k,
            values.flatten(2, 3),
            strengths.flatten(2, 3),
            g.flatten(2, 3),
            memories[:, :, : count - 1].flatten(1, 2),
            cu_seqlens=cu_seqlens,
        )
        among = torch.where(at.reads[:, :, None], weights[..., 1:count], 0)
        y = (among[..., None] * o.unflatten(2, (self.num_v_heads, -1))).sum(3)
        own = (q * k).sum(-1).repeat_interleave(self.num_v_heads // self.num_heads, 2) / math.sqrt(self.head_dim)
        y = y + (weights[..., 0] * beta * own)[..., None] * v
        y = self.o_norm(y, None if self.g_proj is None else self.g_proj(x).view_as(y))
        memories = memories.unflatten(1, (self.num_v_heads, -1))
        memories = torch.cat([memories, *[memories[:, :, -1:]] * (self.levels - count)], 2)
        recurrent = (memories, position)
        return self.o_proj(y.to(x.dtype).flatten(-2)), LevelsState(recurrent, conv)
