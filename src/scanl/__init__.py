"""Recurrent sequence models: a state, a transition and a readout."""

from scanl import ops as ops

__version__ = "0.1.0"
