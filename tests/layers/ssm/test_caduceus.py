"""CaduceusMixer: its equation step by step."""

from by_hand import DIM
from scanl.layers import CaduceusMixer
from tests.layers.ssm.equations import SIZES, bimamba

EQUATIONS = {"caduceus": (lambda: CaduceusMixer(DIM, **SIZES), bimamba)}
