r"""SaShiMi: S4 at several resolutions. A slow tier reads pooled steps and answers one slow step later.

.. math:: f(x) = \mathrm{blocks}(r) + r, \; r = x + \mathrm{up}(f'(\mathrm{down}(x))); \quad
          f \text{ of the slowest tier: } \mathrm{blocks}(x) + x
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer, register, widen
from scanl.layers.module import Module
from scanl.layers.packing import each_alone
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.ssm.s4 import S4
from scanl.layers.state import Device, DType, State, cat, index, map_leaves
from scanl.ops.offsets import sequences

PHASE = "which steps a slow tier takes depends on the position in the pool, a number in the state"


class TierState(NamedTuple):
    """State of one tier and of those below it.

    blocks: state of each S4.   phase: (B,) int64, steps since the last pooled one.   read: (B, p-1, D), those steps,
    zeros after them.   due: (B, p, D), what the tier below adds to the p steps of this pool.   slow: its state.
    The slowest tier has () for all but the first.
    """

    blocks: tuple[Tensor, ...]
    phase: State = ()
    read: State = ()
    due: State = ()
    slow: State = ()


class SashimiBlock(Module):
    """x + S4(LN x), then x + W GELU(W' LN x)."""

    def __init__(self, dim: int, d_state: int, ff: int, dropout: float, lr: float | None) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(dim), S4(dim, d_state, lr=lr)
        self.ff_norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, ff * dim), nn.GELU(), nn.Linear(ff * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        y, state = self.mixer(self.norm(x), state)
        x = x + self.dropout(y)
        return x + self.dropout(self.ff(self.ff_norm(x))), state


class Tier(Module):
    """Blocks at one resolution, and the tier below, which takes one step for `pool` steps of this one."""

    def __init__(self, dim: int, blocks: Sequence[SashimiBlock], pool: int = 1, slow: "Tier | None" = None) -> None:
        super().__init__()
        self.dim, self.pool = dim, pool
        self.blocks = nn.ModuleList(blocks)
        self.slow = slow
        if slow is not None:
            self.down = nn.Linear(pool * dim, slow.dim)
            self.up = nn.Linear(slow.dim, pool * dim)

    def init_state(self, batch_size: int, *, device: torch.device, dtype: torch.dtype) -> TierState:
        mixers = [cast(SashimiBlock, block).mixer for block in self.blocks]
        blocks = tuple(mixer.init_state(batch_size, device=device, dtype=dtype) for mixer in mixers)
        if self.slow is None:
            return TierState(blocks)
        wide = torch.promote_types(dtype, torch.float32)
        zeros = torch.zeros(batch_size, self.pool, self.dim, device=device, dtype=wide)
        phase = torch.zeros(batch_size, dtype=torch.int64, device=zeros.device)
        return TierState(
            blocks, phase, zeros[:, 1:], zeros, self.slow.init_state(batch_size, device=device, dtype=dtype)
        )

    def forward(self, x: Tensor, state: TierState) -> tuple[Tensor, TierState]:
        if self.slow is not None:
            phases = torch.zeros(1) if state.phase.is_meta else state.phase
            if bool((phases != phases[:1]).any()):
                rows = [self(x[n : n + 1], index(state, slice(n, n + 1))) for n in range(len(x))]
                return torch.cat([y for y, _ in rows]), cat([after for _, after in rows])
            x, phase, read, due, slow = self._through_slow(x, state, int(phases[0]) if len(phases) else 0)
        else:
            phase = read = due = slow = ()
        y, states = x, []
        for block, before in zip(self.blocks, state.blocks, strict=True):
            y, after = block(y, before)
            states.append(after)
        return y + x, TierState(tuple(states), phase, read, due, slow)

    def _through_slow(self, x: Tensor, state: TierState, phase: int) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
        """Return x plus what the tier below adds, and what is kept of it."""
        assert self.slow is not None
        pool, steps = self.pool, x.shape[1]
        read = torch.cat([state.read[:, :phase].to(x.dtype), x], 1)
        count = read.shape[1] // pool
        due, slow = state.due.to(x.dtype), state.slow
        if count:
            pooled = read[:, : count * pool].unflatten(1, (count, pool)).mT.flatten(2)  # channel by channel
            answers, slow = self.slow(self.down(pooled), slow)
            due = torch.cat([due, self.up(answers).unflatten(2, (-1, pool)).mT.flatten(1, 2)], 1)
        x = x + due[:, phase : phase + steps]
        rest, due = widen(read[:, count * pool :]), widen(due[:, count * pool :])
        kept = F.pad(rest, (0, 0, 0, pool - 1 - rest.shape[1]))
        return x, torch.full_like(state.phase, rest.shape[1]), kept, due, slow


@register("sashimi")
class Sashimi(Layer):
    """SaShiMi: a network of S4 blocks at several resolutions, causal and streaming.

    Each tier takes one step for `pool` steps of the tier above, and is `expand` times as wide. Its output for one pool
    is added to the steps of the next pool, so the network is causal. Calls may have any length, also a single step, and
    memory is constant: a slow tier runs when its pool is full. A step costs most where several pools fill at once.

    The defaults are of the size of a layer: two tiers of one block each, 16 D² weights. `scanl.models.sashimi` has
    the published ones: pools of 4 and 4, twice the width in each slower tier, eight blocks a tier, ff = 2.

    Differs: the released training code divides the weights of the pooling maps by their norms and learns the norms. The
    released standalone file does not do this, and neither does this layer.

    Args:
        dim: D, model width.
        pool: p of each tier, the fastest first.
        expand: factor of the width from a tier to the slower one.
        n_layers: blocks of each tier.
        ff: factor of the width inside the feed-forward maps.
        d_state: N, numbers of state of each S4.
        dropout: dropout of what blocks add, in training only.
        lr: learning rate of Λ, P, B and Δ of each S4; None for the optimiser's own.

    Parameters: tier: blocks; down (expand D, p D) and up (p D, expand D), whose p steps of one channel are adjacent;
    slow, the next tier; norm, a LayerNorm.   Initialisation: as in `s4`, all else as in PyTorch.
    State: TierState.
    """

    id = "S-sashimi"
    equation = (
        "f(x) = blocks(r) + r,  r = x + up(f_slow(down(x))) one pool later;  blocks x + S4(LN x), x + W GELU(W' LN x)"
    )
    source = (
        'Goel, Gu, Donahue and Ré, "It\'s Raw! Audio Generation with State-Space Models", arXiv:2202.09729, sec. 4.3, '
        "and its code"
    )
    op = None
    excused: ClassVar = {
        **BY_CONVOLUTION,
        "default_sizes_are_in_proportion": "it has a block and a pooling map for each tier",
        "compiles_to_one_graph": PHASE,
        "an_exported_layer_takes_any_length": PHASE,
    }
    sample: ClassVar = {"pool": (2,), "n_layers": 1, "d_state": 2, "ff": 1}

    def __init__(
        self,
        dim: int = 64,
        pool: Sequence[int] = (4,),
        expand: int = 1,
        n_layers: int = 1,
        ff: int = 1,
        d_state: int = 64,
        dropout: float = 0.0,
        lr: float | None = 1e-3,
    ) -> None:
        super().__init__()
        if min((expand, n_layers, ff, *pool)) < 1:
            sizes = f"{tuple(pool)}, {expand}, {n_layers}, {ff}"
            raise ConfigError(f"sashimi: pool, expand, n_layers, ff are {sizes}, expected at least 1")
        self.dim = dim
        tier = None
        for level in reversed(range(len(pool) + 1)):
            width = dim * expand**level
            blocks = [SashimiBlock(width, d_state, ff, dropout, lr) for _ in range(n_layers)]
            tier = Tier(width, blocks, pool[level] if tier is not None else 1, tier)
        assert tier is not None
        self.tier = tier
        self.norm = nn.LayerNorm(dim)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> TierState:
        like = self._zeros(0, device=device, dtype=dtype)
        return self.tier.init_state(batch_size, device=like.device, dtype=like.dtype)

    def forward(
        self, x: Tensor, state: TierState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, TierState]:
        self._check(x, state, cu_seqlens)
        if state is None:
            before = self.init_state(sequences(x, cu_seqlens))
        else:  # a tier that does not run in this call keeps its state, in the layer's own dtype
            before = cast(TierState, map_leaves(lambda leaf, own: leaf.to(own.dtype), state, self._state_form()))
        y, after = self.tier(x, before) if cu_seqlens is None else each_alone(self.tier, x, before, cu_seqlens)
        return self.norm(y), cast(TierState, after)
