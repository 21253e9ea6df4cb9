"""Filters of Hyena: the output of a small network of the lag, times a decay over the lag.

Source: Poli et al., arXiv:2302.10866, section 3.3; parameter names as in the released code, safari.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.base import widen
from scanl.layers.module import Module

TARGET, SLOW, FAST = 1e-2, 1.5, 0.3


class Sin(Module):
    """sin(freq x); freq (1, width) is trained."""

    def __init__(self, width: int, frequency: float) -> None:
        super().__init__()
        self.freq = nn.Parameter(frequency * torch.ones(1, width))


class WideLinear(nn.Linear):
    """A linear map that is computed in float32 or wider."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(widen(input), widen(self.weight), None if self.bias is None else widen(self.bias))


class PositionalEmbedding(Module):
    """Embedding of the lag.

    z: (1, L, emb_dim), trained; initially the lag from 0 to 1, its cosines and its sines.   t: (1, L, 1), the lag.
    """

    t: Tensor

    def __init__(self, emb_dim: int, max_length: int) -> None:
        super().__init__()
        bands = (emb_dim - 1) // 2
        t = torch.linspace(0, 1, max_length)[None, :, None]
        lags = (2 * math.pi / max_length * torch.arange(max_length))[None, :, None]
        angles = torch.linspace(1e-4, bands - 1, bands) * lags
        self.z = nn.Parameter(torch.cat([t, angles.cos(), -angles.sin()], -1))
        self.register_buffer("t", t)


class Modulation(Module):
    """Decay of the filters. deltas: (1, 1, width), the rates, not trained.

    A filter decays to `TARGET` within a fraction of all lags: SLOW in the first channel, FAST in the last.
    """

    deltas: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        slow, fast = math.log(TARGET) / SLOW, math.log(TARGET) / FAST
        self.register_buffer("deltas", torch.linspace(slow, fast, width)[None, None])


class HyenaFilter(Module):
    """The filters: `pos_emb`, then `implicit_filter` (linear maps with sines between), then `modulation`.

    bias: (width).
    """

    def __init__(
        self, width: int, emb_dim: int, hidden_dim: int, max_length: int, frequency: float, depth: int, shift: float
    ) -> None:
        super().__init__()
        self.shift = shift
        self.bias = nn.Parameter(torch.randn(width))
        self.pos_emb = PositionalEmbedding(emb_dim, max_length)
        # All layers use one sine. The released code saves its frequencies once for each layer.
        self._repeats = [2 * i + 3 for i in range(depth)]
        maps: dict[str, nn.Module] = {"0": WideLinear(emb_dim, hidden_dim), "1": Sin(hidden_dim, frequency)}
        maps |= {str(2 * i + 2): WideLinear(hidden_dim, hidden_dim) for i in range(depth)}
        maps[str(2 * depth + 2)] = WideLinear(hidden_dim, width, bias=False)
        self.implicit_filter = nn.ModuleDict(maps)
        self.modulation = Modulation(width)
        self.register_load_state_dict_pre_hook(_drop_repeated_sines)

    def forward(self) -> Tensor:
        """Return the filters (width, L), in float32 or wider."""
        sine = self.implicit_filter["1"]
        assert isinstance(sine, Sin)
        *maps, last = (module for module in self.implicit_filter.values() if module is not sine)
        h, freq = widen(self.pos_emb.z), widen(sine.freq)
        for linear in maps:
            h = torch.sin(freq * linear(h))
        h = last(h)
        fading = torch.exp(-widen(self.pos_emb.t) * widen(self.modulation.deltas).abs())
        return (h * (fading + self.shift))[0].t()


def _drop_repeated_sines(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    assert isinstance(module, HyenaFilter)
    for index in module._repeats:
        state_dict.pop(f"{prefix}implicit_filter.{index}.freq", None)
