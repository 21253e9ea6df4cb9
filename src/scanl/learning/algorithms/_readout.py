"""The readout of a model: the linear map that makes its answers."""

from typing import Any

from torch import nn

from scanl.errors import ConfigError
from scanl.learning.questions import Model


def readout(who: str, model: Model) -> nn.Linear:
    """Return the model's `head`. Raises ConfigError for a model whose answers are not a linear map's."""
    head: Any = getattr(model, "head", None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"{who}: the model is a {type(model).__name__}, expected one whose `head` is a linear map")
    return head
