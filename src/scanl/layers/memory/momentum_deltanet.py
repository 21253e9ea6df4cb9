"""Momentum DeltaNet: a delta rule whose corrections are averaged over time before the memory takes them."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, as_widened, widen
from scanl.layers.parts.cell_cases import cases
from scanl.layers.parts.delta_memory import DeltaMemory, ExpandHead
from scanl.layers.parts.query_key_value import MemoryState
from scanl.ops.cell import cell
from scanl.ops.delta_rule import unit

EQUATION = (
    "M_t = mu_t M_{t-1} + eta_t k_t (v_t - alpha_t S_{t-1}^T k_t)^T,  S_t = alpha_t S_{t-1} + beta_t M_t,  "
    "o_t = S_t^T q_t / sqrt(K)"
)
SOURCE = (
    '"MDN: Parallelizing Stepwise Momentum for Delta Linear Attention", arXiv:2605.05838, as in flash-linear-attention'
)


@cell("q: B T K, k: B T K, v: B T V, gates: B T 4, state: B 2 K V -> B T V", equation=EQUATION, source=SOURCE)
def momentum_delta_cell(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Correct the momentum, then the memory, and read. gates: α, μ, β and η.   state: S and M."""
    alpha, mu, beta, eta = gates.split(1, -1)
    memory, momentum = state.unbind(1)
    missing = v - alpha * (k[..., None] * memory).sum(1)
    momentum = mu[..., None] * momentum + (eta * k)[..., None] * missing[:, None]
    memory = alpha[..., None] * memory + beta[..., None] * momentum
    return (q[..., None] * memory).sum(1), torch.stack([memory, momentum], 1)


cases(
    momentum_delta_cell,
    "K=3 V=4",
    "gates has shape (2, 5, 3), expected (B, T, 4) with B=2 from q, T=5 from q",
    gates=Tensor.sigmoid,
)


def _each_head(
    q: Tensor, k: Tensor, v: Tensor, gates: Tensor, state: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the cell with every head as a sequence of its own: heads run on several threads, each state in the cache."""
    batch, steps, heads, _ = q.shape
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v, gates)]
    if cu_seqlens is not None:
        rows = [x.flatten(0, 1)[None] for x in rows]
        starts = cu_seqlens[:-1] + steps * torch.arange(heads, device=cu_seqlens.device)[:, None]
        cu_seqlens = torch.cat([starts.flatten(), starts.new_full((1,), heads * steps)])
    if state is not None:  # heads come first where they are packed one after the other
        state = state.movedim(2, 1 if cu_seqlens is None else 0).flatten(0, 1)
    o, last = momentum_delta_cell(*rows, state, cu_seqlens=cu_seqlens)
    if cu_seqlens is None:
        return o.unflatten(0, (batch, heads)).transpose(1, 2), last.unflatten(0, (batch, heads)).movedim(1, 2)
    o, last = o[0].unflatten(0, (heads, steps)), last.unflatten(0, (heads, last.shape[0] // heads))
    return o.transpose(0, 1)[None], last.movedim(0, 2)


@registry.register("momentum_deltanet")
class MomentumDeltaNet(DeltaMemory):
    """Momentum DeltaNet: gated DeltaNet whose corrections pass through a running average, the momentum.

    The transition of the pair (memory, momentum) is not diagonal plus rank one. So the layer runs as a cell, step by
    step.

    η = 1 + tanh(W_e x / √D), tan θ = η e^{log_factor}, β = sin²θ σ(W_b x), ln α = ln cos²θ - e^{A_log} softplus(W_a x +
    dt_bias), ln μ = -e^{Mu_log} softplus(W_m x + mu_bias). Queries are q - e^{D_log} k. Queries and keys have unit
    length.
    Parameters as in flash-linear-attention: `gated_deltanet`'s; e_proj, m_proj (H, D); mu_bias, Mu_log,
    log_factor, D_log (H), without weight decay.
    Initialisation: as in `gated_deltanet`; Mu_log = ln U(0, 16), log_factor = ln U(0, 4), D_log = ln U(0, 1), mu_bias
    equal to dt_bias.
    """

    id = "S-momentum-delta"
    equation = f"{EQUATION};  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    source = SOURCE
    op = momentum_delta_cell.name
    sample: ClassVar = {"head_dim": 3, "num_heads": 2}
    hints: ClassVar = dict.fromkeys(("mu_bias", "Mu_log", "log_factor", "D_log"), UNDECAYED_HINT)

    def __init__(
        self,
        dim: options.Dim,
        expand_v: ExpandHead = 2.0,
        head_dim: Annotated[
            options.HeadDim | None,
            "K, channels of a query and of a key; by default all heads together are 3/4 dim, rounded",
        ] = None,
        num_heads: options.FreeHeads = 6,
        output_gate: Annotated[options.OutputGate, "a SiLU gate after the norm"] = True,
        min_log_mu: Annotated[float, "least ln μ"] = -2.0,
        conv_size: options.ConvSizeOrNone = 4,
        conv_bias: options.ConvBias = False,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__(dim, expand_v, head_dim, num_heads, None, output_gate, conv_size, conv_bias, norm_eps)
        self.min_log_mu = min_log_mu
        self.memory = (2, num_heads, self.head_dim, self.head_v_dim)
        self.e_proj, self.m_proj = (nn.Linear(dim, num_heads, bias=False) for _ in range(2))
        for linear in (self.e_proj, self.m_proj):
            nn.init.normal_(linear.weight, std=0.02)
        self.mu_bias = nn.Parameter(self.dt_bias.detach().clone())
        self.Mu_log, self.log_factor, self.D_log = (
            nn.Parameter((high * (1 - torch.rand(num_heads))).log()) for high in (16, 4, 1)
        )

    def run(self, x: Tensor, state: MemoryState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, MemoryState]:
        qkv, recurrent, conv = self._read(x, state, cu_seqlens)
        q, k, v = (widen(tensor).unflatten(-1, (self.num_heads, -1)) for tensor in qkv)
        q, k = unit(q - widen(self.D_log).exp()[:, None] * k, 1e-6), unit(k, 1e-6)
        eta = 1 + torch.tanh(widen(self.e_proj(x)) / math.sqrt(self.dim))
        square = (eta * widen(self.log_factor).exp()).square()  # of the tangent of θ
        beta = square / (1 + square) * widen(self.b_proj(x)).sigmoid()
        decay = self._log_decay(x)
        assert decay is not None
        alpha = (decay - torch.log1p(square)).exp()
        log_mu = -widen(self.Mu_log).exp() * F.softplus(widen(self.m_proj(x)) + widen(self.mu_bias))
        gates = torch.stack([alpha, log_mu.clamp(min=self.min_log_mu).exp(), beta, eta], -1)
        with as_widened(x):
            o, recurrent = _each_head(q / math.sqrt(self.head_dim), k, v, gates, recurrent, cu_seqlens)
        o = self.o_norm(o, None if self.g_proj is None else self.g_proj(x).view_as(o))
        return self.o_proj(o.to(x.dtype).flatten(-2)), MemoryState(recurrent, conv)
