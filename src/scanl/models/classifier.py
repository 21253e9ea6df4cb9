"""A sequence classifier that can use any layer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.layers.packing import pack, sequence_index
from scanl.layers.parts.timespans import check_timespans
from scanl.layers.state import Device, DType
from scanl.models.block import embedded
from scanl.models.saving import Saved
from scanl.models.stack import Stack, StackState


class ClassifierState(NamedTuple):
    """State of a `SequenceClassifier`.

    stack: state of the blocks.   pooled: (B, D), sum of the outputs so far, or the last output.
    steps: (B,), number of steps read.
    """

    stack: StackState
    pooled: Tensor
    steps: Tensor


class SequenceClassifier(Saved):
    """Classify a sequence: a stack of blocks, pooled over time.

    Args:
        num_classes: C.
        dim, depth, layer, layer_options, channel_mixer, channel_options, norm, dropout: passed to `Stack`;
            bidirectional layers are allowed.
        vocab_size: the input is tokens (B, T) int64, which are embedded.
        input_dim: the input is features (B, T, input_dim), which pass through a linear map. Give either vocab_size or
            input_dim.
        pool: "mean" over the steps, or the "last" step.

    logits: (B, C).   State: ClassifierState. With it a causal model can read a sequence in pieces; the logits then
    cover everything read so far.
    config: the constructor arguments by name; `save` writes them with the weights.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        depth: int,
        layer: str | Sequence[str] = "hawk",
        *,
        vocab_size: int | None = None,
        input_dim: int | None = None,
        pool: str = "mean",
        layer_options: Mapping[str, Any] | None = None,
        channel_mixer: str = "gated_mlp",
        channel_options: Mapping[str, Any] | None = None,
        norm: str = "rmsnorm",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(locals())
        if (vocab_size is None) == (input_dim is None):
            raise ConfigError(
                f"classifier: vocab_size is {vocab_size} and input_dim is {input_dim}, expected one of them"
            )
        if pool not in ("mean", "last"):
            raise ConfigError(f"classifier: pool is {pool!r}, expected 'mean' or 'last'")
        self.pool = pool
        self.vocab_size = vocab_size
        self.input_dim = input_dim
        self.input = nn.Embedding(vocab_size, dim) if vocab_size is not None else nn.Linear(input_dim or 0, dim)
        if vocab_size is not None:
            nn.init.normal_(self.input.weight, std=0.02)
        self.stack = Stack(**self.options_of(Stack))
        self.head = nn.Linear(dim, num_classes)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> ClassifierState:
        weight = self.head.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        wide = torch.promote_types(dtype, torch.float32)
        return ClassifierState(
            self.stack.init_state(batch_size, device=device, dtype=dtype),
            torch.zeros(batch_size, self.stack.dim, device=device, dtype=wide),
            torch.zeros(batch_size, device=device, dtype=torch.int64),
        )

    def forward(
        self,
        x: Tensor,
        state: ClassifierState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, ClassifierState]:
        """Map tokens (B, T) or features (B, T, input_dim) to logits (B, C), or (N, C) if packed, and the state.

        mask: (B, T) bool, True at valid steps.   cu_seqlens: (N+1,) offsets of N sequences packed over B == 1.
        timespans: (B, T), duration of each step, for irregularly sampled input. Every layer must accept it.
        """
        self._check(x)
        check_timespans("classifier", timespans, x)
        if mask is not None:
            if cu_seqlens is not None:
                raise ShapeError("classifier: mask and cu_seqlens are both given, expected one of them")
            timespans = timespans if timespans is None else pack(timespans, mask)[0]
            x, cu_seqlens = pack(x, mask)
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        before = self.init_state(rows) if state is None else state
        y, stack = self.stack(self._read(x), before.stack, cu_seqlens=cu_seqlens, timespans=timespans)
        pooled, count = self._pool(y.to(before.pooled.dtype), before.pooled, before.steps, cu_seqlens)
        feature = pooled / count.clamp(min=1)[:, None] if self.pool == "mean" else pooled
        return self.head(feature.to(y.dtype)), ClassifierState(stack, pooled, count)

    def _read(self, x: Tensor) -> Tensor:
        return embedded("classifier", self.input, x) if isinstance(self.input, nn.Embedding) else self.input(x)

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

    def _check(self, x: Tensor) -> None:
        if self.vocab_size is not None and (x.ndim != 2 or x.is_floating_point()):
            raise ShapeError(f"classifier: x is {x.dtype} {tuple(x.shape)}, expected integers (B, T) of tokens")
        if self.input_dim is not None and (x.ndim != 3 or x.shape[2] != self.input_dim):
            raise ShapeError(f"classifier: x has shape {tuple(x.shape)}, expected (B, T, {self.input_dim})")
