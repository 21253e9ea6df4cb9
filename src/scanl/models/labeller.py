"""A labeller of steps that can use any layer."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from scanl.layers.designation import Designation
from scanl.layers.packing import unpack
from scanl.layers.state import Device, DType
from scanl.models.reader import Reader, Scales
from scanl.models.stack import StackState


class SequenceLabeller(Reader):
    """Give each step of a sequence a class: a stack of blocks, and a linear map at each step.

    Args:
        num_classes: C.
        dim, depth, layer, vocab_size, input_dim, scales, missing, layer_options, channel_mixer, channel_options, norm,
            dropout: as in `SequenceClassifier`.

    logits: (B, T, C).   State: one BlockState for each block.
    """

    who = "labeller"

    def __init__(
        self,
        num_classes: int,
        dim: int,
        depth: int,
        layer: Designation | Sequence[Designation] = "hawk",
        *,
        vocab_size: int | None = None,
        input_dim: int | None = None,
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

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> StackState:
        return self.stack.init_state(batch_size, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        state: StackState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, StackState]:
        """Map tokens (B, T) or features (B, T, input_dim) to logits (B, T, C) and the state.

        mask: (B, T) bool, True at valid steps; logits are zero at the others.   cu_seqlens, timespans: as in
        `SequenceClassifier.forward`.
        """
        y, state, _ = self._hidden(x, state, mask, cu_seqlens, timespans)
        logits = self.head(y)
        return (logits if mask is None else unpack(logits, mask)), state
