"""SGConv: a long convolution whose kernel is made of a few numbers at every scale of time."""

import math
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers import options, registry
from scanl.layers.base import Hint, Layer, widen
from scanl.layers.initial_state import StateAxes
from scanl.layers.packing import each_alone
from scanl.layers.parts.history import with_history
from scanl.layers.ssm._base import BY_CONVOLUTION
from scanl.options import above, at_least_option


@registry.register("sgconv")
class SGConv(Layer):
    """SGConv: kernels of k numbers, stretched by powers of two and joined end to end; longer ones have smaller weights.

    A kernel has L = max_length lags, so older inputs have no effect. Sequences may be longer; in the released code a
    longer one meets all k 2^(S-1) lags, which are more where L/k is no power of two. The state holds the last L - 1
    inputs, so a step costs O(L D). Differs: here the divisor is the norm of the kernels at construction. In the
    released code it is their norm at the first call, and a flag says whether that has happened.

    Parameters as in the released code: D (1, D); kernel_list.0 to .S-1 (1, D, k), without weight decay; output_linear
    (D, D), there `output_linear.0`; as buffers multiplier = 1/α and kernel_norm = Z (1, D, 1), the norm over all
    k 2^(S-1) lags.
    Initialisation: kernels and D N(0, 1); the linear map as in PyTorch.
    """

    id = "S-sgconv"
    cost = ("T log T", "T")
    aliases = ("structured_global_convolution",)
    equation = "y = W GELU(K conv x + D * x) + b,  K = [alpha^i stretch(w_i, 2^max(i-1, 0)) for i < S] / Z"
    source = (
        'Li, Cai, Zhang, Chen and Dey, "What Makes Convolutional Models Great on Long Sequence Modeling?", '
        "arXiv:2210.09298, sec. 3, and its code"
    )
    op = None
    state: ClassVar = StateAxes("max_length - 1, dim", "the last inputs")
    excused: ClassVar = BY_CONVOLUTION
    sample: ClassVar = {"max_length": 4, "conv_size": 1}
    hints: ClassVar = {"kernel_list": Hint(weight_decay=False, lr="lr")}

    multiplier: Tensor
    kernel_norm: Tensor

    def __init__(
        self,
        dim: options.Dim,
        max_length: Annotated[options.MaxLength, "L, lags of the kernel"] = 1024,
        conv_size: Annotated[
            options.ConvSize, "k, numbers of each of the S = 1 + ceil(log2(L/k)) scales, at least one scale"
        ] = 64,
        decay_min: Annotated[float, above(0), "1/α of the first channel"] = 2.0,
        decay_max: Annotated[
            float, at_least_option("decay_min"), "1/α of the last channel; those between are evenly spaced"
        ] = 2.0,
        lr: Annotated[options.LearningRate, "learning rate of the kernels; None for the optimizer's"] = 1e-3,
    ) -> None:
        super().__init__()
        self.dim, self.max_length, self.conv_size, self.lr = dim, max_length, conv_size, lr
        scales = 1 + max(0, math.ceil(math.log2(max_length / conv_size)))
        self.D = nn.Parameter(torch.randn(1, dim))
        self.kernel_list = nn.ParameterList([torch.randn(1, dim, conv_size) for _ in range(scales)])
        self.register_buffer("multiplier", torch.linspace(decay_min, decay_max, dim).view(1, -1, 1))
        with torch.no_grad():
            self.register_buffer("kernel_norm", self._kernels().norm(dim=-1, keepdim=True))
        self.output_linear = nn.Linear(dim, dim)

    def _kernels(self) -> Tensor:
        """Return the kernels before they are divided by Z and cut, (1, D, k 2^(S-1))."""
        scales = len(self.kernel_list)
        parts = [
            F.interpolate(widen(kernel), scale_factor=float(1 << max(0, i - 1)), mode="linear")
            * widen(self.multiplier) ** (scales - 1 - i)
            for i, kernel in enumerate(self.kernel_list)
        ]
        return torch.cat(parts, -1)

    def run(self, x: Tensor, state: Tensor | None, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        u, kernel = widen(x), (self._kernels() / widen(self.kernel_norm))[0, :, : self.max_length]
        state = None if state is None else state.to(u.dtype)
        if cu_seqlens is None:
            y, last = with_history(u, state, kernel)
        else:
            y, last = each_alone(lambda u, row: with_history(u, row, kernel), u, state, cu_seqlens, after_zeros=2)
        return self.output_linear(F.gelu(torch.addcmul(y, u, widen(self.D))).to(x.dtype)), last
