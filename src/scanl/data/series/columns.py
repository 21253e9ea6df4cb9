"""Read a user's table, CSV, Parquet, Feather, Excel or NumPy arrays, and take checked columns from it."""

import csv
import gzip
import re
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scanl.errors import ConfigError, DataError, counted, unknown
from scanl.files import written_whole

KINDS = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet", ".feather", ".xlsx", ".npz")
MOST_CATEGORIES = 1000  # texts in a column of covariates
MAX_TEXTS = 64  # texts in a column that is read without a role
BETWEEN_NAMES = ", "  # the parts of a name in several columns
FILE = "file"  # the column with the name of the file, where a table is several
WRITTEN_ENDINGS = (".csv", ".parquet")  # the formats in which answers are written
MISSING = (  # texts that stand for a missing number, as pandas has them
    *("", "NA", "N/A", "n/a", "<NA>", "#N/A", "#NA", "#N/A N/A", "NULL", "null", "None"),
    *("NaN", "-NaN", "nan", "-nan", "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN"),
)
UNNAMED_PATTERN = re.compile(r"Unnamed: \d+(\.\d+)*")  # how pandas calls a column without a name
COMMENT = re.compile(r'"?(#|//|--)')

Numbers = NDArray[np.float64]


def ending(path: Path) -> str:
    """Return how the name of a file ends: ".csv", or ".csv.gz" if the file is packed."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def files_of(path: Path) -> list[Path]:
    """Return the files that a path with `*`, `?` or `[` stands for, in order; for another path only itself.

    Raises DataError when there is none.
    """
    if path.exists() or not any(mark in str(path) for mark in "*?["):
        return [path]
    files = sorted(map(Path, glob(str(path), recursive=True)))
    if not files:
        raise DataError(f"table: {path} stands for no file, expected one or more")
    return files


def read_tables(paths: Sequence[Path], names: Sequence[str] = (), least: int = 2) -> Any:
    """Read tables with the same columns as one, row after row, with a further column `file` of the files' names.

    A single table is as `read_table` returns it.
    """
    import pandas as pd

    if len(paths) == 1:
        return read_table(paths[0], names, least)
    frames = [read_table(path, names, 0) for path in paths]
    for path, frame in zip(paths, frames, strict=True):
        if others := set(frame.columns) ^ set(frames[0].columns):
            raise DataError(
                f"table: {path} has the columns {', '.join(frame.columns)}, expected the columns of {paths[0]}; "
                f"{min(others)!r} is in one of them only"
            )
    named = [
        frame.assign(**{FILE: path.name.removesuffix("".join(path.suffixes))}) if FILE not in frame.columns else frame
        for path, frame in zip(paths, frames, strict=True)
    ]
    result = pd.concat(named, ignore_index=True)
    if len(result) < least:
        raise DataError(
            f"table: {paths[0]} and {len(paths) - 1} more have {counted(len(result), 'row')}, expected {least} or more"
        )
    return result


def read_table(path: Path, names: Sequence[str] = (), least: int = 2) -> Any:
    """Read a table as a pandas DataFrame. Raises DataError for a file that is missing, damaged or of another form.

    names: columns whose values are names, of series or classes. In CSV a name stays as it is written, such as 007 and
    NA; only an empty one is missing. So does text in the other columns.   least: rows that a table has at least.

    .csv: in UTF-8, with commas, decimal points, and a line of names first; .tsv has tabs in place of commas, and .gz
    packs either.   .parquet, .feather: an index of pandas that has a
    name is a column, and so is one of times or text, called `index`.   .npz: arrays (N,) are columns. If there is an
    array (N, T) or (N, T, C), the table has N series of T steps. Such an array becomes one column, or C columns NAME_0,
    NAME_1, ... An array (N,) is then constant over each series, and there are also columns `series` and `step`. Nothing
    is unpickled.   .xlsx: the first sheet.
    """
    if path.is_dir():
        raise DataError(f"table: {path} is a folder, expected one file of {', '.join(KINDS)}")
    if not path.exists():
        raise DataError(f"table: {path} does not exist; name a file of {', '.join(KINDS)}")
    if ending(path) not in KINDS:
        raise DataError(f"table: {path} has the format {path.suffix or 'none'!r}, expected one of {', '.join(KINDS)}")
    about = path.stat()
    if about.st_size == 0:
        raise DataError(f"table: {path} is empty, expected a line of names and rows below it")
    frame = _read(path, tuple(names), about.st_mtime_ns, about.st_size)
    if len(frame) < least:
        raise DataError(f"table: {path} has {counted(len(frame), 'row')}, expected at least {least}")
    return frame


def rows_of_lines(lines: Sequence[str], names: Sequence[str] = ()) -> Any:
    """Return lines of CSV as a table, the first of which has the names of the columns. names: as in `read_table`.

    Raises DataError for lines that are no rows of this table.
    """
    import pandas as pd

    try:
        header, *rows = csv.reader(lines)
    except csv.Error as error:
        raise DataError(f"table: a row cannot be read: {error}") from error
    _refuse_twice("the line of names", header)
    for row in rows:
        if len(row) != len(header):
            raise DataError(
                f"table: a row has {len(row)} fields, expected {len(header)} as in its line of names: {row}"
            )
    frame = pd.DataFrame(rows, columns=header, dtype=object).replace("", None)
    for name in frame.columns:
        if name not in names:
            known = frame[name].where(~frame[name].isin(MISSING))
            as_numbers: Any = pd.to_numeric(known, errors="coerce")
            if as_numbers.notna().sum() == known.notna().sum():
                frame[name] = as_numbers
    return frame


def as_table(frame: Any, who: str) -> Any:
    """Return a user's frame as a table: its index is columns as in Parquet, and its columns have names of text.

    Raises DataError for what is no frame of pandas, for a frame without rows, and for two columns of one name.
    """
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise DataError(f"{who} is of type {type(frame).__name__}, expected a DataFrame of pandas")
    if frame.empty:
        raise DataError(f"{who} has no rows, expected a row for each step of a series")
    frame = _with_index(frame).rename(columns=str)
    if not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"{who} has two columns called {twice!r}; rename one")
    return frame


# What readers raise for a damaged file; KeyError is openpyxl's, for an archive that is no workbook.
_READ_ERRORS = (OSError, EOFError, ValueError, KeyError, csv.Error, zlib.error, zipfile.BadZipFile)


@lru_cache(maxsize=16)
def _read(path: Path, as_text: tuple[str, ...], _time: int, _size: int) -> Any:
    """Read a file once as long as it does not change."""
    try:
        import pandas as pd
    except ImportError as error:
        raise ConfigError("table: tables are read with pandas: pip install 'scanl[series]'") from error
    try:
        if ending(path) in (".csv", ".tsv", ".csv.gz", ".tsv.gz"):
            frame, names = _csv(path, as_text, "\t" if ending(path).startswith(".tsv") else ",")
        else:
            readers: dict[str, Callable[[Path], Any]] = {
                ".parquet": lambda path: _with_index(pd.read_parquet(path, engine="pyarrow")),
                ".feather": lambda path: _with_index(pd.read_feather(path)),
                ".xlsx": lambda path: pd.read_excel(path, engine="openpyxl"),
                ".npz": _arrays,
            }
            frame = readers[ending(path)](path)
            names = list(frame.columns)
    except UnicodeDecodeError as error:
        odd = error.object[error.start]
        raise DataError(f"table: {path} is not UTF-8: it has the invalid byte {odd:#x}; save it as UTF-8") from error
    except ImportError as error:
        package, extra = ("openpyxl", "excel") if ending(path) == ".xlsx" else ("pyarrow", "series")
        raise ConfigError(f"table: {path} is read with {package}: pip install 'scanl[{extra}]'") from error
    except DataError:
        raise
    except (*_READ_ERRORS, pd.errors.ParserError, pd.errors.ParserWarning) as error:
        raise DataError(f"table: {path} cannot be read: {' '.join(str(error).split())}") from error
    _refuse_twice(path, names)
    return frame.rename(columns=str)


def _refuse_twice(what: Path | str, names: Sequence[Any]) -> None:
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"table: {what} has two columns called {twice[0]!r}; rename one")


def write_table(frame: Any, path: Path) -> None:
    """Write a frame as .csv or .parquet, whole or not at all."""
    with written_whole(path) as temporary:
        if path.suffix.lower() == ".parquet":
            frame.to_parquet(temporary, index=False)
        else:
            frame.to_csv(temporary, index=False)


def _csv(path: Path, as_text: Sequence[str], mark: str) -> tuple[Any, list[Any]]:
    """Return the table of a CSV file, and the names in its first line. mark: between columns."""
    import pandas as pd

    _refuse_other_forms(path, mark)
    how: dict[str, Any] = {"encoding": "utf-8", "index_col": False, "keep_default_na": False, "sep": mark}
    if tuple(map(int, pd.__version__.split(".")[:2])) < (3, 1):
        how["float_precision"] = "round_trip"  # pandas 3.1 and newer always read the number that was written
    with warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)
        names = pd.read_csv(path, header=None, nrows=1, dtype=str, encoding="utf-8", sep=mark).iloc[0].tolist()
        frame = pd.read_csv(path, low_memory=False, na_values=list(MISSING), **how)
    text = [
        i
        for i, name in enumerate(frame.columns)
        if name in as_text or not (pd.api.types.is_numeric_dtype(frame[name]) or frame[name].isna().all())
    ]
    if text:
        written = pd.read_csv(path, usecols=text, dtype=str, na_values=[""], **how)
        for name in written.columns:
            if name not in as_text:
                _refuse_units(path, name, written[name])
        frame = frame.assign(**{str(name): written[name] for name in written.columns})
    return frame, names


def _refuse_other_forms(path: Path, mark: str) -> None:
    """Raise DataError for a file whose first line has no names, or whose columns have another mark between them."""
    opened = gzip.open if ending(path).endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        lines = [line for line in islice(file, 20) if line.strip()][:10]
    if not lines:
        return
    first = lines[0].strip()
    if COMMENT.match(first):
        raise DataError(f"table: {path} begins with the comment {first[:40]!r}, expected a line of names; delete it")
    fields = [len(row) for row in csv.reader(lines, delimiter=mark)]
    if len(set(fields)) == 1 and fields[0] > 1:
        return
    marks = "commas" if mark == "," else "tabs"
    for other in sorted({*first, "\t"} - {*'."-+/_', mark}, key=lambda other: -first.count(other)):
        counts = {line.strip("\r\n").count(other) for line in lines}
        if not other.isalnum() and len(counts) == 1 and 0 not in counts and len(lines) > 1:
            raise DataError(
                f"table: {path} has {other!r} between its columns, expected {marks}, and points in its numbers; "
                f"convert it, for example by pandas.read_csv({path.name!r}, sep={other!r}, decimal=',')"
            )
    if fields[0] == 1 and max(fields) > 1:
        raise DataError(f"table: {path} begins with {first[:40]!r}, expected a line of names with {marks} between them")


def _refuse_units(path: Path, name: str, values: Any) -> None:
    """Raise DataError for a column of numbers under a line that has no number, such as one of units."""
    import pandas as pd

    known = values[values.notna() & ~values.isin(MISSING)]
    as_numbers: Any = pd.to_numeric(known, errors="coerce")
    odd = as_numbers.isna()
    if len(odd) > 1 and known.index[0] == 0 and odd.iloc[0] and not odd.iloc[1:].any():
        raise DataError(
            f"table: {path}: column {name!r} is {values.iloc[0]!r} in row 1 and has numbers below it, expected a "
            "number; delete that row if it has the units"
        )


def _with_index(frame: Any) -> Any:
    """Return a table whose index is columns, except the levels that number its rows: they have no name."""
    import pandas as pd

    levels = range(frame.index.nlevels)
    numbers = [
        i
        for i in levels
        if frame.index.names[i] is not None or not pd.api.types.is_numeric_dtype(frame.index.get_level_values(i))
    ]
    frame = frame.reset_index(level=numbers) if numbers else frame
    return frame.reset_index(drop=True)


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

    entries = column(frame, path, name, role)
    if pd.api.types.is_datetime64_any_dtype(entries):
        raise DataError(f"table: {path}: column {name!r} holds times, expected numbers because it is {role}")
    if pd.api.types.is_timedelta64_dtype(entries) or pd.api.types.is_complex_dtype(entries):
        kind = "complex numbers" if pd.api.types.is_complex_dtype(entries) else "durations"
        raise DataError(f"table: {path}: column {name!r} holds {kind}, expected real numbers because it is {role}")
    as_numbers: Any = pd.to_numeric(entries, errors="coerce")
    values: Numbers = as_numbers.to_numpy(dtype=np.float64, na_value=np.nan)
    odd = np.isnan(values) & entries.notna().to_numpy()
    odd[odd] = ~entries[odd].isin(MISSING).to_numpy()
    if odd.any():
        row = int(odd.argmax())
        raise DataError(
            f"table: {path}: column {name!r} is {entries.iloc[row]!r} in row {row + 1}, expected a number because it "
            f"is {role}"
        )
    with np.errstate(over="ignore"):
        infinite = np.isinf(values.astype(np.float32))
    if infinite.any():
        row = int(infinite.argmax())
        raise DataError(f"table: {path}: column {name!r} is {values[row]:g} in row {row + 1}, expected a finite number")
    return values


def is_text(entries: Any) -> bool:
    """Whether the known entries of a column are texts, none of which is a number."""
    import pandas as pd

    if pd.api.types.is_numeric_dtype(entries) or not len(known := entries[entries.notna()]):
        return False
    if not known.map(type).eq(str).all():
        return False
    known = known.astype(object)[~known.isin(MISSING).to_numpy()]
    as_numbers: Any = pd.to_numeric(known, errors="coerce")
    return len(known) > 0 and bool(as_numbers.isna().all())


def indicators(
    frame: Any, path: Path, name: str, role: str, categories: Sequence[str] | None = None
) -> tuple[Numbers, list[str], list[str]]:
    """Return a column of text as one column of 0 and 1 for each text, the texts, and the texts that are unknown.

    categories: the texts of training; None: all that the column has. A row is 0 where the text is unknown, and NaN
    where it is missing. Raises DataError for more than `MOST_CATEGORIES` texts.
    """
    entries = column(frame, path, name, role)
    known = entries.notna().to_numpy() & ~entries.isin(MISSING).to_numpy()
    text = _names(entries, path, name)
    there = sorted(set(text[known]))
    names = there if categories is None else list(categories)
    if len(names) > MOST_CATEGORIES:
        raise DataError(
            f"table: {path}: column {name!r} has {len(names):,} different texts, expected at most {MOST_CATEGORIES} "
            f"because it is {role}"
        )
    values = np.full((len(frame), len(names)), np.nan)
    values[known] = text[known, None] == np.array(names, object)
    return values, names, [label for label in there if label not in names]


def labels(
    frame: Any, path: Path, name: str, classes: Sequence[str] | None = None
) -> tuple[list[str], NDArray[np.int64]]:
    """Return the sorted names of the classes in a column, and the number of each row's class, -1 where missing.

    classes: the names in training, which are returned. Raises DataError for a class that is not among them.
    """
    entries = column(frame, path, name, "the target")
    known = entries.notna().to_numpy()
    text = _names(entries, path, name)
    there = sorted(set(text[known]))
    names = there if classes is None else list(classes)
    if others := [label for label in there if label not in names]:
        known_names = ", ".join(map(repr, names[:10]))
        raise DataError(
            f"table: {path}: column {name!r} has {others[0]!r}, expected one of {known_names}, the classes of training"
        )
    order = {label: i for i, label in enumerate(names)}
    return names, np.array([order[label] if is_ else -1 for label, is_ in zip(text, known, strict=True)], np.int64)


def grouped(frame: Any, path: Path, names: Sequence[str]) -> list[tuple[str, NDArray[np.int64]]]:
    """Return each series' name and its rows in the order of the table.

    names: columns whose values together are the name of a series, with commas between them; none: one series.
    """
    import pandas as pd

    if not names:
        return [("", np.arange(len(frame)))]
    parts = []
    for name in names:
        entries = column(frame, path, name, "the series")
        if entries.isna().any():
            raise DataError(f"table: {path}: column {name!r} is missing in row {int(entries.isna().argmax()) + 1}")
        parts.append(_names(entries, path, name))
    if len(parts) > 1:
        parts = [pd.Series(part, dtype=object).map({text: quoted(text) for text in set(part)}) for part in parts]
    codes, labels = pd.factorize(reduce(lambda text, part: text + BETWEEN_NAMES + part, parts))
    rows = np.split(np.argsort(codes, kind="stable"), np.bincount(codes, minlength=1).cumsum()[:-1])
    return list(zip(labels, rows, strict=False))  # without rows there is no label


def quoted(text: str) -> str:
    """Return a part of a name of several parts, in quotes if it has the mark between parts."""
    return repr(text) if BETWEEN_NAMES in text else text


def split_names(names: str) -> list[str]:
    """Return the names of columns that have commas between them."""
    return [name.strip() for name in names.split(",")]


def _names(values: Any, path: Path, name: str) -> NDArray[np.object_]:
    """Return values as text. Raises DataError when two of them would have the same name, such as 7 and "7"."""
    text = values.astype(str)
    if values.dtype == object:
        kinds = values[values.notna()].drop_duplicates()
        twice = kinds[kinds.astype(str).duplicated()]
        if len(twice):
            raise DataError(f"table: {path}: column {name!r} has {twice.iloc[0]!r} as a number and as text; write one")
    return text.to_numpy(dtype=object)


def unread(frame: Any) -> list[str]:
    """Return the columns that nobody means as numbers to read: columns without a name, and columns that number the
    rows."""
    rows, result = np.arange(len(frame)), []
    for name in frame.columns:
        values = frame[name].to_numpy()
        if UNNAMED_PATTERN.fullmatch(name) or (
            np.issubdtype(values.dtype, np.integer) and (values == rows + values[0]).all()
        ):
            result.append(name)
    return result


def refuse_overlap(path: Path, roles: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Raise DataError when a column has two roles, or the same role twice."""
    role_of: dict[str, str] = {}
    for role, names in roles:
        for name in names:
            if name in role_of:
                raise DataError(f"table: {path}: column {name!r} is {role_of[name]} and {role}, expected one of them")
            role_of[name] = role
