"""PaTH attention: softmax attention whose positions are reflections that depend on the data."""

import math
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.attention.softmax_attention import memory, unread
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.positions import check_length
from scanl.layers.parts.short_convolution import convolve
from scanl.ops import SegmentMemory
from scanl.ops._attention import attention_with_logs
from scanl.ops._frame.nonfinite import faulty, since, suspected
from scanl.ops._frame.opaque import opaque
from scanl.ops.delta_rule import unit

_CHUNK = 64


class PaTHState(NamedTuple):
    memory: Annotated[SegmentMemory, memory("num_kv_heads, head_dim", "num_kv_heads, head_dim", "rewritten keys")]
    conv: Annotated[Tensor, StateAxes("conv_size - 1, num_kv_heads * head_dim", "the last inputs of the convolution")]


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, keys: Tensor, values: Tensor, position: Tensor | None
) -> list[Tensor]:
    return [torch.empty_like(q), torch.empty_like(keys), torch.empty_like(values)]


@opaque(
    "path_attention(Tensor q, Tensor k, Tensor v, Tensor w, Tensor beta, Tensor keys, Tensor values, "
    "Tensor? position) -> Tensor[]",
    _shapes,
)
def _attended(
    q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor, keys: Tensor, values: Tensor, position: Tensor | None
) -> list[Tensor]:
    """Attend chunk by chunk. After each chunk, every key before it goes through the chunk's reflections.

    q: (B, T, H, K), scaled.   k, v, w: (B, T, G, K).   beta: (B, T, G).   keys, values: (B, M, G, K), a ring.
    position: (B,), tokens read before; None for none.
    With T = (I + tril(β W Wᵀ, -1))^{-1}, H_1 ... H_C is I - Wᵀ T β W.
    """
    steps, room = q.shape[1], keys.shape[1]
    spoil = None
    if suspected(q, k, v, w, beta):
        fault = torch.stack([faulty(tensor).flatten(2).any(2) for tensor in (q, k, v, w, beta)]).any(0)
        spoil = since(fault, 1).to(q.dtype)
        q, k, v, w = (torch.where(fault[:, :, None, None], 0, tensor) for tensor in (q, k, v, w))
        beta = torch.where(fault[:, :, None], 0, beta)
    q, k, v, w = (tensor.transpose(1, 2).contiguous() for tensor in (q, k, v, w))
    wb = w * beta.transpose(1, 2)[..., None]
    q = q.unflatten(1, (k.shape[1], -1))
    if position is None:
        before_k, before_v = k[:, :, :0], v[:, :, :0]
        unused = blank = None
    else:
        before_k, before_v = keys.transpose(1, 2), values.transpose(1, 2)
        unused = torch.arange(room, device=q.device) >= position[:, None]
        blank = F.pad(unused, (0, steps), value=False)
    outputs = []
    for q_c, k_c, v_c, w_c, wb_c in zip(*(tensor.split(_CHUNK, -2) for tensor in (q, k, v, w, wb)), strict=True):
        count = k_c.shape[2]
        eye = torch.eye(count, dtype=q.dtype, device=q.device)
        right = torch.cat([wb_c, (wb_c @ k_c.mT).tril(-1)], -1)
        solved = torch.linalg.solve_triangular(
            eye + (wb_c @ w_c.mT).tril(-1), right, upper=False, unitriangular=True
        ).unsqueeze(2)
        reflected, changed = solved[..., : w_c.shape[-1]], solved[..., w_c.shape[-1] :]
        qw = (q_c @ w_c.unsqueeze(2).mT).tril()
        inside = (q_c @ k_c.unsqueeze(2).mT - qw @ changed).tril()
        inside = inside.masked_fill(torch.ones_like(eye, dtype=torch.bool).triu(1), -torch.inf)
        known = before_k.shape[2]
        logs = inside.logsumexp(-1, keepdim=True)
        y = (inside - logs).exp() @ v_c.unsqueeze(2)
        if known:
            visible = None if blank is None else ~blank[:, None, :known]
            reads = (q_c - qw @ reflected).flatten(1, 2)
            across, of_across = attention_with_logs(reads, before_k, before_v, visible, scale=1.0)
            share = (of_across.view_as(logs[..., 0]).unsqueeze(-1) - logs).sigmoid()
            y = y + share * (across.view_as(y) - y)
        outputs.append(y)
        before_k = _reflect(before_k, reflected.squeeze(2), w_c)
        before_k = torch.cat([before_k, k_c - changed.squeeze(2).mT @ w_c], 2)
        before_v = torch.cat([before_v, v_c], 2)
    y, *every = (tensor.transpose(1, 2) for tensor in (torch.cat(outputs, 3).flatten(1, 2), before_k, before_v))
    if spoil is not None:
        y, *every = y * spoil[:, :, None, None], *(tensor * spoil[:, -1, None, None, None] for tensor in every)
    if position is None or unused is None:
        return [y, *(F.pad(tensor, (0, 0, 0, 0, 0, room - steps)) for tensor in every)]
    at = ((position[:, None] + torch.arange(steps, device=q.device)) % room)[:, :, None, None]
    rings = []
    for tensor in every:
        ring = torch.where(unused[:, :, None, None], 0, tensor[:, :room])  # a slot that holds nothing stays zero
        rings.append(ring.scatter(1, at.expand_as(tensor[:, room:]), tensor[:, room:]))
    return [y, *rings]


def _reflect(keys: Tensor, reflected: Tensor, w: Tensor) -> Tensor:
    """Return keys - (keys reflectedᵀ) w, by one product with a matrix K x K where that has fewer multiplications."""
    if keys.shape[-1] > 2 * w.shape[-2]:
        return keys - (keys @ reflected.mT) @ w
    return keys @ (torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device) - reflected.mT @ w)


@registry.register("path_attention")
class PaTHAttention(Layer):
    """PaTH attention: a product of reflections, one for each step between, stands between a key and a query.

    A new token rewrites every key in the cache: k_j loses β (k_j · w) of its part along w. A sequence longer than
    `max_length` raises an error, as for `attention`. The forget gate, which the paper combines with this attention, is
    not part of this layer.

    Parameters as in flash-linear-attention: q_proj, o_proj (D, D); k_proj, v_proj (G K, D); w_proj.0 (rank, D),
    w_proj.1 (G K, rank), or w_proj (G K, D); w_conv1d (G K, 1, W); bt_proj (G, D) with a bias; maybe_q_norm,
    maybe_k_norm (K) for the norms.
    Initialisation: linear weights N(0, 0.02²), their bias 0, norms 1, the convolution as in PyTorch.
    """

    id = "S-path"
    cost = ("T^2", "T")
    equation = (
        "y_t = W_o sum_{j<=t} softmax_j(k_j^T H_{j+1} ... H_t q_t / sqrt(K)) v_j,  H_s = I - beta_s w_s w_s^T,  "
        "w = unit(SiLU(conv(W_2 W_1 x))),  beta = 2 sigmoid(W_b x + b)"
    )
    source = (
        'Yang et al., "PaTH Attention: Position Encoding via Accumulating Householder Transformations", '
        "arXiv:2505.16381"
    )
    excused: ClassVar = {
        "bits_are_the_same_in_any_company": "reflections are solved by torch, in blocks that begin with the call"
    }
    state: ClassVar = PaTHState
    reads: ClassVar = {"w_conv1d": nn.Conv1d}
    sample: ClassVar = {"num_heads": 4, "num_kv_heads": 2, "max_length": 80, "rank": 3}
    residual_out = "o_proj"

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        num_kv_heads: Annotated[
            options.KeyValueHeads | None, "heads of keys, values and reflections; by default num_heads"
        ] = None,
        max_length: Annotated[options.MaxLength, "length of the longest sequence in tokens"] = 2048,
        rank: Annotated[options.Rank | None, "rank of the projection to w; None for a full one"] = 32,
        conv_size: Annotated[options.ConvSize, "W, window of the convolution over w"] = 3,
        conv_bias: options.ConvBias = False,
        qk_norm: Annotated[bool, "RMSNorm of each head of queries and of keys"] = False,
        norm_eps: options.NormEps = 1e-5,
    ) -> None:
        super().__init__()
        shared = num_kv_heads or num_heads
        self.dim, self.num_heads, self.num_kv_heads, self.head_dim = dim, num_heads, shared, dim // num_heads
        self.reach = self.longest = max_length
        self.conv_size, width = conv_size, shared * (dim // num_heads)
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, width, bias=False) for _ in range(2))
        if rank is None:
            self.w_proj = nn.Linear(dim, width, bias=False)
        else:
            self.w_proj = nn.Sequential(nn.Linear(dim, rank, bias=False), nn.Linear(rank, width, bias=False))
        self.w_conv1d = nn.Conv1d(width, width, conv_size, groups=width, bias=conv_bias)
        self.bt_proj = nn.Linear(dim, shared)
        self.maybe_q_norm, self.maybe_k_norm = (
            GatedRMSNorm(self.head_dim, norm_eps) if qk_norm else None for _ in range(2)
        )
        self.o_proj = nn.Linear(dim, dim, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        nn.init.zeros_(self.bt_proj.bias)

    def run(self, x: Tensor, state: PaTHState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, PaTHState]:
        check_length(self._who(), x, None if state is None else state.memory.position, cu_seqlens, self.longest)
        if cu_seqlens is not None:
            return each_alone(self.forward, x, state, cu_seqlens)
        fresh = state is None or unread(state.memory)
        start: PaTHState = state or self.init_state(x.shape[0])
        if x.shape[1] == 0:
            return self.o_proj(x), start
        w, conv = convolve(self.w_conv1d, self.w_proj(x), start.conv, silu=True)
        q, k, v, w = (
            widen(tensor).unflatten(-1, (-1, self.head_dim))
            for tensor in (self.q_proj(x), self.k_proj(x), self.v_proj(x), w)
        )
        if self.maybe_q_norm is not None and self.maybe_k_norm is not None:
            q, k = self.maybe_q_norm(q, None), self.maybe_k_norm(k, None)
        keys, values, past = start.memory
        beta = 2 * widen(self.bt_proj(x)).sigmoid()
        with as_widened(x):
            y, keys, values = _attended(
                q / math.sqrt(self.head_dim),
                k,
                v,
                unit(w, 1e-6),
                beta,
                keys.to(q.dtype),
                values.to(q.dtype),
                None if fresh else past,
            )
        memory = SegmentMemory(keys, values, past + x.shape[1])
        return self.o_proj(y.flatten(2).to(x.dtype)), PaTHState(memory, conv)
