"""How parameters learn, one file an algorithm."""

from scanl.learning.algorithms.base import Algorithm as Algorithm
from scanl.learning.algorithms.bptt import BPTT as BPTT
