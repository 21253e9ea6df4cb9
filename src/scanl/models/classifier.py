"""A sequence classifier that can use any layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from scanl.layers.designation import Designation
from scanl.models.pooling import Pooled, PooledState
from scanl.models.reader import Scales


class SequenceClassifier(Pooled):
    """Classify a sequence: a stack of blocks, pooled over time.

    Args:
        num_classes: C.
        dim, depth, layer, layer_options, channel_mixer, channel_options, norm, dropout: passed to `Stack`;
            bidirectional layers are allowed.
        vocab_size: the input is tokens (B, T) int64, which are embedded.
        input_dim: the input is features (B, T, input_dim), which pass through a linear map. Give either vocab_size or
            input_dim.
        pool: "mean" over the steps, or the "last" step.
        scales: (location, scale) of each feature, by which it is standardised first; None if the features are
            standardised already.
        missing: NaN in a feature means that it is missing.

    logits: (B, C).   State: PooledState. With it a causal model can read a sequence in pieces; the logits then
    cover everything read so far.
    config: the constructor arguments by name; `save` writes them with the weights.
    """

    who = "classifier"

    def __init__(
        self,
        num_classes: int,
        dim: int,
        depth: int,
        layer: Designation | Sequence[Designation] = "hawk",
        *,
        vocab_size: int | None = None,
        input_dim: int | None = None,
        pool: str = "mean",
        scales: Scales | None = None,
        missing: bool = False,
        layer_options: Mapping[str, Any] | None = None,
        channel_mixer: str = "gated_mlp",
        channel_options: Mapping[str, Any] | None = None,
        norm: str = "rmsnorm",
        dropout: float = 0.0,
    ) -> None:
        super().__init__(locals())
        self.head = nn.Linear(dim, num_classes)

    def forward(
        self,
        x: Tensor,
        state: PooledState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, PooledState]:
        """Map tokens (B, T) or features (B, T, input_dim) to logits (B, C), or (N, C) if packed, and the state.

        mask: (B, T) bool, True at valid steps.   cu_seqlens: (N+1,) offsets of N sequences packed over B == 1.
        timespans: (B, T), duration of each step, for irregularly sampled input. Every layer must accept it.
        """
        feature, state = self._feature(x, state, mask, cu_seqlens, timespans)
        return self.head(feature), state
