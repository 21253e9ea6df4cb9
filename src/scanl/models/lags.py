r"""A linear map of the last values of a series to its next ones, with a state of constant size.

.. math:: \ell_{t,h} = \sum_{k=0}^{q-1} W_{h,k} \, o_{t-k} \, (x_{t-k} - m_t) / s_t

with o = 1 where x is known, else 0, and before the first step 0. m_t and s_t are the location and the scale of step t.

Source: Lai et al., "Modeling Long- and Short-Term Temporal Patterns with Deep Neural Networks" (LSTNet),
arXiv:1703.07015, eq. (8). Differs: every h of the horizon has weights of its own, as in DLinear (Zeng et al.,
arXiv:2205.13504, eq. (1)), and the values are normalised by the step from which the forecast is made.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.layers.packing import each_alone
from scanl.layers.state import State


class Lags(nn.Module):
    """Map the last `lags` values of each channel to `horizon` numbers; the channels have the weights in common.

    The weights start at zero. State: (B, lags - 1, 2 C), the last values and whether each is known.
    """

    def __init__(self, lags: int, horizon: int) -> None:
        super().__init__()
        self.lags = lags
        self.weight = nn.Parameter(torch.zeros(horizon, lags))

    def forward(
        self, x: Tensor, mean: Tensor, scale: Tensor, state: Tensor, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map x (B, T, C), NaN where missing, to (B, T, H, C). mean, scale: (B, T, C)."""
        known = ~x.isnan()
        joined = torch.cat([torch.where(known, x, 0).to(mean), known.to(mean)], -1)
        if cu_seqlens is None:
            sums, state = self._sums(joined, state)
        else:
            sums, state = each_alone(self._sums, joined, state, cu_seqlens)
            sums = sums if sums.ndim == 4 else x.new_zeros(*x.shape[:2], len(self.weight), joined.shape[2])
        values, weights = sums.chunk(2, -1)
        return (values - mean[:, :, None] * weights) / scale[:, :, None], state

    def _sums(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the weighted sums of the last values (B, T, H, 2 C), and the values that the next step needs."""
        x = torch.cat([state.to(x), x], 1)
        steps = x.shape[1] - (self.lags - 1)
        rows = x.transpose(1, 2).flatten(0, 1)[:, None]
        kernel = self.weight.flip(1)[:, None].to(x.dtype)
        sums = F.conv1d(rows, kernel) if steps else rows.new_zeros(len(rows), len(kernel), 0)
        return sums.unflatten(0, (x.shape[0], x.shape[2])).permute(0, 3, 2, 1), x[:, steps:]
