"""Initial biases with which a gated cell remembers: a fixed forget bias, or chrono initialisation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from scanl.errors import ConfigError


def check_memory(who: str, bias: bool, forget_bias: float | None, t_max: int | None) -> None:
    """Raise ConfigError for options that `init_memory` cannot use. bias: whether the cell has biases."""
    if not bias and (forget_bias is not None or t_max is not None):
        raise ConfigError(f"{who}: bias is False, expected True because of forget_bias or t_max")
    if forget_bias is not None and t_max is not None:
        raise ConfigError(f"{who}: forget_bias is {forget_bias} and t_max is {t_max}, expected only one of them")
    if t_max is not None and t_max < 3:
        raise ConfigError(f"{who}: t_max is {t_max}, expected at least 3")


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
    kept = torch.empty_like(biases[0][keep])
    kept = kept.fill_(forget_bias or 0.0) if t_max is None else kept.uniform_(1, t_max - 1).log()
    for rows, value in ((keep, kept), (write, -kept)):
        if rows is not None and (rows is keep or t_max is not None):
            for index, bias in enumerate(biases):
                bias[rows] = value if index == 0 else 0
