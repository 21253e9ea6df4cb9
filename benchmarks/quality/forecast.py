"""Train forecasters: ETTh1, intervals for Beijing's air and hourly electricity, and SpaceTime.

    python benchmarks/quality/forecast.py [etth1] [intervals] [spacetime] [--seeds 3]

ETTh1 has the published protocol. `spacetime` forecasts the monthly temperatures of El Niño by SpaceTime in closed loop,
by the same network that reads its own forecasts, and by an autoregression of statsmodels. Its first 70 % are learned
from; the next 15 % choose the number of steps and of lags; errors are over all windows of the rest, in units of the
standard deviation of the first part. Needs `pip install -e '.[series,sklearn,statsmodels]'`. The data lie where
`scanl data get NAME` puts them.
"""

import argparse
import copy
import importlib
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.data.base import LEVELS, Exam
from scanl.data.published.forecasts import LongHorizon, PublishedSeries
from scanl.data.questions import ForecastQuestion
from scanl.learning import TrainConfig
from scanl.learning.descent import optimize
from scanl.learning.evaluation import baselines, measures
from scanl.learning.questions import answerer
from scanl.learning.questions.base import means
from scanl.learning.run.config import seeded_model
from scanl.models import Forecaster, SpaceTimeNet

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from quality.learn import learn

HORIZONS = (96, 192, 336, 720)
READ = 336  # rows that a forecast of ETTh1 reads
LAYERS: dict[str, dict[str, Any]] = {
    "lru": {},
    "mingru": {},
    "gru": {},
    "lstm": {},
    "gated_deltanet": {"num_heads": 2, "head_dim": 16, "expand_v": 1},
    "cfc": {"hidden_dim": 32},
}
ALONE = ("lru alone", "gru alone")  # without the linear map
STEPS = {96: 250, 192: 200, 336: 100, 720: 60}
LINEAR_STEPS = 1000  # of DLinear
SHARED = {"dim": 32, "depth": 1, "batch_size": 8, "lr": 3e-3, "dropout": 0.2}
LONG = {"data": ["etth1"], "sequence_length": READ, "distribution": "points", "lags": READ, "origins": 32}


class DLinear(nn.Module):
    """A moving average of 25 steps and the rest, each by a linear map of its own that all channels have in common.

    Source: Zeng et al., "Are Transformers Effective for Time Series Forecasting?", arXiv:2205.13504, section 4 and the
    individual=False of its table.
    """

    def __init__(self, read: int, horizon: int, kernel: int = 25) -> None:
        super().__init__()
        self.kernel = kernel
        self.trend, self.rest = nn.Linear(read, horizon), nn.Linear(read, horizon)
        for layer in (self.trend, self.rest):
            nn.init.constant_(layer.weight, 1 / read)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, T, C) to (B, H, C). A missing number is 0, the mean."""
        x = x.nan_to_num().transpose(1, 2)
        around = F.pad(x, (self.kernel // 2, self.kernel // 2), mode="replicate")
        trend = F.avg_pool1d(around, self.kernel, 1)
        return (self.trend(trend) + self.rest(x - trend)).transpose(1, 2)


def etth1(options: argparse.Namespace) -> None:
    """Mean squared and absolute errors of ETTh1 at four horizons: layers, DLinear, the linear map, the naive."""
    results = Results("etth1", options)
    for seed in range(options.seeds):
        for who in ("seasonal naive", "linear map", *LAYERS, "DLinear", *ALONE):
            for horizon in HORIZONS[:1] if who in ALONE else HORIZONS:
                done = results.has(model=who, horizon=horizon, seed=seed)
                if not done and (who != "seasonal naive" or seed == 0):
                    found = _long(who, horizon, seed, options.quick)
                    results.add(model=who, horizon=horizon, seed=seed, **found)


def _long(who: str, horizon: int, seed: int, quick: bool) -> dict[str, Any]:
    steps = 2 if quick else STEPS[horizon]
    layer = "lru" if who in ("seasonal naive", "DLinear", "linear map") else who.removesuffix(" alone")
    given = {**LONG, **SHARED, "layer_options": LAYERS[layer], **({"lags": 0} if who in ALONE else {})}
    config = TrainConfig.of(**given, layer=layer, horizon=horizon, steps=steps, seed=seed)
    source = config.open_source()
    model = seeded_model(config, source.question)
    assert isinstance(source, LongHorizon)
    assert isinstance(model, Forecaster)
    if who == "seasonal naive":
        naive = baselines(source, source.exam())["seasonal naive"]
        return {"MSE": naive["MSE"], "MAE": naive["MAE"]}
    if who == "DLinear":
        return _dlinear(source, horizon, seed, 2 if quick else LINEAR_STEPS)
    if who == "linear map":  # what the layer adds is switched off, and is not learnt
        assert model.lags is not None
        model.requires_grad_(False)
        model.lags.requires_grad_(True)
        for parameter in model.head.parameters():
            nn.init.zeros_(parameter)
    minutes = learn(model, (source, config))
    found = measures(model, source, source.exam().examples, chunk=READ)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"MSE": found["MSE"], "MAE": found["MAE"], "minutes": minutes, "steps": steps, "parameters": parameters}


def _dlinear(source: LongHorizon, horizon: int, seed: int, steps: int) -> dict[str, Any]:
    """Train DLinear on the same windows, and measure it on the same forecasts."""
    assert isinstance(source.question, ForecastQuestion)
    scales = torch.tensor(source.question.scales)
    location, scale = scales.unbind(1)
    source = replace(source, origins=1)
    torch.manual_seed(seed)
    model = DLinear(READ, horizon)

    def loss(step: int) -> Tensor:
        batch = source.batch(step, 32).tensors()
        x, targets = batch.inputs.target.float(), batch.targets[:, -1].float()
        off = model((x - location) / scale) - (targets - location) / scale
        return off[~targets.isnan()].square().mean()  # missing behind the end of the training part

    begin = time.perf_counter()
    optimize(model, steps, 5e-3, seed, loss)
    minutes = (time.perf_counter() - begin) / 60
    parts = []
    with torch.no_grad():
        for batch in source.exam().examples:
            x, targets, *_ = batch.tensors()
            forecast = model((x.target.float() - location) / scale) * scale + location
            quantiles = forecast[..., None].expand(*forecast.shape, len(LEVELS))
            parts.append(answerer(source.question).scores(quantiles, targets))
    found = means(parts)
    parameters = sum(p.numel() for p in model.parameters())
    return {"MSE": found["MSE"], "MAE": found["MAE"], "minutes": minutes, "steps": steps, "parameters": parameters}


SERIES = ("hourly_electricity", "beijing_pm25")
DAY: dict[str, Any] = {
    "horizon": 24, "sequence_length": 336, "distribution": "quantiles", "lags": 168, "origins": 48,
    "dim": 32, "depth": 1, "dropout": 0.1, "batch_size": 16, "lr": 3e-3, "steps": 300,
}  # fmt: skip
INTERVALS: dict[str, dict[str, Any]] = {"lru": {}, "gru": {}}


def intervals(options: argparse.Namespace) -> None:
    """CRPS, MASE and coverage of forecasts of a day: layers, an autoregression of statsmodels, the naive."""
    results = Results("intervals", options)
    for name in SERIES:
        for who in ("seasonal naive", "AR", *INTERVALS):
            for seed in range(options.seeds if who in INTERVALS else 1):
                if not results.has(series=name, model=who, seed=seed):
                    results.add(series=name, model=who, seed=seed, **_interval(name, who, seed, options.quick))


def _interval(name: str, who: str, seed: int, quick: bool) -> dict[str, Any]:
    layer = who if who in INTERVALS else "lru"
    day = {**DAY, "steps": 2} if quick else DAY
    config = TrainConfig.of(**day, data=[name], layer=layer, layer_options=INTERVALS[layer], seed=seed)
    source = config.open_source()
    assert isinstance(source, PublishedSeries)
    exam = source.exam()
    if who == "seasonal naive":
        return baselines(source, exam)["seasonal naive"]
    if who == "AR":
        return _autoregression(source, exam)
    model = seeded_model(config, source.question)
    minutes = learn(model, (source, config))
    found = measures(model, source, exam.examples, chunk=source.length)
    return {**found, "minutes": minutes, "steps": config.training.steps}


def _autoregression(source: PublishedSeries, exam: Exam) -> dict[str, Any]:
    """Fit an autoregression over a week of hours to each column of the training part, once, and measure its forecasts.

    The mean is iterated; the variance after h steps is that of the noise times the sum of the squares of the first h
    weights of the moving average that the autoregression is. A missing number is the last one known.
    """
    from statsmodels.tsa.ar_model import AutoReg
    from statsmodels.tsa.arima_process import arma2ma

    lags, ahead, columns = DAY["lags"], source.horizon, len(source.targets)
    begin = time.perf_counter()
    ((_, first, last),) = source.parts[0]
    known = pd.DataFrame(source.table[1][first:last]).ffill().bfill().to_numpy()
    fits = [AutoReg(column, lags).fit() for column in known.T]
    minutes = (time.perf_counter() - begin) / 60
    widths = np.stack([
        np.sqrt(fit.sigma2 * np.cumsum(arma2ma(np.r_[1, -fit.params[1:]], [1.0], ahead) ** 2)) for fit in fits
    ])  # fmt: skip
    normal = np.array([NormalDist().inv_cdf(level) for level in LEVELS])
    parts = []
    for batch in exam.examples:
        points = np.empty((batch.size, ahead, columns))
        for c, fit in enumerate(fits):
            past = (
                pd.DataFrame(batch.inputs.target[..., c].T)
                .ffill()
                .bfill()
                .fillna(known[:, c].mean())
                .to_numpy()
                .T[:, -lags:]
            )
            for step in range(ahead):
                points[:, step, c] = fit.params[0] + past[:, ::-1] @ fit.params[1:]
                past = np.column_stack([past[:, 1:], points[:, step, c]])
        quantiles = torch.from_numpy(points[..., None] + widths.T[:, :, None] * normal)
        parts.append(answerer(source.question).scores(quantiles, batch.tensors().targets))
    return {**means(parts), "minutes": minutes}


LAGS = (1, 2, 3, 6, 9, 12, 18, 24, 36, 48, 60)
SPACETIME = {"dim": 32, "depth": 1, "state_dim": 32, "num_groups": 16}


def el_nino() -> np.ndarray:
    """Return the monthly temperatures that come with statsmodels."""
    datasets: Any = importlib.import_module("statsmodels.datasets.elnino")
    values = np.asarray(datasets.load_pandas().data.drop(columns="YEAR").stack(), np.float64).ravel()
    return values[~np.isnan(values)]


def _windows(series: Tensor, first: int, last: int, window: int, horizon: int) -> tuple[Tensor, Tensor]:
    """Return all windows whose answers lie in steps first to last, and the answers: (n, window, 1), (n, horizon, 1)."""
    rows = series[max(0, first - window) : last].unfold(0, window + horizon, 1)
    return rows[:, :window, None], rows[:, window:, None]


def _rms(forecast: Tensor, answers: Tensor) -> float:
    return (forecast - answers).square().mean().sqrt().item()


def _autoregressed(series: Tensor, lags: int, fitted: int, x: Tensor, horizon: int) -> Tensor:
    models: Any = importlib.import_module("statsmodels.tsa.ar_model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        phi = models.AutoReg(series[:fitted].numpy(), lags).fit().params
    constant, phi = float(phi[0]), torch.as_tensor(np.asarray(phi[1:]), dtype=x.dtype)
    for _ in range(horizon):
        x = torch.cat([x, constant + (x[:, -lags:].flip(1) * phi[:, None]).sum(1, keepdim=True)], 1)
    return x[:, -horizon:]


def _spacetime(
    parts: list[tuple[Tensor, Tensor]], closed: bool, steps: int, seed: int, sizes: dict[str, int]
) -> Tensor:
    """Return the forecasts of the test windows by the weights that were best on the windows for validation."""
    torch.manual_seed(seed)
    net = SpaceTimeNet(**sizes)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-3)
    (x, answers), (x_valid, valid), (x_test, _) = parts
    lowest, weights = float("inf"), copy.deepcopy(net.state_dict())
    for step in range(steps):
        rows = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        net.train().loss(x[rows], answers[rows], closed_loop=closed).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 24:
            with torch.no_grad():
                wrong = _rms(net.eval().predict(x_valid[::4], valid.shape[1], closed_loop=closed), valid[::4])
            if wrong < lowest:
                lowest, weights = wrong, copy.deepcopy(net.state_dict())
    net.load_state_dict(weights)
    with torch.no_grad():
        return net.eval().predict(x_test, answers.shape[1], closed_loop=closed)


def spacetime(options: argparse.Namespace) -> None:
    """Root mean squared errors of forecasts of 24 months from windows of 96."""
    results, window, horizon = Results("spacetime", options), 96, 24
    steps = 2 if options.quick else 125
    values = el_nino()[: 400 if options.quick else None]
    fitted, tested = int(0.7 * len(values)), int(0.85 * len(values))
    series = torch.tensor((values - values[:fitted].mean()) / values[:fitted].std(), dtype=torch.float32)
    bounds = ((window, fitted), (fitted, tested), (tested, len(series)))
    parts = [_windows(series, *part, window, horizon) for part in bounds]
    key = {"series": "elnino", "window": window, "horizon": horizon}
    for model, closed in (("closed loop", True), ("open loop", False)):
        for seed in range(options.seeds):
            if not results.has(**key, model=model, seed=seed):
                wrong = _rms(_spacetime(parts, closed, steps, seed, SPACETIME), parts[2][1])
                results.add(**key, model=model, seed=seed, steps=steps, error=wrong)
    if not results.has(**key, model="last value"):
        _, (x_valid, valid), (x, answers) = parts
        by_lags = {lags: _rms(_autoregressed(series, lags, fitted, x_valid, horizon), valid) for lags in LAGS}
        lags = min(by_lags, key=by_lags.__getitem__)
        wrong = _rms(_autoregressed(series, lags, fitted, x, horizon), answers)
        results.add(**key, model=f"AR({lags})", seed=0, error=wrong)
        results.add(**key, model="last value", seed=0, error=_rms(x[:, -1:].expand(-1, horizon, -1), answers))


TABLES = {"etth1": etth1, "intervals": intervals, "spacetime": spacetime}


def main() -> None:
    options = parse(parser(__doc__, TABLES, seeds=True))
    for name in options.names:
        TABLES[name](options)


if __name__ == "__main__":
    main()
