"""Lightning attention of MiniMax-01: linear attention with a constant decay for each head."""

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor

from scanl.hub import call
from scanl.hub.patches.base import Patch, given_cache, register
from scanl.ops import linear_attention


@register("lightning_attention")
class LightningAttentionPatch(Patch):
    """Keeps the state in float32; the original keeps it in the model's dtype."""

    modules: ClassVar = ("minimax.MiniMaxLightningAttention",)
    original: ClassVar = "a Python loop over blocks, and one over the steps after a cached state"
    runs: ClassVar = "linear_attention"
    corrects: ClassVar = (
        "beam search reorders the states",
        "the cache knows its length when the first layer is of this kind",
        "packed sequences are kept apart",
    )
    needs_call: ClassVar = ("packing",)

    @staticmethod
    def forward(
        module: Any,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor]:
        cache = given_cache(cache, others)
        rows, x = call.TokenRows.lay(call.of(module, hidden_states, attention_mask), hidden_states)
        state = None if cache is None else cache.get_linear_cache(module.layer_idx)
        rows.start_anew(state is not None)
        heads = module.act_fn(module.qkv_proj(x)).unflatten(-1, (module.num_attention_heads, -1))
        q, k, v = heads.split(module.head_dim, -1)
        decay = -module.slope_rate.float().flatten()
        y, state = linear_attention(q, k, v, decay, state=state, scale=1.0, cu_seqlens=rows.cu_seqlens)
        y = module.out_proj(torch.sigmoid(module.output_gate(x)) * module.norm(y.flatten(2)))
        state = rows.last(state)
        if cache is not None:
            _keep(cache, module.layer_idx, state, hidden_states.shape[1])
        return rows.back(y), state


def _keep(cache: Any, index: int, state: Tensor, steps: int) -> None:
    """Store the state as MiniMaxCache does. Add a cache layer of our own, which counts the steps."""
    cache.set_linear_cache(index, state)
    while len(cache.layers) <= index:
        cache.layers.append(cache.layer_class_to_replicate())
    if type(cache.layers[index]) is not _layer_class():
        cache.layers[index] = _layer_class()(cache, index)
    cache.layers[index].steps += steps


@functools.cache
def _layer_class() -> type:
    from transformers.cache_utils import DynamicLayer

    class LightningLayer(DynamicLayer):
        """A cache layer without keys and values. It gives the cache's length and reorders the state for beam search."""

        def __init__(self, cache: Any, index: int) -> None:
            super().__init__()
            self.states, self.index, self.steps = cache.linear_cache, index, 0

        def get_seq_length(self) -> int:
            return self.steps

        def reorder_cache(self, beam_idx: Tensor) -> None:
            state = self.states[self.index]
            self.states[self.index] = state.index_select(0, beam_idx.to(state.device))

        def reset(self) -> None:
            self.states[self.index], self.steps = None, 0

    return LightningLayer
