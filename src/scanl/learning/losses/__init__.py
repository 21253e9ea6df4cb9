"""Losses of answers, by name, one file each. A file in this folder is found by itself.

A loss is a function of outputs and targets that returns the loss of each answer. The mean over the answers of a batch
is learnt. It is registered with `@loss("name")`, and a question names it.
"""

from scanl.learning.losses.base import Loss as Loss
from scanl.learning.losses.base import loss as loss
from scanl.learning.losses.base import losses as losses
from scanl.registry import import_all

import_all(__name__)
