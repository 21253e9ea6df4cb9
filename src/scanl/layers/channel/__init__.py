"""Layers that mix features instead of time."""

from typing import TYPE_CHECKING

from scanl.faces import face
from scanl.layers.registry import channel_mixers

if not TYPE_CHECKING:
    __getattr__, __dir__ = face(__name__, lambda: map(channel_mixers.get, channel_mixers.names()))
