from scanl.learning.algorithms.base import Algorithm as Algorithm
from scanl.learning.algorithms.base import algorithm as algorithm
from scanl.learning.algorithms.base import algorithms as algorithms
from scanl.learning.algorithms.base import with_gradients as with_gradients
from scanl.learning.algorithms.bptt import BPTT as BPTT
from scanl.learning.algorithms.rtrl import RTRL as RTRL
from scanl.learning.algorithms.tbptt import TBPTT as TBPTT
