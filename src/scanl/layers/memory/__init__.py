"""Matrix memories: linear attention, gated decays, delta rules, mLSTM."""

from typing import TYPE_CHECKING

from scanl.faces import face
from scanl.layers.registry import classes

if not TYPE_CHECKING:
    __getattr__, __dir__ = face(__name__, classes)
