"""Columns of a forecast as a frame, and the levels of its intervals."""

from collections.abc import Sequence
from pathlib import Path

from scanl.errors import ConfigError

FRAME, STREAM = Path("frame"), Path("stream")  # stand for a frame, and for a stream, in messages
STEP = "step"  # the column that counts the steps where a table has no times
INTERVALS = (80.0, 95.0)  # per cent, of forecasts


def bounds(target: str, levels: Sequence[float]) -> list[str]:
    """Return the names of the columns with the bounds of intervals."""
    return [f"{target}-{side}-{level:g}" for level in levels for side in ("lo", "hi")]


def refuse_twice(who: str, names: Sequence[str]) -> None:
    """Raise ConfigError when an answer would have two columns of one name."""
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise ConfigError(f"{who}: the answer would have two columns called {twice[0]!r}; rename one in the table")


def check_levels(who: str, distribution: str, levels: Sequence[float] | None) -> tuple[float, ...]:
    """Return the levels of intervals in per cent; None becomes `INTERVALS`, or none where the distribution is points.

    Raises ConfigError for a level out of range, and for any level where the distribution has no intervals.
    """
    if levels is None:
        return () if distribution == "points" else INTERVALS
    for level in levels:
        if not 0 < level < 100:
            raise ConfigError(f"{who}: levels is {list(levels)}, expected per cents above 0 and below 100")
        if distribution == "points":
            raise ConfigError(f"{who}: levels is {list(levels)}, expected none because the distribution is points")
    return tuple(dict.fromkeys(levels))
