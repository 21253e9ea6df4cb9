"""Infini-attention: attention within segments, and a linear memory of all segments before."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.attention._segments import SegmentLayer
from scanl.layers.attention.rmt import Horizon
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.rotary import rotate
from scanl.layers.parts.segments import CallSegments, behind_horizon


class InfiniState(NamedTuple):
    """State of `InfiniAttention`. Keys and values are zeros where no step of the present segment is."""

    memory: Annotated[Tensor, StateAxes("num_heads, head_dim, head_dim", "M, from features of keys to values")]
    norm: Annotated[Tensor, StateAxes("num_heads, head_dim", "z, the sum of features of keys")]
    keys: Annotated[Tensor, StateAxes("chunk_size, num_heads, head_dim", "keys of the present segment, not rotated")]
    values: Annotated[Tensor, StateAxes("chunk_size, num_heads, head_dim", "their values")]
    steps: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


MIN_DENOMINATOR = 1e-10  # denominator of a read; that of an empty memory is 0


@registry.register("infini_attention")
class InfiniAttention(SegmentLayer):
    """Infini-attention: causal softmax attention within a segment, mixed with a read of a matrix memory in each head.

    phi is ELU + 1. At the end of a segment its keys and values are written into the memory, all at once: M + phi(K)^T V
    ("linear"), or what the memory does not already return ("delta"). A step reads the memory of the segments before
    its own. Positions act in the softmax alone, and start again in each segment; there is no 1/sqrt(K) in the memory.

    A read of an empty memory is 0, so the first segment gives (1 - sigmoid(beta)) times its attention, as the formula
    says. In infini-transformer-pytorch the first segment is not gated, and sigmoid of its gate weighs the attention.
    Gradients flow through the memory; with `horizon` k they stop at every k-th boundary of segments.

    Parameters: q_proj, k_proj, v_proj (H K, D); o_proj (D, H K); beta (H).
    Initialisation: weights N(0, 1/D), beta 0.
    """

    id = "S-infini"
    cost = ("T W", "W")
    aliases = ("infini_transformer", "infini")
    equation = (
        "y_t = W_o (sigmoid(beta) phi(q_t) M / (phi(q_t) . z) + (1 - sigmoid(beta)) sum_j softmax_j(R_t q_t . R_j k_j "
        "/ sqrt(K)) v_j), j <= t in the segment;  after it M += phi(K)^T (V - phi(K) M / (phi(K) z)), z += sum phi(k)"
    )
    source = (
        'Munkhdalai, Faruqui and Gopal, "Leave No Context Behind: Efficient Infinite Context Transformers with '
        'Infini-attention", arXiv:2404.07143, eq. (1) to (7)'
    )
    sample: ClassVar = {"num_heads": 3, "chunk_size": 3}
    state: ClassVar = InfiniState

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        chunk_size: Annotated[options.ChunkSize, "steps of a segment; 2048 in the paper"] = 256,
        variant: Annotated[Literal["delta", "linear"], 'what is written: "delta" or "linear"'] = "delta",
        horizon: Horizon = None,
        rope_base: options.RopeBase = 10000.0,
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim} without head_dim")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim or dim // num_heads
        if self.head_dim % 2:
            self._refuse("head_dim", self.head_dim, "an even number because of the rotary positions")
        self.chunk_size, self.variant, self.horizon, self.rope_base = chunk_size, variant, horizon, rope_base
        width = num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, width, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(width, dim, bias=False)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=dim**-0.5)
        self.beta = nn.Parameter(torch.zeros(num_heads))

    def over(self, x: Tensor, state: InfiniState, segments: CallSegments) -> tuple[Tensor, InfiniState]:
        projected = (
            segments.cut(widen(project(x)).unflatten(-1, (self.num_heads, self.head_dim)))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        memory, norm, keys, values, steps = state
        gate, slots, ys = widen(self.beta).sigmoid()[:, None], torch.arange(self.chunk_size, device=x.device), []
        for piece, *operands in zip(segments.pieces, *projected, strict=True):
            q, k, v = operands
            places = piece.places(x)
            keys, values, steps = piece.write(keys, k), piece.write(values, v), steps + piece.count
            local = attend(
                self._rotated(q, places), self._rotated(keys, slots[None]), values, slots <= places[..., None]
            )
            with as_widened(x):
                ys.append(gate * self._read(q, memory, norm) + (1 - gate) * local)
                memory, norm, keys, values = piece.at_end(
                    lambda: self._after(memory, norm, keys, values, steps),  # noqa: B023
                    (memory, norm, keys, values),
                )
        y = self.o_proj(segments.join(ys).flatten(2).to(x.dtype))
        return y, InfiniState(memory, norm, keys, values, steps)

    def _rotated(self, x: Tensor, places: Tensor) -> Tensor:
        return rotate(x, places, self.head_dim, self.rope_base)

    def _read(self, queries: Tensor, memory: Tensor, norm: Tensor) -> Tensor:
        """Read the memory at queries (B, Q, H, K)."""
        features = F.elu(queries).transpose(1, 2) + 1
        values = features @ memory / (features @ norm[..., None]).clamp(min=MIN_DENOMINATOR)
        return values.transpose(1, 2)

    def _after(self, memory: Tensor, norm: Tensor, keys: Tensor, values: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
        """Return memory, norm, keys and values after a segment: the last two are zeros."""
        features, new = F.elu(keys).transpose(1, 2) + 1, values
        if self.variant == "delta":
            new = values - self._read(keys, memory, norm)
        written = memory + features.mT @ new.transpose(1, 2), norm + features.sum(2)
        after = behind_horizon(written, steps // self.chunk_size, self.horizon)
        return *after, torch.zeros_like(keys), torch.zeros_like(values)
