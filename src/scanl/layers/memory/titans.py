"""Titans' neural memory: a model that learns each token with momentum, and forgets by weight decay."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import initial
from scanl.layers.memory._mini_batches import STEPS_EXCUSE, in_mini_batches
from scanl.layers.packing import each_alone
from scanl.layers.parts.norm import GatedRMSNorm
from scanl.layers.parts.query_key_value import WINDOWS, QueryKeyValue, Windows
from scanl.layers.state import Device, DType, loadable
from scanl.ops._chunks import between, leading
from scanl.ops._frame.opaque import opaque
from scanl.ops.delta_rule import unit
from scanl.ops.fused.learned_matrices import Norm, Rates, learn, learn_whole, rates


@loadable
class LearnedMatrices(NamedTuple):
    """A memory in the middle of a chunk. Each matrix of it is (B, H, rows, columns).

    start: M where the chunk began.   now: M.   momentum: Z.   position: (B,), steps of the chunk so far.
    """

    start: tuple[Tensor, ...]
    now: tuple[Tensor, ...]
    momentum: tuple[Tensor, ...]
    position: Tensor


@loadable
class TitansState(NamedTuple):
    """State of `Titans`: the memory, and the last inputs of the convolutions."""

    recurrent: LearnedMatrices
    conv: Windows


@opaque(
    "titans(Tensor q, Tensor k, Tensor v, Tensor gates, Tensor weight, Tensor bias, Tensor[] matrices, "
    "Tensor? position, int size) -> Tensor[]",
    lambda q, k, v, gates, weight, bias, matrices, *_: list(map(torch.empty_like, (v, *matrices))),
)
def _titans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Tensor,
    weight: Tensor,
    bias: Tensor,
    matrices: list[Tensor],
    position: Tensor | None,
    size: int,
) -> list[Tensor]:
    """Return o (B, T, H, K) and the matrices: start, now and momentum.

    gates: ln(1 - α), ln η and 2 θ / K, (B, T, H, 3).
    """
    norm, count = Norm(weight, bias), len(matrices) // 3

    def coefficients(operands: Sequence[Tensor], within: Tensor, holds: Tensor) -> Rates:
        logs, theta = operands[3].split([2, 1], -1)  # zero where a slot holds no step: it keeps all, and learns nothing
        A, E = between(logs, False).exp().movedim(-1, 0).tril()
        a, e = leading(logs, False).exp().unbind(-1)
        A = A * holds[:, :, None, None]
        f = (A @ e[..., None]).squeeze(-1)
        E = E * theta.mT
        return rates(a, f, e, A @ E, E)

    def run(
        operands: Sequence[Tensor], rates: Rates, done: Tensor | None, state: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        q, k, v, _ = operands
        start, memory = state[:count], state[count:]
        o, memory = learn(start, memory, q, k, v, rates, norm, bias=False, copies=2)
        after = [matrix[:, :, 0] for matrix in memory]
        if done is not None:
            ends = done[:, None, None, None]
            after = [torch.where(ends, new, old) for new, old in zip(after, start, strict=True)]
        return o, [*after, *memory]

    def run_whole(operands: Sequence[Tensor], rates: Rates, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        q, k, v, _ = operands
        o, memory = learn_whole(state[count:], q, k, v, rates, norm, bias=False)
        return o, [*(matrix[:, :, 0] for matrix in memory), *memory]

    start, now, momentum = matrices[:count], matrices[count : 2 * count], matrices[2 * count :]
    memory = [torch.stack(pair, 2) for pair in zip(now, momentum, strict=True)]
    o, state = in_mini_batches(size, position, (q, k, v, gates), [*start, *memory], coefficients, run, run_whole)
    return [o, *state[:count], *(matrix[:, :, n] for n in range(2) for matrix in state[count:])]


@registry.register("titans")
class Titans(QueryKeyValue):
    """Titans' long-term memory as a layer: each head's state is a model that learns keys and values as they come.

    The gradients of all steps of a chunk are taken at the memory before the chunk, so its steps are computed together.
    With chunks of one step this is the equation. A sequence may be cut anywhere.

    With depth 2 the memory's activation is GELU by tanh, as in TTT. The authors have no program. PyPI's titans-pytorch
    has the exact GELU and a norm without a bias.

    Queries and keys are convolved, pass through SiLU and have unit length. α, η and θ are sigmoids of linear maps, for
    each head and step.
    Differs: the paper's loss is a sum over channels. Here it is their mean, as in lucidrains' titans-pytorch. In that
    program a chunk has one η and one α, and a step reads the memory after the last whole chunk.
    Parameters: q_proj, k_proj, v_proj, g_proj, o_proj (D, D); q_conv1d, k_conv1d, v_conv1d with weight (D, 1, W);
    alpha_proj, eta_proj, theta_proj (H, D) with a bias; M1 (H, K, K), or M1 (H, K, 4 K) and M2 (H, 4 K, K);
    memory_norm_weight, memory_norm_bias (H, K); o_norm.weight (K).
    Initialisation: M1 and M2 Xavier uniform, norms 1 and their bias 0; the biases such that α and θ are near 0.01 and η
    near 0.5; the rest as in PyTorch. The paper gives no initial values.
    State: TitansState, which starts from M1 and M2: the memory where the chunk began, the memory and its momentum, the
    position in the chunk, and the last inputs of the convolutions.
    """

    id = "S-titans"
    equation = (
        "M_t = (1 - alpha_t) M_{t-1} + Z_t,  Z_t = eta_t Z_{t-1} - theta_t grad |M(k_t) - v_t|^2 / K,  "
        "M(x) = x + LN(f(x)),  o_t = M_t(q_t);  y = W_o (RMSNorm(o) * sigmoid(W_g x))"
    )
    source = 'Behrouz, Zhong and Mirrokni, "Titans: Learning to Memorize at Test Time", arXiv:2501.00663'
    state: ClassVar = None  # `init_state` starts from parameters
    sample: ClassVar = {"num_heads": 2}
    residual_out = "o_proj"
    excused: ClassVar = {
        "default_sizes_are_in_proportion": "its state is three models with hidden layers",
        "bits_are_the_same_in_any_company": STEPS_EXCUSE,
    }

    def __init__(
        self,
        dim: options.Dim,
        num_heads: Annotated[options.FreeHeads | None, "H heads of K = D / H channels; by default dim / 64"] = None,
        depth: Annotated[
            Literal[1, 2],
            "matrices of the memory, M(x) = x + LN(f(x)): 1 for a linear f, 2 for a hidden layer of 4 K channels",
        ] = 2,
        chunk_size: options.ChunkSize = 16,
        conv_size: Annotated[
            options.ConvSizeOrNone, "W, window of the convolutions over q, k and v; None for none"
        ] = 4,
        conv_bias: options.ConvBias = False,
        norm_eps: Annotated[options.NormEps, "ε in the norm of the output"] = 1e-5,
    ) -> None:
        super().__init__()
        num_heads = num_heads or max(1, dim // 64)
        if dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim}")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, dim // num_heads
        self.depth, self.chunk_size = depth, chunk_size
        self._make_projections((dim, dim, dim), conv_size, conv_bias)
        self.alpha_proj, self.eta_proj, self.theta_proj = (nn.Linear(dim, num_heads) for _ in range(3))
        for linear, start in ((self.alpha_proj, 0.01), (self.eta_proj, 0.5), (self.theta_proj, 0.01)):
            nn.init.constant_(linear.bias, math.log(start / (1 - start)))
        width, hidden = self.head_dim, 4 * self.head_dim
        shapes = ((width, width),) if depth == 1 else ((width, hidden), (hidden, width))
        for index, (rows, columns) in enumerate(shapes, 1):
            bound = (6 / (rows + columns)) ** 0.5
            matrix = torch.empty(num_heads, rows, columns).uniform_(-bound, bound)
            self.register_parameter(f"M{index}", nn.Parameter(matrix))
        self.memory_norm_weight = nn.Parameter(torch.ones(num_heads, width))
        self.memory_norm_bias = nn.Parameter(torch.zeros(num_heads, width))
        self.g_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.o_norm = GatedRMSNorm(width, norm_eps, activation="sigmoid")

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> TitansState:  # type: ignore[override]
        like = self._zeros(batch_size, device=device, dtype=dtype, at_least=torch.float32)
        matrices = [widen(getattr(self, f"M{index + 1}")) for index in range(self.depth)]
        start = tuple(matrix.to(like) + like.view(-1, 1, 1, 1) for matrix in matrices)  # a copy for each row
        momentum = tuple(torch.zeros_like(matrix) for matrix in start)
        windows = initial(self, WINDOWS, batch_size, device, dtype)
        return TitansState(LearnedMatrices(start, start, momentum, torch.zeros_like(like, dtype=torch.int64)), windows)

    def run(self, x: Tensor, state: TitansState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, TitansState]:
        if cu_seqlens is not None:
            return each_alone(self.forward, x, state, cu_seqlens)
        fresh = state is None
        state = self.init_state(x.shape[0]) if state is None else state
        steps = x.shape[1]
        if steps == 0:
            return self.o_proj(x), state
        qkv, memory, conv = self._read(x, state, None)
        q, k, v = (widen(tensor).unflatten(-1, (self.num_heads, -1)) for tensor in qkv)
        keep = F.logsigmoid(-widen(self.alpha_proj(x)))
        hold = F.logsigmoid(widen(self.eta_proj(x)))
        theta = widen(self.theta_proj(x)).sigmoid() * (2 / self.head_dim)
        norm = (widen(self.memory_norm_weight), widen(self.memory_norm_bias))
        matrices = [matrix.to(q.dtype) for group in memory[:3] for matrix in group]
        with as_widened(x):
            o, *after = _titans(
                unit(q, 1e-6),
                unit(k, 1e-6),
                v,
                torch.stack([keep, hold, theta], -1),
                *norm,
                matrices,
                None if fresh else memory.position,
                self.chunk_size,
            )
        start, now, momentum = (tuple(after[n * self.depth : (n + 1) * self.depth]) for n in range(3))
        y = self.o_norm(o, self.g_proj(x).view_as(o))
        memory = LearnedMatrices(start, now, momentum, (memory.position + steps) % self.chunk_size)
        return self.o_proj(y.to(x.dtype).flatten(-2)), TitansState(memory, conv)
