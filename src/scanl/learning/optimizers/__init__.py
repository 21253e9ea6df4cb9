"""Optimizers, one file for each."""

from scanl.learning.optimizers.adamw import AdamW as AdamW
from scanl.learning.optimizers.base import OPTIMIZERS as OPTIMIZERS
from scanl.learning.optimizers.base import optimizer as optimizer
from scanl.learning.optimizers.lion import Lion as Lion
from scanl.learning.optimizers.muon import Muon as Muon
