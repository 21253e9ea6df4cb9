"""Recurrent linear transformer: an outer-product memory whose every entry has its own gate."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.cell_cases import cases
from scanl.ops import linear_scan
from scanl.ops.cell import cell
from scanl.options import at_least

SOURCE = (
    'Pramanik, Elelimy, Machado and White, "Recurrent Linear Transformers", arXiv:2310.15719, sec. 3, with the '
    "queries of the released code"
)


@cell(
    "q: B T H K, k: B T H K, g: B T H K, v: B T H V, b: B T H V, state: B H V K -> B T H V",
    equation="C_t = (1 - b g^T) * C_{t-1} + (b g^T) * (v k^T),  o_t = C_t q_t",
    source=SOURCE,
)
def gated_outer_product_cell(q, k, g, v, b, state):
    """Step a memory of outer products whose entry of row n and column m has the gate b_n g_m, and read it.

    q, k: queries and keys, (B, T, H, K).   g: gates of columns, in [0, 1], likewise.   v: values, (B, T, H, V).
    b: gates of rows, in [0, 1], likewise.   state: C, (B, H, V, K).
    """
    write = b[..., None] * g[..., None, :]
    state = (1 - write) * state + write * (v[..., None] * k[..., None, :])
    return (state * q[..., None, :]).sum(-1), state


cases(
    gated_outer_product_cell,
    "H=2 K=3 V=4",
    "b has shape (2, 5, 2, 3), expected (B, T, H, V)",
    "state has shape (2, 2, 4), expected (B, H, V, K)",
    g=Tensor.sigmoid,
    b=Tensor.sigmoid,
)


@gated_outer_product_cell.backend("parallel")
def _as_scan(q: Tensor, k: Tensor, g: Tensor, v: Tensor, b: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Make the gates and the writes of all steps, and scan each entry for itself."""
    write = b.unsqueeze(-1) * g.unsqueeze(-2)
    C, last = linear_scan(write * v.unsqueeze(-1) * k.unsqueeze(-2), 1 - write, state)
    return torch.einsum("...vk,...k->...v", C, q), last


HeadDim = Annotated[
    options.HeadDim | None,
    "K, channels of keys, queries and values before their expansion; by default dim / num_heads, rounded down. The "
    "authors have 64 for a dim of 128",
]
Eta = Annotated[int, at_least(1), "η, factor of the expansion"]


class GatedOuterProducts(Layer):
    """Base class of `relit` and `arelit`: expanded keys and gates."""

    residual_out = "project"
    expansions: ClassVar[int]  # vectors of η numbers that linear_p1p2p3 gives for each head

    def __init__(self, dim: options.Dim, num_heads: options.FreeHeads, head_dim: HeadDim, eta: Eta) -> None:
        super().__init__()
        head_dim = head_dim or max(1, dim // num_heads)
        self.dim, self.num_heads, self.head_dim, self.eta = dim, num_heads, head_dim, eta
        self.linear_kqvbetagammas = nn.Linear(dim, 5 * num_heads * head_dim)
        self.linear_p1p2p3 = nn.Linear(dim, self.expansions * num_heads * eta)
        self.project = nn.Linear(num_heads * head_dim, dim)
        for linear in (self.linear_kqvbetagammas, self.linear_p1p2p3, self.project):
            nn.init.orthogonal_(linear.weight, math.sqrt(2))
            nn.init.zeros_(linear.bias)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return k, q, v, β, γ (B, T, H, K) before any activation, then the expansions (B, T, H, η)."""
        parts = widen(self.linear_kqvbetagammas(x)).unflatten(-1, (self.num_heads, 5, self.head_dim)).unbind(-2)
        return *parts, *widen(self.linear_p1p2p3(x)).unflatten(-1, (self.num_heads, -1, self.eta)).unbind(-2)


def expand(x: Tensor, p: Tensor) -> Tensor:
    """Return all products of x (..., K) with p (..., η): (..., η K)."""
    return (p.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)


@registry.register("relit")
class ReLiT(GatedOuterProducts):
    """ReLiT (later GaLiTe): learned expansions of keys and queries, and a gate for each entry of the memory.

    The gate is 1 - β γᵀ, which is not a product of a decay of rows and a decay of columns. So each of the H K (K + 1) η
    numbers of the memory has a gate of its own in each step. A compiled kernel keeps them in the processor's cache.
    Where there is no kernel, as on a GPU, the numbers of all steps are in memory. `arelit` approximates this layer. Two
    things are not part of it: the authors' block, which has gates in place of residual sums, and their reset at the
    start of an episode.

    Parameters: linear_kqvbetagammas (5 H K, D), in which the rows of a head are together; linear_p1p2p3 (2 H η, D);
    query_weight (H, K + η, K) and query_bias (H, K + η), the second map of the queries; project (D, H K).
    Initialisation: of each head the maps to k, q, v, β, γ and to each vector of the expansions orthogonal with gain
    sqrt(2), as in the released code, where they are apart; project likewise; biases 0, but for those of keys, queries
    and their expansions.
    Differs: these are 1, there 0. With 0 most products of four ReLUs are 0, so s . q is often near 0, and the gradient
    of a stack of 12 layers begins at hundreds.
    """

    id = "S-relit"
    aliases = ("recurrent_linear_transformer", "GaLiTe")
    equation = (
        "C_t = (1 - b g^T) * C_{t-1} + (b g^T) * (v k^T),  s_t = (1 - g) * s_{t-1} + g * k,  "
        "o_t = C_t q_t / (s_t . q_t),  k = ReLU(W_k x) (x) ReLU(W_1 x),  g = sigmoid(W_g x) (x) sigmoid(W_3 x)"
    )
    source = SOURCE
    op = "gated_outer_product_cell"
    expansions = 2
    state: ClassVar = StateAxes("num_heads, head_dim + 1, eta * head_dim", "C, with s as its last row")
    sample: ClassVar = {"num_heads": 2, "head_dim": 9, "eta": 8}  # with few channels, all ReLUs of a step may be 0

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 4,
        head_dim: HeadDim = None,
        eta: Eta = 2,
        eps: options.Eps = 1e-10,
    ) -> None:
        super().__init__(dim, num_heads, head_dim, eta)
        self.eps = eps
        width = self.head_dim
        self.query_weight = nn.Parameter(torch.empty(num_heads, width + eta, width))
        self.query_bias = nn.Parameter(torch.ones(num_heads, width + eta))
        for linear, vectors in ((self.linear_kqvbetagammas, 5), (self.linear_p1p2p3, 2)):
            linear.bias.detach().view(num_heads, vectors, -1)[:, 0] = 1  # of k, and of its expansion
        maps = [*self.linear_kqvbetagammas.weight.split(width), *self.linear_p1p2p3.weight.split(eta)]
        for head in self.query_weight:
            maps += head.split([width, eta])
        for matrix in maps:
            nn.init.orthogonal_(matrix.detach(), math.sqrt(2))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        k, q, v, beta, gamma, p1, p3 = self._project(x)
        k, gamma = expand(k.relu(), p1.relu()), expand(gamma.sigmoid(), p3.sigmoid())
        q = torch.einsum("...hk,hmk->...hm", q, widen(self.query_weight)) + widen(self.query_bias)
        q = expand(*q.relu().split([self.head_dim, self.eta], -1))
        v, beta = F.pad(v, (0, 1), value=1.0), F.pad(beta.sigmoid(), (0, 1), value=1.0)  # the last row is s
        o, last = gated_outer_product_cell(q, k, gamma, v, beta, state, cu_seqlens=cu_seqlens)
        o = o[..., :-1] / (o[..., -1:] + self.eps)
        return self.project(o.flatten(-2).to(x.dtype)), last
