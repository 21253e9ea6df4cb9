"""Cut time into mini-batches, for memories that learn in them: see `scanl.ops.fused.learned_matrices`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._frame.nonfinite import faulty, since, suspected
from scanl.ops.fused.learned_matrices import Rates

STEPS_EXCUSE = "the steps of a mini-batch are summed at once, and how many there are depends on the call"

# Of all parts: operands (P, B, H, C, ·), the place of each step in its mini-batch, counted from 1, and which slots hold
# a step, (P, B, C); to the coefficients, with a first axis of P parts.
Coefficients = Callable[[Sequence[Tensor], Tensor, Tensor], Rates]

# Of one mini-batch or a part of it: operands, coefficients, which rows come to the end of their mini-batch (None where
# all do), and the state; to the outputs and the state.
Part = Callable[[Sequence[Tensor], Rates, Tensor | None, list[Tensor]], tuple[Tensor, list[Tensor]]]

# Of whole mini-batches: operands and coefficients with a first axis of P, and the state; to the outputs (P, B, H, C, ·)
# and the state.
Whole = Callable[[Sequence[Tensor], Rates, list[Tensor]], tuple[Tensor, list[Tensor]]]


def in_mini_batches(
    size: int,
    position: Tensor | None,
    operands: Sequence[Tensor],
    state: list[Tensor],
    coefficients: Coefficients,
    run: Part,
    run_whole: Whole,
) -> tuple[Tensor, list[Tensor]]:
    """Cut time at the ends of each row's mini-batches, and run one part of every row after the other.

    size: steps of a mini-batch.   position: (B,), steps of its mini-batch that each row has read; None for 0.
    operands: (B, T, H, ·), at least one step; `run` gets (B, H, C, ·), zero in slots without a step. What does not
    depend on the state is computed for all parts at once. `run_whole` gets all parts that are a mini-batch of each row.
    Returns the outputs (B, T, H, ·) and the state.
    Numbers that are not finite are replaced by zeros. Outputs are NaN from that step on, and so is the state.
    """
    like = operands[0]
    batch, steps = like.shape[:2]
    past = like.new_zeros(batch, dtype=torch.int64) if position is None else position
    spoil = None
    if suspected(*operands):
        fault = torch.stack([faulty(tensor).flatten(2).any(2) for tensor in operands]).any(0)
        spoil = since(fault, 1).to(like.dtype)
        operands = [torch.where(fault[:, :, None, None], 0, tensor) for tensor in operands]
    width = min(size, steps)
    slots = torch.arange(width, device=like.device)
    parts = -(-(steps + (0 if position is None else size - 1)) // size)
    # Of each part and row, (P, B): the slot of its first step; below 0 where that was read before.
    begins = size * torch.arange(parts, device=like.device)[:, None] - past
    at = begins.clamp(min=0)[..., None] + slots
    within = at - begins[..., None] + 1
    holds = (at < steps) & (within <= size)

    def cut(x: Tensor) -> Tensor:
        """Cut (B, T, H, ·) into (P, B, H, C, ·)."""
        if position is None:
            x = x if parts * width == steps else F.pad(x, (0, 0, 0, 0, 0, parts * width - steps))
            x = x.unflatten(1, (parts, width))
        else:
            index = at.clamp(max=steps - 1).transpose(0, 1)
            x = x.gather(1, index.flatten(1)[:, :, None, None].expand(-1, -1, *x.shape[2:]))
            x = torch.where(holds.transpose(0, 1)[..., None, None], x.unflatten(1, (parts, width)), 0)
        return x.permute(1, 0, 3, 2, 4)

    taken = [cut(tensor) for tensor in operands]
    rates = coefficients(taken, within.clamp(max=size), holds)
    outputs: list[Tensor] = []
    first, stop = min(parts, 0 if position is None else 1), steps // size

    def pieces(begin: int, end: int) -> tuple[list[Tensor], Rates]:
        return [tensor[begin:end] for tensor in taken], Rates(*(tensor[begin:end] for tensor in rates))

    def in_turn(begin: int, end: int, state: list[Tensor]) -> list[Tensor]:
        operands_of, rates_of = pieces(begin, end)
        # Parts are unbound, since the gradient of an index is as large as all parts.
        every = zip(zip(*operands_of, strict=True), zip(*rates_of, strict=True), strict=True)
        for index, (slots_of_batch, of_part) in enumerate(every, begin):
            done = None if (index + 1) * size <= steps else begins[index] + size <= steps
            y, state = run(slots_of_batch, Rates(*of_part), done, state)
            outputs.append(y)
        return state

    state = in_turn(0, first, state)
    if stop > first:
        y, state = run_whole(*pieces(first, stop), state)
        outputs.append(y.permute(1, 2, 0, 3, 4).flatten(2, 3))
    state = in_turn(max(first, stop), parts, state)
    y = torch.cat(outputs, 2).transpose(1, 2)
    if position is None:
        y = y[:, :steps]
    else:
        every = torch.arange(steps, device=like.device)
        batch_index = (past[:, None] + every) // size
        slot = batch_index * width + every - (batch_index * size - past[:, None]).clamp(min=0)
        y = y.gather(1, slot[:, :, None, None].expand(-1, -1, *y.shape[2:]))
    if spoil is None:
        return y, state
    last = [tensor * spoil[:, -1].view(-1, *(1,) * (tensor.ndim - 1)) for tensor in state]
    return y * spoil[:, :, None, None], last
