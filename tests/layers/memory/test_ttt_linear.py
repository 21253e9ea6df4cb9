"""TTTLinear: its equation step by step, and what it refuses."""

from by_hand import DIM
from scanl import layers
from tests.layers.memory.equations import ttt

EQUATIONS = {
    "ttt_linear": (lambda: layers.build("ttt_linear", DIM, num_heads=2, chunk_size=3), ttt),
    "ttt_linear_whole": (lambda: layers.build("ttt_linear", DIM, output_gate=True, base_lr=3.0, rope_base=100.0), ttt),
}

WRONG = [("ttt_linear", {"num_heads": 3}, "num_heads is 3, expected a divisor of dim/2=4")]
