"""Series of a panel from which nothing is learnt: without a number, always equal, or ended long before the others."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scanl.data.series.columns import grouped, numbers
from scanl.data.series.series import Roles
from scanl.data.series.times import times

MIN_NUMBERS = 10  # of a series that is always equal; a shorter one has only begun
MIN_STEPS, ENDED_SHARE = 10, 0.1  # steps, and part of the time of all series, by which a series ends before the last

Reasons = Mapping[str, str]  # why a series is left out, by its name


def without_idle(
    frame: Any, path: Path, roles: Roles, horizon: int, known: Reasons | None = None
) -> tuple[Any, Reasons]:
    """Return a table without its idle series, and why each is left out. If all are idle, the table stays as it is.

    horizon: steps that a series may lack at its end.   known: the idle series of training, which are left out here,
    with those that have no number; None: this is the table of training.
    """
    groups = grouped(frame, path, roles.series)
    if len(groups) < 2:
        return frame, {}
    answers = np.column_stack([numbers(frame, path, name, "the target") for name in roles.target])
    there = ~np.isnan(answers)
    reasons = {name: "has no number" for name, rows in groups if not there[rows].any(0).all()}
    if known is None:
        for name, rows in groups:
            if name not in reasons and there[rows].sum() >= MIN_NUMBERS * len(roles.target):
                least, most = (bound(answers[rows], axis=0) for bound in (np.nanmin, np.nanmax))
                reasons |= {name: f"is always {', '.join(map('{:g}'.format, most))}"} if (least == most).all() else {}
        if roles.time is not None:
            rows_of = {name: rows[there[rows].any(1)] for name, rows in groups if name not in reasons}
            reasons |= _ended(frame, path, roles.time, rows_of, horizon)
    else:
        reasons = {name: known.get(name, "has no number") for name, _ in groups if name in known or name in reasons}
    if not reasons or len(reasons) == len(groups):
        return frame, {}
    kept = np.sort(np.concatenate([rows for name, rows in groups if name not in reasons]))
    return frame.iloc[kept].reset_index(drop=True), reasons


def _ended(frame: Any, path: Path, time: str, rows_of: Mapping[str, Any], horizon: int) -> dict[str, str]:
    """Return the series that ended long ago, if most end together. rows_of: rows with a number, by series."""
    clock = times(frame, path, time)[1]
    steps = np.concatenate([np.zeros(0), *(np.diff(clock.marks[rows]) for rows in rows_of.values())])
    step = float(np.median(steps)) if len(steps) else 0.0
    if step <= 0:
        return {}
    ends = np.array([clock.marks[rows[-1]] for rows in rows_of.values()], np.float64)
    begin = min(float(clock.marks[rows[0]]) for rows in rows_of.values())
    behind = (ends.max() - ends) / step
    long_ago = max(2 * horizon, MIN_STEPS, ENDED_SHARE * (ends.max() - begin) / step)
    if (behind <= horizon).mean() <= 0.5:
        return {}
    when = {name: str(frame[time].iloc[rows[-1]]).removesuffix(" 00:00:00") for name, rows in rows_of.items()}
    return {name: f"ended {when[name]}" for name, lag in zip(rows_of, behind, strict=True) if lag > long_ago}
