"""The encoder of a transformer, and Memformer's: slots of memory that it reads, and writes at the end of a segment."""

from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.attention._blocks import TransformerBlock
from scanl.layers.base import Layer, widen
from scanl.layers.module import Module
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.norm import RMSNorm
from scanl.layers.state import Device, DType
from scanl.models.block import normed
from scanl.models.presets import whole
from scanl.models.stack import Backbone
from scanl.models.whole.cross_attention import CrossAttention, seen, side_by_side
from scanl.options import above, at_least, divides


class SlotWriter(Module):
    r"""Memformer's write and its forgetting.

    .. math:: a = \mathrm{softmax}(q_i \cdot [k_i ; K] / (τ \sqrt K)), \quad
        m_i' = \mathrm{unit}(a [m_i ; V] + v_i), \quad q_i = W_q m_i, \; k_i = W_k m_i, \; K = W_k y, \; V = W_v y

    A slot sees itself and the steps y, and no other slot. Its own value is m_i itself, so weight 1 on it keeps it.
    Where nothing is new, a slot drifts to unit(v_i), which is also its start.
    """

    def __init__(self, dim: int, num_slots: int, num_heads: int, tau: float) -> None:
        super().__init__()
        self.num_heads, self.tau = num_heads, tau
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.normal_(linear.weight, std=dim**-0.5)
        self.bias = nn.Parameter(torch.randn(num_slots, dim) * dim**-0.5)

    def start(self) -> Tensor:
        """Return the slots (M, D) before any segment."""
        return F.normalize(widen(self.bias), dim=-1)

    def forward(self, m: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
        """Return the slots (B, M, D) after a segment with the outputs y (B, S, D). mask: (B, S), its steps."""
        inputs = m.to(self.q_proj.weight.dtype)
        q, slot_keys = self._heads(self.q_proj(inputs)), self._heads(self.k_proj(inputs))
        k, v = self._heads(self.k_proj(y)), self._heads(self.v_proj(y))
        scores = torch.einsum("bmhk,bshk->bhms", q, k)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -torch.inf)
        scores = torch.cat([(q * slot_keys).sum(-1).transpose(1, 2)[..., None], scores], -1)
        a = (scores / (self.tau * q.shape[-1] ** 0.5)).softmax(-1)
        old = a[..., 0].transpose(1, 2)[..., None] * self._heads(m)
        written = old + torch.einsum("bhms,bshk->bmhk", a[..., 1:], v)
        return F.normalize(written.flatten(2) + widen(self.bias), dim=-1)

    def _heads(self, x: Tensor) -> Tensor:
        return widen(x).unflatten(-1, (self.num_heads, -1))


@whole("transformer_encoder", "Memformer")
class TransformerEncoder(Backbone):
    """A transformer's encoder: every step reads all steps. With `num_slots` it is Memformer's.

    A block is self-attention with rotary positions, the read of the slots by cross-attention, and a gated network,
    each behind an RMSNorm and added to its input. A call is a segment. At its end `SlotWriter` writes the outputs into
    the slots, which the next call reads. A segment may not be cut.

    Gradients flow through the slots from call to call; `scanl.layers.state.detach` stops them. The paper saves memory
    in this by computing the segments again from the last to the first, with the same gradients; here a user's loop
    may use `torch.utils.checkpoint`.

    Differs: the paper has absolute positions and norms behind the sums; τ is not published, 1/4 is ours.

    State: (B, num_slots, D), the slots, of length 1; () without them.
    Source: Vaswani et al., "Attention Is All You Need", arXiv:1706.03762, sec. 3.1; Wu et al., "Memformer",
    arXiv:2010.06891, sec. 3.
    """

    name: ClassVar[str] = "transformer_encoder"

    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, width"],
        depth: Annotated[int, at_least(1), "number of blocks"],
        *,
        num_heads: Annotated[int, divides("dim"), "H, number of heads; a divisor of dim"] = 8,
        expand: Annotated[float, above(0), "the network has int(expand D) features"] = 8 / 3,
        num_slots: Annotated[int, at_least(0), "M, slots of memory; 0 for an encoder without memory"] = 0,
        tau: Annotated[float, above(0), "temperature of the write"] = 0.25,
    ) -> None:
        super().__init__()
        if (dim // num_heads) % 2:
            raise ConfigError(
                f"transformer_encoder: num_heads is {num_heads}, expected dim / num_heads to be even because of the "
                f"rotary positions, with dim={dim}"
            )
        self.dim = dim
        self.blocks = nn.ModuleList(
            TransformerBlock(dim, num_heads, expand, 10000.0, 1e-6, depth) for _ in range(depth)
        )
        self.reads = nn.ModuleList(CrossAttention(dim, dim, num_heads, depth) for _ in range(depth if num_slots else 0))
        self.write = SlotWriter(dim, num_slots, num_heads, tau) if num_slots else None
        self.norm = self.make_norm()

    def mixers(self) -> list[Layer]:
        return []

    def make_norm(self) -> nn.RMSNorm:
        return RMSNorm(self.dim, eps=1e-6)

    @property
    def bidirectional(self) -> bool:
        return True

    @property
    def timed(self) -> bool:
        return False

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor | tuple[()]:
        if self.write is None:
            return ()
        start = self.write.start()
        kind = torch.promote_types(dtype or self.write.bias.dtype, torch.float32)
        return start.to(device=device, dtype=kind).expand(batch_size, -1, -1)

    def forward(
        self,
        x: Tensor,
        state: Tensor | tuple[()] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Map x (B, T, D) to y (B, T, D) and the slots. Raises ConfigError for durations, which it does not take."""
        if timespans is not None:
            raise ConfigError("transformer_encoder: timespans is given, expected none; it has no durations")
        h, mask = (x, None) if cu_seqlens is None else side_by_side(x, cu_seqlens)
        slots = self.init_state(len(h), device=x.device) if state is None else state
        if h.shape[1] == 0:
            return x, slots
        visible, everything = seen(mask, x), seen(None, x)
        steps = torch.arange(h.shape[1], device=x.device)[None]
        for index, block in enumerate(cast(list[TransformerBlock], list(self.blocks))):
            h = block.mixed(h, attend(*block.projected(h, steps), visible))
            if isinstance(slots, Tensor):
                attention = cast(CrossAttention, self.reads[index])
                h = h + attention(h, *attention.keys_values(slots.to(h.dtype)), everything)
            h = block.fed(h)
        y = normed(self.norm, h)
        if self.write is not None:
            before = cast(Tensor, slots)
            slots = self.write(before, y, mask)
            if mask is not None:  # an empty sequence writes nothing
                slots = torch.where(mask.any(1)[:, None, None], slots, before.to(slots))
        return (y if mask is None else y[mask][None]), slots
