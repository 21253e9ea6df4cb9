"""Softmax attention whose keys are divided: each rank gets the last W keys and values before its stretch.

W is the window of the op. The state of a full attention is all keys, so that its rank gets all before its stretch; the
keys do not go round a ring. The ranks work at once; under full attention a later one has more to do.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scanl.ops import SegmentMemory, segment_attention
from scanl.ops._frame.op import Op
from scanl.ops._frame.summary import Window
from scanl.parallel.exchanges import gradient_after, state_before, tied
from scanl.parallel.ranks import Ranks

WINDOW = Window()


def able(op: Op[..., Any], operands: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
    """Return whether `attend` runs this call. Padded or reversed attention works in turn."""
    return op is segment_attention and operands["mask"] is None and not call["reverse"]


def attend(
    ranks: Ranks, anchor: Tensor, operands: Mapping[str, Any], options: Mapping[str, Any], **call: Any
) -> tuple[Tensor, SegmentMemory]:
    """Return what `segment_attention` returns for this rank's stretch. The arguments are as in `division.run`."""
    k, v, memory, cu_seqlens = operands["k"], operands["v"], operands["memory"], call["cu_seqlens"]
    if memory is None:
        memory = segment_attention.empty(operands, options, cu_seqlens)
    rows = len(k) if cu_seqlens is None else 1
    goes_on = cu_seqlens is None or len(cu_seqlens) == 2  # the sequences that enter are those that leave
    begin = 0 if cu_seqlens is None else int(cu_seqlens[-2])
    tokens = torch.cat([k.flatten(2), v.flatten(2)], 2)[:, begin:]
    begins = ranks.rank == 0 or not goes_on
    start = memory.position[-rows:] if begins else torch.zeros_like(memory.position[-rows:])
    steps = start + tokens.shape[1]
    tail = torch.cat([_ordered(memory, rows, begins), tokens], 1)[:, -options["window"] :]
    entering = Halo.apply(ranks, anchor, torch.full_like(steps, tokens.shape[1] if goes_on else tail.shape[1]), tail)
    assert isinstance(entering, Tensor)
    position = _position(ranks, steps, begins)
    if ranks.rank > 0:
        first = _ring(entering, position, memory)
        memory = SegmentMemory(*(torch.cat([a, b[rows:]]) for a, b in zip(first, memory, strict=True)))
    y, memory = Op._call(segment_attention, **{**operands, "memory": memory}, **options, **call)
    return tied(y, entering), memory


def _position(ranks: Ranks, steps: Tensor, begins: bool) -> Tensor:
    """Return the position at which the sequences go on that enter, (rows,).

    steps: that the sequences which leave have had, from their begin if it lies here, or else in this stretch.
    """
    position = torch.zeros_like(steps)
    answers = ranks.everyone(torch.cat([steps.new_tensor([begins]), steps]))
    for answer in answers[: ranks.rank]:
        position = answer[1:] + (0 if answer[0] else position)
    return position


def _ordered(memory: SegmentMemory, rows: int, begins: bool) -> Tensor:
    """Return the tokens of the last rows, (rows, W, C), oldest first; zeros if the sequence does not begin here."""
    tokens = torch.cat([memory.keys[-rows:].flatten(2), memory.values[-rows:].flatten(2)], 2)
    return _turned(tokens, memory.position[-rows:]) if begins else torch.zeros_like(tokens)


def _ring(tokens: Tensor, position: Tensor, like: SegmentMemory) -> SegmentMemory:
    """Return the memory of the tokens, (rows, W, C), oldest first, of which the last has position - 1."""
    heads, channels = like.keys.shape[2:], like.values.shape[2:]
    keys, values = _turned(tokens, -position).split([heads.numel(), channels.numel()], 2)
    return SegmentMemory(keys.unflatten(2, heads), values.unflatten(2, channels), position)


def _turned(tokens: Tensor, by: Tensor) -> Tensor:
    """Return the tokens of which that at `by` mod W comes first."""
    size = tokens.shape[1]
    source = (torch.arange(size, device=tokens.device) + by[:, None]) % size
    return tokens.gather(1, source[..., None].expand_as(tokens))


class Halo(torch.autograd.Function):
    """The last W tokens before the stretch, (rows, W, C). Their gradients go back to the ranks that read them."""

    @staticmethod
    def forward(ctx: Any, ranks: Ranks, anchor: Tensor, steps: Tensor, tail: Tensor) -> Tensor:
        ctx.ranks, ctx.steps = ranks, steps
        entering = state_before(WINDOW, ranks, steps, tail)
        return torch.zeros_like(tail) if entering is None else entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_entering: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        later = gradient_after(WINDOW, ctx.ranks, ctx.steps, d_entering)
        return None, None, None, torch.zeros_like(d_entering) if later is None else later
