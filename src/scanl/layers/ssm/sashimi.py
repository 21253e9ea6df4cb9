"""SaShiMi: S4 at several resolutions. A slow tier reads pooled steps and answers one slow step later."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import InnerState, StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.layers.ssm.s4 import S4
from scanl.layers.state import State, cat, index, map_leaves
from scanl.options import at_least

PHASE = "which steps a slow tier takes depends on the position in the pool, a number in the state"


class TierState(NamedTuple):
    """State of one tier and of those below it. The slowest tier has () for all but the first."""

    blocks: Annotated[tuple[Tensor, ...], InnerState("blocks")]
    phase: Annotated[State, StateAxes("", "steps since the last pooled one", dtype=torch.int64, when="slow")]
    read: Annotated[State, StateAxes("pool - 1, dim", "those steps, zeros after them", when="slow")]
    due: Annotated[State, StateAxes("pool, dim", "what the tier below adds to the steps of this pool", when="slow")]
    slow: Annotated[State, InnerState("slow")]


class SashimiBlock(Layer):
    """x + S4(LN x), then x + W GELU(W' LN x)."""

    state: ClassVar = InnerState("mixer")

    def __init__(self, dim: int, state_dim: int, ff: int, dropout: float, lr: float | None) -> None:
        super().__init__()
        self.dim = dim
        self.norm, self.mixer = nn.LayerNorm(dim), S4(dim, state_dim, lr=lr)
        self.ff_norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, ff * dim), nn.GELU(), nn.Linear(ff * dim, dim))
        self.dropout = nn.Dropout(dropout)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        y, state = self.mixer(self.norm(x), state, cu_seqlens=cu_seqlens)
        x = x + self.dropout(y)
        return x + self.dropout(self.ff(self.ff_norm(x))), state


class Tier(Layer):
    """Blocks at one resolution, and the tier below, which takes one step for `pool` steps of this one."""

    state: ClassVar = TierState

    def __init__(self, dim: int, pools: Sequence[int], expand: int, depth: int, block: Mapping[str, Any]) -> None:
        super().__init__()
        self.dim, self.pool = dim, next(iter(pools), 1)
        slow = Tier(dim * expand, pools[1:], expand, depth, block) if pools else None
        self.blocks = nn.ModuleList([SashimiBlock(dim, **block) for _ in range(depth)])
        self.slow = slow
        if slow is not None:
            self.down = nn.Linear(self.pool * dim, slow.dim)
            self.up = nn.Linear(slow.dim, self.pool * dim)

    def run(self, x: Tensor, state: TierState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, TierState]:
        if cu_seqlens is not None:
            return each_alone(self, x, state, cu_seqlens)
        return self._run(x, self._begin(x, state, None), new=state is None)

    def _run(self, x: Tensor, state: TierState, *, new: bool = False) -> tuple[Tensor, TierState]:
        """Run rows. new: no step was read before; then a block need not compute what a state of zeros adds."""
        if self.slow is not None:
            phases = torch.zeros(1) if state.phase.is_meta else state.phase
            if bool((phases != phases[:1]).any()):
                rows = [self._run(x[n : n + 1], index(state, slice(n, n + 1))) for n in range(len(x))]
                return torch.cat([y for y, _ in rows]), cat([after for _, after in rows])
            first = int(phases[0]) if len(phases) else 0
            x, phase, pending, due, slow = self._through_slow(x, state, first, new)
        else:
            phase = pending = due = slow = ()
        y, states = x, []
        for block, start in zip(self.blocks, state.blocks, strict=True):
            y, after = block(y, None if new else start)
            states.append(after)
        return y + x, TierState(tuple(states), phase, pending, due, slow)

    def _through_slow(
        self, x: Tensor, state: TierState, phase: int, new: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
        """Return x plus what the tier below adds, and what is kept of it."""
        assert self.slow is not None
        pool, steps = self.pool, x.shape[1]
        pending = torch.cat([state.read[:, :phase].to(x.dtype), x], 1)
        count = pending.shape[1] // pool
        due, slow = state.due.to(x.dtype), state.slow
        if count:
            pooled = pending[:, : count * pool].unflatten(1, (count, pool)).mT.flatten(2)  # channel by channel
            answers, slow = self.slow(self.down(pooled), None if new else slow)
            due = torch.cat([due, self.up(answers).unflatten(2, (-1, pool)).mT.flatten(1, 2)], 1)
        x = x + due[:, phase : phase + steps]
        tail, due = widen(pending[:, count * pool :]), widen(due[:, count * pool :])
        padded = F.pad(tail, (0, 0, 0, pool - 1 - tail.shape[1]))
        return x, torch.full_like(state.phase, tail.shape[1]), padded, due, slow


@registry.register("sashimi")
class Sashimi(Layer):
    """SaShiMi: a network of S4 blocks at several resolutions, causal and streaming.

    Each tier takes one step for `pool` steps of the tier above, and is `expand` times as wide. Its output for one pool
    is added to the steps of the next pool, so the network is causal. Calls may have any length, also a single step, and
    memory is constant: a slow tier runs when its pool is full. A step costs most where several pools fill at once.

    The defaults are of the size of a layer: two tiers of one block each, 16 D² weights. `scanl.models.whole.sashimi`
    has the published ones: pools of 4 and 4, twice the width in each slower tier, eight blocks a tier, ff = 2.

    Differs: the released training code divides the weights of the pooling maps by their norms and learns the norms. The
    released standalone file does not do this, and neither does this layer.

    Parameters: tier: blocks; down (expand D, p D) and up (p D, expand D), whose p steps of one channel are adjacent;
    slow, the next tier; norm, a LayerNorm.   Initialisation: as in `s4`, all else as in PyTorch.
    """

    id = "S-sashimi"
    cost = ("T log T", "1")
    kind: ClassVar = {"elementwise": False, "linear": False}
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
    state: ClassVar = InnerState("tier")
    sample: ClassVar = {"pool": (2,), "depth": 1, "state_dim": 2, "ff": 1}

    def __init__(
        self,
        dim: options.Dim = 64,
        pool: Annotated[Sequence[Annotated[int, at_least(1)]], "p of each tier, the fastest first"] = (4,),
        expand: Annotated[int, at_least(1), "factor of the width from a tier to the slower one"] = 1,
        depth: Annotated[options.Depth, "blocks of each tier"] = 1,
        ff: Annotated[int, at_least(1), "factor of the width inside the feed-forward maps"] = 1,
        state_dim: Annotated[options.EvenStateDim, "N, numbers of state of each S4, even"] = 64,
        dropout: Annotated[options.Dropout, "dropout of what blocks add, in training only"] = 0.0,
        lr: Annotated[
            options.LearningRate, "learning rate of Λ, P, B and Δ of each S4; None for the optimizer's"
        ] = 1e-3,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.tier = Tier(dim, pool, expand, depth, {"state_dim": state_dim, "ff": ff, "dropout": dropout, "lr": lr})
        self.norm = nn.LayerNorm(dim)

    def run(self, x: Tensor, state: TierState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, TierState]:
        if state is not None:  # a tier that does not run in this call keeps its state, in the layer's own dtype
            state = cast(TierState, map_leaves(lambda leaf, form: leaf.to(form.dtype), state, self._state_form()))
        y, after = self.tier(x, state, cu_seqlens=cu_seqlens)
        return self.norm(y), after
