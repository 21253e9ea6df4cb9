"""The inputs of a forecast, which sources make, batches carry and forecasters read."""

from typing import Any, NamedTuple


class SeriesColumns(NamedTuple):
    """The inputs of a forecast of the H steps after each of T steps, as arrays or tensors. NaN is a missing number.

    target: (B, T, C), what is forecast.   past: (B, T, P), covariates that are known up to the present.   static: (B,
    S), covariates that are constant over a series.   future: (B, T + H, F), covariates that are known ahead, at the T
    steps and at the H steps after them.   timespans: (B, T + H), the durations of these steps; NaN ahead where they
    are not known.   None: there are none.
    """

    target: Any
    past: Any = None
    static: Any = None
    future: Any = None
    timespans: Any = None

    def steps(self, begin: int, end: int) -> "SeriesColumns":
        """Return the steps from `begin` to before `end`; of what is known ahead, also the H steps after them."""
        length = self.target.shape[1]
        cut = {
            name: values[:, begin : end + values.shape[1] - length]
            for name, values in self._asdict().items()
            if values is not None and name != "static"
        }
        return self._replace(**cut)
