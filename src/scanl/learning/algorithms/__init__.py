"""Learning algorithms, one file for each."""

from scanl.learning.algorithms.base import Algorithm as Algorithm
from scanl.learning.algorithms.bptt import BPTT as BPTT
