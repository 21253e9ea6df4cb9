"""SpaceTime: a network of companion systems that forecasts a series in closed loop."""

from typing import Annotated, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers.module import Module
from scanl.layers.ssm.spacetime import SpaceTime
from scanl.models.presets import whole
from scanl.models.saving import Saved
from scanl.ops import long_convolution
from scanl.options import at_least, divides

GROUP = 8  # fixed filters of a group: differences of order 0 to 3, then what moving averages leave


class FixedFilters(Module):
    """Convolve channels with filters that are not learned: differences, and the input minus moving averages.

    Channel c has filter i = c mod 8, which is (1 - lag)^i for i < 4, and otherwise 1 minus the mean of the last w
    steps, with a w of its own.   weight (D, N).   Initialisation: w uniform in 4, ..., N - 1.
    """

    weight: Tensor

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        rows = torch.zeros(dim, width)
        for channel, row in enumerate(rows):
            if channel % GROUP < 4:
                difference = torch.ones(1)
                for _ in range(channel % GROUP):
                    difference = F.pad(difference, (0, 1)) - F.pad(difference, (1, 0))
                row[: len(difference)] = difference[:width]
            else:
                last = int(torch.randint(min(4, width), width, ())) if width > 4 else width
                row[:last] = -1 / last
                row[0] += 1
        self.register_buffer("weight", rows)

    def forward(self, x: Tensor) -> Tensor:
        return long_convolution(x, self.weight)[0]


class SpaceTimeBlock(Module):
    """A companion system, then x + W dropout(GELU(x)). The first block reads the output of the fixed filters."""

    def __init__(self, dim: int, state_dim: int, num_groups: int, dropout: float, first: bool) -> None:
        super().__init__()
        self.filters = FixedFilters(dim, state_dim) if first else None
        self.ssm = SpaceTime(dim, state_dim, num_groups)
        self.dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(dim, dim)

    def forward(self, u: Tensor) -> Tensor:
        z = u if self.filters is None else self.filters(u)
        y = self.ssm(z)[0]
        return z + y + self.linear(self.dropout(F.gelu(y)))


@whole("spacetime")
class SpaceTimeNet(Saved):
    r"""Forecast the next steps of a series from a window of its past, in closed loop.

    .. math:: \hat y_{t+h} = W\, \mathrm{GELU}(C (A + B K)^h s_t) + b + m

    with s_t the state of the last layer and m the mean of the window. The window passes through blocks of companion
    systems; the first has fixed filters before it. The last layer runs on the inputs that it predicts itself. So a
    forecast of any length is one run of a linear system, and its steps do not pass through the blocks again.

    Source: Zhang et al., "Effectively Modeling Time Series with Simple Discrete State Spaces", arXiv:2303.09489, sec. 3
    and appendix; sizes of the released code: D = 128, N = 64, 16 kernels in the first block.
    """

    name: ClassVar[str] = "spacetime"

    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, width. The series is repeated over it"] = 128,
        depth: Annotated[int, at_least(1), "blocks before the last layer"] = 1,
        state_dim: Annotated[int, at_least(1), "N, numbers in the state of each channel"] = 64,
        num_groups: Annotated[int, divides("dim"), "groups of channels that share a system of the first block"] = 16,
        dropout: Annotated[float, "dropout after each GELU, in the blocks and before W, in training only"] = 0.25,
    ) -> None:
        super().__init__()
        self.state_dim = state_dim
        self.blocks = nn.ModuleList(
            SpaceTimeBlock(dim, state_dim, dim if i else num_groups, dropout, first=i == 0) for i in range(depth)
        )
        self.decoder = SpaceTime(dim, state_dim, closed_loop=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(dim, 1)

    def _hidden(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of the last layer (B, T, D), and the mean of the window (B, 1, 1)."""
        if x.ndim != 3 or x.shape[2] != 1 or x.shape[1] == 0:
            raise ShapeError(f"spacetime: x has shape {tuple(x.shape)}, expected (B, T, 1) with T at least 1")
        mean = x.mean(1, keepdim=True)
        u = (x - mean).expand(-1, -1, self.decoder.dim)
        for block in self.blocks:
            u = cast(SpaceTimeBlock, block)(u)
        return u, mean

    def _read_out(self, y: Tensor, mean: Tensor) -> Tensor:
        return self.head(self.dropout(F.gelu(y))) + mean

    def forward(self, x: Tensor) -> Tensor:
        """Map a window x (B, T, 1) to open-loop forecasts (B, T, 1): at step t, of step t + 1.

        All steps use the mean of the whole window.
        """
        u, mean = self._hidden(x)
        return self._read_out(self.decoder(u)[0], mean)

    def predict(self, x: Tensor, horizon: int, *, closed_loop: bool = True) -> Tensor:
        """Forecast (B, horizon, 1) after the window x (B, T, 1).

        closed_loop: run the last layer on its own inputs. Otherwise each forecast is appended to the window, which then
        passes through the whole network.
        """
        if closed_loop:
            u, mean = self._hidden(x)
            return self._read_out(self.decoder.forecast(self.decoder(u)[1], horizon)[0], mean)
        for _ in range(horizon):
            x = torch.cat([x, self(x)[:, -1:]], 1)
        return x[:, x.shape[1] - horizon :]

    def loss(self, x: Tensor, future: Tensor, *, closed_loop: bool = True) -> Tensor:
        """Return the loss over windows x (B, T, 1) and the steps after them, future (B, H, 1).

        The loss is the sum of three root mean squared errors, as in the released code: of the closed-loop forecasts; of
        the open-loop forecasts of the steps from N on, the first step of the future included; and of the inputs that
        the last layer predicts for itself at these steps of the window. Without `closed_loop` the loss is the second
        error alone.
        """
        u, mean = self._hidden(x)
        y, state = self.decoder(u)
        skipped = min(self.state_dim, x.shape[1] - 1) - 1  # states of fewer steps than N have not seen enough
        skipped = max(skipped, 0)
        opened = _rmse(self._read_out(y, mean)[:, skipped:], torch.cat([x[:, skipped + 1 :], future[:, :1]], 1))
        if not closed_loop:
            return opened
        ahead = self._read_out(self.decoder.forecast(state, future.shape[1])[0], mean)
        input_error = _rmse(self.decoder.next_inputs(u)[:, skipped:-1], u[:, skipped + 1 :])
        return _rmse(ahead, future) + opened + input_error


def _rmse(forecast: Tensor, expected: Tensor) -> Tensor:
    return (forecast - expected).square().mean().sqrt()
