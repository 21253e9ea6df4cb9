"""Vision Mamba: a classifier of images whose patches are read in both directions."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError
from scanl.models.saving import Saved
from scanl.models.stack import Stack

UNCUT = 0.87962566103423978  # deviation of a standard normal number that is cut at -2 and 2


class Vim(Saved):
    """Vision Mamba: patches of an image as a sequence, with a token for the class in its middle.

    The model has a linear map of each patch, a learned vector for each position, blocks of `vim` without a channel
    mixer, an RMSNorm, and a linear map at the class token. Differs: training has no stochastic depth.

    Args:
        num_classes: C.
        image: height and width in pixels, each a multiple of `patch`.
        channels: of a pixel.
        patch: height and width of a patch.
        dim: D, width; 192, 384 and 768 are Vim-Ti, Vim-S and Vim-B.
        depth: blocks.
        layer_options: options of `vim`.

    Parameters beside the blocks: patches, a convolution (D, channels, patch, patch); positions (1, M + 1, D) for the M
    patches and the token; token (1, 1, D); head (C, D).
    Initialisation as in the authors' code: positions, token and the weight of head normal with deviation 0.02; the
    weight of patches normal with deviation 1/sqrt(channels patch²), after a cut at two deviations; both biases 0; the
    blocks as of `Stack`.
    Source: Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model",
    arXiv:2401.09417, sec. 3, and its code for the place of the token.
    """

    def __init__(
        self,
        num_classes: int,
        image: tuple[int, int] = (224, 224),
        channels: int = 3,
        patch: int = 16,
        dim: int = 192,
        depth: int = 24,
        layer_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(locals())
        if patch < 1 or len(image) != 2 or min(image) < 1 or any(size % patch for size in image):
            raise ConfigError(f"vim: image is {tuple(image)}, expected two multiples of patch={patch}")
        self.image, self.channels = tuple(image), channels
        self.patches = nn.Conv2d(channels, dim, patch, patch)
        count = image[0] * image[1] // patch**2
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count + 1, dim), std=0.02))
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, dim), std=0.02))
        self.stack = Stack(dim, depth, "vim", layer_options=layer_options, channel_mixer="none", norm_eps=1e-5)
        self.head = nn.Linear(dim, num_classes)
        deviation = (channels * patch**2) ** -0.5 / UNCUT
        nn.init.trunc_normal_(self.patches.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        for biased in (self.patches, self.head):
            nn.init.zeros_(cast(Tensor, biased.bias))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, channels, height, width) to logits (B, C)."""
        expected = (self.channels, *self.image)
        if images.ndim != 4 or images.shape[1:] != expected:
            sizes = ", ".join(map(str, expected))
            raise ShapeError(f"vim: images has shape {tuple(images.shape)}, expected (B, {sizes})")
        x = self.patches(images).flatten(2).mT
        middle = x.shape[1] // 2
        x = torch.cat([x[:, :middle], self.token.expand(len(x), -1, -1), x[:, middle:]], 1) + self.positions
        return self.head(self.stack(x)[0][:, middle])
