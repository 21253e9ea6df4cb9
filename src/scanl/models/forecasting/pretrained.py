r"""A forecaster that needs no training on a table: recurrent layers weigh simple forecasts of any series.

.. math::
    g_k = \operatorname{softmax}_k\bigl(c_k - a \log e_k - b \log \tilde e_k\bigr), \quad
    \hat y_{t+h} = \sum_k g_k f_k(t + h) + \sigma \tanh \rho, \quad
    \sigma = \tfrac12 \sum_k g_k (e_k + \tilde e_k)

f_k are simple forecasts, e_k and ẽ_k their recent and their older errors h steps ahead (`simple_forecasts`). A stack
reads the series and these errors step by step; from its output after step t and from h a head makes a, b, c, ρ and the
distances of the quantiles, in units of σ. It learns on simulated series alone (`scanl.tasks.simulated_series`).
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from scanl.digests import load_tensors
from scanl.errors import ConfigError
from scanl.layers import state as states
from scanl.layers.packing import pack, unpack
from scanl.models.forecasting import simple_forecasts
from scanl.models.forecasting.share import Forecast, as_series, check_series
from scanl.models.forecasting.simple_forecasts import (
    COUNT,
    KNOTS,
    OTHERS,
    Counts,
    Numbers,
    Seasons,
    SimpleState,
    SimpleSteps,
)
from scanl.models.heads.distributions import LEVELS, as_levels
from scanl.models.saving import WEIGHTS as FILE
from scanl.models.saving import Saved, restored
from scanl.models.stack import Backbone
from scanl.ops import backend
from scanl.ops._frame.context import exactly, undirected
from scanl.options import at_least
from scanl.whole import whole_number

MAX_TRAINED_HORIZON = 64
QUANTILES = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975)  # that are learnt
MIDDLE = QUANTILES.index(0.5)
LEAST_ERROR = 1e-3  # in units of the mean absolute difference
# Of the knots, by which errors 1, 2, ... steps ahead are interpolated in log h; beyond the last knot its own.
_KNOT_WEIGHTS = torch.tensor(
    np.stack(
        [np.interp(np.log(np.arange(1, MAX_TRAINED_HORIZON + 1)), np.log(KNOTS), one) for one in np.eye(len(KNOTS))], -1
    )
)
PHASES = 2  # of a season, its sine and its cosine
STEP_FEATURES = 4 * COUNT + 13 + 2 * PHASES
AHEAD_FEATURES = 3 * COUNT + 8 + 2 * PHASES
FIRST_POWERS = (1.0, 1.5)  # a and b at first
WEIGHTS = Path(__file__).with_name("weights")  # the folder of the model in the package
DIGEST = "c55b599ad9cff7a4f101bdb300b12327ec11a94831dd26a70222fbe953f57556"  # SHA-256 of its file
MIN_SINGLE_STEPS = 64  # steps that came alone, after which a kernel is compiled in two seconds
MIN_TORCH_STEPS = 64  # of a series at once, from which kernels are not faster
PIECE_STEPS = 16384  # of all series together, so that memory does not grow with a panel
MIN_REPEATED, MIN_REPEATED_SHARE = (
    3,
    0.05,
)  # of values at the least one, which then is a bound


class PretrainedState(NamedTuple):
    """State of a `PretrainedForecaster`: that of the simple forecasts, with tensors, and that of the stack.

    hidden: (B, D), the output of the stack after the last known value.
    """

    simple: SimpleState
    stack: Any
    hidden: Tensor


class RowKernels:
    """Kernels that read one step of some rows: those of `scanl.models.forecasting.pretrained_step`.

    They pay after some steps that came alone. A copy has none, because they read the parameters of one model.
    """

    def __init__(self) -> None:
        self._steps, self._kernels = 0, dict[Any, Any]()

    def __deepcopy__(self, memo: Any) -> "RowKernels":
        return RowKernels()

    def __reduce__(self) -> tuple[Any, ...]:
        return RowKernels, ()

    def pay(self) -> bool:
        """Take note of a step that came alone, and return whether a kernel reads it. Its bits are those of no other."""
        self._steps += 1
        return self._steps > MIN_SINGLE_STEPS and not exactly()

    def run(
        self, model: "PretrainedForecaster", y: Numbers, state: PretrainedState, horizon: int, levels: tuple[float, ...]
    ) -> tuple[Numbers, PretrainedState] | None:
        """Read a step y (B, 1), and return as `each` does; None where no kernel can."""
        seasons = [tuple(set(part.tolist())) for part in state.simple.seasons]
        if any(len(every) != 1 for every in seasons):
            return None
        weight = model.input.weight
        form = len(y), *seasons, horizon, levels, weight.dtype, weight.data_ptr()
        if form not in self._kernels:
            from scanl.models.forecasting.pretrained_step import kernel

            self._kernels[form] = kernel(model, len(y), (seasons[0][0], seasons[1][0]), horizon, levels)
        step = self._kernels[form]
        if step is None:
            return None
        quantiles, after = step(torch.from_numpy(y)[..., None], *(leaf for _, leaf in states.leaves(state)))
        return quantiles.numpy(), after


class Outputs(NamedTuple):
    """Median (·) and quantiles (·, Q) relative to the last values, in units of the mean absolute difference."""

    median: Tensor
    quantiles: Tensor


class PretrainedForecaster(Saved):
    """Weigh simple forecasts of series by a stack that has read them (see the module)."""

    name: ClassVar[str] = "pretrained_forecaster"

    def __init__(
        self,
        stack: Annotated[Backbone, "the layers that read the series"],
        width: Annotated[int, at_least(1), "of the hidden layers of the head"] = 128,
    ) -> None:
        super().__init__()
        self.stack = stack
        self._row_kernels = RowKernels()
        self.input = nn.Linear(STEP_FEATURES, stack.dim)
        self.head = nn.Sequential(
            nn.Linear(stack.dim + AHEAD_FEATURES, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU()
        )
        self.output = nn.Linear(width, COUNT + 3 + len(QUANTILES) - 1)
        with torch.no_grad():
            self.output.weight.mul_(0.1)
            self.output.bias.zero_()
            self.output.bias[COUNT : COUNT + 2] = torch.tensor(FIRST_POWERS).expm1().log()
            normal = [NormalDist(0, math.sqrt(math.pi / 2)).inv_cdf(p) for p in QUANTILES]
            steps = torch.tensor(np.diff(normal))
            self.output.bias[COUNT + 3 :] = steps.expm1().log()

    def hidden(self, told: SimpleSteps, seasons: Seasons, state: Any = None) -> tuple[Tensor, Any]:
        """Return the output of the stack (B, T, D), and its state. No step before a first value is read."""
        x = self.input(step_features(told, seasons).to(self.input.weight.dtype))
        begun = told.steps > 0
        if bool(begun.all()):
            with backend("parallel", "reference") if self._in_torch(x) else nullcontext():
                return self.stack(x, state)
        packed, bounds = pack(x, begun)
        state = self.stack.init_state(len(x), device=x.device, dtype=x.dtype) if state is None else state
        y, state = self.stack(packed, state, cu_seqlens=bounds)
        return unpack(y, begun), state

    @staticmethod
    def _in_torch(x: Tensor) -> bool:
        """Return whether plain torch reads x (B, T, D): about as fast, and no kernel is compiled or loaded first."""
        return x.shape[1] >= MIN_TORCH_STEPS and not x.requires_grad and undirected() and not exactly()

    def ahead(self, hidden: Tensor, features: Tensor, logs: Tensor, simple: Tensor) -> Outputs:
        """Return forecasts from what is known after some steps.

        hidden: (·, D).   features: (·, F).   logs: (·, K, 2), logarithms of the errors.   simple: (·, K), forecasts.
        """
        dtype = hidden.dtype
        out = self.head(torch.cat([hidden, features.to(dtype)], -1))
        return self.weighed(out, logs.to(dtype), simple.to(dtype))

    def weighed(self, out: Tensor, errors: Tensor, forecasts: Tensor) -> Outputs:
        """Return forecasts from the output of the head, (·, W).   errors, forecasts: as logs and simple of `ahead`."""
        changes, powers, residual, widths = self.output(out).split([COUNT, 2, 1, len(QUANTILES) - 1], -1)
        gates = (changes - (softplus(powers)[..., None, :] * errors).sum(-1)).softmax(-1)
        scale = (gates * errors.exp().mean(-1)).sum(-1)
        median = (gates * forecasts).sum(-1) + scale * residual[..., 0].tanh()
        steps = softplus(widths) * scale[..., None]
        low, high = steps[..., :MIDDLE], steps[..., MIDDLE:]
        below = median[..., None] - low.flip(-1).cumsum(-1).flip(-1)
        above = median[..., None] + high.cumsum(-1)
        return Outputs(median, torch.cat([below, median[..., None], above], -1))

    @torch.no_grad()
    def predict(
        self,
        x: Tensor,
        state: PretrainedState | None = None,
        *,
        horizon: int,
        season: int | tuple[int, int] = 1,
        levels: Sequence[float] = LEVELS,
    ) -> tuple[Forecast, PretrainedState]:
        """Read T steps of series x (B, T, C), at least one, and forecast the next H after the last one.

        Each channel is a series of its own. NaN is a missing value; those at the end are steps ahead, so intervals grow
        with them. The mean of the forecast is its median. A series without a value has NaN.   state: of the steps
        before; the forecasts are those of the whole history.   horizon: H.   season: steps of a season, or of two, the
        longer one last; 1: none. A state keeps those with which it began.   levels: of the quantiles.
        """
        y = as_series(self.name, x).double().cpu().numpy()
        state = self.init_state(len(y), season=season) if state is None else state
        check_series(self.name, len(state.simple.known), len(y))
        last = np.array([y.shape[1] - 1])
        numbers, after = self.each(y, state, last, horizon=horizon, levels=[0.5, *levels])
        numbers = torch.from_numpy(numbers[:, 0]).unflatten(0, (len(x), x.shape[2])).transpose(1, 2)
        return Forecast(numbers[..., 0], numbers[..., 1:]), after

    @torch.no_grad()
    def each(
        self, y: Numbers, state: PretrainedState, after: Counts, *, horizon: int, levels: Sequence[float]
    ) -> tuple[Numbers, PretrainedState]:
        """Read values y (B, T). Return the quantiles (B, N, H, Q) after N of the steps, and the state after the last.

        after: (N,), numbers of steps, in order.   The rest is as in `predict`.
        """
        horizon = whole_number(self.name, "horizon", horizon, 1)
        probabilities = as_levels(levels, torch.zeros(1, dtype=torch.float64)).tolist()
        if y.shape[1] == len(after) == 1 and self._row_kernels.pay():
            known = self._row_kernels.run(self, y, state, horizon, tuple(probabilities))
            if known is not None:
                return known
        rows = max(1, PIECE_STEPS // y.shape[1])
        pieces = [
            self._each(y[a : a + rows], states.index(state, slice(a, a + rows)), after, horizon)
            for a in range(0, len(y), rows)
        ]
        learnt = torch.cat([one for one, _ in pieces])
        last = [one for _, one in pieces]
        return at_levels(learnt, probabilities).numpy(), last[0] if len(last) == 1 else states.cat(last)

    def init_state(self, batch_size: int, *, season: int | tuple[int, int] = 1) -> PretrainedState:
        """Return the state before any step of some series.   season: as in `predict`."""
        first, second = (season, 1) if isinstance(season, int) else season
        for steps in (first, second):
            whole_number(self.name, "season", steps, 1)
        if 1 < second <= first:
            raise ConfigError(f"{self.name}: season is {season}, expected the longer one last")
        seasons = Seasons(np.full(batch_size, first), np.full(batch_size, max(first, second)))
        like = self.input.weight
        stack = self.stack.init_state(batch_size, device=like.device, dtype=like.dtype)
        hidden = like.new_zeros(batch_size, self.stack.dim)
        return PretrainedState(_as_tensors(simple_forecasts.nothing_read(seasons)), stack, hidden)

    def _each(self, y: Numbers, state: PretrainedState, steps: Counts, horizon: int) -> tuple[Tensor, PretrainedState]:
        """Return the learnt quantiles (B, N, H, Q) after some steps of y (B, T), and the state after the last step."""
        before = states.map_leaves(lambda part: part.numpy(), state.simple)
        told, simple, after = simple_forecasts.read(y, before, steps, horizon)
        told = SimpleSteps(*map(torch.from_numpy, told))
        hidden, stack = self.hidden(told, state.simple.seasons, state.stack)
        hidden = torch.cat([state.hidden[:, None], hidden], 1)
        known = (torch.arange(1, y.shape[1] + 1) - told.missing).clamp(min=0)
        hidden = hidden.take_along_dim(known[:, [*steps, -1], None], 1)
        quantiles = self.quantiles(
            hidden[:, :-1], told.after(steps), state.simple.seasons, torch.from_numpy(simple), after.origin
        )
        return quantiles, PretrainedState(_as_tensors(after), stack, hidden[:, -1])

    def quantiles(
        self, hidden: Tensor, picked: SimpleSteps, seasons: Seasons, simple: Tensor, origin: Tensor
    ) -> Tensor:
        """Return the learnt quantiles (B, N, H, Q) after N steps. Missing steps at the end are steps ahead.

        hidden: (B, N, D), the output of the stack after the last known values.   picked: known after these steps.
        simple: (B, N, K, H).   origin: (B,), the first values.
        """
        horizon = simple.shape[-1]
        ahead = np.tile(np.arange(1, horizon + 1), (simple.shape[1], 1))
        picked = picked._replace(value=torch.where(picked.missing > 0, simple[:, :, 0, 0], picked.value))
        simple = _with_drift(simple, picked, torch.from_numpy(ahead))
        hidden = hidden[:, :, None].expand(-1, -1, horizon, -1)
        outputs = self.ahead(hidden, *ahead_features(picked, seasons, simple, ahead, picked.missing))
        quantiles = picked.value[..., None, None] + picked.scale[..., None, None] * outputs.quantiles.double()
        for share, bound, clip in (
            (picked.at_least, picked.least, torch.maximum), (picked.at_most, picked.most, torch.minimum)
        ):  # fmt: skip
            is_bound = (share >= MIN_REPEATED_SHARE) & (share * picked.known >= MIN_REPEATED)
            bounded = clip(quantiles, bound[..., None, None])
            quantiles = torch.where(is_bound[..., None, None], bounded, quantiles)
        quantiles = quantiles + torch.as_tensor(origin)[:, None, None, None]
        return torch.where((picked.known > 0)[..., None, None], quantiles, torch.nan)


@cache
def pretrained_forecaster() -> PretrainedForecaster:
    """Return the model that is in the package. It needs no training, no download and no covariates.

    >>> series = torch.arange(60.0)[None, :, None]
    >>> forecast, state = pretrained_forecaster().predict(series, horizon=3)
    >>> forecast.mean.shape, forecast.quantiles.shape
    (torch.Size([1, 3, 1]), torch.Size([1, 3, 1, 11]))
    """
    tensors, about = load_tensors(WEIGHTS / FILE, "pretrained")
    with torch.device("cpu"):  # it is kept, also where the caller makes models without memory
        model = PretrainedForecaster(**restored(about["config"]))  # `load` would import torch's compiler first
    model.load_state_dict(tensors)
    return model.eval().double().requires_grad_(False)


def _as_tensors(simple: SimpleState) -> SimpleState:
    """Return a state whose arrays are tensors in the same memory, so that it is kept as any other state is."""
    parts: list[Any] = [torch.from_numpy(part) for part in simple[1:]]
    seasons: list[Any] = [torch.from_numpy(part) for part in simple.seasons]
    return SimpleState(Seasons(*seasons), *parts)


def at_levels(learnt: Tensor, levels: Sequence[float]) -> Tensor:
    """Return quantiles (..., Q) at some levels, between and beyond those that are learnt: as a normal bends them."""
    normal = NormalDist()
    known, wanted = (np.array([normal.inv_cdf(float(p)) for p in some]) for some in (QUANTILES, levels))
    upper = np.searchsorted(known, wanted).clip(1, len(known) - 1)
    share = torch.from_numpy((wanted - known[upper - 1]) / (known[upper] - known[upper - 1]))
    low, high = (learnt[..., torch.from_numpy(places)] for places in (upper - 1, upper))
    return low + share * (high - low)


def units(told: SimpleSteps) -> Tensor:
    """Return the unit of each step (B, T): the mean absolute difference so far, or 1 before any."""
    return torch.where(told.scale > 0, told.scale, 1.0)


def step_features(told: SimpleSteps, seasons: Seasons) -> Tensor:
    """Return what the stack reads of each step, (B, T, F). told, seasons: of tensors."""
    unit = units(told)
    m, n = (season[:, None].double() for season in seasons)
    spread = told.most - told.least
    place = (told.value - told.least) / torch.where(spread > 0, spread, 1.0)
    logs = log_errors(told)[..., 0][..., [0, 2, 3]]
    count = (told.steps - 1).clamp(min=0)
    ones = torch.ones_like(unit)
    more = [
        place, (spread / unit + 1).log() / 3, (told.recent / unit + LEAST_ERROR).log(), told.known.double().log1p() / 4,
        m.log() / 4 * ones, n.log() / 4 * ones, (told.known / m).log1p() / 3, (m > 1) * ones, (n > m) * ones,
        told.is_known * ones, told.at_least, told.at_most, (told.known / n).log1p() / 3,
    ]  # fmt: skip
    angles = [2 * math.pi * (count % season[:, None]).double() / season[:, None] for season in seasons]
    more += [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)]
    return torch.cat([_arcsinh(told.off / unit[..., None]), logs.flatten(2), torch.stack(more, -1)], -1)


def _arcsinh(x: Tensor) -> Tensor:
    """Return asinh of numbers, which has no operator in a recorded step."""
    return x.sign() * (x.abs() + (x * x + 1).sqrt()).log()


def log_errors(told: SimpleSteps) -> Tensor:
    """Return logarithms of the running errors (B, T, K, J, 2), in units of the mean absolute difference.

    Where none has been seen so far ahead, those of fewer steps ahead stand for them.
    """
    logs = (told.errors / units(told)[..., None, None, None] + LEAST_ERROR).log()
    of_knots = [torch.zeros_like(logs[..., 0, :])]
    for j in range(len(KNOTS)):
        of_knots.append(torch.where((told.weights[..., j] > 0)[..., None, None], logs[..., j, :], of_knots[-1]))
    return torch.stack(of_knots[1:], -2)


def _with_drift(simple: Tensor, picked: SimpleSteps, ahead: Tensor) -> Tensor:
    """Return forecasts (B, N, K, H) whose drift goes from the first value to the last known one, and on from there."""
    naive, level = simple[:, :, 0], simple[:, :, simple_forecasts.THETA]
    change = naive / (picked.steps - 1 - picked.missing).clamp(min=1)[..., None].double()
    change = change * (ahead + picked.missing[..., None])
    drift = len(simple_forecasts.SMOOTHINGS) + OTHERS.index("drift")
    assert OTHERS.index("theta") == OTHERS.index("drift") + 1
    new = torch.stack([naive + change, level + change / 2], 2)
    return torch.cat([simple[:, :, :drift], new, simple[:, :, drift + 2 :]], 2)


def ahead_features(
    picked: SimpleSteps, seasons: Seasons, simple: Tensor, ahead: Counts, missing: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (B, N, H, F), logarithms of errors (B, N, H, K, 2) and forecasts (B, N, H, K) in units.

    picked: known after N steps.   simple: (B, N, K, H), relative to the first value.   ahead: (N, H), steps ahead.
    missing: (B, N), steps since the last known value, which are steps ahead too; None: none are.
    """
    unit = units(picked)
    steps = torch.from_numpy(ahead)[None]
    steps = steps if missing is None else steps + missing[..., None]
    trained = steps.clamp(max=MAX_TRAINED_HORIZON)
    weights = _KNOT_WEIGHTS[trained - 1]
    errors = log_errors(picked)
    logs = sum(weights[..., j, None, None] * errors[:, :, None, :, j] for j in range(len(KNOTS)))
    assert isinstance(logs, Tensor)
    forecasts = ((simple - picked.value[..., None, None]) / unit[..., None, None]).transpose(2, 3)
    relative = logs - logs.mean(-2, keepdim=True)
    m, n = (season[:, None, None].double() for season in seasons)
    h = trained.double()
    ones = torch.ones(unit.shape[0], *ahead.shape, dtype=torch.float64)
    seen = sum(weights[..., j] * picked.weights[:, :, None, j] for j in range(len(KNOTS)))
    assert isinstance(seen, Tensor)
    more = [
        h.log() / 3 * ones, (h / m).clamp(max=3), (h <= m) * ones, (h / KNOTS[-1]).log().clamp(min=0) * ones,
        seen.log1p() / 4, logs.mean((-2, -1)), logs.amin((-2, -1)), (h / n).clamp(max=3),
    ]  # fmt: skip
    more += [wave(2 * math.pi * steps.double() / season) * ones for season in (m, n) for wave in (torch.sin, torch.cos)]
    features = [relative[..., 0], relative[..., 1], _arcsinh(forecasts / 2), torch.stack(more, -1)]
    return torch.cat(features, -1), logs, forecasts
