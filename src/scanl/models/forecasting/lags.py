r"""A linear map of the last values of a series to its next ones, with a state of constant size.

.. math:: \ell_{t,h} = \sum_{k=0}^{q-1} W_{h,k} \, o_{t-k} \, (x_{t-k} - m_t) / s_t

with o = 1 where x is known, else 0, and before the first step 0. m_t and s_t are the location and the scale of step t.

Source: Lai et al., "Modeling Long- and Short-Term Temporal Patterns with Deep Neural Networks" (LSTNet),
arXiv:1703.07015, eq. (8). Differs: every h of the horizon has weights of its own, as in DLinear (Zeng et al.,
arXiv:2205.13504, eq. (1)), and the values are normalised by the step from which the forecast is made.
"""

import torch
from torch import Tensor, nn

from scanl.layers.packing import each_alone
from scanl.layers.state import State


class Lags(nn.Module):
    """Map the last `lags` values of each channel to `horizon` numbers; the channels have the weights in common.

    The weights start at zero. State: (B, lags - 1 + further, 3 C), the last values, whether each is known, and the
    location after it. further: how many values the state has beyond those that the map needs.
    """

    def __init__(self, lags: int, horizon: int, further: int = 0) -> None:
        super().__init__()
        self.lags, self.kept = lags, lags - 1 + further
        self.weight = nn.Parameter(torch.zeros(horizon, lags))

    def forward(
        self,
        x: Tensor,
        mean: Tensor,
        scale: Tensor,
        state: Tensor,
        cu_seqlens: Tensor | None = None,
        after: Tensor | slice = slice(None),
    ) -> tuple[Tensor, Tensor]:
        """Map x (B, T, C), NaN where missing, to (B, T, H, C). mean, scale: (B, T, C).

        after: the steps after which a forecast is made; the result has only these. By default all steps.
        """
        known = ~x.isnan()
        joined = torch.cat([torch.where(known, x, 0).to(mean), known.to(mean), mean], -1)
        if cu_seqlens is None:
            windows, state = self._windows(joined, state)
        else:
            windows, state = each_alone(self._windows, joined, state, cu_seqlens)
            windows = windows if windows.ndim == 4 else joined.new_zeros(*x.shape[:2], 2 * x.shape[2], self.lags)
        sums = windows[:, after] @ self.weight.flip(1).t().to(mean.dtype)
        values, weights = sums.transpose(2, 3).chunk(2, -1)
        return (values - mean[:, after, None] * weights) / scale[:, after, None], state

    def _windows(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the last values of each step (B, T, 2 C, lags), a view, and what the next step needs."""
        x = torch.cat([state.to(x), x], 1)
        steps = x.shape[1] - self.kept
        last = x[:, self.kept - (self.lags - 1) :, : x.shape[2] * 2 // 3]
        windows = last.unfold(1, self.lags, 1) if steps else x.new_zeros(len(x), 0, last.shape[2], self.lags)
        return windows, x[:, steps:]
