"""The size of the gradient that an error at the last step sends to the inputs before it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.inspect.base import BLUE, LIGHT, Drawing, Inspection, inspector, prepared
from scanl.layers.base import Layer

STEPS = 256


@dataclass(frozen=True)
class GradientNorms(Inspection):
    """norms: (B, T), the norm of the gradient that reaches the input k steps before the last, k = 0, ..., T - 1."""

    norms: Tensor

    def _mean(self) -> Tensor:
        return self.norms.square().mean(0).sqrt()

    def figures(self) -> dict[str, float]:
        mean = self._mean()
        half, last = len(mean) // 2, len(mean) - 1
        return {"at distance 0": mean[0].item(), f"at {half}": mean[half].item(), f"at {last}": mean[last].item()}

    def columns(self) -> dict[str, Any]:
        rows, steps = self.norms.shape
        return {
            "row": torch.arange(rows).repeat_interleave(steps).tolist(),
            "distance": torch.arange(steps).repeat(rows).tolist(),
            "norm": self.norms.flatten().tolist(),
        }

    def panels(self) -> dict[str, Drawing]:
        return {"": self._draw}

    def _draw(self, axes: Any) -> None:
        for row in self.norms:
            axes.plot(row, lw=0.8, color=LIGHT)
        axes.plot(self._mean(), lw=1.6, color=BLUE)
        axes.set(xlabel="distance, steps", ylabel="norm of the gradient", yscale="log")
        axes.grid(alpha=0.3, which="both")


@inspector(
    title="Norm of the gradient against distance",
    equation="|d(u^T y_T)/dx_{T-k}| for random u, |u| = 1",
    source='Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", arXiv:1211.5063, '
    "sec. 2",
)
def gradient_norms(layer: Layer, x: Tensor | None = None) -> GradientNorms:
    """Return the norm of the gradient of the last output by each input, by the distance between them.

    x: (B, T, dim), what the layer reads; None for 4 sequences of 256 steps of white noise. The gradient is that of a
    projection of the last output on a random direction u, one for each sequence, by backpropagation in float64.

    Raises ConfigError for a layer whose last output depends on no input.
    """
    layer, x = prepared("gradient_norms", layer, x, STEPS)
    u = F.normalize(torch.randn(x[:, -1].shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype), dim=-1)
    with torch.enable_grad():
        y = layer(x.requires_grad_())[0][:, -1]
        if not y.requires_grad:
            raise ConfigError("gradient_norms: the last output has no gradient by the inputs, expected one")
        (slope,) = torch.autograd.grad((u * y).sum(), x)
    return GradientNorms(slope.norm(dim=2).flip(1))
