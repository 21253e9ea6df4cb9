"""Recurrent positional embedding: attention, some of whose channels come from a recurrent network."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.attention.softmax_attention import memory, over, places
from scanl.layers.base import Layer
from scanl.layers.initial_state import InnerState
from scanl.layers.parts.positions import check_length
from scanl.layers.rnn.elman import Elman
from scanl.ops import SegmentMemory


class RPEState(NamedTuple):
    memory: Annotated[SegmentMemory, memory("num_heads, head_dim", "num_heads, head_dim", "keys")]
    recurrent: Annotated[Tensor, InnerState("rnn")]


def sinusoids(steps: Tensor, width: int) -> Tensor:
    """Return the positional encoding of the Transformer (..., width): sines, then cosines, of steps (...)."""
    count = (width + 1) // 2
    rates = 10000.0 ** (-torch.arange(count, device=steps.device, dtype=torch.float64) / count)
    angles = steps[..., None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)[..., :width]


@registry.register("rpe")
class RPE(Layer):
    """Attention over recurrent positional embeddings: a part of each input goes through a recurrent network.

    The input has two parts, u^p and u^r. Sinusoids are added to u^p; an Elman network reads u^r, and its states r stand
    for positions. With `variant` "heads" some heads attend over u^p, and the others over r. With "slices" each head has
    channels of both.

    Differs: the authors have it in an encoder, which sees the future; here attention is causal. At most `max_length`
    steps are read.

    Parameters: rnn, as in the layer `elman`; for the two parts q_proj.i, k_proj.i, v_proj.i, square; o_proj (D, D).
    Initialisation: projections N(0, 1/fan_in); the network as in `elman`.
    """

    id = "S-rpe"
    cost = ("T^2", "T")
    aliases = ("recurrent_positional_embedding",)
    equation = (
        "[u^p; u^r] = x,  r_t = tanh(V u^r_t + W r_{t-1} + b),  e_t = [u^p_t + PE_t; r_t],  "
        "y_t = W_o sum_{j <= t} softmax_j(q_t . k_j / sqrt(K)) v_j,  q, k, v from e by parts"
    )
    source = (
        'Chen, Wang, Utiyama and Sumita, "Recurrent Positional Embedding for Neural Machine Translation", EMNLP 2019, '
        "https://aclanthology.org/D19-1139"
    )
    op = "segment_attention"
    state: ClassVar = RPEState
    sample: ClassVar = {"num_heads": 3, "width": 4, "max_length": 80}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.Heads = 8,
        width: Annotated[
            options.Width | None,
            'channels of r, below D: with "heads" a multiple of dim / num_heads, with "slices" of num_heads; by '
            "default one head, or one channel of each head",
        ] = None,
        variant: Annotated[Literal["heads", "slices"], "r has heads of its own, or a slice of each head"] = "heads",
        max_length: Annotated[options.MaxLength, "length of the longest sequence in tokens"] = 2048,
    ) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        unit = self.head_dim if variant == "heads" else num_heads
        width = unit if width is None else width
        if width % unit or width >= dim:
            self._refuse("width", width, f"a multiple of {unit} below dim={dim}")
        self.dim, self.num_heads, self.variant = dim, num_heads, variant
        self.reach = self.longest = max_length
        self.widths = dim - width, width
        self.rnn = Elman(width)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.ModuleList(nn.Linear(size, size, bias=False) for size in self.widths) for _ in range(3)
        )
        self.o_proj = nn.Linear(dim, dim, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=math.sqrt(1 / module.in_features))

    def run(self, x: Tensor, state: RPEState | None, cu_seqlens: Tensor | None) -> tuple[Tensor, RPEState]:
        keys, recurrent = state or (None, None)
        check_length(self._who(), x, None if keys is None else keys.position, cu_seqlens, self.longest)
        placed, entering = x.split(self.widths, -1)
        placed = placed + sinusoids(places(x, keys, cu_seqlens), self.widths[0]).to(x.dtype)
        r, recurrent = self.rnn(entering, recurrent, cu_seqlens=cu_seqlens)
        q, k, v = (self._heads(maps, placed, r) for maps in (self.q_proj, self.k_proj, self.v_proj))
        y, keys = over(q, k, v, keys, cu_seqlens, self.reach)
        return self.o_proj(y.flatten(2)), RPEState(keys, recurrent)

    def _heads(self, maps: nn.ModuleList, *parts: Tensor) -> Tensor:
        """Map the two parts, and arrange them as heads (B, T, H, K)."""
        first, second = (linear(values) for linear, values in zip(maps, parts, strict=True))
        if self.variant == "heads":
            return torch.cat([first, second], -1).unflatten(-1, (self.num_heads, -1))
        return torch.cat([values.unflatten(-1, (self.num_heads, -1)) for values in (first, second)], -1)
