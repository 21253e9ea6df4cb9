"""Log-linear gated DeltaNet: gated DeltaNets over O(log T) blocks of the past, each read with a weight of its own."""

import math
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import UNDECAYED_HINT, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.delta_memory import DeltaMemory
from scanl.layers.parts.levels import count_levels, levels
from scanl.layers.parts.positions import check_length, positions
from scanl.layers.parts.query_key_value import LastInputs
from scanl.ops import delta_rule
from scanl.ops._frame.nonfinite import readable
from scanl.ops.delta_rule import unit
from scanl.ops.offsets import sequences


class LevelsMemory(NamedTuple):
    """Memories of the levels, and how many steps they have read."""

    levels: Annotated[Tensor, StateAxes("*memory", "S of levels 1 to L - 1")]
    steps: Annotated[Tensor, StateAxes("1", "steps read", dtype=torch.int64, after=torch.add)]


class LevelsState(NamedTuple):
    recurrent: Annotated[LevelsMemory, LevelsMemory]
    conv: LastInputs


@registry.register("log_linear_gated_deltanet")
class LogLinearGatedDeltaNet(DeltaMemory):
    """Log-linear attention over gated DeltaNet: each step corrects and decays every level, and writes into the lowest.

    As in `log_linear_mamba2`, the blocks are the nodes of a Fenwick tree, and the L - 1 levels are heads of one
    `delta_rule`. A level that does not take a step's value is corrected towards zero at the step's key. A sequence
    longer than `max_length` raises an error.

    Parameters as in `gated_deltanet`; l_proj (H L, D); L (H, L), without weight decay.
    Initialisation: as in `gated_deltanet`; l_proj N(0, 0.02²), L 1.
    """

    id = "S-loglinear"
    cost = ("T log T", "log T")
    carried_by = "turns"
    equation = (
        "o_t = sum_l lambda_t^l (S_t^l)^T q_t / sqrt(K),  S_t^l = (I - beta_t k_t k_t^T) alpha_t S_{t-1}^l, with "
        "beta_t k_t v_t^T in level 0,  lambda_t^l = softplus(L_l (W_l x_t));  y = W_o (RMSNorm(o) * SiLU(W_g x))"
    )
    source = 'Guo et al., "Log-Linear Attention", arXiv:2506.04761'
    state: ClassVar = LevelsState
    sample: ClassVar = {"head_dim": 3, "num_heads": 2, "num_v_heads": 4, "max_length": 80}
    hints: ClassVar = {"L": UNDECAYED_HINT}

    def __init__(
        self,
        dim: options.Dim,
        max_length: Annotated[
            options.MaxLength, "length of the longest sequence; it takes L = ⌈log2 max_length⌉ + 1 levels"
        ] = 16384,
        **shared: Any,
    ) -> None:
        super().__init__(dim, **shared)
        self.longest, self.levels = max_length, count_levels(max_length)
        self.memory = (self.num_v_heads, self.levels - 1, self.head_dim, self.head_v_dim)
        self.l_proj = nn.Linear(dim, self.num_v_heads * self.levels, bias=False)
        nn.init.normal_(self.l_proj.weight, std=0.02)
        self.L = nn.Parameter(torch.ones(self.num_v_heads, self.levels))

    def run(  # type: ignore[override]
        self, x: Tensor, state: LevelsState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, LevelsState]:
        count = self.levels
        if state is None:
            state = cast(LevelsState, self.init_state(sequences(x, cu_seqlens)))
            if readable(x):  # no step reads a level above these; all above hold the same, for which the last one stands
                count = min(count, max(0, x.shape[1] - 1).bit_length() + 2)
        qkv, (memories, past), conv = self._read(x, state, cu_seqlens)
        check_length(self._who(), x, past, cu_seqlens, self.longest)
        q, k = (unit(widen(tensor).unflatten(-1, (self.num_heads, -1)), 1e-6) for tensor in qkv[:2])
        v = widen(qkv[2]).unflatten(-1, (self.num_v_heads, -1))
        beta, g = widen(self.b_proj(x)).sigmoid(), self._log_decay(x)
        assert g is not None
        weights = F.softplus(widen(self.L) * widen(self.l_proj(x)).unflatten(-1, (self.num_v_heads, self.levels)))
        places, position = positions(past, x.shape[1], cu_seqlens)
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
        present = (q * k).sum(-1).repeat_interleave(self.num_v_heads // self.num_heads, 2) / math.sqrt(self.head_dim)
        y = y + (weights[..., 0] * beta * present)[..., None] * v
        y = self.o_norm(y, None if self.g_proj is None else self.g_proj(x).view_as(y))
        memories = memories.unflatten(1, (self.num_v_heads, -1))
        memories = torch.cat([memories, *[memories[:, :, -1:]] * (self.levels - count)], 2)
        recurrent = LevelsMemory(memories, position)
        return self.o_proj(y.to(x.dtype).flatten(-2)), LevelsState(recurrent, conv)
