"""Time mix of RWKV-4 "Dove"."""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.base import Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.depth import channel_ramp, channel_shares, relative_depth, remaining_depth
from scanl.layers.parts.short_convolution import token_shift
from scanl.ops import weighted_average


class RWKV4State(NamedTuple):
    recurrent: Annotated[Tensor, StateAxes("3, width", "p, z and m of `weighted_average`", fill=(0, 0, -math.inf))]
    shift: Annotated[Tensor, StateAxes("1, dim", "the last input")]


def mix(x: Tensor, previous: Tensor, mu: Tensor) -> Tensor:
    """Return mu ⊙ x_t + (1 - mu) ⊙ x_{t-1}."""
    return previous + mu * (x - previous)


@registry.register("rwkv4")
class RWKV4(Layer):
    """Time mix of RWKV-4: an average of all values with decaying weights, gated by a receptance.

    Parameters as in transformers' RwkvSelfAttention: time_decay, time_first (E); time_mix_key, time_mix_value,
    time_mix_receptance (1, 1, D); key, value, receptance (E, D); output (D, E).
    Initialisation as in RWKV-LM, with j the channel, layer l of L, a = l/(L-1), c = 1 - l/L: time_decay =
    -5 + 8 (j/(E-1))^(0.7+1.3a), time_first = ln 0.3 + 0.5 ((j+1) mod 3 - 1), time_mix_key = (j/D)^c, time_mix_value =
    (j/D)^c + 0.3a, time_mix_receptance = (j/D)^(c/2); key, receptance and output 0; value orthogonal, times
    sqrt(E/D) if E > D. Outside a stack l = 0 and L = 1, so a = 0 and c = 1.
    In the paper the parameter is w itself. Here w = exp(time_decay), as in the released code, so that it is positive.
    u = time_first.
    """

    id = "S-rwkv4"
    aliases = ("RWKV", "receptance_weighted_key_value", "Dove")
    equation = (
        "y_t = W_o (sigmoid(r_t) * (sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{u + k_t} v_t) / "
        "(sum_{i<t} e^{k_i - (t-1-i) w} + e^{u + k_t})),  r, k, v = W (mu * x_t + (1 - mu) * x_{t-1})"
    )
    source = 'Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048, eq. (11) to (17)'
    op = "weighted_average"
    state: ClassVar = RWKV4State
    sample: ClassVar = {"width": 8}
    residual_out = "output"

    def __init__(
        self,
        dim: options.Dim,
        width: Annotated[options.Width | None, "E, channels of the average; default dim"] = None,
    ) -> None:
        super().__init__()
        size = width or dim
        self.dim, self.width = dim, size
        self.time_decay = nn.Parameter(torch.empty(size))
        self.time_first = nn.Parameter(math.log(0.3) + 0.5 * ((torch.arange(size) + 1) % 3 - 1))
        self.time_mix_key, self.time_mix_value, self.time_mix_receptance = (
            nn.Parameter(torch.empty(1, 1, dim)) for _ in range(3)
        )
        self.key, self.value, self.receptance = (nn.Linear(dim, size, bias=False) for _ in range(3))
        self.output = nn.Linear(size, dim, bias=False)
        for linear in (self.key, self.receptance, self.output):
            nn.init.zeros_(linear.weight)
        nn.init.orthogonal_(self.value.weight, gain=max(1.0, size / dim) ** 0.5)
        self.enter_stack(0, [self])

    def enter_stack(self, index: int, layers: Sequence[Layer]) -> None:
        a, c = relative_depth(index, len(layers)), remaining_depth(index, len(layers))
        fraction = channel_shares(self.dim)
        with torch.no_grad():
            self.time_decay.copy_(-5 + 8 * channel_ramp(self.width) ** (0.7 + 1.3 * a))
            self.time_mix_key.copy_(fraction**c)
            self.time_mix_value.copy_(fraction**c + 0.3 * a)
            self.time_mix_receptance.copy_(fraction ** (0.5 * c))

    def run(self, x: Tensor, state: RWKV4State | None, cu_seqlens: Tensor | None) -> tuple[Tensor, RWKV4State]:
        recurrent, shift = state or (None, None)
        previous, shift = token_shift(x, shift, cu_seqlens=cu_seqlens)
        k = self.key(mix(x, previous, self.time_mix_key))
        v = self.value(mix(x, previous, self.time_mix_value))
        r = self.receptance(mix(x, previous, self.time_mix_receptance))
        average, recurrent = weighted_average(
            k, v, -widen(self.time_decay).exp(), self.time_first, recurrent, cu_seqlens=cu_seqlens
        )
        return self.output(r.sigmoid() * average), RWKV4State(recurrent, shift)
