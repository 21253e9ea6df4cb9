"""The response of a layer to a push on one of its inputs: its kernel, if it is linear."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.inspect.base import Drawing, Inspection, inspector, prepared
from scanl.layers.base import Layer

STEPS = 128
CHANNELS = 8  # that are pushed where the caller names none
MAX_SHOWN_CHANNELS = 5  # channels of a picture
PUSH = 1e-4  # in units of the inputs
BUDGET = 2**21  # numbers of the inputs that are in memory at once


@dataclass(frozen=True)
class ImpulseResponse(Inspection):
    """response: (B, C, K, D), what a unit at step 0 in each of C input channels adds to the output k steps later.

    channels: (C,), these input channels.
    """

    response: Tensor
    channels: Tensor

    def figures(self) -> dict[str, float]:
        size = self.response.square().sum(3).mean((0, 1)).sqrt()
        return {"at step 0": size[0].item(), "largest later": size[1:].max().item(), "last": size[-1].item()}

    def columns(self) -> dict[str, Any]:
        _, count, steps, dim = self.response.shape
        mean = self.response.mean(0)
        return {
            "into": self.channels.repeat_interleave(steps * dim).tolist(),
            "steps": torch.arange(steps).repeat_interleave(dim).repeat(count).tolist(),
            "out_of": torch.arange(dim).repeat(count * steps).tolist(),
            "mean": mean.flatten().tolist(),
        }

    def panels(self) -> dict[str, Drawing]:
        return {"": self._draw}

    def _draw(self, axes: Any) -> None:
        """Draw of some channels the output that answers most, in the first sequence."""
        for curves, channel in zip(
            self.response[0, :MAX_SHOWN_CHANNELS], self.channels[:MAX_SHOWN_CHANNELS].tolist(), strict=True
        ):
            strongest = int(curves[1:].square().sum(0).argmax())
            axes.plot(range(1, len(curves)), curves[1:, strongest], lw=1.2, label=f"{channel} to {strongest}")
        axes.axhline(0, lw=0.8, color="#bdbdbd")
        axes.set(xlabel="steps after the push", ylabel="output for a unit of input", xscale="log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=8, title="channel", title_fontsize=8)
        axes.grid(alpha=0.3)


@inspector(
    title="Impulse response",
    equation="R_k = dy_k/dx_0;  of a linear layer y_t = sum_k R_k x_{t-k}",
    source='Gu et al., "Combining Recurrent, Convolutional, and Continuous-time Models", arXiv:2110.13985, sec. 3',
)
def impulse_response(
    layer: Layer, x: Tensor | None = None, *, channels: Sequence[int] | None = None
) -> ImpulseResponse:
    """Return the derivative of the outputs by the input of the first step, in some channels.

    x: (B, K, dim), what the layer reads beside the push; None for 4 sequences of 128 steps of white noise. Of a linear
    time-invariant layer the response does not depend on x, and is its kernel.   channels: input channels that are
    pushed, one after the other; None for 8 of them at even distances.

    Computed in float64 as a central difference of two outputs, 2e-4 apart in the input, so its relative error is about
    1e-8, and less for a linear layer. Raises ConfigError for a channel that the layer does not have, and for one step.
    """
    layer, x = prepared("impulse_response", layer, x, STEPS)
    if channels is None:
        channels = torch.linspace(0, layer.dim - 1, min(CHANNELS, layer.dim)).round().int().tolist()
    wrong = [channel for channel in channels if not 0 <= channel < layer.dim]
    if wrong or not channels:
        raise ConfigError(f"impulse_response: channels is {list(channels)}, expected some from 0 to {layer.dim - 1}")
    if x.shape[1] < 2:
        raise ConfigError("impulse_response: x has 1 step, expected at least 2")
    pushed = torch.tensor(channels)
    return ImpulseResponse(torch.cat([responses(layer, x, some) for some in pieces(pushed, x)], 1), pushed)


def pieces(channels: Tensor, x: Tensor) -> Sequence[Tensor]:
    """Split channels so that the pushed copies of x are small enough to be in memory at once."""
    return channels.split(max(1, BUDGET // (2 * x.numel())))


@torch.no_grad()
def responses(layer: Layer, x: Tensor, channels: Tensor) -> Tensor:
    """Return (B, C, K, D), the derivative of the outputs by x (B, K, D) at step 0, in C channels."""
    pushed = x[:, None, None].repeat(1, len(channels), 2, 1, 1)  # (B, C, 2, K, D)
    at = torch.arange(len(channels))
    pushed[:, at, 0, 0, channels] += PUSH
    pushed[:, at, 1, 0, channels] -= PUSH
    y = layer(pushed.flatten(0, 2))[0].unflatten(0, pushed.shape[:3])
    return (y[:, :, 0] - y[:, :, 1]) / (2 * PUSH)
