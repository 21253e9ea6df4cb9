"""One step of the pretrained forecaster, of operations of torch alone: for a row that arrives alone, and for export.

The definition of what is computed is `simple_forecasts.read`, which reads many steps at once.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from scanl.layers import state as states
from scanl.models.forecasting import simple_forecasts as simple
from scanl.models.forecasting.pretrained import PretrainedForecaster, PretrainedState, at_levels, step_features
from scanl.models.forecasting.simple_forecasts import SimpleState, SimpleSteps
from scanl.models.forecasting.tuned import TunedForecaster
from scanl.models.heads.distributions import LEVELS
from scanl.ops._compiler.recorded import RecordedFunction
from scanl.ops._compiler.rules import UnsupportedOperation

V = len(simple.SMOOTHINGS)
FIRST, SECOND = simple.FIRST_SMOOTHINGS, simple.SECOND_SMOOTHINGS


def _constant(values: Any) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float64)


def _spread(part: Tensor, rows: simple.Counts) -> Tensor:
    """Return numbers (B, n, ...) of some smoothings as numbers of all of them (B, V, ...): 0 for the others."""
    places = np.full(V, len(rows))
    places[rows] = np.arange(len(rows))
    return torch.cat([part, torch.zeros_like(part[:, :1])], 1)[:, torch.from_numpy(places)]


class PretrainedStep(nn.Module):
    """Read one step x (B, 1, 1), and return the quantiles (B, 1, H, Q) of the next H steps, and the state.

    Seasons, horizon and levels are constants of the step. The state is that of a `PretrainedForecaster`.
    """

    name = "pretrained_step"
    smoothings: Tensor

    def __init__(
        self,
        model: PretrainedForecaster,
        horizon: int,
        season: tuple[int, int] = (1, 1),
        levels: tuple[float, ...] = LEVELS,
    ) -> None:
        super().__init__()
        self.model, self.horizon, self.levels = model, horizon, levels
        self.m, self.n = season[0], max(season)
        self.register_buffer("smoothings", _constant(simple.SMOOTHINGS.T), persistent=False)

    def init_state(self, batch_size: int) -> PretrainedState:
        return self.model.init_state(batch_size, season=(self.m, self.n if self.n > self.m else 1))

    def forward(self, x: Tensor, state: PretrainedState | None = None) -> tuple[Tensor, PretrainedState]:
        state = self.init_state(len(x)) if state is None else state
        told, ahead, after = self._read(x[:, 0, 0].double(), state.simple)
        features = self.model.input(step_features(told, state.simple.seasons).to(self.model.input.weight.dtype))
        hidden, read = self.model.stack(features, state.stack)
        hidden = torch.where(told.is_known[..., None], hidden, state.hidden[:, None])
        begun = after.steps > 0
        stack = states.map_leaves(
            lambda new, old: torch.where(begun.reshape(-1, *[1] * (new.ndim - 1)), new, old), read, state.stack
        )
        quantiles = self.model.quantiles(hidden, told, state.simple.seasons, ahead[:, None], after.origin)
        return at_levels(quantiles, self.levels), PretrainedState(after, stack, hidden[:, 0])

    def _read(self, y: Tensor, state: SimpleState) -> tuple[SimpleSteps, Tensor, SimpleState]:
        """Return what is known after a step y (B,), the forecasts (B, K, H), and the state."""
        m, n = self.m, self.n
        alpha, beta, phi, gamma, delta = self.smoothings
        here = ~y.isnan()
        begun = state.known > 0
        origin = torch.where(begun, state.origin, torch.where(here, y, 0.0))
        x = torch.where(here, y - origin, 0.0)
        started = begun | here
        known, count = state.known + here.long(), state.steps + started.long()
        missing = torch.where(here | ~started, 0, state.missing + 1)
        before = (count - 1).clamp(min=0)
        seen = known.clamp(min=1).double()
        moved = state.level + phi * state.trend
        steps = torch.arange(m), torch.arange(n)
        now, now2 = ((before % s)[:, None] == at for s, at in zip((m, n), steps, strict=True))
        of_first, of_second = (
            torch.where(at[:, None], part, 0.0).sum(2) for at, part in ((now, state.season), (now2, state.second))
        )
        expected = moved + _spread(of_first, FIRST) + _spread(of_second, SECOND)
        value = torch.where(here, x, torch.where(started, expected[:, simple.FILLING], 0.0))
        past = torch.cat([state.past[:, 1:], value[:, None]], 1)
        error = torch.where(here[:, None], value[:, None] - expected, 0.0)
        raised = torch.maximum(alpha, (1 / seen)[:, None]) * error
        level = torch.where(started[:, None], moved + raised, state.level)
        trend = torch.where(started[:, None], phi * state.trend + beta * raised, state.trend)
        rest = error - raised
        season, second = state.season, state.second
        if m > 1:
            gains = (
                torch.maximum(gamma[FIRST.tolist()], (1 / (before // m + 1).double())[:, None]) * (count > m)[:, None]
            )
            season = season + torch.where(now[:, None], (gains * rest[:, FIRST.tolist()])[..., None], 0.0)
            level, trend, season = self._begin_first(past, count, started, level, trend, season)
        if n > m:
            gains = (
                torch.maximum(delta[SECOND.tolist()], (1 / (before // n + 1).double())[:, None]) * (count > n)[:, None]
            )
            second = second + torch.where(now2[:, None], (gains * rest[:, SECOND.tolist()])[..., None], 0.0)
            level, second = self._begin_second(past, count, started, level, season, second)
        sums = _sums(x, here, known, state)
        lags = self._lagged(state.past, count - 1)
        weights, products, along = self._autoregressions(lags, value, here, count, sums, state)
        reach = max(self.horizon, simple.KEPT_STEPS)
        ahead = torch.cat(
            [
                self._smoothed(level, trend, season, second, before, reach),
                self._others(past, count, level, sums, weights, reach),
            ],
            1,
        )
        kept = torch.cat([state.ahead[:, 1:], ahead[:, None, :, (simple.KNOTS - 1).tolist()]], 1)
        valid = here[:, None] & (count[:, None] > torch.from_numpy(simple.KNOTS))
        made = torch.stack(
            [state.ahead[:, simple.KEPT_STEPS - h, :, j] for j, h in enumerate(simple.KNOTS.tolist())], -1
        )
        came = x[:, None, None] - made
        numbers = state.weights + valid.double()
        rates = torch.maximum(_constant(simple.RATES), 1 / numbers.clamp(min=1)[..., None]) * valid[..., None]
        errors = state.errors + rates[:, None] * (came.abs()[..., None] - state.errors)
        parts = (
            value, here, count, known, missing, sums[:, 0] / sums[:, 2].clamp(min=1), sums[:, 3],
            came[..., 0] * valid[:, :1], errors, numbers, sums[:, 4], sums[:, 5] / seen, sums[:, 6], sums[:, 7] / seen,
        )  # fmt: skip
        told = SimpleSteps(*(part[:, None] for part in parts))  # pyright: ignore[reportArgumentType]
        after: Any = (
            state.seasons, origin, count, known, missing, level, trend, season, second, past, kept, errors,
            numbers, products, along, sums,
        )  # fmt: skip
        return told, ahead[:, :, : self.horizon], SimpleState(*after)

    def _begin_first(
        self, past: Tensor, count: Tensor, started: Tensor, level: Tensor, trend: Tensor, season: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Set the first season after one and after two of it."""
        m = self.m
        alpha, beta = self.smoothings[:2]
        twice = (count == 2 * m)[:, None]
        ends = ((count == m)[:, None] | twice) & started[:, None]
        last, older = past[:, -m:], past[:, -2 * m : -m]
        mean, mean_older = (part.mean(1, keepdim=True) for part in (last, older))
        slope = torch.where(twice, (mean - mean_older) / m, 0.0)
        line = slope * (torch.arange(m) - (m - 1) / 2)
        own = last - mean - line
        pattern = torch.where(twice, (own + older - mean_older - line) / 2, own)
        first = (1 - alpha) * (mean + line[:, -1:]) + alpha * (past[:, -1:] - pattern[:, -1:])
        has = torch.from_numpy(simple.GAMMA > 0)
        level = torch.where(ends & has, first, level)
        trend = torch.where(ends & has, torch.where(beta > 0, slope, 0.0), trend)
        return level, trend, torch.where(ends[..., None], pattern[:, None], season)

    def _begin_second(
        self, past: Tensor, count: Tensor, started: Tensor, level: Tensor, season: Tensor, second: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Set the second season after one of it."""
        m, n = self.m, self.n
        alpha, gamma = self.smoothings[0], self.smoothings[3]
        ends = ((count == n) & started)[:, None]
        block = past[:, -n:]
        mean = block.mean(1, keepdim=True)
        both = (gamma[SECOND.tolist()] > 0)[:, None]
        row = {int(v): k for k, v in enumerate(FIRST.tolist())}
        of_first = season[:, torch.tensor([row.get(v, 0) for v in SECOND.tolist()])]
        of_first = torch.where(both, of_first[:, :, torch.arange(n) % m], 0.0)
        own = (block - mean)[:, None] - of_first
        own = own - own.mean(2, keepdim=True)
        first = (1 - alpha[SECOND.tolist()]) * mean + alpha[SECOND.tolist()] * (
            past[:, -1:] - own[..., -1] - of_first[..., -1]
        )
        has = torch.from_numpy(simple.DELTA > 0)
        level = torch.where(ends & has, _spread(first, SECOND), level)
        return level, torch.where(ends[..., None], own, second)

    def _smoothed(
        self, level: Tensor, trend: Tensor, season: Tensor, second: Tensor, before: Tensor, reach: int
    ) -> Tensor:
        """Return the forecasts of the smoothings, (B, V, reach)."""
        steps = np.arange(1, reach + 1)
        ahead = level[..., None] + trend[..., None] * _constant(simple.trend_weights(steps))
        for part, rows, s in ((season, FIRST, self.m), (second, SECOND, self.n)):
            places = ((before[:, None] + torch.from_numpy(steps)) % s)[:, None].expand(-1, len(rows), -1)
            ahead = ahead + _spread(part.gather(2, places), rows)
        return ahead

    def _lagged(self, past: Tensor, count: Tensor) -> list[list[Tensor]]:
        """Return what each autoregression reads after a step, as in `simple_forecasts`: (B,) each."""
        m, n = self.m, self.n
        one, zero = torch.ones_like(past[:, 0]), torch.zeros_like(past[:, 0])
        lag = lambda s: past[:, -s]  # noqa: E731
        there, there2 = count >= m, count >= n
        second = [torch.where(there2, lag(n), 0.0), torch.where(count > n, lag(n + 1), 0.0)] if n > m else [zero, zero]
        return [
            [one, *(lag(s) for s in range(1, simple.SHORT_LAGS + 1)), zero, zero],
            [one, lag(1), lag(2), torch.where(there, lag(m), 0.0), torch.where(count > m, lag(m + 1), 0.0), *second],
            [one, torch.where(there, lag(m), lag(1)), torch.where(count >= 2 * m, lag(2 * m), 0.0), second[0]]
            + [zero] * 3,
        ]

    def _autoregressions(
        self, lags: list[list[Tensor]], value: Tensor, here: Tensor, count: Tensor, sums: Tensor, state: SimpleState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the weights (B, 3, q) after a step, and the sums."""
        m = self.m
        x = torch.stack([torch.stack(row, 1) for row in lags], 1)
        least = torch.tensor([simple.SHORT_LAGS, m + 1 if m > 1 else 2, m])
        fresh = count[:, None] <= least
        x = x * (here[:, None] & ~fresh)[..., None]
        products = state.products + x[..., None] * x[..., None, :]
        along = state.along + x * value[:, None, None]
        power = sums[:, 1] / sums[:, 2].clamp(min=1)
        power = torch.where(power > 0, power, 1.0)[:, None]
        ridge = simple.RIDGE * torch.where(torch.arange(simple.LAGS) == 0, 0.02, power)
        prior = _constant(simple.PRIOR if m > 1 else simple.PRIOR[[simple.AR, simple.AR, simple.REGRESSION]])
        left = products + ridge[:, None, :, None] * torch.eye(simple.LAGS, dtype=torch.float64)
        solved = _solved(left, along + ridge[:, None] * prior)
        return torch.where(fresh[..., None], _constant(simple.PRIOR[simple.AR]), solved), products, along

    def _others(self, past: Tensor, count: Tensor, level: Tensor, sums: Tensor, weights: Tensor, reach: int) -> Tensor:
        """Return the forecasts that are no smoothings, (B, 8, reach)."""
        m, n = self.m, self.n
        ahead = np.arange(1, reach + 1)
        naive = level[:, :1]
        seasonal = []
        for s in (m, n):
            behind = torch.from_numpy(past.shape[1] - 1 + ahead - s * -(-ahead // s))
            seasonal.append(torch.where((count >= s)[:, None], past[:, behind], naive))
        second = torch.where((count >= n)[:, None], seasonal[1], seasonal[0]) if n > m else seasonal[0]
        with_drift = seasonal[0]
        if m > 1:
            change = (past[:, -m:].sum(1) - past[:, -2 * m : -m].sum(1)) / m
            change = torch.where(count >= 2 * m, change, 0.0)
            with_drift = with_drift + change[:, None] * _constant(-(-ahead // m))
        drift = naive / (count - 1).clamp(min=1).double()[:, None] * _constant(ahead)
        theta = level[:, simple.THETA, None] + drift / 2
        forecasts = [seasonal[0], second, with_drift, naive + drift, theta]
        paths = self._paths(past, count, sums, weights, naive, reach)
        return torch.cat([torch.stack(forecasts, 1), paths], 1)

    def _paths(self, past: Tensor, count: Tensor, sums: Tensor, weights: Tensor, naive: Tensor, reach: int) -> Tensor:
        """Return the forecasts of the autoregressions, (B, 3, reach)."""
        m, n, zeros = self.m, self.n, torch.zeros_like(naive)
        low, high = 2 * sums[:, 4:5] - sums[:, 6:7], 2 * sums[:, 6:7] - sums[:, 4:5]

        def values(s: int, absent: Tensor) -> Tensor:
            """Return the values s steps before the steps from the second one ahead on, as far as they have come."""
            number = min(s, reach) - 1
            begin = past.shape[1] + 1 - s
            return torch.where(
                count[:, None] + torch.arange(1, number + 1) >= s, past[:, begin : begin + number], absent
            )

        # What moves on with the steps: the row of an autoregression, a lag, and the values that have come.
        moving = [(1, m, values(m, zeros)), (2, m, values(m, naive)), (2, 2 * m, values(2 * m, zeros))]
        if n > m:
            moving += [(1, n, values(n, zeros)), (2, n, values(n, zeros))]
        size, first = simple.LAGS, 3 * simple.LAGS + 3
        places = 3 + np.arange(3 * size).reshape(3, size)
        places[0, 1 : simple.SHORT_LAGS + 1] = [0, *places[0, 1 : simple.SHORT_LAGS]]
        places[1, 1:] = [1, places[1, 1], first, *places[1, [3, 5, 5]]]
        places[2, 1:3] = first + 1, first + 2
        if n > m:
            places[1, 5], places[2, 3] = first + 3, first + 4
        order = torch.from_numpy(places.ravel())
        x = torch.stack([torch.stack(row, 1) for row in self._lagged(past, count)], 1)
        paths: list[Tensor] = []
        for h in range(reach):
            paths.append(torch.minimum(torch.maximum((weights * x).sum(2), low), high))
            if h + 1 < reach:
                new = [
                    come[:, h : h + 1] if h + 1 < s else paths[h + 1 - s][:, row : row + 1] for row, s, come in moving
                ]
                x = torch.cat([paths[h], x.flatten(1), *new], 1)[:, order].unflatten(1, (3, size))
        return torch.stack(paths, 2)


def stepped(model: nn.Module) -> nn.Module:
    """Return a model in the form that is exported: a tuned forecaster as the step of one series."""
    if not isinstance(model, TunedForecaster):
        return model
    return PretrainedStep(model.forecaster, model.horizon, (model.season, model.second))


def _sums(x: Tensor, here: Tensor, known: Tensor, state: SimpleState) -> Tensor:
    """Return the sums after a step, (B, 8)."""
    change_, squares, number, recent, least, at_least_, most, at_most = state.sums.unbind(1)
    second = here & (known > 1)
    change = torch.where(second, (x - state.level[:, 0]).abs(), 0.0)
    number = number + second.double()
    recent = recent + torch.where(second, (1 / number.clamp(min=1)).clamp(min=0.05) * (change - recent), 0.0)
    below, above = here & (x < least), here & (x > most)
    at_least_ = torch.where(below, 1.0, at_least_ + (here & (x == least)).double())
    at_most = torch.where(above, 1.0, at_most + (here & (x == most)).double())
    parts = [
        change_ + change, squares + change * change, number, recent, torch.where(below, x, least), at_least_,
        torch.where(above, x, most), at_most,
    ]  # fmt: skip
    return torch.stack(parts, 1)


def _solved(left: Tensor, right: Tensor) -> Tensor:
    """Return the solution of symmetric positive definite systems (B, 3, q, q), by elimination."""
    both = torch.cat([left, right[..., None]], -1)
    size = left.shape[-1]
    for k in range(size):
        others = torch.arange(size) != k
        row = both[..., k : k + 1, :]
        both = both - both[..., k : k + 1] / row[..., k : k + 1] * others[:, None] * row
    return both[..., size] / both[..., :size].diagonal(dim1=-2, dim2=-1)


def kernel(
    model: PretrainedForecaster, rows: int, season: tuple[int, int], horizon: int, levels: tuple[float, ...]
) -> RecordedFunction | None:
    """Return the step of some rows as one kernel of (x, *leaves of the state); None if no kernel can run it."""
    step = PretrainedStep(model, horizon, season, levels)
    state = step.init_state(rows)

    def flat(x: Tensor, *leaves: Tensor) -> tuple[Tensor, PretrainedState]:
        members = iter(leaves)
        return step(x, states.map_leaves(lambda _: next(members), state))

    x = torch.zeros(rows, 1, 1, dtype=torch.float64)
    try:
        with torch.inference_mode(False), torch.no_grad():
            return RecordedFunction(flat, x, *(leaf.clone() for _, leaf in states.leaves(state)), by_rows=True)
    except UnsupportedOperation:
        return None
