"""Kernels of cells for a GPU: write them for Triton, and run them.

Half precision is widened before and rounded after: a step waits for the step before it, not for memory.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scanl.ops._compiler.cells.compiled import LENGTH, CompiledCell, OfTorch, States, flat, rows
from scanl.ops._compiler.cells.tiles import Tiles
from scanl.ops._compiler.cells.triton_source import TritonWriter, source
from scanl.ops._compiler.cells.values import Sizes

BLOCK_CHANNELS = 64  # of a block, where channels are divided over programs
MAX_CHANNELS = 4096  # most channels of a program that sums over them
MAX_MATRIX_WIDTH = 128  # most rows or columns of a tile of a matrix
MAX_HELD_NUMBERS = 16384  # most numbers of the matrices that a program holds in registers
# Most sequences of a program in the interpreter, which is faster with few programs; a GPU has one in each.
MAX_ROWS = 16


class OnGpu(CompiledCell):
    """The kernels of a cell for a GPU."""

    def source(self, name: str) -> str:
        plans = self._forward_plan, self._backward_plan
        self.tiles = tiles = Tiles(self.axes, plans)
        common, rows = (self._kept, self.y_is_state), {**self._rows, **self._factors}
        self._forward_writer = TritonWriter("forward", plans[0], tiles, self.timed, {"y": self.y}, {}, *common)
        self._backward_writer = TritonWriter("backward", plans[1], tiles, self.timed, rows, self._sums, *common)
        reduces = any(node.kind == "reduce" for plan in plans for node in plan.needed)
        self.multiplies = any(plan.lefts for plan in plans)
        self.divided = not (reduces or self.multiplies) and len(tiles.widths) == 1
        return source(name, self._forward_writer, self._backward_writer)

    def refusals(self, sizes: Sizes) -> list[str]:
        widest = MAX_MATRIX_WIDTH if self.multiplies else MAX_CHANNELS
        if self.divided:
            return []
        return [
            f"{letter}={sizes[width]} is over {widest}"
            for letter, width in self.tiles.widths.items()
            if sizes[width] > widest
        ]

    def window(self, sizes: Sizes) -> int:
        return LENGTH

    def forward(
        self, values: Mapping[str, Tensor], sizes: Sizes, y_shape: Sequence[int], reverse: bool,
        cu_seqlens: Tensor | None, keep: bool, name: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        first, state = values[self.timed[0]], values["state"].contiguous()
        y, last = first.new_empty(tuple(y_shape)), torch.empty_like(state)
        numbers = self.kept_numbers(sizes) if keep else 0
        residuals = first.new_empty((*first.shape[:2], numbers))
        torchs = OfTorch(self, values, sizes)
        operands = {"state": state, "kept": residuals, "last": last, "y": y, **torchs.operands(self._forward_plan)}
        timed = {n: rows(values[n]) for n in self.timed}
        self._launch("forward", operands, timed, sizes, reverse, cu_seqlens, KEEP=numbers > 0)
        return y, last, residuals

    def backward(
        self, dy: Tensor, dlast: Tensor, values: Mapping[str, Tensor], y: Tensor, residuals: Tensor, sizes: Sizes,
        reverse: bool, cu_seqlens: Tensor | None, name: str,
    ) -> list[Tensor]:  # fmt: skip
        first, state = values[self.timed[0]], values["state"].contiguous()
        if residuals.shape[-1] != self.kept_numbers(sizes):
            y, _, residuals = self.forward(values, sizes, y.shape, reverse, cu_seqlens, True, name)
        results, factors = (
            {n: first.new_empty((*first.shape[:2], sizes[numbers])) for n, numbers in group.items()}
            for group in (self._rows, self._factors)
        )
        dstate = torch.empty_like(state)
        torchs = OfTorch(self, values, sizes)
        states = States(y if self.y_is_state else residuals, sizes[self.state], values["state"], reverse, cu_seqlens)
        added = sum(sizes[numbers] for numbers in self._sums.values())
        programs = -(-len(state) // _sequences(len(state)))
        sums = first.new_zeros((programs, added))
        operands = {
            "state": state, "kept": residuals, "history": y.contiguous() if self.y_is_state else residuals,
            "carry": dlast.contiguous(), "dstate": dstate, "sums": sums, **results, **factors,
            **torchs.operands(self._backward_plan),
        }  # fmt: skip
        timed = {n: rows(values[n]) for n in self.timed} | {"dy": rows(dy)}
        self._launch("backward", operands, timed, sizes, reverse, cu_seqlens)
        torchs.start({**results, "y": y}, states)
        torchs.add(0, len(states.after), {name: flat(value) for name, value in factors.items()})
        torchs.finish(sums.sum(0))
        return self._gradients(values, results, dstate, torchs)

    def _launch(
        self, which: str, operands: Mapping[str, Tensor], timed: Mapping[str, Tensor], sizes: Sizes, reverse: bool,
        cu_seqlens: Tensor | None, **flags: bool,
    ) -> None:  # fmt: skip
        import triton

        from scanl.ops._triton._tuned import MIN_WIDTH, block

        state, axes = operands["state"], sizes.names
        blocks = {
            f"BLOCK_{letter}": block(sizes[width], BLOCK_CHANNELS)
            if self.divided
            else max(MIN_WIDTH, triton.next_power_of_2(sizes[width]))
            for letter, width in self.tiles.widths.items()
        }
        writer = self._forward_writer if which == "forward" else self._backward_writer
        resident = sum(math.prod(blocks[f"BLOCK_{letter}"] for letter in pair) for pair in writer.matrices.values())
        size, groups, parts = _sequences(len(state)), sizes[self.tiles.groups], 1
        if self.divided:
            ((letter, width),) = self.tiles.widths.items()
            parts = triton.cdiv(sizes[width], blocks[f"BLOCK_{letter}"])
        strides: dict[str, Any] = {}
        for name, value in timed.items():
            strides |= {f"{name}_batch": value.stride(0), f"{name}_time": value.stride(1)}
        pointers = {f"p_{name}": value for name, value in {**operands, **timed}.items()}
        with torch.cuda.device_of(state):
            getattr(self.module, which)[(triton.cdiv(len(state), size) * groups * parts,)](
                **pointers, p_offsets=cu_seqlens, **strides,
                length=next(iter(timed.values())).shape[1], sequences=len(state), groups=groups, blocks=parts,
                **axes, **blocks, ROWS=size, HELD=resident <= MAX_HELD_NUMBERS, REVERSE=reverse, **flags,
                enable_fp_fusion=True,
            )  # fmt: skip


def _sequences(count: int) -> int:
    """Return how many sequences a program takes."""
    from scanl.ops._triton._tuned import HAS_SMALL_TILES

    return MAX_ROWS if HAS_SMALL_TILES and count > 1 else 1
