"""Recurrent sequence models: a state, a transition and a readout.

Trained over the whole sequence at once, run one token at a time in constant memory, with the same numbers.
"""

from scanl import layers as layers
from scanl import models as models
from scanl import ops as ops
from scanl.errors import ScanlError as ScanlError

__version__ = "0.1.0"
