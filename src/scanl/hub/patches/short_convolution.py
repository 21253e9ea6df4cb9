"""Short convolutions: between two gates in LFM2, with a residual connection in Inkling."""

import math
from typing import Any, ClassVar

from torch import Tensor

from scanl.hub.patches.base import CachedPatch, convolved, register
from scanl.layers.parts.short_convolution import convolve


@register("gated_convolution")
class GatedConvolutionPatch(CachedPatch):
    modules: ClassVar = ("lfm2.Lfm2ShortConv", "lfm2_moe.Lfm2MoeShortConv", "lfm3.Lfm3ShortConv")
    original: ClassVar = "a convolution of transposed copies"
    runs: ClassVar = "short_convolution"
    corrects: ClassVar = ("padding adds nothing where projections have biases", "packed sequences are kept apart")
    kernels: ClassVar = ("causal_conv1d_fn",)
    reads: ClassVar = ("conv",)
    needs_call: ClassVar = ("packing",)

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        B, C, u = module.in_proj(x).chunk(3, -1)
        inputs = B * u
        y, conv = convolve(module.conv, inputs, conv, cu_seqlens=cu_seqlens)
        return module.out_proj(C * y), inputs, conv, None


@register("residual_convolution")
class ResidualConvolutionPatch(CachedPatch):
    """Computes in float32 for any model dtype. A layer has four, each with its own state in the layer's cache."""

    modules: ClassVar = ("inkling.InklingShortConvolution", "inkling2.Inkling2ShortConvolution")
    original: ClassVar = GatedConvolutionPatch.original
    runs: ClassVar = GatedConvolutionPatch.runs
    corrects: ClassVar = ("packed sequences are kept apart",)
    kernels: ClassVar = GatedConvolutionPatch.kernels
    reads: ClassVar = ("conv1d",)
    needs_call: ClassVar = ("packing",)

    @staticmethod
    def slot(module: Any) -> int:
        return module.conv_idx

    @classmethod
    def takes(cls, module: Any, *args: Any, **kwargs: Any) -> bool:
        return not kwargs.get("cache_offset")

    @classmethod
    def forward(cls, module: Any, *args: Any, conv_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        if len(args) > 1 and isinstance(args[1], Tensor):
            args = args[:1]  # the second one is what other convolutions of the model make their weights of
        return super().forward(module, *args, attention_mask=conv_mask, **kwargs)

    @staticmethod
    def run(
        module: Any, x: Tensor, conv: Tensor | None, recurrent: Tensor | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        inputs = x.float()
        y, conv = convolved(module, inputs, conv, cu_seqlens, None)
        y = y + inputs
        if type(module).__name__.startswith("Inkling2"):
            y = y / math.sqrt(module.conv_kernel_size + 1)
        return y.to(x.dtype), inputs, conv, None
