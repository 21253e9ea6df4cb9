"""What layers with a matrix memory do alike: its state, and a short convolution and SiLU over queries, keys, values."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.base import Layer
from scanl.layers.short_convolution import convolve
from scanl.layers.state import Device, DType

Convolutions: TypeAlias = Sequence[nn.Conv1d | None]  # of q, k and v; None has no window
Windows: TypeAlias = tuple[Tensor, ...]  # the last inputs of each that there is, (B, W-1, width)


def depthwise(width: int, conv_size: int, bias: bool) -> nn.Conv1d:
    """A window of its own for each channel."""
    return nn.Conv1d(width, width, conv_size, groups=width, bias=bias)


class MemoryState(NamedTuple):
    """recurrent: S (B, H, K, V), float32 or wider.   conv: the windows of the convolutions; () where there are none."""

    recurrent: Tensor
    conv: Windows


def init_memory(
    layer: Layer, memory: Sequence[int], convs: Convolutions, batch_size: int, device: Device, dtype: DType
) -> MemoryState:
    """Zeros, float32 or wider.   memory: (H, K, V)."""

    def zeros(*shape: int) -> Tensor:
        return layer._zeros(batch_size, *shape, device=device, dtype=dtype, at_least=torch.float32)

    windows = [zeros(conv.kernel_size[0] - 1, conv.in_channels) for conv in convs if conv is not None]
    return MemoryState(zeros(*memory), tuple(windows))


def convolve_each(
    convs: Convolutions,
    xs: Sequence[Tensor],
    windows: Windows | None,
    *,
    cu_seqlens: Tensor | None = None,
    silu: Sequence[bool] = (True, True, True),
) -> tuple[list[Tensor], Windows]:
    """Each x through its convolution, if any, and through SiLU where `silu` says so; windows None: the start."""
    ys, after = [], []
    before = iter(windows or [None] * len(xs))
    for conv, x, active in zip(convs, xs, silu, strict=True):
        if conv is None:
            ys.append(F.silu(x) if active else x)
            continue
        y, window = convolve(conv, x, next(before), cu_seqlens=cu_seqlens, silu=active)
        ys.append(y)
        after.append(window)
    return ys, tuple(after)


def whole_heads(who: str, option: str, expand: float, dim: int, num_heads: int) -> int:
    """Channels of one of `num_heads` heads that have expand * dim together, or ConfigError."""
    width = round(expand * dim)
    if num_heads < 1 or width < 1 or abs(width - expand * dim) > 1e-5 * width or width % num_heads:
        raise ConfigError(
            f"{who}: {option} is {expand} and num_heads is {num_heads}, expected {option} * dim={expand * dim:g} to be "
            "a multiple of num_heads"
        )
    return width // num_heads
