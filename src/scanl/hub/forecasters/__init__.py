"""Checkpoints of forecasters of others, by the `model_type` of their config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from scanl.hub.forecasters import flowstate
from scanl.hub.weights import Weights

Reader = Callable[[Mapping[str, Any], Weights, str], tuple[nn.Module, Mapping[str, str]]]
# Each returns the model, and the stored name of each of its tensors. The last argument begins its messages.
READERS: Mapping[str, Reader] = {"flowstate": flowstate.model}
