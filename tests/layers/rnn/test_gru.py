"""GRU: its equation step by step, and what it refuses."""

from by_hand import DIM
from scanl.layers import GRU
from tests.layers.rnn.equations import gru

EQUATIONS = {"gru": (lambda: GRU(DIM), gru), "gru_without_bias": (lambda: GRU(DIM, False), gru)}

REFUSED = [
    (lambda: GRU(8, False, 9), "gru: t_max is 9, expected None because of bias=False"),
    (lambda: GRU(0), "gru: dim is 0, expected at least 1"),
]
