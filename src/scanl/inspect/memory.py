"""The number of steps for which an input matters to the outputs."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scanl.errors import ConfigError
from scanl.inspect.base import BLUE, RED, Drawing, Inspection, inspector, prepared
from scanl.inspect.impulse import pieces, responses
from scanl.layers.base import Layer
from scanl.options import Portion, checked

STEPS = 256


@dataclass(frozen=True)
class EffectiveMemory(Inspection):
    """steps: (D,), of each input channel the steps after which its response stays small; infinity if it does not.

    size: (D, K), root mean square of the response's norm, k steps later.
    """

    steps: Tensor
    size: Tensor

    def figures(self) -> dict[str, float]:
        return {
            "shortest, steps": self.steps.min().item(),
            "median, steps": self.steps.median().item(),
            "longest, steps": self.steps.max().item(),
        }

    def columns(self) -> dict[str, Any]:
        return {"channel": list(range(len(self.steps))), "steps": self.steps.tolist()}

    def panels(self) -> dict[str, Drawing]:
        return {"": self._draw}

    def _draw(self, axes: Any) -> None:
        ranked, longest = self.steps.sort(descending=True).values, self.size.shape[1] - 1
        rank = torch.arange(1, len(ranked) + 1)
        beyond = ranked.isinf()
        axes.plot(rank[~beyond], ranked[~beyond].clamp(min=0.5), "o", ms=4, color=BLUE)
        axes.plot(
            rank[beyond], torch.full((int(beyond.sum()),), longest), "^", ms=5, color=RED, label="longer than seen"
        )
        axes.set(xlabel="input channel, longest first", ylabel="effective memory, steps")
        axes.set_yscale("log", base=2)
        axes.set_ylim(0.45 if (ranked < 1).any() else 0.9, 1.2 * longest)
        axes.yaxis.set_major_formatter("{x:g}")
        if beyond.any():
            axes.legend(frameon=False, fontsize=8)
        axes.grid(alpha=0.3, which="both")


@inspector(
    title="Effective memory of each input channel",
    equation="m_i = min{m : |dy_{t+k}/dx_{t,i}| < f max_{j>=1} |dy_{t+j}/dx_{t,i}| for all k >= m}",
    source='Poli et al., "Hyena Hierarchy: Towards Larger Convolutional Language Models", arXiv:2302.10866, sec. 2.1',
)
@checked("effective_memory")
def effective_memory(layer: Layer, x: Tensor | None = None, *, fraction: Portion = 1 / math.e) -> EffectiveMemory:
    """Return for each input channel the steps after which the outputs have nearly forgotten it.

    x: (B, K, dim), what the layer reads; None for 4 sequences of 256 steps of white noise.   fraction: f, of the
    largest response after step 0, below which the response stays. The norm is over the output channels, its mean square
    over the sequences. 0 means that no later output depends on the channel. For a response a^k it is the first whole
    number of steps above 1 + ln f / ln a.

    Differs: the source counts the entries of a kernel that are not 0. Raises ConfigError for a fraction that is not
    between 0 and 1, and for one step.

    >>> from scanl.layers import LRU
    >>> effective_memory(LRU(4, r_min=0.9, r_max=0.91)).steps.max() < 256
    tensor(True)
    """
    layer, x = prepared("effective_memory", layer, x, STEPS)
    if x.shape[1] < 2:
        raise ConfigError("effective_memory: x has 1 step, expected at least 2")
    every = pieces(torch.arange(layer.dim), x)
    size = torch.cat([responses(layer, x, some).square().sum(3).mean(0).sqrt() for some in every])
    later = size[:, 1:]
    large = later >= fraction * later.amax(1, keepdim=True)
    large &= later > 0
    steps = large.shape[1] - large.flip(1).int().argmax(1) + 1.0
    steps = torch.where(large[:, -1], math.inf, torch.where(large.any(1), steps, 0.0))
    return EffectiveMemory(steps.double(), size)
