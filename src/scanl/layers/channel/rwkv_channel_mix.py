"""Channel mixes of RWKV: two linear maps over features that also read the previous input, which is their state."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Layer
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.depth import channel_shares, remaining_depth
from scanl.layers.parts.short_convolution import token_shift
from scanl.layers.rwkv.rwkv4 import RWKV4, mix
from scanl.layers.rwkv.rwkv5 import RWKV5
from scanl.layers.rwkv.rwkv6 import RWKV6
from scanl.layers.rwkv.rwkv7 import RWKV7

Shorter = Annotated[
    options.HiddenDim, "hidden features; by default 3.5 dim, rounded down to a multiple of 32, at least 32"
]


def _shorter(dim: int) -> int:
    return max(int(3.5 * dim) // 32 * 32, 32)


class ChannelMix(Layer):
    """Base class of RWKV's channel mixes."""

    residual_out = "value"
    state: ClassVar = StateAxes("1, dim", "the last input")


@registry.channel_mixers.add("rwkv4")
class RWKV4ChannelMix(ChannelMix):
    """Channel mix of RWKV-4: y = σ(W_r x_r) ⊙ W_v ReLU(W_k x_k)², where x_r and x_k mix x_t and x_{t-1}.

    Parameters as in transformers' RwkvFeedForward: time_mix_key, time_mix_receptance (1, 1, D); key (4D, D);
    receptance (D, D); value (D, 4D).
    Initialisation as in RWKV-LM: time_mix_key = time_mix_receptance = (j/D)^c (see RWKV4); receptance and value 0; key
    orthogonal, times sqrt(4D/D).
    """

    id = "S-rwkv4"
    equation = "y_t = sigmoid(W_r x_r) * W_v ReLU(W_k x_k)^2"
    source = RWKV4.source

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: Annotated[options.HiddenDim | None, "hidden features; by default 4 dim"] = None,
    ) -> None:
        super().__init__()
        self.dim, hidden = dim, hidden_dim or 4 * dim
        self.time_mix_key = nn.Parameter(torch.empty(1, 1, dim))
        self.time_mix_receptance = nn.Parameter(torch.empty(1, 1, dim))
        self.key = nn.Linear(dim, hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)
        nn.init.zeros_(self.receptance.weight)
        nn.init.zeros_(self.value.weight)
        nn.init.orthogonal_(self.key.weight, gain=max(1.0, hidden / dim) ** 0.5)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        with torch.no_grad():
            for mu in (self.time_mix_key, self.time_mix_receptance):
                mu.copy_(channel_shares(self.dim) ** remaining_depth(index, len(layers)))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        previous, state = token_shift(x, state, cu_seqlens=cu_seqlens)
        hidden = F.relu(self.key(mix(x, previous, self.time_mix_key))).square()
        r = self.receptance(mix(x, previous, self.time_mix_receptance))
        return r.sigmoid() * self.value(hidden), state


@registry.channel_mixers.add("rwkv5")
class RWKV5ChannelMix(RWKV4ChannelMix):
    """Channel mix of RWKV-5: that of RWKV-4 with fewer hidden features.

    Parameters as in RWKV-LM's RWKV_CMix_x052: time_mix_k is time_mix_key here, time_mix_r time_mix_receptance; key
    (hidden_dim, D); receptance (D, D); value (D, hidden_dim).
    Initialisation as in that code: time_mix_key = time_mix_receptance = (j/D)^c (see RWKV5); receptance and value 0;
    key orthogonal.
    """

    id = "S-rwkv5"
    equation = "y_t = sigmoid(W_r x_r) * W_v ReLU(W_k x_k)^2"
    source = RWKV5.source

    def __init__(self, dim: options.Dim, hidden_dim: Shorter | None = None) -> None:
        super().__init__(dim, hidden_dim or _shorter(dim))
        nn.init.orthogonal_(self.key.weight)


@registry.channel_mixers.add("rwkv6")
class RWKV6ChannelMix(ChannelMix):
    """Channel mix of RWKV-6: y = σ(W_r x_r) ⊙ W_v ReLU(W_k x_k)², with x_□ = x_t + (x_{t-1} - x_t) ⊙ time_maa_□.

    Parameters as in RWKV-LM's RWKV_CMix_x060: time_maa_k, time_maa_r (1, 1, D); key (hidden_dim, D); receptance (D, D);
    value (D, hidden_dim).
    Initialisation as in that code: time_maa_k = time_maa_r = 1 - (j/D)^(c^3) (see RWKV6; in earlier releases 1 -
    (j/D)^c); receptance and value 0; key orthogonal.
    """

    id = "S-rwkv6"
    equation = "y_t = sigmoid(W_r x_r) * W_v ReLU(W_k x_k)^2"
    source = RWKV6.source

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: Shorter | None = None,
    ) -> None:
        super().__init__()
        self.dim, hidden = dim, hidden_dim or _shorter(dim)
        self.time_maa_k = nn.Parameter(torch.empty(1, 1, dim))
        self.time_maa_r = nn.Parameter(torch.empty(1, 1, dim))
        self.key = nn.Linear(dim, hidden, bias=False)
        self.receptance = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)
        nn.init.orthogonal_(self.key.weight)
        nn.init.zeros_(self.receptance.weight)
        nn.init.zeros_(self.value.weight)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        with torch.no_grad():
            for mu in (self.time_maa_k, self.time_maa_r):
                mu.copy_(1 - channel_shares(self.dim) ** remaining_depth(index, len(layers)) ** 3)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        previous, state = token_shift(x, state, cu_seqlens=cu_seqlens)
        change = previous - x
        hidden = F.relu(self.key(x + change * self.time_maa_k)).square()
        return self.receptance(x + change * self.time_maa_r).sigmoid() * self.value(hidden), state


@registry.channel_mixers.add("rwkv7")
class RWKV7ChannelMix(ChannelMix):
    """Channel mix of RWKV-7: y = W_v ReLU(W_k (x_t + (x_{t-1} - x_t) ⊙ x_k))².

    Parameters as in RWKV-LM's RWKV_CMix_x070: x_k (1, 1, D); key (4D, D); value (D, 4D).
    Initialisation as in that code: x_k = 1 - (j/D)^(c^4) (see RWKV7); key U(±0.5/sqrt(D)); value 0.
    """

    id = "S-rwkv7"
    equation = "y_t = W_v ReLU(W_k x_k)^2"
    source = RWKV7.source

    def __init__(
        self,
        dim: options.Dim,
        hidden_dim: Annotated[options.HiddenDim | None, "hidden features; by default 4 dim"] = None,
    ) -> None:
        super().__init__()
        self.dim, hidden = dim, hidden_dim or 4 * dim
        self.x_k = nn.Parameter(torch.empty(1, 1, dim))
        self.key = nn.Linear(dim, hidden, bias=False)
        self.value = nn.Linear(hidden, dim, bias=False)
        nn.init.uniform_(self.key.weight, -0.5 / math.sqrt(dim), 0.5 / math.sqrt(dim))
        nn.init.zeros_(self.value.weight)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        with torch.no_grad():
            self.x_k.copy_(1 - channel_shares(self.dim) ** (remaining_depth(index, len(layers)) ** 4))

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        previous, state = token_shift(x, state, cu_seqlens=cu_seqlens)
        return self.value(F.relu(self.key(x + (previous - x) * self.x_k)).square()), state
