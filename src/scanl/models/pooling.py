"""A feature of a whole sequence: the mean over its steps, or the last one; and random filters beside it."""

from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.layers.packing import sequence_index
from scanl.layers.state import Device, DType, State, loadable
from scanl.models.embedding import check_tensor
from scanl.models.forecasting.random_filters import RandomFilters
from scanl.models.inputs import Features, Tokens
from scanl.models.reader import Reader
from scanl.models.stack import Backbone
from scanl.ops.offsets import sequences

Pool = Annotated[Literal["mean", "last"], "the mean over the steps, or the last step"]
Filters = Annotated[
    RandomFilters | None,
    "a model whose answers are added: of as many outputs, over the same features; None: no filters",
]


@loadable
class PooledState(NamedTuple):
    """State of a model that pools.

    stack: state of the blocks.   pooled: (B, D), sum of the outputs so far, or the last output.
    steps: (B,), number of steps read.   filters: state of the filters, if there are any.
    """

    stack: State
    pooled: Tensor
    steps: Tensor
    filters: Any = None


class PooledReader(Reader):
    """A reader with one answer for a sequence. Abstract."""

    def __init__(
        self, stack: Backbone, inputs: Tokens | Features, pool: str, filters: RandomFilters | None, outputs: int
    ) -> None:
        super().__init__(stack, inputs)
        self.pool, self.filters = pool, filters
        if filters is not None and (filters.inputs.channels, filters.readout.out_features) != (
            getattr(inputs, "channels", None),
            outputs,
        ):
            raise ConfigError(
                f"{self._who()}: filters map {filters.inputs.channels} channels to {filters.readout.out_features} "
                f"outputs, expected {outputs} outputs of {inputs}"
            )

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> PooledState:
        weight = self.input.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        return PooledState(
            self.stack.init_state(batch_size, device=device, dtype=dtype),
            torch.zeros(batch_size, self.stack.dim, device=device, dtype=wide),
            torch.zeros(batch_size, device=device, dtype=torch.int64),
            None if self.filters is None else self.filters.init_state(batch_size, device=device),
        )

    def _feature(
        self,
        x: Tensor,
        state: PooledState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        timespans: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, PooledState]:
        """Return of everything read so far the feature (B, D), the answers of the filters (B, O), and the state."""
        check_tensor(self._who(), "x", x, "(B, T) of tokens, or (B, T, C) of features")
        rows, offsets = sequences(x, cu_seqlens), cu_seqlens
        previous = self.init_state(rows) if state is None else state
        y, stack, cu_seqlens = self._hidden(x, None if state is None else state.stack, mask, cu_seqlens, timespans)
        pooled, count = self._pool(y.to(previous.pooled.dtype), previous.pooled, previous.steps, cu_seqlens)
        feature = pooled / count.clamp(min=1)[:, None] if self.pool == "mean" else pooled
        beside, filters = None, None
        if self.filters is not None:
            before = None if state is None else state.filters
            beside, filters = self.filters(x, before, mask=mask, cu_seqlens=offsets)
        return feature.to(y.dtype), beside, PooledState(stack, pooled, count, filters)

    def _pool(self, y: Tensor, pooled: Tensor, count: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        if cu_seqlens is None:
            count = count + y.shape[1]
            if self.pool == "mean":
                return pooled + y.sum(1), count
            return (y[:, -1] if y.shape[1] else pooled), count
        lengths = cu_seqlens.diff()
        if self.pool == "mean":
            owner = sequence_index(cu_seqlens, y.shape[1])
            return pooled.index_add(0, owner, y[0]), count + lengths
        if y.shape[1]:
            last = y[0, (cu_seqlens[1:] - 1).clamp(min=0)]
            pooled = torch.where(lengths[:, None] > 0, last, pooled)
        return pooled, count + lengths
