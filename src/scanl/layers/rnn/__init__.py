"""Gated, orthogonal and other RNNs."""

from scanl.faces import face
from scanl.layers.registry import classes

__getattr__, __dir__ = face(__name__, classes)
