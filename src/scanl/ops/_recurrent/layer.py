"""One layer of torch's recurrent modules as one kernel forward, and one backward.

A call of torch costs microseconds for each step, or packs the weights for a library, which takes as long as tens of
steps. Here a call is one kernel, for all steps and both directions, whatever the sizes. All tensors are of float32.
"""

import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scanl.ops._cpu._threads import threads
from scanl.ops._recurrent import backward, forward
from scanl.ops._recurrent.cells import CELLS
from scanl.ops._recurrent.slots import COMMON_SLOTS

CHUNK_ROWS = 128  # rows, of all steps that are computed at a time: their numbers stay in the second-level cache
LARGE_CHUNK_ROWS = 512  # the same for gradients of LARGE_WEIGHTS, which come from farther away for each chunk
LARGE_WEIGHTS = 1 << 17  # numbers of the weights of a direction
FEW_ROWS = 16  # rows for which packing a weight takes longer than its product as it lies
SHARED_WORK = 1 << 21  # products of numbers: with fewer, to start threads takes longer than they save
OWN_SCRATCH = 1 << 17  # numbers that a thread keeps
MIN_GROUP_ROWS = 4  # rows of the batch for a thread of its own
IDLE_RATIOS = {"LSTM": 1, "GRU": 2, "RNN_TANH": 2, "RNN_RELU": 2}  # threads of torch that one of ours is as fast as

Plain = Callable[..., Any]


_FORMATS = [f"{COMMON_SLOTS + count}q" for count in range(64)]


class RecurrentKernel:
    """A kernel, which is compiled when it first runs."""

    def __init__(self, source: Callable[[str], str], mode: str) -> None:
        self._source = functools.partial(source, mode)

    @functools.cached_property
    def _native(self) -> Any:
        from scanl.ops._compiler.machine_code import NativeKernel
        from scanl.ops._compiler.print_llvm import KernelSource

        return NativeKernel(KernelSource(self._source(), frozenset()))

    def run(self, packed: Sequence[int], units: int, work: int) -> None:
        """Run the kernel; on this thread alone if `work` is 0: an array of ctypes takes longer than a small step."""
        if work:
            self._native.prepared(list(packed), units, work)()
        else:
            self._native.once(struct.pack(_FORMATS[len(packed)], 0, units, *packed))


_FORWARD = {mode: RecurrentKernel(forward.source, mode) for mode in CELLS}
_BACKWARD = {mode: RecurrentKernel(backward.source, mode) for mode in CELLS}


class ScratchMemory(threading.local):
    """Scratch memory of a thread, if there is little of it. No call leaves anything in it."""

    def __init__(self) -> None:
        self.own = torch.empty(OWN_SCRATCH)
        self.address = self.own.data_ptr()

    def of(self, numbers: int) -> tuple[int, torch.Tensor]:
        """Return the address of memory, and what keeps it."""
        if numbers <= OWN_SCRATCH:
            return self.address, self.own
        memory = torch.empty(numbers)
        return memory.data_ptr(), memory


_scratch = ScratchMemory()


class RecurrentSizes(NamedTuple):
    """The sizes of a layer, and of the division of its work.

    kept, kept_row: numbers that the gradients of a direction need, in all and in a row of a step, for `padded` units.
    groups: of rows of the batch.   work: products of numbers; 0 for a call that stays on its thread.
    steps_forward, steps_backward: that are computed at a time.   forward, backward: numbers of scratch memory of a
    unit.   idle: whether torch may take less time, on more threads than there are units here.
    """

    kept: int
    kept_row: int
    padded: int
    groups: int
    work: int
    steps_forward: int
    steps_backward: int
    forward: int
    backward: int
    idle: bool


@functools.lru_cache(4096)
def sizes_of(
    mode: str, batch: int, steps: int, inputs: int, units: int, directions: int, threads: int
) -> RecurrentSizes:
    """Return the sizes of a layer."""
    cell, groups, weights = CELLS[mode], 1, CELLS[mode].gates * units * (inputs + units)
    work = steps * batch * weights
    if work < SHARED_WORK:
        work = 0
    else:
        groups = max(1, min(-(-threads // directions), batch // MIN_GROUP_ROWS))
    rows = -(-batch // groups)
    limits = CHUNK_ROWS, LARGE_CHUNK_ROWS if weights > LARGE_WEIGHTS else CHUNK_ROWS
    first, second = (max(1, min(steps, limit // rows)) for limit in limits)
    padded = forward.padded(cell, units)
    kept_row = cell.kept * padded
    idle = work > 0 and threads > IDLE_RATIOS[mode] * directions * groups
    return RecurrentSizes(
        steps * batch * kept_row, kept_row, padded, groups, work, first, second,
        forward.scratch_size(cell, rows, inputs, units, first),
        backward.scratch_size(cell, rows, inputs, units, second), idle,
    )  # fmt: skip


def run(
    mode: str, x: Tensor, weights: Sequence[Tensor], initial: Sequence[Tensor], y: Tensor, last: Sequence[Tensor],
    *, carries: Tensor | None = None, keeps: bool,
) -> Tensor | None:  # fmt: skip
    """Run one layer over x (B, T, ·), whose last axis is contiguous. Return what the gradients need.

    weights: of a direction weight_ih, weight_hh and, with biases, bias_ih and bias_hh; then those of the other.
    initial, last: h, and c of an LSTM, (directions, B, D) each; no `initial` for zeros.   y: (B, T, directions · D).
    carries: (T, B) of int32, 0 where the state is zero before a step, as at the start of an episode, and else 1; None
    for 1; for one direction.   `last` and `y` are written.
    """
    (batch, steps, inputs), (directions, _, units) = x.shape, last[0].shape
    sizes = sizes_of(mode, batch, steps, inputs, units, directions, threads())
    count = directions * sizes.groups
    scratch, memory = _scratch.of(sizes.forward * count)
    kept = torch.empty(directions * sizes.kept) if keeps and sizes.kept else None
    few = steps * batch < FEW_ROWS
    (x_batch, x_step, _), (y_batch, y_step, _) = x.stride(), y.stride()
    packed = [
        steps, batch, inputs, units, x.data_ptr(), x_step, x_batch, y.data_ptr(), y_step, y_batch,
        batch * sizes.kept_row, 0 if carries is None else carries.data_ptr(), sizes.groups, scratch, sizes.forward,
        sizes.steps_forward, few, few or (steps == 1 and not initial),
    ]  # fmt: skip
    each, state = len(weights) // directions, batch * units * 4
    places = [weight.data_ptr() for weight in weights]
    (h0, c0), (h, c) = _places(initial), _places(last)
    of_kept = 0 if kept is None else kept.data_ptr()
    for n in range(directions):
        packed += places[n * each : (n + 1) * each]
        if each == 2:
            packed += 0, 0
        packed += (
            h0 and h0 + n * state, c0 and c0 + n * state, h + n * state, c and c + n * state,
            of_kept and of_kept + n * sizes.kept * 4,
        )  # fmt: skip
    _FORWARD[mode].run(packed, count, sizes.work)
    del memory
    return kept


class RecurrentLayer(torch.autograd.Function):
    """The same with gradients."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        mode: str,
        plain: Plain,
        steps_first: bool,
        states: int,
        carries: Tensor | None,
        x: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return y, (T, B, directions · D) if `steps_first`, else (B, T, directions · D), and the last states.

        plain: computes the same of x and `tensors` by torch, for derivatives of the gradient.
        carries: as in `run`.   tensors: `states` first states, if not zeros, and the weights.
        """
        initial, weights = tensors[:states], tensors[states:]
        directions, units = _directions(weights), weights[1].shape[1]
        result, y = outputs(x, directions * units, steps_first)
        last = [x.new_empty(directions, x.shape[0], units)]
        if CELLS[mode].memory:
            last.append(x.new_empty(directions, x.shape[0], units))
        kept = run(mode, x, weights, initial, y, last, carries=carries, keeps=True)
        ctx.set_materialize_grads(False)
        # torch would refuse the backward pass after a change of y in place.
        ctx.save_for_backward(x, *tensors, kept, y.data)
        ctx.known = mode, plain, steps_first, states, carries, result.detach(), result._version
        return result, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *tensors, kept, y = ctx.saved_tensors
        mode, plain, steps_first, states, carries, counter, version = ctx.known
        needs, initial, weights = ctx.needs_input_grad[5:], tensors[:states], tensors[states:]
        if torch.is_grad_enabled():
            found = _differentiable(plain, [x, *tensors], gradients, needs)
        else:
            dy, *dlast = gradients
            if counter._version != version:
                y = torch.empty_like(y)
                shape = _directions(weights), x.shape[0], weights[1].shape[1]
                last = [x.new_empty(shape) for _ in range(1 + CELLS[mode].memory)]
                run(mode, x, weights, initial, y, last, carries=carries, keeps=False)
            dy = dy.transpose(0, 1) if dy is not None and steps_first else dy
            found = differentiate(mode, x, weights, initial, carries, kept, y, dy, dlast, needs)
        return None, None, None, None, None, *found


def one_layer(
    mode: str, plain: Plain, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor], carries: Tensor | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """Run one layer in one direction over x (B, T, ·), with gradients if they are asked for.

    Return the outputs (B, T, D) and the last states, (1, B, D) each. The arguments are those of `RecurrentLayer`.
    """
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *initial, *weights)):
        x, initial, weights = _readable(x, initial, weights)
        y, *last = RecurrentLayer.apply(mode, plain, False, len(initial), carries, x, *initial, *weights)
        return y, last
    return without_gradients(mode, x, initial, weights, carries)


def without_gradients(
    mode: str, x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor], carries: Tensor | None
) -> tuple[Tensor, Sequence[Tensor]]:
    """Do the same without gradients."""
    x, initial, weights = _readable(x, initial, weights)
    units = weights[1].shape[1]
    y = x.new_empty(*x.shape[:2], units)
    last = [x.new_empty(1, x.shape[0], units) for _ in range(1 + CELLS[mode].memory)]
    run(mode, x, weights, initial, y, last, carries=carries, keeps=False)
    return y, last


def _readable(
    x: Tensor, initial: Sequence[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Return tensors as a kernel reads them: x with a contiguous last axis, the others contiguous."""
    x = x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()
    return x, [state.contiguous() for state in initial], [weight.contiguous() for weight in weights]


def outputs(x: Tensor, width: int, steps_first: bool) -> tuple[Tensor, Tensor]:
    """Return memory for the outputs of x (B, T, ·) as it lies, and as (B, T, width)."""
    batch, steps, _ = x.shape
    if steps_first:
        result = x.new_empty(steps, batch, width)
        return result, result.transpose(0, 1)
    result = x.new_empty(batch, steps, width)
    return result, result


def _directions(weights: Sequence[Tensor]) -> int:
    """Return how many directions have these weights: without biases, the third is the weight of another one."""
    each = 4 if len(weights) > 2 and weights[2].ndim == 1 else 2
    return len(weights) // each


def _differentiable(
    plain: Plain, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients as functions of all tensors."""
    pairs = [(y, by) for y, by in zip(plain(*inputs), gradients, strict=True) if by is not None]
    wanted = [tensor for tensor, need in zip(inputs, needs, strict=True) if need]
    ys, by = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(ys, wanted, by, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needs]


def differentiate(
    mode: str, x: Tensor, weights: Sequence[Tensor], initial: Sequence[Tensor], carries: Tensor | None,
    kept: Tensor | None, y: Tensor, dy: Tensor | None, dlast: Sequence[Tensor | None], needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of x, the first states and the weights, where needed.

    carries: as in `run`.   kept: from `run`.   dy, dlast: gradients of y and the last states, None for zeros.
    """
    units, (batch, steps, inputs) = weights[1].shape[1], x.shape
    directions, states = y.shape[2] // units, len(initial)
    sizes = sizes_of(mode, batch, steps, inputs, units, directions, threads())
    count, groups = directions * sizes.groups, sizes.groups
    scratch, memory = _scratch.of(sizes.backward * count)
    if dy is None:
        dy = x.new_zeros(directions * units).expand(y.shape)
    elif dy.stride(2) != 1 and dy.shape[2] > 1:
        dy = dy.contiguous()
    dx = x.new_empty(directions, steps, batch, inputs) if needs[0] else None
    # Gradients of first states decide how far the kernel goes back.
    dinitial = [torch.empty_like(state) for state in initial] if True in needs[1 : 1 + states] else [None] * states
    dweights: list[Tensor | None] = [None] * len(weights)
    if True in needs[1 + states :]:
        lead = (groups,) if groups > 1 else ()
        dweights = [weight.new_empty(lead + weight.shape) for weight in weights]
    (x_batch, x_step, _), (y_batch, y_step, _), (dy_batch, dy_step, _) = x.stride(), y.stride(), dy.stride()
    packed = [
        steps, batch, inputs, units, x.data_ptr(), x_step, x_batch, y.data_ptr(), y_step, y_batch, dy.data_ptr(),
        dy_step, dy_batch, batch * inputs, batch * sizes.kept_row, sizes.padded,
        0 if carries is None else carries.data_ptr(), groups, scratch, sizes.backward, sizes.steps_backward,
    ]  # fmt: skip
    each, of_state = len(weights) // directions, batch * units * 4
    h0, c0 = _places(initial)
    held = [None if by is None else by.contiguous() for by in dlast]
    dh, dc = _places(held)
    dh0, dc0 = _places(dinitial)
    of_kept, of_dx = _places([kept, dx])
    own = [0 if by is None else by.data_ptr() for by in dweights]
    for n in range(directions):
        at, first = n * of_state, n * each
        packed += (
            weights[first].data_ptr(), weights[first + 1].data_ptr(), h0 and h0 + at, c0 and c0 + at,
            of_kept and of_kept + n * sizes.kept * 4, dh and dh + at, dc and dc + at,
            of_dx and of_dx + n * steps * batch * inputs * 4, *own[first : first + each], *(0, 0)[: 4 - each],
            dh0 and dh0 + at, dc0 and dc0 + at,
        )  # fmt: skip
    _BACKWARD[mode].run(packed, count, sizes.work)
    del memory, held
    if dx is not None:
        dx = (dx[0] if directions == 1 else dx[0].add_(dx[1])).transpose(0, 1)
    if groups > 1:
        dweights = [None if by is None else by.sum(0) for by in dweights]
    found = [dx, *dinitial, *dweights]
    return found if all(needs) else [by if need else None for by, need in zip(found, needs, strict=True)]


def _places(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the addresses of two tensors, 0 for one that there is not."""
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return [*places, 0, 0][:2]
