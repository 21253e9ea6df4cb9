"""A sequence classifier that can use any layer."""

from typing import Annotated, ClassVar

from torch import Tensor, nn

from scanl.models.pooling import Filters, Pool, PooledReader, PooledState
from scanl.models.reader import AnyStack, Inputs
from scanl.options import at_least


class SequenceClassifier(PooledReader):
    """Classify a sequence: a stack of blocks, pooled over time. Random filters may stand beside it.

    logits: (B, C).   State: PooledState. With it a causal model can read a sequence in pieces; the logits then
    cover everything read so far.
    config: the constructor arguments by name; `save` writes them with the weights.
    """

    name: ClassVar[str] = "classifier"

    def __init__(
        self,
        num_classes: Annotated[int, at_least(1), "C"],
        stack: AnyStack,
        inputs: Inputs,
        *,
        pool: Pool = "mean",
        filters: Filters = None,
    ) -> None:
        super().__init__(stack, inputs, pool, filters, num_classes)
        self.head = nn.Linear(stack.dim, num_classes)

    def forward(
        self,
        x: Tensor,
        state: PooledState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, PooledState]:
        """Map tokens (B, T) or features (B, T, channels) to logits (B, C), or (N, C) if packed, and the state.

        mask: (B, T) bool, True at valid steps.   cu_seqlens: (N+1,) offsets of N sequences packed over B == 1.
        timespans: (B, T), duration of each step, for irregularly sampled input. Every layer must accept it.
        """
        feature, beside, state = self._feature(x, state, mask, cu_seqlens, timespans)
        logits = self.head(feature)
        return logits if beside is None else logits + beside, state
