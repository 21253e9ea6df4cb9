"""A classifier of images as sequences of patches, and Vision Mamba."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from scanl.errors import ShapeError
from scanl.models.presets import whole
from scanl.models.saving import ModelPart, Saved
from scanl.models.stack import Backbone, Stack
from scanl.options import WORDS, ConfiguredMeta, at_least, refuse

UNCUT_SHARE = 0.87962566103423978  # deviation of a standard normal number that is cut at -2 and 2


@dataclass(frozen=True)
class Patches(ModelPart, metaclass=ConfiguredMeta):
    """Images (B, channels, height, width) that are cut into square patches, each a step of a sequence."""

    image: Annotated[Sequence[int], "height and width in pixels, each a multiple of `size`"] = (224, 224)
    channels: Annotated[int, at_least(1), "channels of a pixel"] = 3
    size: Annotated[int, at_least(1), "height and width of a patch"] = 16

    def __post_init__(self) -> None:
        if len(self.image) != 2 or min(self.image) < 1 or any(side % self.size for side in self.image):
            refuse(Patches, "image", tuple(self.image), f"two multiples of size={self.size}")


WORDS[Patches] = "Patches((224, 224))"


class ImageClassifier(Saved):
    """Classify an image: its patches as a sequence, with a token for the class in its middle. `vim` makes one.

    The model has a linear map of each patch, a learned vector for each position, the layers of the stack, and a linear
    map at the class token.

    Parameters outside of the stack: patches, a convolution (D, channels, size, size); positions (1, M + 1, D) for the M
    patches and the token; token (1, 1, D); head (C, D).
    Initialisation: positions, token and the weight of head normal with deviation 0.02; the weight of patches normal
    with deviation 1/sqrt(channels size²), after a cut at two deviations; both biases 0.
    """

    name: ClassVar[str] = "image classifier"

    def __init__(
        self,
        num_classes: Annotated[int, at_least(1), "C"],
        stack: Annotated[Backbone, "bidirectional layers; causal ones would read the patches before the token alone"],
        patches: Annotated[Patches, "the images, and how they are cut"] = Patches(),
    ) -> None:
        super().__init__()
        size, channels = patches.size, patches.channels
        self.shape = (channels, *patches.image)
        self.patches = nn.Conv2d(channels, stack.dim, size, size)
        count = math.prod(patches.image) // size**2
        self.positions = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, count + 1, stack.dim), std=0.02))
        self.token = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, 1, stack.dim), std=0.02))
        self.stack = stack
        self.head = nn.Linear(stack.dim, num_classes)
        deviation = (channels * size**2) ** -0.5 / UNCUT_SHARE
        nn.init.trunc_normal_(self.patches.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        for biased in (self.patches, self.head):
            nn.init.zeros_(cast(Tensor, biased.bias))

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, channels, height, width) to logits (B, C)."""
        if images.ndim != 4 or images.shape[1:] != self.shape:
            sizes = ", ".join(map(str, self.shape))
            raise ShapeError(f"image classifier: images has shape {tuple(images.shape)}, expected (B, {sizes})")
        x = self.patches(images).flatten(2).mT
        middle = x.shape[1] // 2
        x = torch.cat([x[:, :middle], self.token.expand(len(x), -1, -1), x[:, middle:]], 1) + self.positions
        return self.head(self.stack(x)[0][:, middle])


@whole("vim")
def vim(
    num_classes: int,
    patches: Patches = Patches(),
    dim: int = 192,
    depth: int = 24,
    layer_options: Mapping[str, Any] | None = None,
) -> ImageClassifier:
    """Return Vision Mamba: a classifier of images whose patches are read in both directions.

    An `ImageClassifier` of blocks `vim` without a channel mixer. Differs: training has no stochastic depth.

    Args:
        num_classes, patches: as in `ImageClassifier`.
        dim: D, width; 192, 384 and 768 are Vim-Ti, Vim-S and Vim-B.
        depth: blocks.
        layer_options: options of `vim`.

    Initialisation: as in `ImageClassifier` and the authors' code; the blocks as in `Stack`.
    Source: Zhu et al., "Vision Mamba: Efficient Visual Representation Learning with Bidirectional State Space Model",
    arXiv:2401.09417, sec. 3, and its code for the place of the token.
    """
    stack = Stack(dim, depth, "vim", layer_options=layer_options, channel_mixer="none", norm_eps=1e-5)
    return ImageClassifier(num_classes, stack, patches)
