"""Stacks side by side, whose outputs are joined, and stacks one above the other."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.state import Device, DType, State
from scanl.models.presets import whole
from scanl.models.stack import Backbone

Columned = Annotated[Sequence[Any], "stacks of one width, such as Stack(256, 2, 'lstm')"]


class _Stacks(Backbone):
    """Base class of a backbone of several stacks of one width. State: a tuple of their states."""

    name: ClassVar[str]

    def __init__(self, columns: Columned) -> None:
        super().__init__()
        if not columns or not all(isinstance(column, Backbone) for column in columns):
            kinds = [type(column).__name__ for column in columns]
            raise ConfigError(f"{self.name}: columns is {kinds}, expected a list of at least one stack")
        if len({column.dim for column in columns}) > 1:
            raise ConfigError(
                f"{self.name}: columns have widths {[column.dim for column in columns]}, expected one width"
            )
        self.dim = columns[0].dim
        self.columns = nn.ModuleList(columns)

    def _columns(self) -> list[Backbone]:
        return cast(list[Backbone], list(self.columns))

    def mixers(self) -> list[Layer]:
        return [mixer for column in self._columns() for mixer in column.mixers()]

    def make_norm(self) -> nn.RMSNorm | nn.LayerNorm:
        return self._columns()[0].make_norm()

    @property
    def bidirectional(self) -> bool:
        return any(column.bidirectional for column in self._columns())

    @property
    def timed(self) -> bool:
        return all(column.timed for column in self._columns())

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> tuple[State, ...]:
        return tuple(column.init_state(batch_size, device=device, dtype=dtype) for column in self._columns())

    def _with_states(self, state: tuple[State, ...] | None) -> list[tuple[Backbone, State]]:
        return list(zip(self._columns(), [None] * len(self.columns) if state is None else state, strict=True))


@whole("columns", "multi_column_encoder")
class Columns(_Stacks):
    """y = W [y_1; ...; y_n], y_i the output of stack i: every stack reads the same input.

    A column of recurrent layers beside a `TransformerEncoder` is the multi-column encoder of Chen et al., "The Best of
    Both Worlds", arXiv:1804.09849, sec. 5.2.

    State: a tuple of the states of the columns.
    """

    name: ClassVar[str] = "columns"

    def __init__(self, columns: Columned) -> None:
        super().__init__(columns)
        self.out_proj = nn.Linear(len(columns) * self.dim, self.dim)

    def forward(
        self,
        x: Tensor,
        state: tuple[State, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Map x (B, T, D) to y (B, T, D) and the states."""
        ys, after = zip(
            *(column(x, past, cu_seqlens=cu_seqlens, timespans=timespans) for column, past in self._with_states(state)),
            strict=True,
        )
        return self.out_proj(torch.cat(ys, -1)), after


@whole("cascade", "cascaded_encoder")
class Cascade(_Stacks):
    """y = f_n(... f_1(x)): every stack reads the outputs of the one before.

    A `TransformerEncoder` over a stack of recurrent layers is the cascaded encoder of Chen et al., "The Best of Both
    Worlds", arXiv:1804.09849, sec. 5.1. There the recurrent encoder is trained first and then frozen:
    `cascade.columns[0].requires_grad_(False)`.

    State: a tuple of the states of the stacks.
    """

    name: ClassVar[str] = "cascade"

    def __init__(self, columns: Columned) -> None:
        super().__init__(columns)

    def forward(
        self,
        x: Tensor,
        state: tuple[State, ...] | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Map x (B, T, D) to y (B, T, D) and the states."""
        after = []
        for column, past in self._with_states(state):
            x, past = column(x, past, cu_seqlens=cu_seqlens, timespans=timespans)
            after.append(past)
        return x, tuple(after)
