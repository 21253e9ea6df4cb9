r"""Transformer-XL: attention to a segment and to the inputs before it, with relative positions.

.. math:: s_{ij} = \big((q_i + u) \cdot W_k h_j + (q_i + v) \cdot W_r R_{i-j}\big) / \sqrt K
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.attention._segments import SegmentLayer
from scanl.layers.base import widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.masked_attention import attend
from scanl.layers.parts.positions import check_length
from scanl.layers.parts.segments import CallSegments, SegmentPiece
from scanl.options import at_least


class TransformerXLState(NamedTuple):
    """State of `TransformerXL`."""

    inputs: Annotated[Tensor, StateAxes("reach, dim", "the last inputs, oldest first, after blank rows")]
    steps: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


Clamp = Annotated[int | None, at_least(0), "distances beyond it count as it; None for no such limit"]


def distances(steps: int, dim: int, clamp: int | None, like: Tensor) -> Tensor:
    """Return the codes (T, D) of the distances 0 to T - 1: the sines of all frequencies, then the cosines."""
    frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=like.device, dtype=torch.float64) / dim)
    distance = torch.arange(steps, device=like.device, dtype=torch.float64)
    angles = (distance if clamp is None else distance.clamp(max=clamp))[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :dim].to(like.dtype)


def shifted(scores: Tensor) -> Tensor:
    """Move row i of scores (..., Q, S) to the left by Q - 1 - i columns. What enters at the right has no meaning."""
    queries, keys = scores.shape[-2:]
    return F.pad(scores, (1, 0)).flatten(-2)[..., queries:].unflatten(-1, (queries, keys))


class RelativeAttention(SegmentLayer):
    """Base class of `transformer_xl` and `compressive_transformer`: projections, relative positions, and the mask."""

    def __init__(
        self, dim: int, num_heads: int, head_dim: int | None, window: int, chunk_size: int, clamp: int | None
    ) -> None:
        super().__init__()
        if head_dim is None and dim % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of dim={dim} without head_dim")
        self.dim, self.num_heads, self.head_dim = dim, num_heads, head_dim or dim // num_heads
        self.window, self.chunk_size, self.clamp = window, chunk_size, clamp
        width = num_heads * self.head_dim
        self.q_proj, self.k_proj, self.v_proj, self.r_proj = (nn.Linear(dim, width, bias=False) for _ in range(4))
        self.o_proj = nn.Linear(width, dim, bias=False)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.r_proj, self.o_proj):
            nn.init.normal_(linear.weight, std=0.02)
        self.u, self.v = (nn.Parameter(0.02 * torch.randn(num_heads, self.head_dim)) for _ in range(2))

    def heads(self, x: Tensor) -> Tensor:
        """Split (..., H K) into (..., H, K)."""
        return x.unflatten(-1, (self.num_heads, self.head_dim))

    def codes(self, steps: int, like: Tensor) -> Tensor:
        """Return the projected codes (1, H, T, K) of the distances 0 to T - 1."""
        return widen(self.heads(self.r_proj(distances(steps, self.dim, self.clamp, like)[None]))).transpose(1, 2)

    def attend(self, q: Tensor, rows: Tensor, visible: Tensor, codes: Tensor) -> Tensor:
        """Return (B, Q, H, K), from queries (B, Q, H, K) of the last Q of rows (B, S, D). codes: of S distances."""
        q, codes = widen(q), codes[:, :, : rows.shape[1]].flip(2)
        bias = shifted((q + widen(self.v)).transpose(1, 2) @ codes.mT) * self.head_dim**-0.5
        k, v = self.heads(self.k_proj(rows)), self.heads(self.v_proj(rows))
        return attend(q + widen(self.u), k, v, visible, bias=bias)


def detached_past(rows: Tensor, begin: int | Tensor, first: int) -> Tensor:
    """Return rows (B, S, D) without gradient for those before the segment. first: row of the first step of the call.

    begin: place of that step in its segment, a number or (B,).
    """
    if isinstance(begin, int):
        cut = max(0, first - begin)
        return torch.cat([rows[:, :cut].detach(), rows[:, cut:]], 1)
    present = torch.arange(rows.shape[1], device=rows.device) >= first - begin[:, None]
    return torch.where(present[..., None], rows, rows.detach())


@registry.register("transformer_xl")
class TransformerXL(RelativeAttention):
    """Attention of Transformer-XL: a step attends to its segment and to `window` inputs before the segment.

    R_d are sines and cosines of the distance d. The scale applies to all terms. No gradient passes into the inputs
    before the segment; the projections of them have one. Three forms:

    - "bounded": all steps of a segment see the `window` inputs before it, and the steps of the segment up to
      themselves.
    - "same_length": every step sees exactly the last `window` inputs, its own among them. The segments then have no
      effect except on gradients.
    - "growing": every step sees all inputs before it. A sequence of more than `max_length` steps raises an error.

    The memory is empty at the start of a sequence, as in the authors' program of PyTorch. That of transformers starts
    with rows of zeros, which are attended to. The layer is the attention alone, with its own u and v (`untie_r`). The
    authors add it to its input before the norm; a `Stack` has the norm first.

    Parameters: q_proj, k_proj, v_proj (rows of `qkv_net` in the authors' program), r_proj (H K, D); o_proj (D, H K);
    u, v (H, K), there `r_w_bias` and `r_r_bias`.
    Initialisation as in that program: N(0, 0.02²).
    """

    id = "S-txl"
    cost = ("T W", "W")
    aliases = ("txl",)
    equation = (
        "y_i = W_o sum_j softmax_j(((q_i + u) . W_k h_j + (q_i + v) . W_r R_{i-j}) / sqrt(K)) W_v h_j,  "
        "h = [stop_gradient(memory); segment]"
    )
    source = (
        'Dai et al., "Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context", arXiv:1901.02860, '
        "sec. 3.2 and 3.3, and its code"
    )
    excused: ClassVar = {
        "gradients_are_the_derivatives_and_reach_every_parameter": "no gradient passes into the memory, as published"
    }
    sample: ClassVar = {"num_heads": 3, "window": 4, "chunk_size": 3}
    state: ClassVar = TransformerXLState

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        window: Annotated[options.Window, "inputs before the segment that a step sees"] = 256,
        chunk_size: Annotated[options.ChunkSize, "steps of a segment"] = 256,
        variant: Annotated[
            Literal["bounded", "same_length", "growing"], '"bounded", "same_length" or "growing"'
        ] = "bounded",
        clamp: Clamp = None,
        max_length: Annotated[options.MaxLength, 'length of the longest sequence with "growing"'] = 2048,
    ) -> None:
        super().__init__(dim, num_heads, head_dim, window, chunk_size, clamp)
        self.variant, self.longest = variant, max_length if variant == "growing" else None
        self.reach = {"bounded": window + chunk_size, "same_length": window, "growing": max_length}[variant] - 1

    def over(self, x: Tensor, state: TransformerXLState, segments: CallSegments) -> tuple[Tensor, TransformerXLState]:
        check_length(self._who(), x, state.steps, None, self.longest)
        inputs, steps = state.inputs.to(x.dtype), state.steps
        contexts = list(self._contexts(inputs, segments))
        codes = self.codes(max(past + piece.width for piece, past in contexts), x)
        pieces = zip(contexts, segments.cut(x), segments.cut(self.heads(self.q_proj(x))), strict=True)
        ys = []
        for (piece, past), new, q in pieces:
            rows = torch.cat([inputs[:, self.reach - past :], new], 1)
            visible = self._visible(piece, past, steps)
            ys.append(self.attend(q, detached_past(rows, piece.begin, past), visible, codes))
            inputs, steps = piece.last(inputs, new), steps + piece.count
        y = self.o_proj(segments.join(ys).flatten(2).to(x.dtype))
        return y, TransformerXLState(widen(inputs), steps)

    def _contexts(self, inputs: Tensor, segments: CallSegments) -> Iterator[tuple[SegmentPiece, int]]:
        """Yield each piece, and how many of the last inputs its steps may see."""
        longest = segments.longest
        for piece in segments.pieces:
            past = self.reach
            if isinstance(piece.begin, int) and isinstance(piece.count, int):
                past = min(past, self.window + piece.begin) if self.variant == "bounded" else past
                if longest is not None:
                    past, longest = min(past, longest), longest + piece.count
            yield piece, past

    def _visible(self, piece: SegmentPiece, past: int, steps: Tensor) -> Tensor:
        """Return (B or 1, Q, S): whether a slot sees a row. past: rows before the piece.   steps: (B,), read before."""
        row = torch.arange(past + piece.width, device=steps.device) - past  # counted from the first step of the piece
        age = torch.arange(piece.width, device=steps.device)[:, None] - row
        visible = (age >= 0) & (row >= -steps[:, None])[:, None]
        if self.variant == "same_length":
            return visible & (age < self.window)
        if self.variant == "bounded":
            begin = torch.as_tensor(piece.begin, device=steps.device).reshape(-1, 1)
            visible = visible & (row >= -self.window - begin)[:, None]
        return visible
