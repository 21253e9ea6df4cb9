"""Self-attention with recurrence: softmax attention mixed with fixed matrices of a linear recurrence."""

import math
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from scanl.layers import options, registry
from scanl.layers.attention.softmax_attention import SoftmaxAttention, memory, unread
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.blocks import Blocks
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.positions import check_length
from scanl.ops import SegmentMemory, linear_scan

KINDS = ("regular", "cosine", "sine")


class RSAState(NamedTuple):
    memory: Annotated[SegmentMemory, memory("num_heads, head_dim", "num_heads, head_dim", "keys")]
    recurrent: Annotated[Tensor, StateAxes("num_heads, head_dim", "sums of values", dtype=torch.complex64)]


@registry.register("rsa")
class RSA(SoftmaxAttention):
    """Self-attention with recurrence: each head mixes a softmax with a recurrence encoding matrix (REM).

    The matrix P has a number for each distance d > 0, and zeros elsewhere: λ^d in a regular head, γ^d cos(d θ) or γ^d
    sin(d θ) in a cyclical one. These are the modes of a linear RNN. P is added after the softmax, and P v is computed
    as a recurrence. At most `max_length` steps are read. With causal=False the sum is over all j, with P_{|t-j|}: the
    matrix has both triangles, and a second recurrence runs backward.

    Differs: there are no dilated REMs, which leave out all distances that D does not divide. Each head has its own λ, γ
    and θ.

    Parameters: q_proj, k_proj, v_proj (H K, D); o_proj (D, H K); mu (H), where sigmoid(mu) is the share of the
    recurrence; rate (H), with λ = tanh(rate) and γ = sigmoid(rate); theta (H), absent where all heads are regular.
    Initialisation: projections N(0, 1/D); mu U(-3, 3); rate U(1, 2), in regular heads of either sign; theta π/4.
    """

    id = "S-rsa"
    cost = ("T^2", "T")
    aliases = ("REM", "self_attention_with_recurrence")
    equation = (
        "y_t = W_o sum_{j <= t} ((1 - sigmoid(mu)) softmax_j(q_t . k_j / sqrt(K)) + sigmoid(mu) P_{t-j}) v_j,  "
        "P_d = lambda^d, gamma^d cos(d theta) or gamma^d sin(d theta) for d > 0, P_0 = 0"
    )
    source = (
        'Huang et al., "Encoding Recurrence into Transformers", ICLR 2023, eq. (2) to (6), '
        "https://openreview.net/forum?id=7YfHla7IxBJ"
    )
    op = "linear_scan"
    state: ClassVar = RSAState
    sample: ClassVar = {"num_heads": 3, "max_length": 80}

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        max_length: Annotated[options.MaxLength, "length of the longest sequence in tokens"] = 2048,
        variant: Annotated[
            Literal["mixed", "regular", "cyclical"],
            'REMs of the heads: "mixed", regular, cosine and sine in turn; "regular"; "cyclical", cosine and sine',
        ] = "mixed",
        rope_base: options.RopeBase = 10000.0,
        rope_fraction: Annotated[options.RopeFraction, "share of a head's channels that turn with the position"] = 0.0,
        bias: options.Bias = False,
        causal: options.Causal = True,
    ) -> None:
        super().__init__(dim, num_heads, num_heads, head_dim, max_length, rope_base, rope_fraction, bias, bias)
        self.longest, self.causal, self.bidirectional = max_length, causal, not causal
        kinds = {"mixed": KINDS, "regular": KINDS[:1], "cyclical": KINDS[1:]}[variant]
        self.kinds = [kinds[head % len(kinds)] for head in range(num_heads)]
        self.mu = nn.Parameter(torch.empty(num_heads).uniform_(-3, 3))
        signs = torch.where(torch.rand(num_heads) < 0.5, -1.0, 1.0)
        regular = torch.tensor([kind == "regular" for kind in self.kinds])
        self.rate = nn.Parameter(torch.empty(num_heads).uniform_(1, 2) * torch.where(regular, signs, 1.0))
        self.register_parameter("theta", None)
        if variant != "regular":
            self.theta = nn.Parameter(torch.full((num_heads,), math.pi / 4))

    def run(  # pyright: ignore[reportIncompatibleMethodOverride]: the state of this attention is another
        self, x: Tensor, state: RSAState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, RSAState]:
        keys, recurrent = state or (None, None)
        check_length(self._who(), x, None if keys is None else keys.position, cu_seqlens, self.longest)
        q, k, v = self._projected(x, keys, cu_seqlens)
        attended, keys = (self._over if self.causal else self._over_all)(q, k, v, keys, cu_seqlens)
        with as_widened(x):
            v = widen(v)
            drive, rates = torch.complex(v, torch.zeros_like(v)), self._rates()[:, None]
            sums, recurrent = linear_scan(drive, rates, recurrent, cu_seqlens=cu_seqlens)
            others = sums - drive  # the present step has no part in it
            if not self.causal:
                others = others + linear_scan(drive, rates, cu_seqlens=cu_seqlens, reverse=True)[0] - drive
            sine = torch.tensor([kind == "sine" for kind in self.kinds], device=x.device)[:, None]
            share = widen(self.mu).sigmoid()[:, None]
            y = (1 - share) * widen(attended) + share * torch.where(sine, others.imag, others.real)
        return self.o_proj(y.flatten(2).to(x.dtype)), RSAState(keys, recurrent)

    def _over_all(
        self, q: Tensor, k: Tensor, v: Tensor, memory: SegmentMemory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, SegmentMemory]:
        """Attend with queries to all keys and values (B, T, H, K), and to the state's."""
        keys = values = past = None
        if memory is not None and not unread(memory):
            keys, values, past = *memory[:2], memory.position[:, None]
        blocks = Blocks(q, past, self.reach, cu_seqlens, causal=False)
        k, v = blocks.keys(widen(k), keys), blocks.keys(widen(v), values)
        seen = blocks.seen(k)
        seen = seen | ~seen.any(2, keepdim=True)  # a block without a step sees all: its output is unused
        y = blocks.taken(attend(blocks.queries(q), k, v, seen)).to(q.dtype)
        return y, SegmentMemory(blocks.kept(k), blocks.kept(v), blocks.after[:, 0])

    def _rates(self) -> Tensor:
        """Return λ or γ e^{iθ} of each head (H), complex."""
        rate = widen(self.rate)
        regular = torch.tensor([kind == "regular" for kind in self.kinds], device=rate.device)
        size = torch.where(regular, rate.tanh(), rate.sigmoid())
        if self.theta is None:
            return torch.complex(size, torch.zeros_like(size))
        theta = torch.where(regular, 0, widen(self.theta))
        return torch.complex(size * theta.cos(), size * theta.sin())
