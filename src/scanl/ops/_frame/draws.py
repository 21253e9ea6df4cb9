"""Random operands for the samples of ops."""

import torch
from torch import Tensor


class Draws:
    """Draw operands in float64, the same ones in every process. A call draws normal numbers of a shape."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def rate(self, *shape: int) -> Tensor:
        """Draw numbers in [0.01, 1), uniform but for the least ones."""
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).clamp(0.01)

    def decay(self, *shape: int) -> Tensor:
        """Draw log decays: the logarithms of `rate`."""
        return self.rate(*shape).log()
