"""Learning algorithms, one file for each. A file in this folder is found by itself."""

from typing import TYPE_CHECKING

from scanl.faces import face
from scanl.learning.algorithms.base import Algorithm as Algorithm
from scanl.learning.algorithms.base import algorithm as algorithm
from scanl.learning.algorithms.base import algorithms as algorithms
from scanl.learning.algorithms.base import with_gradients as with_gradients

if not TYPE_CHECKING:
    __getattr__, __dir__ = face(__name__, lambda: map(algorithms.get, algorithms.names()))
