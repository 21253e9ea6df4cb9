"""Layers that mix features instead of time."""

from scanl.faces import face
from scanl.layers.registry import channel_mixers

__getattr__, __dir__ = face(__name__, lambda: map(channel_mixers.get, channel_mixers.names()))
