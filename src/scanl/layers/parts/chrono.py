"""Initial biases with which a gated cell remembers: a fixed forget bias, or chrono initialisation."""

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from scanl.options import Range, at_least

has_biases = Range("None because of bias=False", lambda value, options: options.get("bias", True), relation=True)
alone = Range(
    "None because of forget_bias={forget_bias}",
    lambda value, options: options.get("forget_bias") is None,
    relation=True,
)

ForgetBias = Annotated[
    float, has_biases, "initial sum of the biases of the forget gate; None for the usual initial values"
]
LongestMemory = Annotated[
    int,
    at_least(3),
    has_biases,
    alone,
    "T_max, the longest memory in steps, for chrono initialisation: the gate that keeps the state starts with the bias "
    "ln U(1, T_max - 1), the gate that writes with its negative; None for the usual initial values",
]


@torch.no_grad()
def init_memory(
    biases: Sequence[Tensor], keep: slice, write: slice | None, forget_bias: float | None, t_max: int | None
) -> None:
    """Set the biases of the gate that multiplies the old state, and of the gate that multiplies the new input.

    biases: their sum enters the gates; the first gets the value, the others 0.   keep, write: the rows of the two gates
    in the biases; write is None if one gate does both.   forget_bias: the sum for `keep`; `write` is not changed.
    t_max: T_max, the longest memory in steps: the sum for `keep` is ln U(1, T_max - 1), and that for `write` is its
    negative. With a constant input the memory then lasts 1 + e^b steps, between 2 and T_max.
    Neither: nothing is set. Source: Tallec and Ollivier, "Can recurrent neural networks warp time?",
    arXiv:1804.11188, eq. (16).
    """
    if forget_bias is None and t_max is None:
        return
    start = torch.empty_like(biases[0][keep])
    start = start.fill_(forget_bias or 0.0) if t_max is None else start.uniform_(1, t_max - 1).log()
    for rows, value in ((keep, start), (write, -start)):
        if rows is not None and (rows is keep or t_max is not None):
            for index, bias in enumerate(biases):
                bias[rows] = value if index == 0 else 0
