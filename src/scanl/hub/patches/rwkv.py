"""RWKV-4's time mix and channel mix. Their state is a list of five tensors (B, D, layers), changed in place."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.hub import call
from scanl.hub.patches.base import Patch, decay, register
from scanl.layers.parts.short_convolution import token_shift
from scanl.ops import weighted_average

_CORRECTIONS = ("padding is left out", "one token at a time works in a batch", "packed sequences are kept apart")


class State(list[Tensor]):
    """The five state tensors, in a list that `generate` can reorder. Beam search fails with a plain list."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self[:] = [tensor.index_select(0, beam_idx.to(tensor.device)) for tensor in self]


@register("rwkv")
class RWKVPatch(Patch):
    """Time mix. state[1]: the last input.   state[2:]: p, z and m of `weighted_average`."""

    modules: ClassVar = ("rwkv.RwkvSelfAttention",)
    original: ClassVar = "a Python loop over the steps"
    runs: ClassVar = "weighted_average"
    corrects: ClassVar = (*_CORRECTIONS, "beam search works")
    reads: ClassVar = ("time_shift",)
    needs_call: ClassVar = ("padding", "packing")

    @staticmethod
    def forward(
        module: Any, hidden: Tensor, state: list[Tensor] | None = None, use_cache: bool = False
    ) -> tuple[Tensor, State | None]:
        rows, x, previous = _shifted(module, hidden, state, 1)
        change = x - previous
        k, v, r = (
            project(torch.addcmul(previous, change, mix))
            for project, mix in (
                (module.key, module.time_mix_key),
                (module.value, module.time_mix_value),
                (module.receptance, module.time_mix_receptance),
            )
        )
        recurrent = None if state is None else torch.stack([tensor[..., module.layer_id] for tensor in state[2:]], 1)
        if recurrent is not None and rows.packed:
            rows.start_anew(bool((recurrent[:, 1] != 0).any()))
            recurrent = None
        average, recurrent = weighted_average(
            k, v, decay(module.time_decay), module.time_first.float(), recurrent, cu_seqlens=rows.cu_seqlens
        )
        y = rows.back(module.output(r.sigmoid() * average))
        if state is None:
            return y, None
        for tensor, last in zip(state[2:], rows.last(recurrent).unbind(1), strict=True):
            tensor[..., module.layer_id] = last
        return y, state if isinstance(state, State) else State(state)


@register("rwkv_channel_mix")
class RWKVChannelMixPatch(Patch):
    """Channel mix. state[0]: the last input."""

    modules: ClassVar = ("rwkv.RwkvFeedForward",)
    original: ClassVar = "plain PyTorch"
    runs: ClassVar = "the same, without padding and across no packed sequence"
    corrects: ClassVar = _CORRECTIONS
    reads: ClassVar = RWKVPatch.reads
    needs_call: ClassVar = RWKVPatch.needs_call

    @staticmethod
    def forward(module: Any, hidden: Tensor, state: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor] | None]:
        rows, x, previous = _shifted(module, hidden, state, 0)
        change = x - previous
        k = module.key(torch.addcmul(previous, change, module.time_mix_key))
        r = module.receptance(torch.addcmul(previous, change, module.time_mix_receptance))
        return rows.back(r.sigmoid() * module.value(F.relu(k).square())), state


def _shifted(
    module: Any, hidden: Tensor, state: list[Tensor] | None, slot: int
) -> tuple[call.TokenRows, Tensor, Tensor]:
    """Return the layout, the tokens in it, and the previous input of each. Write the last input to state[slot]."""
    rows, x = call.TokenRows.lay(call.of(module, hidden), hidden)
    last_input = None if state is None else state[slot][..., module.layer_id]
    if rows.cu_seqlens is not None:
        first = (
            None if last_input is None or rows.packed else last_input[:, None].clone()
        )  # a backward pass needs the old value
        previous, last = token_shift(x, first, cu_seqlens=rows.cu_seqlens)
        if last_input is not None:
            last_input.copy_(rows.last(last)[:, 0])
    elif last_input is None:
        previous = nn.functional.pad(x, (0, 0, 1, -1))
    else:
        previous = torch.cat([last_input[:, None], x[:, :-1]], 1)
        last_input.copy_(x[:, -1])
    return rows, x, previous
