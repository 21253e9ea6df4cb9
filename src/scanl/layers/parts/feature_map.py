"""Feature map of a linear attention layer, chosen by name, with its random projection or learned scale."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, nearest
from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.ops.feature_maps import (
    FEATURE_MAPS,
    cosine_reweighting,
    dpfp,
    fourier_features,
    positive_random_features,
    random_projection,
    trigonometric_random_features,
)

_RANDOM = {
    function.__name__: function
    for function in (positive_random_features, trigonometric_random_features, fourier_features)
}
# The kernel of these maps is e^{q·k} or close to it. Scaling q and k by K^(-1/4) makes it the kernel of softmax.
_SOFTMAX = ("taylor", "positive_random_features", "trigonometric_random_features")


class FeatureMap(Module):
    """Feature map φ for heads of K channels: (B, T, H, K) to (B, T, H, `width`), float32 or wider.

    Args:
        name: name of a function in `scanl.ops.feature_maps`.
        num_heads, head_dim: H and K.
        num_features: m, rows of a random projection; by default K ln K.
        nu: ν of dpfp, the number of shifts.
        horizon: M of cosine_reweighting, the longest distance in steps.

    Random maps have a buffer `projection` (m, K) with orthogonal rows, which all heads use. Assign
    `random_projection(m, K)` to it to draw another. fourier_features scale x to unit length and multiply it by `sigma`
    (H, 1, K), which is learned and starts at 1. taylor and the random maps for softmax multiply x by K^(-1/4).
    """

    projection: Tensor | None

    def __init__(
        self,
        name: str,
        num_heads: int,
        head_dim: int,
        num_features: int | None = None,
        nu: int = 1,
        horizon: float = 4096,
    ) -> None:
        super().__init__()
        known = [*FEATURE_MAPS, *_RANDOM, "cosine_reweighting"]
        if name not in known:
            raise nearest("feature map", name, known)
        if num_features is None:
            num_features = max(1, round(head_dim * math.log(head_dim)))
        if num_features < 1 or not horizon > 0:
            found = f"num_features is {num_features} and horizon is {horizon}"
            raise ConfigError(f"feature_map: {found}, expected positive numbers")
        self.name, self.head_dim, self.nu, self.horizon = name, head_dim, nu, horizon
        self.positional = name == "cosine_reweighting"
        device = torch.get_default_device()  # "meta" when only shapes are needed
        projection = random_projection(num_features, head_dim, device=device) if name in _RANDOM else None
        self.register_buffer("projection", projection)
        self.sigma = nn.Parameter(torch.ones(num_heads, 1, head_dim)) if name == "fourier_features" else None
        probe = torch.zeros(1, 1, num_heads, head_dim)
        self.width = self(probe, probe.new_zeros(1, 1)).shape[-1]

    def forward(self, x: Tensor, steps: Tensor | None) -> Tensor:
        """Apply φ. steps: (B, T), position of each step in its sequence; needed if the map is `positional`."""
        x = widen(x)
        if self.name in _SOFTMAX:
            x = x * self.head_dim**-0.25
        if self.sigma is not None:
            x = F.normalize(x, dim=-1, eps=1e-6) * widen(self.sigma)[:, 0]
        if self.projection is not None:
            return _RANDOM[self.name](x, self.projection)
        if self.name == "dpfp":
            return dpfp(x, self.nu)
        if self.positional:
            assert steps is not None
            return cosine_reweighting(x, steps, self.horizon)
        return FEATURE_MAPS[self.name](x)
