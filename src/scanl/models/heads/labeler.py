"""A labeler of steps that can use any layer."""

from typing import Annotated, ClassVar

from torch import Tensor, nn

from scanl.layers.packing import unpack
from scanl.layers.state import Device, DType, State
from scanl.models.reader import AnyStack, Inputs, Reader
from scanl.options import at_least


class SequenceLabeler(Reader):
    """Give each step of a sequence a class: a stack of blocks, and a linear map at each step.

    logits: (B, T, C).   State: one BlockState for each block.
    """

    name: ClassVar[str] = "labeler"

    def __init__(self, num_classes: Annotated[int, at_least(1), "C"], stack: AnyStack, inputs: Inputs) -> None:
        super().__init__(stack, inputs)
        self.head = nn.Linear(stack.dim, num_classes)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> State:
        return self.stack.init_state(batch_size, device=device, dtype=dtype)

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Map tokens (B, T) or features (B, T, channels) to logits (B, T, C) and the state.

        mask: (B, T) bool, True at valid steps; logits are zero at the others.   cu_seqlens, timespans: as in
        `SequenceClassifier.forward`.   starts: (B, T) bool, True at steps before which the state begins anew.
        """
        y, state, _ = self._hidden(x, state, mask, cu_seqlens, timespans, starts)
        logits = self.head(y)
        return (logits if mask is None else unpack(logits, mask)), state
