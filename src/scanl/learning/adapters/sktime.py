"""Forecasters as sktime has them. `pip install 'scanl[sktime]'`; nothing else of scanl imports sktime.

They are `Frames` with the face of sktime: one model forecasts all series of a panel or of a hierarchy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Self

import pandas as pd
from sktime.forecasting.base import BaseForecaster  # pyright: ignore[reportMissingImports]

from scanl.learning.forecasting.choose import MINUTES
from scanl.learning.forecasting.frames import Frames, levels_of

MTYPES = ["pd.DataFrame", "pd-multiindex", "pd_multiindex_hier"]


class _Forecaster(BaseForecaster, ABC):
    """What both forecasters have: they keep the names of the series, and answer from a frame."""

    _tags = {  # noqa: RUF012
        "y_inner_mtype": MTYPES,
        "X_inner_mtype": MTYPES,
        "capability:multivariate": False,
        "capability:insample": False,
        "capability:missing_values": True,
        "capability:non_contiguous_X": False,
        "capability:pred_int": True,
        "capability:pred_int:insample": False,
        "capability:update": True,
    }

    def _name_series(self, y: Any) -> None:
        self._levels, self._series = y.index.names, _by_text(y)

    def _predict(self, fh: Any, X: Any) -> Any:
        return self._quantiles(fh, X, [0.5]).set_axis(self._get_varnames(), axis=1)

    def _predict_quantiles(self, fh: Any, X: Any, alpha: list[float]) -> Any:
        columns = pd.MultiIndex.from_product([self._get_varnames(), alpha])
        return self._quantiles(fh, X, alpha).set_axis(columns, axis=1)

    def _quantiles(self, fh: Any, X: Any, alpha: list[float]) -> Any:
        """Return a frame with a column for each probability, and for each series a row for each step of `fh`."""
        levels, columns = levels_of(alpha)
        answers = self._answers(fh, X, levels)
        steps = fh.to_numpy() - 1 if fh.is_relative else fh.to_pandas()
        pieces = {}
        for name, of_series in answers.groupby("unique_id", sort=False):
            rows = of_series.set_index("ds")[columns]
            pieces[self._series[str(name)]] = rows.iloc[steps] if fh.is_relative else rows.loc[steps]
        return pieces[()] if () in pieces else pd.concat(pieces, names=self._levels)

    @abstractmethod
    def _answers(self, fh: Any, X: Any, levels: list[float]) -> Any:
        """Return the forecast of `Frames` as far as `fh` reaches, or farther."""


class SktimeForecaster(_Forecaster):
    """Forecast series with what backtests choose, as a forecaster of sktime.

    Args:
        minutes: of the backtests and the training of what they choose, as of `Frames`.
        random_state: of training.
        options: further arguments of `Frames`, such as {"season": 12} or {"layer": "lru", "steps": 300}.

    The horizon is the last step of `fh`. X has covariates that are known ahead. `update` with `update_params` fits
    anew, on all rows up to the last new one; without it takes the new rows, and nothing is trained.
    Fitted: `frames_`, a `Frames`.

    >>> import pandas as pd
    >>> from scanl.learning.adapters.sktime import SktimeForecaster
    >>> y = pd.Series(range(40), pd.period_range("2024-01", periods=40, freq="M"), float)
    >>> SktimeForecaster(minutes=0.01).fit(y, fh=[1, 12]).predict().index.tolist()
    [Period('2027-05', 'M'), Period('2028-04', 'M')]
    """

    _tags = {"capability:random_state": True, "requires-fh-in-fit": True}  # noqa: RUF012

    def __init__(
        self, minutes: float = MINUTES, random_state: int = 0, options: Mapping[str, Any] | None = None
    ) -> None:
        self.minutes, self.random_state, self.options = minutes, random_state, options
        super().__init__()

    def _fit(self, y: Any, X: Any, fh: Any) -> Self:
        self._name_series(y)
        rows, future = _rows(X, y), [] if X is None else _covariates(X).columns.tolist()
        options = {"minutes": self.minutes, "random_state": self.random_state, **(self.options or {})}
        self.frames_ = Frames(_horizon(fh, rows), future=future, **options).fit(rows)
        return self

    def _update(self, y: Any, X: Any = None, update_params: bool = True) -> Self:
        if update_params and self.get_config()["remember_data"]:
            last = y.index.get_level_values(-1).max()
            y, X = (
                None if rows is None else rows[rows.index.get_level_values(-1) <= last] for rows in (self._y, self._X)
            )
            return self._fit(y, X, self._fh)
        self._series |= _by_text(y)
        self.frames_.update(_rows(X, y))
        return self

    def _answers(self, fh: Any, X: Any, levels: list[float]) -> Any:
        known = _rows(X) if self.frames_.future and X is not None else None
        return self.frames_.predict(X=known, levels=levels)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        return [{"options": {"layer": "lru", "dim": 8, "steps": 1}}, {}]


class PretrainedSktimeForecaster(_Forecaster):
    """Forecast series by the model in the package, as a forecaster of sktime. `fit` trains nothing.

    Args:
        season, freq: as of `Frames.pretrained`.

    Any horizon may be asked of `predict`; `fit` needs none. X is not read. `update` takes new rows.

    >>> import pandas as pd
    >>> from scanl.learning.adapters.sktime import PretrainedSktimeForecaster
    >>> y = pd.Series(range(40), pd.period_range("2024-01", periods=40, freq="M"), float)
    >>> PretrainedSktimeForecaster().fit(y).predict(fh=[1, 12]).index.tolist()
    [Period('2027-05', 'M'), Period('2028-04', 'M')]
    """

    _tags = {"capability:exogenous": False, "requires-fh-in-fit": False}  # noqa: RUF012

    def __init__(self, season: int | None = None, freq: Any = None) -> None:
        self.season, self.freq = season, freq
        super().__init__()

    def _fit(self, y: Any, X: Any, fh: Any) -> Self:
        self._name_series(y)
        self._history = _rows(None, y)
        Frames.pretrained(1, season=self.season, freq=self.freq).fit(self._history)  # raises for rows it cannot read
        return self

    def _update(self, y: Any, X: Any = None, update_params: bool = True) -> Self:
        self._series |= _by_text(y)
        both = pd.concat([self._history, _rows(None, y)], ignore_index=True)
        self._history = both.drop_duplicates(["unique_id", "ds"], keep="last")
        return self

    def _answers(self, fh: Any, X: Any, levels: list[float]) -> Any:
        frames = Frames.pretrained(_horizon(fh, self._history), season=self.season, freq=self.freq)
        return frames.fit(self._history).predict(levels=levels)

    @classmethod
    def get_test_params(cls, parameter_set: str = "default") -> list[dict[str, Any]]:
        return [{}, {"season": 4}]


def _horizon(fh: Any, rows: Any) -> int:
    """Return how many steps after the end of the series that ends first a horizon reaches."""
    first_end = rows.groupby("unique_id")["ds"].max().min()
    return int(fh.to_relative(pd.Index([first_end])).to_numpy().max())


def _names(index: Any) -> list[tuple[Any, ...]]:
    """Return the name of the series of each row: the levels of the index above the times, none for a single series."""
    return [levels[:-1] for levels in index] if index.nlevels > 1 else [()] * len(index)


def _by_text(y: Any) -> dict[str, tuple[Any, ...]]:
    return {str(name): name for name in dict.fromkeys(_names(y.index))}


def _covariates(X: Any) -> Any:
    return X.rename(columns="X {}".format)


def _rows(X: Any, y: Any = None) -> Any:
    """Return the frame of `Frames` for series and their covariates."""
    index = X.index if y is None else y.index
    keys = {"unique_id": list(map(str, _names(index))), "ds": index.get_level_values(-1)}
    numbers = {} if y is None else {"y": y.iloc[:, 0].to_numpy()}
    more = {} if X is None else {name: column.to_numpy() for name, column in _covariates(X).items()}
    return pd.DataFrame(keys | numbers | more)
