"""Kernels of cells for a CPU: write them for numba, and run them.

Their source and their machine code are kept on disk.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.ops._compiler.cells.compiled import LENGTH, CompiledCell, OfTorch, States, rows
from scanl.ops._compiler.cells.plan import StepPlan
from scanl.ops._compiler.cells.source import KernelLayout, NumbaWriter, source
from scanl.ops._compiler.cells.values import Sizes
from scanl.ops._cpu._cells import ROWS, Lanes, blocks, groups, in_panels, lanes
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._threads import threads

WINDOW = 1024  # most steps of the backward pass whose factors of products are in memory at the same time
MIN_WINDOW_STEPS = 128  # of such windows
# Least steps of sequences that have products of their own; in several windows, shorter ones have them too.
MIN_PRODUCT_STEPS = 512
HEAD = 64  # steps of one such product, in which the states before the steps are copied: the others are in their place
MIN_PANEL_STEPS = 16  # least steps for which the matrices are copied into panels
CHUNK = 512  # rows of a product of shorter sequences and of packed ones, whose states are copied


class OnCpu(CompiledCell):
    """The kernels of a cell for a CPU."""

    def source(self, name: str) -> str:
        layout = KernelLayout({n: self._size(n) for n in self.timed}, {"y": self.y}, {}, {}, self.state)
        forward = NumbaWriter("forward", self._forward_plan, layout, self._kept, not self.y_is_state)
        timed_too = {**layout.timed, "dy": self.y}
        back = KernelLayout(timed_too, self._rows, self._factors, self._sums, self.state)
        backward = NumbaWriter("backward", self._backward_plan, back, self._kept, not self.y_is_state)
        return source(name, forward, backward)

    def forward(
        self, values: Mapping[str, Tensor], sizes: Sizes, y_shape: Sequence[int], reverse: bool,
        cu_seqlens: Tensor | None, keep: bool, name: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        first = values[self.timed[0]]
        sequences = self._lanes(self._forward_plan, first, cu_seqlens, name)
        y = empty(tuple(y_shape), first.dtype)
        last = values["state"].clone(memory_format=torch.contiguous_format)
        numbers = self.kept_numbers(sizes) if keep else 0
        residuals = empty((*first.shape[:2], numbers), first.dtype)
        torchs = OfTorch(self, values, sizes)
        units, head = self._head(self._forward_plan, sequences, first, reverse, sizes)
        slots = self.module.forward.pack(
            **head, state=last, kept=residuals if numbers else None, history=0,
            pitch=0, **self._values(torchs, self._forward_plan, first), out_y=y,
            **{f"in_{n}": rows(values[n]) for n in self.timed},
        )  # fmt: skip
        self.module.forward.run(first.dtype, slots, units, _work(first, y, sizes[self.state]))
        return y, last, residuals

    def backward(
        self, dy: Tensor, dlast: Tensor, values: Mapping[str, Tensor], y: Tensor, residuals: Tensor, sizes: Sizes,
        reverse: bool, cu_seqlens: Tensor | None, name: str,
    ) -> list[Tensor]:  # fmt: skip
        first = values[self.timed[0]]
        if residuals.shape[-1] != self.kept_numbers(sizes):
            y, _, residuals = self.forward(values, sizes, y.shape, reverse, cu_seqlens, True, name)
        batch, steps = first.shape[:2]
        results = {n: empty((batch, steps, sizes[numbers]), first.dtype) for n, numbers in self._rows.items()}
        window = self.window(sizes) if self._factors and cu_seqlens is None else max(steps, 1)
        factors = {
            n: empty((batch * min(window, steps), sizes[numbers]), first.dtype) for n, numbers in self._factors.items()
        }
        states = States(y if self.y_is_state else residuals, sizes[self.state], values["state"], reverse, cu_seqlens)
        torchs = OfTorch(self, values, sizes)
        torchs.start({**results, "y": y}, states)
        sequences = self._lanes(self._backward_plan, first, cu_seqlens, name)
        carry = dlast.clone(memory_format=torch.contiguous_format)
        history = y.contiguous() if self.y_is_state else residuals
        units, head = self._head(self._backward_plan, sequences, first, reverse, sizes)
        added = sum(sizes[numbers] for numbers in self._sums.values())
        sums = torch.zeros((max(units, 1), added), dtype=first.dtype)
        call = {
            **head, "kept": residuals, "history": history, "pitch": history[0, 0].numel() if history.numel() else 0,
            **self._values(torchs, self._backward_plan, first),
            **{f"out_{n}": value for n, value in (results | factors).items()},
            "carry": carry, "sums": sums, **{f"in_{n}": rows(values[n]) for n in self.timed}, "in_dy": rows(dy),
        }  # fmt: skip
        lows = range(0, steps, window)
        for low in lows if reverse else reversed(lows):
            high = min(low + window, steps)
            if cu_seqlens is None:
                sequences.pieces[:, 2:] = low, high
            slots = self.module.backward.pack(**call, state=states.entering(low, high), begin=low, window=high - low)
            self.module.backward.run(first.dtype, slots, units, _work(first, dy, sizes[self.state]))
            alone = cu_seqlens is None and (steps >= MIN_PRODUCT_STEPS or window < steps)
            pieces = _pieces(batch, steps, low, high, reverse, alone=alone)
            for start, end, at in pieces:
                torchs.add(start, end, {n: value[at : at + end - start] for n, value in factors.items()})
        torchs.finish(sums.sum(0))
        return self._gradients(values, results, carry, torchs)

    def window(self, sizes: Sizes) -> int:
        """Return for how many steps at a time the backward pass stores factors of products.

        Over `LENGTH` steps they then take a quarter of the inputs, outputs and states, if the window may be so short.
        """
        passing = max(sum(sizes[numbers] for numbers in self._factors.values()), 1)
        passed = sum(sizes[self._size(n)] for n in self.timed) + sizes[self.y] + sizes[self.state]
        return min(WINDOW, max(MIN_WINDOW_STEPS, LENGTH * passed // (4 * passing)))

    def _values(self, torchs: OfTorch, plan: StepPlan, first: Tensor) -> dict[str, Any]:
        """Return the slots of matrices and other values without a batch axis."""
        panels = first.shape[1] >= MIN_PANEL_STEPS
        return {"panels": panels, **torchs.operands(plan, in_panels if panels else Tensor.contiguous)}

    def _lanes(self, plan: StepPlan, first: Tensor, cu_seqlens: Tensor | None, name: str) -> Lanes:
        """Return the sequences in lanes: each in its own, unless lanes share the loads of a matrix."""
        return lanes(first, cu_seqlens, name, ROWS * threads() if plan.lefts or plan.lanes else first.shape[1])

    def _head(
        self, plan: StepPlan, sequences: Lanes, first: Tensor, reverse: bool, sizes: Sizes
    ) -> tuple[int, dict[str, Any]]:
        """Return the number of units of work, and the slots that say how the work is divided.

        A unit is a group of lanes, or one if they have no product to share: its scratch memory then stays in the cache.
        If no channel needs another one, it may be some channels of a group.
        """
        every = len(sequences.begins) - 1
        count, size = groups(every) if plan.lefts or plan.lanes else (every, 1)
        parts, lane = blocks(count, sizes[plan.lanes]) if plan.lanes else (1, 0)
        call = {
            "pieces": sequences.pieces, "count": len(sequences.pieces), "begins": sequences.begins, "lanes": every,
            "steps": first.shape[1], "size": size, "reverse": reverse,
        }  # fmt: skip
        return count * parts, {**call, "blocks": parts, "lane": lane, **sizes.names}


def _pieces(
    batch: int, steps: int, low: int, high: int, reverse: bool, *, alone: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield pieces of the rows of a window: the first row, the row after the last, and where they are in the window.

    alone: each sequence has pieces of its own, and one of them has few rows: those whose states are copied.
    """
    if not alone:
        yield from ((at, min(at + CHUNK, batch * steps), at) for at in range(0, batch * steps, CHUNK))
        return
    cut = high - HEAD if reverse else low + HEAD
    ends = [low, cut, high] if low < cut < high and (high == steps if reverse else low == 0) else [low, high]
    for b in range(batch):
        for start, end in itertools.pairwise(ends):
            yield b * steps + start, b * steps + end, b * (high - low) + start - low


def _work(first: Tensor, y: Tensor, state: int) -> int:
    """Return about how many numbers a kernel touches: each output reads a part of the state through the products."""
    return first.numel() + y.numel() * max(state // 8, 1)
