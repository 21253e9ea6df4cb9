"""Checkpoints of forecasters of others, by the entries of their config.json."""

from collections.abc import Callable, Mapping
from typing import Any

from scanl.hub.forecasters import flowstate, tirex2
from scanl.hub.forecasters.stored_model import StoredModel
from scanl.hub.weights import Weights

Reader = Callable[[Mapping[str, Any], Weights, str], StoredModel]  # the last argument begins its messages


def reader(config: Mapping[str, Any]) -> Reader | None:
    """Return what reads a checkpoint with these options, None if it is of no forecaster."""
    if tirex2.MARK in config:
        return tirex2.model
    return flowstate.model if config.get("model_type") == "flowstate" else None
