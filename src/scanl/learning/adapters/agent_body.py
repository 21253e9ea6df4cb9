"""The body of an agent: a stack of layers whose state also is a row of numbers, as libraries of agents store it."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.errors import ShapeError
from scanl.layers.designation import Designation
from scanl.layers.state import Device, DType, State, leaves, map_leaves
from scanl.models.decoding.compiled_step import CompiledStep
from scanl.models.stack import Stack, check_causal
from scanl.options import at_least, checked


class AgentBody(nn.Module):
    """Map observations (B, T, channels) to (B, T, width) by a linear map and a stack of blocks.

    Libraries of agents keep a state in buffers of float32. So `read` takes it and returns it as a row of numbers for
    each agent, `row_size` of them, exactly: floats and complex numbers of 32 bits or more by their bits, others as
    float64 by its bits. The first number of a row is 1. A row of zeros is the state before any step. From the 65th on,
    single steps without gradients are one kernel.

    Args:
        channels: of an observation.   width: of the output.   depth, layer, layer_options, channel_mixer: of `Stack`.
    """

    name: ClassVar[str] = "agent_body"

    @checked("agent_body")
    def __init__(
        self,
        channels: Annotated[int, at_least(1)],
        width: Annotated[int, at_least(1)] = 128,
        layer: Designation = "gru",
        *,
        depth: Annotated[int, at_least(1)] = 1,
        layer_options: Mapping[str, Any] | None = None,
        channel_mixer: Designation = "none",
    ) -> None:
        super().__init__()
        self.channels = channels
        self.input = nn.Linear(channels, width)
        self.stack = Stack(width, depth, layer, layer_options=layer_options, channel_mixer=channel_mixer)
        check_causal(self.name, self.stack)
        with torch.no_grad():
            numbers = _row(self.init_state(1)).shape[1]
        self.row_size: int = numbers + numbers % 2  # even, for who cuts it in halves
        self.compiled = CompiledStep(self, lambda x: x, self._step, lambda rows: torch.zeros(rows, channels))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        """Return the state before any step."""
        return self.stack.init_state(batch_size, device=device, dtype=dtype)

    def forward(self, x: Tensor, state: State = None, *, starts: Tensor | None = None) -> tuple[Tensor, State]:
        """Map x (B, T, channels) to y (B, T, width) and the state.

        starts: (B, T) bool, True at steps before which the state begins anew.
        """
        return self.stack(self.input(x), state, starts=starts)

    def read(self, x: Tensor, row: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Do the same with the state as a row, (B, row_size). No gradient passes through the row."""
        if row.shape != (len(x), self.row_size) or row.dtype != torch.float32:
            raise ShapeError(
                f"{self.name}: row is {row.dtype} {tuple(row.shape)}, expected torch.float32 {(len(x), self.row_size)}"
            )
        state, first = self._state(row, len(x)), (row[:, 0] == 0)[:, None]
        starts = torch.cat([starts[:, :1] | first, starts[:, 1:]], 1)
        begins = starts if starts.any() else None
        if x.shape[1] == 1 and not torch.is_grad_enabled() and self.compiled.pays(len(x)):
            y, state = self.compiled(x[:, 0], state, starts=None if begins is None else begins[:, 0])
            y = y[:, None]
        else:
            y, state = self(x, state, starts=begins)
        after = _row(state)
        return y, torch.nn.functional.pad(after, (0, self.row_size - after.shape[1]))

    def _step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        y, state = self(x[:, None], state)
        return y[:, 0], state

    def _state(self, row: Tensor, rows: int) -> State:
        """Return the state that `_row` made a row of; any numbers where the row is zeros."""
        numbers = row[:, 1:].detach()
        place = 0

        def part(leaf: Tensor) -> Tensor:
            nonlocal place
            stored = leaf.dtype if _is_wide(leaf) else torch.float64
            size = leaf.numel() * stored.itemsize // 4
            values = numbers[:, place : place + size].clone(memory_format=torch.contiguous_format).view(stored)
            place += size
            return values.view(rows, *leaf.shape[1:]).to(leaf.dtype)

        return map_leaves(part, self.init_state(1, device="meta"))


def _is_wide(leaf: Tensor) -> bool:
    return (leaf.is_floating_point() or leaf.is_complex()) and leaf.dtype.itemsize >= 4


def _row(state: State) -> Tensor:
    """Return a state as a row of float32 numbers that begins with 1, for each row of its batch."""
    parts = [leaf.detach() if _is_wide(leaf) else leaf.detach().to(torch.float64) for _, leaf in leaves(state)]
    rows = [part.reshape(len(part), -1).contiguous().view(torch.float32) for part in parts]
    return torch.cat([rows[0].new_ones(len(rows[0]), 1), *rows], 1)
