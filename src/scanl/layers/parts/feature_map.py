"""Feature map of a linear attention layer, a function or chosen by name, with its projection or learned scale."""

import math
from collections.abc import Callable
from typing import Annotated

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, nearest
from scanl.layers.base import widen
from scanl.layers.module import Module
from scanl.ops.feature_maps import (
    FEATURE_MAPS,
    arc_cosine_features,
    cosine_reweighting,
    dpfp,
    fourier_features,
    polynomial,
    positive_random_features,
    random_projection,
    trigonometric_random_features,
)
from scanl.options import ConfiguredMeta, above, at_least

_RANDOM_MAPS = {
    function.__name__: function
    for function in (positive_random_features, trigonometric_random_features, fourier_features, arc_cosine_features)
}
# The kernel of these maps is a function of q·k, that of softmax or close to it. Scaling q and k by K^(-1/4) makes it
# one of q·k/sqrt(K).
_SCALED_MAPS = ("taylor", "quadratic", "positive_random_features", "trigonometric_random_features")


Name = Annotated[
    str | Callable[[Tensor], Tensor],
    "φ, from K to K' channels, for both queries and keys: the name of a function in `scanl.ops.feature_maps`; or a "
    "function of your own from (..., K) to (..., K'), such as a module, whose parameters are learned too",
]
Features = Annotated[
    int | None, at_least(1), "m, rows of the projection of a random map; by default K ln K, rounded down"
]
Shifts = Annotated[int, at_least(1), "ν, shifts of dpfp"]
Horizon = Annotated[float, above(0), "M, the longest distance of cosine_reweighting, in steps"]
Degree = Annotated[int, at_least(1), "p, the degree of polynomial"]


class FeatureMap(Module, metaclass=ConfiguredMeta):
    """Feature map φ for heads of K channels: (B, T, H, K) to (B, T, H, `width`), float32 or wider.

    Random maps have a buffer `projection`, which the state_dict keeps; `redraw` draws another. It is (m, K) with
    orthogonal rows, which all heads use; for fourier_features it is (H, m, K) with independent rows. fourier_features
    read x / (|x| + 0.001) multiplied by `sigma` (H, 1, K), which is learned and starts at 1. taylor, quadratic and the
    random maps for softmax multiply x by K^(-1/4).
    """

    name = "feature_map"
    projection: Tensor | None

    def __init__(
        self,
        feature_map: Name,
        num_heads: Annotated[int, at_least(1), "H, number of heads"],
        head_dim: Annotated[int, at_least(1), "K, channels of a head"],
        num_features: Features = None,
        nu: Shifts = 1,
        horizon: Horizon = 4096,
        degree: Degree = 2,
    ) -> None:
        super().__init__()
        known = [*FEATURE_MAPS, *_RANDOM_MAPS, "cosine_reweighting"]
        name = feature_map
        self.function = None if isinstance(name, str) else name
        if self.function is None and name not in known:
            raise nearest("feature map", name, known)
        if num_features is None:
            num_features = max(1, int(head_dim * math.log(head_dim)))
        self.name, self.head_dim, self.nu, self.horizon, self.degree = name, head_dim, nu, horizon, degree
        self.positional = name == "cosine_reweighting"
        by_head = name == "fourier_features"
        shape = (num_heads, num_features, head_dim) if by_head else (num_features, head_dim)
        self.register_buffer("projection", torch.empty(shape) if name in _RANDOM_MAPS else None)
        self.sigma = nn.Parameter(torch.ones(num_heads, 1, head_dim)) if by_head else None
        if name in _RANDOM_MAPS:
            self.redraw()
        probe = torch.zeros(1, 1, num_heads, head_dim)
        features = self(probe, probe.new_zeros(1, 1))
        if features.shape[:-1] != probe.shape[:-1]:
            raise ConfigError(
                f"feature_map: it makes {tuple(features.shape)} of {tuple(probe.shape)}, expected (..., K') of (..., K)"
            )
        self.width = features.shape[-1]

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw the projection of a random map anew, in place. generator: as for `random_projection`."""
        if self.projection is None:
            raise ConfigError(f"feature_map: redraw is called, expected a random map and not {self.name!r}")
        *heads, features, width = self.projection.shape
        drawn = random_projection(math.prod(heads) * features, width, generator=generator, orthogonal=not heads)
        self.projection.copy_(drawn.view_as(self.projection))

    @property
    def has_kernel(self) -> bool:
        """Whether φ(q)·φ(k) is a function of q·k, which `kernel` computes."""
        return self.name in ("polynomial", "taylor", "quadratic")

    def kernel(self, q: Tensor, k: Tensor) -> Tensor:
        """Return φ(q_i)·φ(k_j), (..., I, J), of queries (..., I, K) and keys (..., J, K), without their features."""
        scores = widen(q) @ widen(k).mT
        if self.name in _SCALED_MAPS:
            scores = scores * self.head_dim**-0.5
        if self.name == "quadratic":
            return scores.square()
        return (1 + scores) ** self.degree if self.name == "polynomial" else (1 + scores).square() / 2 + 0.5

    def forward(self, x: Tensor, steps: Tensor | None) -> Tensor:
        """Apply φ. steps: (B, T), position of each step in its sequence; needed if the map is `positional`."""
        x = widen(x)
        if self.function is not None:
            return self.function(x)
        if self.name in _SCALED_MAPS:
            x = x * self.head_dim**-0.25
        if self.sigma is not None:
            x = x / (x.norm(dim=-1, keepdim=True) + 1e-3) * widen(self.sigma)[:, 0]
        if self.projection is not None:
            return _RANDOM_MAPS[str(self.name)](x, self.projection)
        if self.name == "dpfp":
            return dpfp(x, self.nu)
        if self.name == "polynomial":
            return polynomial(x, self.degree)
        if self.positional:
            assert steps is not None
            return cosine_reweighting(x, steps, self.horizon)
        return FEATURE_MAPS[str(self.name)](x)
