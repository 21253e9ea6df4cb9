"""TTT-Linear: the state is a linear model that takes a step of gradient descent on every token."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.memory._mini_batches import STEPS_EXCUSE, in_mini_batches
from scanl.layers.packing import each_alone
from scanl.layers.parts.rotary import rotate_pairs
from scanl.layers.state import Device, DType, loadable
from scanl.ops._frame.opaque import opaque
from scanl.ops.fused.learned_matrices import Norm, Rates, learn, learn_whole, rates
from scanl.options import at_least


@loadable
class TTTState(NamedTuple):
    """State of a TTT layer.

    weights: W of each layer of the model where the mini-batch began, with its bias as last row, (B, H, rows, columns).
    sums: -Σ g_j ∇W of the mini-batch so far, of the same shapes.   position: (B,), steps of the mini-batch so far.
    """

    weights: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]
    position: Tensor


Heads = Annotated[options.FreeHeads | None, "H heads of K = D / H channels, K even; by default dim / 64"]
BaseRate = Annotated[
    float,
    at_least(0),
    "learning rate η, constant; the authors of TTT-MLP raise it from 0.01 in the first steps of training",
]


@opaque(
    "ttt(Tensor q, Tensor k, Tensor v, Tensor gate, Tensor factor, Tensor weight, Tensor bias, Tensor[] weights, "
    "Tensor[] sums, Tensor? position, int size) -> Tensor[]",
    lambda q, k, v, gate, factor, weight, bias, weights, sums, *_: list(map(torch.empty_like, (v, *weights, *sums))),
)
def _ttt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    factor: Tensor,
    weight: Tensor,
    bias: Tensor,
    weights: list[Tensor],
    sums: list[Tensor],
    position: Tensor | None,
    size: int,
) -> list[Tensor]:
    """Return o (B, T, H, K), the weights and the sums. gate: g_j (B, T, H, 1).   factor: c_i (size,)."""
    norm = Norm(weight, bias)

    def coefficients(operands: Sequence[Tensor], within: Tensor, holds: Tensor) -> Rates:
        g = operands[3]
        c = factor[within - 1][:, :, None]
        E = g.mT.expand(*g.shape[:4], g.shape[3]).tril()
        one = torch.ones_like(c)
        c, one = (tensor.expand(E.shape[:-1]) for tensor in (c, one))
        return rates(one, c, one, c[..., None] * E, E)

    def run(
        operands: Sequence[Tensor], rates: Rates, done: Tensor | None, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        q, k, v, _ = operands
        start = [tensor[:, :, 0] for tensor in state]
        o, after = learn(start, state, q, k, v, rates, norm, bias=True, copies=1 if done is None else 2)
        if done is None:  # a mini-batch that begins has no sums
            return o, after
        ends = done[:, None, None, None]
        pairs = (
            (torch.where(ends, new[:, :, 0], old), torch.where(ends, 0, new[:, :, 1]))
            for new, old in zip(after, start, strict=True)
        )
        return o, [torch.stack(pair, 2) for pair in pairs]

    def run_whole(operands: Sequence[Tensor], rates: Rates, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        q, k, v, _ = operands
        return learn_whole(state, q, k, v, rates, norm, bias=True)

    state = [tensor.unsqueeze(2) for tensor in weights]
    if position is not None:
        state = [torch.stack(pair, 2) for pair in zip(weights, sums, strict=True)]
    o, state = in_mini_batches(size, position, (q, k, v, gate), state, coefficients, run, run_whole)
    state = [F.pad(tensor, (0, 0, 0, 0, 0, 2 - tensor.shape[2])) for tensor in state]
    return [o, *(tensor[:, :, n] for n in range(2) for tensor in state)]


@registry.register("ttt_linear")
class TTTLinear(Layer):
    """TTT-Linear: each head's state is a linear model with a norm, which learns to map its keys to its values.

    The gradients of a mini-batch are taken at the weights before it, so its steps are computed together. A sequence may
    be cut anywhere: the state keeps the gradients of an unfinished mini-batch. `ttt_mlp` has a model with a hidden
    layer.

    g_j = η σ(w_h x_j + b_h) / K is the learning rate of step j. c_i = max(1/i + learnable_token_idx_i, 0) is the factor
    of the sum at step i of the mini-batch.
    Parameters as in the authors' program: q_proj, k_proj, v_proj, o_proj (D, D); W1 (H, K, K), b1 (H, 1, K);
    learnable_ttt_lr_weight (H, 1, D), learnable_ttt_lr_bias (H, 1); learnable_token_idx (b); ttt_norm_weight,
    ttt_norm_bias (H, K); post_norm (D); g_proj (D, D) for the output gate. The form in which q and k have one
    projection, for the backbone of Mamba, is not part of this layer.
    Initialisation: linear weights, W1 and learnable_ttt_lr_weight N(0, 0.02²), norms 1, biases and learnable_token_idx
    0.
    State: TTTState, which starts from W1 and b1: weights and sums, (B, H, K + 1, K) each, and the position (B).
    """

    id = "S-ttt"
    equation = (
        "W_t = W - c_i sum_{j<=i} g_j grad |k_j + LN(W^T k_j + b) - v_j|^2 / 2,  o_t = q_t + LN(W_t^T q_t + b_t),  "
        "i the place of t in its mini-batch and W the weights at its start;  y = W_o LN(o)"
    )
    source = (
        'Sun et al., "Learning to (Learn at Test Time): RNNs with Expressive Hidden States", arXiv:2407.04620, as '
        "in the authors' program"
    )
    excused: ClassVar = {"bits_are_the_same_in_any_company": STEPS_EXCUSE}
    sample: ClassVar = {"num_heads": 2}
    residual_out = "o_proj"

    hidden: ClassVar[tuple[int, ...]] = ()  # widths of the model's hidden layers, in units of K

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Heads = None,
        chunk_size: Annotated[options.ChunkSize, "b, steps of a mini-batch"] = 16,
        base_lr: BaseRate = 1.0,
        output_gate: Annotated[options.OutputGate, "a GELU gate on the output"] = False,
        rope_base: Annotated[
            options.RopeBase, "base of the rotary angles; positions count from the start of the mini-batch"
        ] = 10000.0,
    ) -> None:
        super().__init__()
        num_heads = num_heads or max(1, dim // 64)
        if dim % (2 * num_heads):
            self._refuse("num_heads", num_heads, f"a divisor of dim/2={dim / 2:g}")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.chunk_size, self.base_lr, self.rope_base = chunk_size, base_lr, rope_base
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.g_proj = nn.Linear(dim, dim, bias=False) if output_gate else None
        widths = [self.head_dim * width for width in (1, *self.hidden, 1)]
        for index, (rows, columns) in enumerate(pairwise(widths), 1):
            self.register_parameter(f"W{index}", nn.Parameter(torch.empty(num_heads, rows, columns).normal_(std=0.02)))
            self.register_parameter(f"b{index}", nn.Parameter(torch.zeros(num_heads, 1, columns)))
        self.learnable_ttt_lr_weight = nn.Parameter(torch.empty(num_heads, 1, dim).normal_(std=0.02))
        self.learnable_ttt_lr_bias = nn.Parameter(torch.zeros(num_heads, 1))
        self.learnable_token_idx = nn.Parameter(torch.zeros(chunk_size))
        self.ttt_norm_weight = nn.Parameter(torch.ones(num_heads, self.head_dim))
        self.ttt_norm_bias = nn.Parameter(torch.zeros(num_heads, self.head_dim))
        self.post_norm = nn.LayerNorm(dim, eps=1e-6)
        for module in self.children():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> TTTState:
        like = self._zeros(0, device=device, dtype=dtype, at_least=torch.float32)
        names = range(1, len(self.hidden) + 2)
        pairs = [torch.cat([getattr(self, f"W{n}"), getattr(self, f"b{n}")], 1) for n in names]
        weights = tuple(pair.to(like).expand(batch_size, *pair.shape) for pair in pairs)
        position = torch.zeros(batch_size, dtype=torch.int64, device=like.device)
        return TTTState(weights, tuple(torch.zeros_like(tensor) for tensor in weights), position)

    def run(self, x: Tensor, state: TTTState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, TTTState]:
        if cu_seqlens is not None:
            return each_alone(self.forward, x, state, cu_seqlens)
        fresh = state is None
        state = self.init_state(x.shape[0]) if state is None else state
        steps, size = x.shape[1], self.chunk_size
        if steps == 0:
            return self.o_proj(x), state
        place = (state.position[:, None] + torch.arange(steps, device=x.device)) % size
        rates = self.rope_base ** (-torch.arange(0, self.head_dim, 2, device=x.device).double() / self.head_dim)
        angles = (place[..., None] * rates)[:, :, None]
        q, k, v = (
            widen(project(x)).unflatten(-1, (self.num_heads, -1)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        gate = F.linear(x, self.learnable_ttt_lr_weight[:, 0].to(x.dtype), self.learnable_ttt_lr_bias[:, 0].to(x.dtype))
        gate = self.base_lr / self.head_dim * widen(gate).sigmoid()[..., None]
        token = 1 / torch.arange(1, size + 1, device=x.device, dtype=q.dtype)
        factor = (token + widen(self.learnable_token_idx)).clamp(min=0)
        norm = (widen(self.ttt_norm_weight), widen(self.ttt_norm_bias))
        weights, sums = ([tensor.to(q.dtype) for tensor in group] for group in (state.weights, state.sums))
        with as_widened(x):
            o, *after = _ttt(
                rotate_pairs(q, angles),
                rotate_pairs(k, angles),
                v,
                gate,
                factor,
                *norm,
                weights,
                sums,
                None if fresh else state.position,
                size,
            )
        y = self.post_norm(o.flatten(-2).to(x.dtype))
        y = y if self.g_proj is None else F.gelu(self.g_proj(x), approximate="tanh") * y
        count = len(weights)
        return self.o_proj(y), TTTState(tuple(after[:count]), tuple(after[count:]), (state.position + steps) % size)
