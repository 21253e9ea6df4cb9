"""The registry of losses."""

from collections.abc import Callable

from torch import Tensor

from scanl.registry import Functions

Loss = Callable[[Tensor, Tensor], Tensor]
losses: Functions[Loss] = Functions("loss")
loss = losses.add
