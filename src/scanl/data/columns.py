"""Read a user's table, CSV, Parquet or NumPy arrays, and take checked columns from it."""

import warnings
import zipfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.errors import ConfigError, DataError, unknown

KINDS = (".csv", ".parquet", ".npz")
DAY = 86400.0

Numbers = NDArray[np.float64]


def read_table(path: Path) -> Any:
    """Read a table as a pandas DataFrame. Raises DataError for a file that is missing, damaged or of another kind.

    .csv: in UTF-8, with a line of names first.   .npz: arrays (N,) are columns. If there is an array (N, T) or (N, T,
    C), the table has N series of T steps. Such an array becomes one column, or C columns NAME_0, NAME_1, ... An array
    (N,) is then constant over each series, and there are also columns `series` and `step`. Nothing is unpickled.
    """
    if path.is_dir():
        raise DataError(f"table: {path} is a folder, expected one file of {', '.join(KINDS)}")
    if not path.exists():
        raise DataError(f"table: {path} does not exist; name a file of {', '.join(KINDS)}")
    if path.suffix.lower() not in KINDS:
        raise DataError(f"table: {path} is of kind {path.suffix or 'none'!r}, expected one of {', '.join(KINDS)}")
    about = path.stat()
    if about.st_size == 0:
        raise DataError(f"table: {path} is empty, expected a line of names and rows below it")
    return _read(path, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, _time: int, _size: int) -> Any:
    """Read a file once as long as it does not change."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError("table: tables are read with pandas: pip install 'scanl[series]'") from error
    try:
        if path.suffix.lower() == ".csv":
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)
                names = pd.read_csv(path, header=None, nrows=1, dtype=str, encoding="utf-8").iloc[0].tolist()
                frame = pd.read_csv(path, encoding="utf-8", index_col=False, low_memory=False)
        elif path.suffix.lower() == ".parquet":
            frame = pd.read_parquet(path, engine="pyarrow").reset_index(drop=True)
            names = list(frame.columns)
        else:
            frame = _arrays(path)
            names = list(frame.columns)
    except UnicodeDecodeError as error:
        odd = error.object[error.start]
        raise DataError(f"table: {path} is not UTF-8: it has the invalid byte {odd:#x}; save it as UTF-8") from error
    except ImportError as error:
        raise ConfigError("table: Parquet is read with pyarrow: pip install 'scanl[series]'") from error
    except (OSError, ValueError, pd.errors.ParserError, pd.errors.ParserWarning, zipfile.BadZipFile) as error:
        raise DataError(f"table: {path} cannot be read: {' '.join(str(error).split())}") from error
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"table: {path} has two columns called {twice[0]!r}; rename one")
    if len(frame) < 2:
        raise DataError(f"table: {path} has {len(frame)} rows, expected at least 2")
    return frame.rename(columns=str)


def _arrays(path: Path) -> Any:
    import pandas as pd

    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    if not arrays or any(array.ndim not in (1, 2, 3) for array in arrays.values()):
        raise ValueError("expected arrays of one to three axes")
    rows = {len(array) for array in arrays.values()}
    steps = {array.shape[1] for array in arrays.values() if array.ndim > 1}
    if len(rows) > 1 or len(steps) > 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"arrays of different lengths: {shapes}")
    if not steps:
        return pd.DataFrame(arrays)
    (count,), (length,) = rows, steps
    columns: dict[str, Any] = {"series": np.repeat(np.arange(count), length), "step": np.tile(np.arange(length), count)}
    for name, array in arrays.items():
        if array.ndim == 1:
            columns[name] = np.repeat(array, length)
        elif array.ndim == 2:
            columns[name] = array.reshape(-1)
        else:
            columns |= {f"{name}_{i}": array[..., i].reshape(-1) for i in range(array.shape[2])}
    return pd.DataFrame(columns)


def column(frame: Any, path: Path, name: str, role: str) -> Any:
    """Return a column. Raises DataError, with the nearest name, when there is none."""
    if name not in frame.columns:
        raise DataError(f"table: {path}: {unknown(f'column for {role}', name, list(frame.columns))}")
    return frame[name]


def numbers(frame: Any, path: Path, name: str, role: str) -> Numbers:
    """Return a column of numbers, NaN where missing. Raises DataError for text, and for numbers that are not finite."""
    import pandas as pd

    given = column(frame, path, name, role)
    if pd.api.types.is_datetime64_any_dtype(given):
        raise DataError(f"table: {path}: column {name!r} holds times, expected numbers because it is {role}")
    if pd.api.types.is_timedelta64_dtype(given) or pd.api.types.is_complex_dtype(given):
        kind = "complex numbers" if pd.api.types.is_complex_dtype(given) else "durations"
        raise DataError(f"table: {path}: column {name!r} holds {kind}, expected real numbers because it is {role}")
    as_numbers: Any = pd.to_numeric(given, errors="coerce")
    found: Numbers = as_numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    odd = np.isnan(found) & given.notna().to_numpy()
    if odd.any():
        row = int(odd.argmax())
        raise DataError(
            f"table: {path}: column {name!r} is {given.iloc[row]!r} in row {row + 1}, expected a number because it is "
            f"{role}"
        )
    with np.errstate(over="ignore"):
        infinite = np.isinf(found.astype(np.float32))
    if infinite.any():
        row = int(infinite.argmax())
        raise DataError(f"table: {path}: column {name!r} is {found[row]:g} in row {row + 1}, expected a finite number")
    return found


def labels(frame: Any, path: Path, name: str) -> tuple[list[str], NDArray[np.int64]]:
    """Return the sorted names of the classes in a column, and the number of each row's class, -1 where missing."""
    given = column(frame, path, name, "the target")
    known = given.notna().to_numpy()
    text = given.astype(str).to_numpy(dtype=object)
    names = sorted(set(text[known]))
    order = {each: i for i, each in enumerate(names)}
    return names, np.array([order[each] if is_ else -1 for each, is_ in zip(text, known, strict=True)], np.int64)


def moments(frame: Any, path: Path, name: str) -> tuple[Any, bool]:
    """Return the times of a column, and whether they are dates. Dates are moments of pandas, other times are numbers.

    Whole numbers of eight digits are dates, YYYYMMDD. Raises DataError for what is neither a number nor a time, for a
    missing time, and for times of several time zones.
    """
    import pandas as pd

    given = column(frame, path, name, "the time")
    if given.isna().any():
        raise DataError(f"table: {path}: column {name!r} is missing in row {int(given.isna().argmax()) + 1}")
    if pd.api.types.is_numeric_dtype(given) and not pd.api.types.is_bool_dtype(given):
        found = given.to_numpy(dtype=np.float64)
        if not ((found == found.round()) & (found >= 18000101) & (found < 22000101)).all():
            return given, False
        dates = pd.to_datetime(given.astype("int64").astype(str), format="%Y%m%d", errors="coerce")
        return (given, False) if dates.isna().any() else (dates, True)
    try:
        return pd.to_datetime(given), True
    except (ValueError, TypeError, OverflowError) as error:
        several = pd.to_datetime(given, format="mixed", utc=True, errors="coerce").notna().all()
        reason = "has times of several time zones or formats" if several else "is no column of times"
        what = "write all alike" if several else "write them as 2024-12-31 23:59"
        raise DataError(f"table: {path}: column {name!r} {reason}; {what}") from error


def times(frame: Any, path: Path, name: str) -> tuple[Numbers, bool]:
    """Return the times of a column, and whether they are dates. Dates are in seconds, other times as they are.

    Raises DataError as `moments` does.
    """
    dates, calendar = moments(frame, path, name)
    if not calendar:
        return numbers(frame, path, name, "the time"), False
    dates = dates.dt.tz_convert(None) if getattr(dates.dt, "tz", None) is not None else dates
    return dates.to_numpy(dtype="datetime64[us]").astype(np.int64) / 1e6, True


def moments_after(when: Any, steps: int) -> Any:
    """Return the times of the steps that follow those of a pandas Series, at its usual distance.

    Months, quarters and years go by the calendar.
    """
    import pandas as pd

    count = np.arange(1, steps + 1)
    if not pd.api.types.is_datetime64_any_dtype(when):
        return when.iloc[-1] + (when.diff().median() if len(when) > 1 else 1) * count
    usual: Any = when.diff().median() if len(when) > 1 else pd.Timedelta(days=1)
    months = round(usual / pd.Timedelta(days=30.4375)) if usual >= pd.Timedelta(days=28) else 0
    step = pd.DateOffset(months=months) if months else usual
    return pd.DatetimeIndex([when.iloc[-1] + step * int(k) for k in count])


def grouped(frame: Any, path: Path, name: str | None) -> list[tuple[str, NDArray[np.int64]]]:
    """Return each series' name and its rows in the order of the table. name: column of the series; None: one series."""
    if name is None:
        return [("", np.arange(len(frame)))]
    given = column(frame, path, name, "the series")
    if given.isna().any():
        raise DataError(f"table: {path}: column {name!r} is missing in row {int(given.isna().argmax()) + 1}")
    text = given.astype(str).to_numpy(dtype=object)
    rows: dict[str, list[int]] = {}
    for row, each in enumerate(text):
        rows.setdefault(each, []).append(row)
    return [(each, np.array(found)) for each, found in rows.items()]


def refuse_overlap(path: Path, roles: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise DataError when a column has two roles, or the same role twice."""
    seen: dict[str, str] = {}
    for role, names in roles:
        for name in names:
            if name in seen:
                raise DataError(f"table: {path}: column {name!r} is {seen[name]} and {role}, expected one of them")
            seen[name] = role
