"""The Compressive Transformer: rows that leave the memory are compressed instead of dropped."""

from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from scanl.layers import auxiliary, options, registry
from scanl.layers.attention.transformer_xl import Clamp, RelativeAttention, detached_past
from scanl.layers.base import as_widened, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.parts.segments import CallSegments, SegmentPiece, chosen, gathered
from scanl.options import at_least


class CompressiveState(NamedTuple):
    """State of `CompressiveTransformer`."""

    inputs: Annotated[Tensor, StateAxes("window + chunk_size, dim", "the last inputs, oldest first, after blank rows")]
    compressed: Annotated[Tensor, StateAxes("num_slots, dim", "compressed rows, oldest first, after blank rows")]
    steps: Annotated[Tensor, StateAxes("", "steps read", dtype=torch.int64, after=torch.add)]


@registry.register("compressive_transformer")
class CompressiveTransformer(RelativeAttention):
    """Attention of the Compressive Transformer: the segment, `window` inputs before it, and compressed inputs.

    As in `transformer_xl`, a step attends to its segment and to the memory, the last inputs before the segment. At the
    end of a segment the oldest `chunk_size` inputs leave the memory. `pool` of them become one row of the compressed
    memory, which keeps the last `num_slots` rows. The order of the keys is compressed memory, memory,
    segment, and a relative position counts rows in this order.

    No gradient passes into either memory. The compression is trained by its own loss alone, inside of
    `scanl.layers.auxiliary.collect()`, with which the trainer trains:

        |attention(h, old) - attention(h, compressed)|, h the segment, old the rows that leave

    by content alone, without positions or a mask. Only the compression has a gradient of it. It is the mean
    of the norms over rows and segments.

    Differs: `window` is a multiple of `chunk_size`, so rows leave in whole segments. In the form of lucidrains the loss
    is the mean of squares, over the whole memory, and layers read the memories of the layers above.

    Parameters: as in `transformer_xl`; for "conv" also compress.weight (D, D, pool), compress.bias (D).
    Initialisation as in `transformer_xl`; the convolution as in torch.
    """

    id = "S-compressive"
    cost = ("T W", "W")
    equation = (
        "attention of transformer_xl over h = stop_gradient([compressed; memory]), segment;  at the end of a segment "
        "compressed <- last rows of [compressed; f(old)], f a convolution, mean or maximum over `pool` rows"
    )
    source = (
        'Rae et al., "Compressive Transformers for Long-Range Sequence Modelling", arXiv:1911.05507, sec. 3, '
        "algorithms 1 and 2"
    )
    excused: ClassVar = {
        "gradients_are_the_derivatives_and_reach_every_parameter": (
            "no gradient passes into the memories, and the compression is trained by its own loss alone, as published"
        ),
        "bits_are_the_same_in_any_company": "torch's convolution rounds a row by the batch that it is in",
        "every_layer_trains_under_autocast": "the compression is trained by its own loss alone, as published",
    }
    sample: ClassVar = {"num_heads": 3, "window": 3, "chunk_size": 3, "num_slots": 2, "pool": 3}
    state: ClassVar = CompressiveState

    def __init__(
        self,
        dim: options.Dim,
        num_heads: options.FreeHeads = 8,
        head_dim: Annotated[options.HeadDim | None, "K, channels of a head; by default dim / num_heads"] = None,
        window: Annotated[options.Window, "inputs before the segment that a step sees; in whole segments"] = 256,
        chunk_size: Annotated[options.ChunkSize, "steps of a segment"] = 256,
        num_slots: Annotated[int, at_least(0), "rows of the compressed memory; 0 is `transformer_xl`"] = 256,
        pool: Annotated[int, at_least(1), "inputs that become one compressed row; a divisor of chunk_size"] = 2,
        pooling: Annotated[
            Literal["conv", "mean", "max"], 'the compression: a convolution ("conv"), "mean" or "max"'
        ] = "conv",
        clamp: Clamp = None,
    ) -> None:
        super().__init__(dim, num_heads, head_dim, window, chunk_size, clamp)
        if window % chunk_size:
            self._refuse("window", window, f"a multiple of chunk_size={chunk_size}")
        if chunk_size % pool:
            self._refuse("pool", pool, f"a divisor of chunk_size={chunk_size}")
        self.num_slots, self.pool, self.pooling = num_slots, pool, pooling
        self.compress = nn.Conv1d(dim, dim, pool, stride=pool) if pooling == "conv" and num_slots else None

    def over(self, x: Tensor, state: CompressiveState, segments: CallSegments) -> tuple[Tensor, CompressiveState]:
        inputs, compressed, steps = state.inputs.to(x.dtype), state.compressed.to(x.dtype), state.steps
        pasts, longest = [], segments.longest
        for piece in segments.pieces:
            pasts.append(self._past(piece, longest))
            longest = longest if longest is None or not isinstance(piece.count, int) else longest + piece.count
        codes = self.codes(max(past + piece.width for piece, past in zip(segments.pieces, pasts, strict=True)), x)
        cuts = zip(segments.pieces, pasts, segments.cut(x), segments.cut(self.heads(self.q_proj(x))), strict=True)
        ys = []
        for piece, past, new, q in cuts:
            rows = torch.cat([self._rows(inputs, compressed, piece, past), new], 1)
            visible = self._visible(piece, past, steps)
            ys.append(self.attend(q, detached_past(rows, piece.begin, past), visible, codes))
            inputs, steps = piece.last(inputs, new), steps + piece.count
            if self.num_slots:
                (compressed,) = piece.at_end(
                    lambda: self._compressed(piece, inputs, compressed, steps),  # noqa: B023
                    [compressed],
                )
        y = self.o_proj(segments.join(ys).flatten(2).to(x.dtype))
        return y, CompressiveState(widen(inputs), widen(compressed), steps)

    def _past(self, piece: SegmentPiece, longest: int | None) -> int:
        """Return the number of rows before the rows of a piece."""
        if not isinstance(piece.begin, int):
            return self.num_slots + self.window + self.chunk_size - 1
        near = self.window + piece.begin
        return longest if longest is not None and longest <= near else self.num_slots + near

    def _rows(self, inputs: Tensor, compressed: Tensor, piece: SegmentPiece, past: int) -> Tensor:
        """Return the last `past` rows before a piece: of the compressed memory, then the memory and the segment."""
        both = torch.cat([compressed, inputs], 1)
        if isinstance(piece.begin, int):
            near = min(past, self.window + piece.begin)
            rows = inputs[:, inputs.shape[1] - near :]
            return rows if past == near else torch.cat([compressed, rows], 1)
        age = past - torch.arange(past, device=inputs.device)
        near = self.window + piece.begin[:, None]
        index = torch.where(age <= near, both.shape[1] - age, self.num_slots + near - age)
        return gathered(both, index.clamp(min=0))

    def _visible(self, piece: SegmentPiece, past: int, steps: Tensor) -> Tensor:
        """Return (B, Q, S): whether a slot sees a row. past: rows before the piece.   steps: (B,), read before it."""
        row = torch.arange(past + piece.width, device=steps.device) - past  # counted from the first step of the piece
        causal = torch.arange(piece.width, device=steps.device)[:, None] >= row
        near = self.window + torch.as_tensor(piece.begin, device=steps.device).reshape(-1, 1)
        behind = (steps // self.chunk_size * self.chunk_size - self.window) // self.pool  # rows compressed
        present = torch.where(
            -row <= near, -row <= steps[:, None], -row - near <= behind.clamp(max=self.num_slots)[:, None]
        )
        return causal & present[:, None]

    def _compressed(self, piece: SegmentPiece, inputs: Tensor, compressed: Tensor, steps: Tensor) -> list[Tensor]:
        """Return the compressed memory after a piece that ends a segment, and add its loss where losses are collected.

        A row whose segment the piece does not end has no loss.
        """
        old, full = inputs[:, : self.chunk_size].detach(), steps >= self.window + self.chunk_size
        if self.compress is not None:
            new = self.compress(old.mT).mT
        else:
            groups = old.unflatten(1, (-1, self.pool))
            new = groups.mean(2) if self.pooling == "mean" else groups.amax(2)
        losses = auxiliary.collecting()
        if self.compress is not None and losses is not None:
            ended = full & piece.ends
            norms = self._norms(inputs[:, -self.chunk_size :].detach(), old, new)
            losses.add(self, "reconstruction", torch.where(ended, norms, 0).sum(), ended.sum())
        return chosen(
            full,
            lambda: [torch.cat([compressed, new.detach().to(compressed.dtype)], 1)[:, new.shape[1] :]],
            [compressed],
        )

    def _norms(self, segment: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """Return (B,): the norm of what the compression changes in the attention of a segment to the old rows."""
        with torch.no_grad():
            q, old_k, old_v = self.q_proj(segment), self.k_proj(old), self.v_proj(old)
        new_k, new_v = (
            functional_call(project, {name: value.detach() for name, value in project.named_parameters()}, (new,))
            for project in (self.k_proj, self.v_proj)
        )
        q, old_k, old_v, new_k, new_v = (widen(self.heads(y)).transpose(1, 2) for y in (q, old_k, old_v, new_k, new_v))
        with as_widened(q):
            target, y = (F.softmax(q @ k.mT * self.head_dim**-0.5, -1) @ v for k, v in ((old_k, old_v), (new_k, new_v)))
        return torch.linalg.vector_norm((y - target).flatten(1), dim=1)
