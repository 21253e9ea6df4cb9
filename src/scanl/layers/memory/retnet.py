r"""Multi-scale retention, the token mixer of RetNet.

.. math:: S_t = \gamma_h S_{t-1} + k_t v_t^\top, \quad o_t = S_t^\top q_t, \quad
          q_t = e^{i t \theta} W_q x_t, \; k_t = e^{i t \theta} W_k x_t / \sqrt{K}, \quad \gamma_h = 1 - 2^{-5-h}
"""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register
from scanl.layers.parts.positions import positions
from scanl.layers.parts.rotary import rotate_pairs
from scanl.layers.state import Device, DType
from scanl.ops import linear_attention
from scanl.ops.fused.rms_norm import rms_norm


class RetNetState(NamedTuple):
    """State of `RetNet`.

    recurrent: S (B, H, K, V).   steps: number of steps read (B, 1), int64; the rotation continues from it.
    """

    recurrent: Tensor
    steps: Tensor


@register("retnet")
class RetNet(Layer):
    """Retention: rotated queries and keys, a constant decay for each head, and a gate after the norm.

    Differs: the released code also divides the scores by sums that have no gradient. The norm of each head cancels
    that, up to its ε, so it is omitted here, as in the paper's recurrence.

    Args:
        dim: D, model width; H queries and keys of K = D / H channels, an even number.
        num_heads: H. Head h remembers about 2^(5+h) steps.
        value_dim: H V; by default 2 D.
        eps: ε of the norm.

    Parameters as in torchscale: q_proj, k_proj (D, D); v_proj, g_proj (H V, D); out_proj (D, H V). The norm has none.
    Initialisation as there: Xavier uniform with gain 2^(-2.5), for out_proj 2^(-1); until November 2023 it was 1.
    State: S (B, H, K, V), zeros, and the count of steps.
    """

    id = "S-retnet"
    aliases = ("retention",)
    equation = (
        "S_t = gamma_h S_{t-1} + k_t v_t^T,  o_t = S_t^T q_t,  gamma_h = 1 - 2^(-5-h);  "
        "y = W_o (SiLU(W_g x) * RMSNorm(o))"
    )
    source = 'Sun et al., "Retentive Network: A Successor to Transformer for LLMs", arXiv:2307.08621, eq. (6) and (8)'
    op = "linear_attention"
    sample: ClassVar = {"num_heads": 3, "value_dim": 9}
    residual_out = "out_proj"

    def __init__(self, dim: int, num_heads: int = 8, value_dim: int | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        value_dim = 2 * dim if value_dim is None else value_dim
        if num_heads < 1 or dim % (2 * num_heads):
            raise ConfigError(f"retnet: num_heads is {num_heads}, expected a divisor of dim/2={dim / 2:g}")
        if value_dim < 1 or value_dim % num_heads:
            raise ConfigError(f"retnet: value_dim is {value_dim}, expected a multiple of num_heads={num_heads}")
        self.dim, self.num_heads, self.eps = dim, num_heads, eps
        self.key_dim, self.head_dim = dim // num_heads, value_dim // num_heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.g_proj = nn.Linear(dim, value_dim, bias=False), nn.Linear(dim, value_dim, bias=False)
        self.out_proj = nn.Linear(value_dim, dim, bias=False)
        for project in (self.q_proj, self.k_proj, self.v_proj, self.g_proj):
            nn.init.xavier_uniform_(project.weight, gain=2**-2.5)
        nn.init.xavier_uniform_(self.out_proj.weight, gain=2**-1)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> RetNetState:
        shape = (batch_size, self.num_heads, self.key_dim, self.head_dim)
        return RetNetState(
            self._zeros(*shape, device=device, dtype=dtype, at_least=torch.float32),
            self._zeros(batch_size, 1, device=device, dtype=torch.int64),
        )

    def forward(
        self, x: Tensor, state: RetNetState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, RetNetState]:
        recurrent, read = self._begin(x, state, cu_seqlens)
        steps, read = positions(read, x.shape[1], cu_seqlens)
        exponents = torch.arange(self.key_dim // 2, device=x.device, dtype=torch.float64)
        angles = 10000.0 ** (-exponents / max(1, self.key_dim // 2 - 1))  # from 1 to 1/10000
        turn = steps[..., None, None] * angles  # in double: a stream may be a million steps long
        q, k = (
            rotate_pairs(project(x).unflatten(-1, (self.num_heads, -1)), turn) for project in (self.q_proj, self.k_proj)
        )
        v = self.v_proj(x).unflatten(-1, (self.num_heads, -1))
        g = torch.log1p(-torch.exp2(-5.0 - torch.arange(self.num_heads, device=x.device, dtype=torch.float64)))
        o, recurrent = linear_attention(q, k, v, g.to(q.dtype), state=recurrent, cu_seqlens=cu_seqlens)
        o = rms_norm(o, None, self.eps).to(x.dtype)
        return self.out_proj(F.silu(self.g_proj(x)) * o.flatten(-2)), RetNetState(recurrent, read)
