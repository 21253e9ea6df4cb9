"""Approximate recurrent linear transformer: traces of keys and values, modulated by cosines, replace outer products."""

import math
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.layers import options, registry
from scanl.layers.initial_state import StateAxes
from scanl.layers.memory.relit import Eta, GatedOuterProducts, HeadDim, expand
from scanl.layers.parts.positions import positions
from scanl.ops import linear_scan


class AReLiTState(NamedTuple):
    keys: Annotated[Tensor, StateAxes("rank, num_heads, eta * head_dim", "traces of keys")]
    values: Annotated[Tensor, StateAxes("rank, num_heads, head_dim", "traces of values")]
    normalizer: Annotated[Tensor, StateAxes("num_heads, eta * head_dim", "s")]
    steps: Annotated[Tensor, StateAxes("1", "count of steps", dtype=torch.int64, after=torch.add)]


@registry.register("arelit")
class AReLiT(GatedOuterProducts):
    """AReLiT (later AGaLiTe): ReLiT with r traces of vectors in place of a memory of outer products.

    With r above the length of the sequence, 4 o_t is the recurrence whose decay is (1 - β)(1 - γ)ᵀ, and not that of
    `relit`; W_o can learn the factor. As in the released code, the frequencies are linspace(-π, π, r), and the count τ
    is 2 at the first step. As for `relit`, the authors' block is not part of this layer.

    Parameters as in the released code: linear_kqvbetagammas (5 H K, D), in which the rows of a head are together;
    linear_p1p2p3 (3 H η, D); project (D, H K); all with biases.
    Initialisation: orthogonal with gain sqrt(2), biases 0.
    """

    id = "S-arelit"
    aliases = ("AGaLiTe", "approximate_recurrent_linear_transformer")
    equation = (
        "k^m_t = (1 - g) * k^m_{t-1} + cos(w_m tau) g * k_t,  v^m_t = (1 - b) * v^m_{t-1} + cos(w_m tau) b * v_t,  "
        "s_t = (1 - g) * s_{t-1} + g * k_t,  o_t = sum_m (k^m_t . q_t) v^m_t / (2 r s_t . q_t + eps)"
    )
    source = (
        'Pramanik, Elelimy, Machado and White, "AGaLiTe: Approximate Gated Linear Transformers for Online '
        'Reinforcement Learning", arXiv:2310.15719, sec. 4'
    )
    op = "linear_scan"
    expansions = 3
    state: ClassVar = AReLiTState
    sample: ClassVar = {"num_heads": 2, "head_dim": 5, "eta": 3}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 4,
        head_dim: HeadDim = None,
        eta: Eta = 4,
        rank: Annotated[options.Rank, "r, number of frequencies"] = 2,
        eps: options.Eps = 1e-5,
    ) -> None:
        super().__init__(dim, num_heads, head_dim, eta)
        self.rank, self.eps = rank, eps

    def run(self, x: Tensor, state: AReLiTState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, AReLiTState]:
        keys, values, normalizer, past = self._begin(x, state, cu_seqlens)
        steps, past = positions(past, x.shape[1], cu_seqlens)
        k, q, v, beta, gamma, p1, p2, p3 = self._project(x)
        q, beta, gamma = expand(q.relu(), p2.relu()), beta.sigmoid(), expand(gamma.sigmoid(), p3.sigmoid())
        k, v = gamma * expand(k.relu(), p1.relu()), beta * v
        omegas = torch.linspace(-math.pi, math.pi, self.rank, device=x.device, dtype=torch.float64)
        waves = ((steps[..., None] + 2) * omegas).cos().to(k.dtype)[..., None, None]
        ks, keys = linear_scan(waves * k.unsqueeze(2), 1 - gamma.unsqueeze(2), keys, cu_seqlens=cu_seqlens)
        vs, values = linear_scan(waves * v.unsqueeze(2), 1 - beta.unsqueeze(2), values, cu_seqlens=cu_seqlens)
        s, normalizer = linear_scan(k, 1 - gamma, normalizer, cu_seqlens=cu_seqlens)
        top = torch.einsum("btrh,btrhv->bthv", torch.einsum("btrhk,bthk->btrh", ks, q), vs)
        o = top / (2 * self.rank * (s * q).sum(-1, keepdim=True) + self.eps)
        return self.project(o.flatten(-2).to(x.dtype)), AReLiTState(keys, values, normalizer, past)
