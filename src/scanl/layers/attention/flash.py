"""FLASH: the gated attention unit with attention within chunks, and linear attention to the chunks before."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.layers import options, registry
from scanl.layers.attention.gau import GatedAttentionUnit, PositionBias, QueryKeyDim
from scanl.layers.base import as_widened
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.blocks import Blocks


class FLASHState(NamedTuple):
    """State of `FLASH`. Keys and values are of the present chunk, zeros where it has no steps."""

    keys: Annotated[Tensor, StateAxes("reach, z_dim", "keys of the present chunk")]
    values: Annotated[Tensor, StateAxes("reach, hidden_dim", "its values")]
    pending: Annotated[Tensor, StateAxes("z_dim, hidden_dim", "its sum of w_j v_j^T / C")]
    memory: Annotated[Tensor, StateAxes("z_dim, hidden_dim", "the sum of all full chunks, M / C")]
    steps: Annotated[Tensor, StateAxes("1", "number of steps read", dtype=torch.int64, after=torch.add)]


@registry.register("flash")
class FLASH(GatedAttentionUnit):
    """FLASH, mixed-chunk attention: squared ReLU within chunks of C steps, unnormalised linear attention across.

    The memory M changes only where a chunk ends: a step reads its own chunk by attention, and the chunks before by M.
    A sequence may have any length. With causal=False a step attends to all of its chunk, and M is the sum over all
    steps of the sequence, its own chunk's too, as in the paper's non-causal form. The published block is x + y with a
    norm before the layer, which a stack forms with channel_mixer="none".

    Differs: a call may end anywhere in a chunk, because the state holds the present chunk. M is divided by C, as in the
    known programs; the paper leaves the factor out. There is no token shift, which FLASH-pytorch has.

    Parameters: in_proj (2 E + S, D), the rows of u, v and z; out_proj (D, E), both with biases; gamma, beta (4, S), of
    q, r, k and w; rel_pos_bias.rel_pos_bias (2 C - 1), or rel_pos_bias.alpha and rel_pos_bias.beta (1, S).
    Initialisation: linear weights, gamma and the bias of positions N(0, 0.02²), beta and linear biases 0. The simple
    bias of distance 1 starts at 0.5, as in `gau`, and for the same reason.
    """

    id = "S-flash"
    cost = ("T W", "W")
    aliases = ("mixed_chunk_attention", "flash_quad")
    equation = (
        "u, v, z = SiLU(W x),  q, r, k, w = R_t (gamma * z + beta),  y_t = W_o (u_t * (sum_{j <= t in chunk} "
        "ReLU(q_t . k_j / C + b_{t-j})^2 v_j + M^T r_t / C)),  M = sum_{j in chunks before} w_j v_j^T"
    )
    source = 'Hua, Dai, Liu and Le, "Transformer Quality in Linear Time", arXiv:2202.10447, sec. 3.2'
    op = "linear_scan"
    carried_by = "turns"
    excused: ClassVar = {
        "bits_are_the_same_in_any_company": "what the steps of a block have written is summed at once, by the call"
    }
    state: ClassVar = FLASHState
    sample: ClassVar = {"z_dim": 4, "expand": 0.5, "chunk_size": 4}

    def __init__(
        self,
        dim: options.Dim,
        z_dim: QueryKeyDim | None = None,
        expand: Annotated[options.Expand, "u and v have E = int(expand D) channels"] = 2.0,
        chunk_size: Annotated[options.ChunkSize, "C, steps of a chunk"] = 256,
        position_bias: PositionBias = "simple",
        rope_fraction: Annotated[options.RopeFraction, "share of S that turns with the position"] = 1.0,
        rope_base: options.RopeBase = 10000.0,
        causal: options.Causal = True,
    ) -> None:
        super().__init__(dim, z_dim, expand, chunk_size, position_bias, rope_fraction, rope_base, causal, 4)

    def run(self, x: Tensor, state: FLASHState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, FLASHState]:
        keys, values, pending, memory, past = state or (None, None, None, None, None)
        blocks = Blocks(x, past, self.reach, cu_seqlens, self.causal)
        u, v, heads = self._operands(x, past, cu_seqlens)
        q, r, k, w = heads.unbind(2)
        if memory is None or pending is None:
            pending = memory = v.new_zeros(blocks.rows, self.z_dim, self.hidden_dim)
        with as_widened(x):
            written = blocks.queries(w).mT @ blocks.queries(v) / self.reach
            at_blocks, pending, memory = blocks.sums(written, pending, memory)
            at_blocks = at_blocks if self.causal else blocks.of_rows(pending + memory)
            k, v = blocks.keys(k, keys), blocks.keys(v, values)
            attended = blocks.taken(self._within(blocks.queries(q), k, v, blocks) + blocks.queries(r) @ at_blocks)
        return self._output(u, attended), FLASHState(blocks.kept(k), blocks.kept(v), pending, memory, blocks.after)
