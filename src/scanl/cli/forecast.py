"""`scanl forecast RUN` or `scanl forecast TABLE`: write the steps that follow each series of a table."""

import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from scanl.cli.parser import Parser
from scanl.data.series.columns import WRITTEN_ENDINGS, write_table
from scanl.errors import ConfigError, DataError
from scanl.files import check_new_file, is_panel
from scanl.options import PositiveOrNone

PIECE_BYTES = 2**20  # bytes of a stream at once, at most
POLL = 0.2  # seconds between two looks at a growing file
COVARIATES = ("past", "static", "future", "future_data", "holidays")  # options of a model that is trained
OF_TABLE = ("target", "time", "series", "season")  # options for a table in place of a run
EXAMPLES = {
    "scanl forecast sales.csv --target sold --time day --horizon 12": "after a table, without training",
    "scanl forecast runs/sales-1 --out next.csv --picture next.png": "the steps after the run's table",
    "scanl forecast runs/sales-1 --data sales.csv --levels 50 90": "after newer rows, with intervals of 50 and 90 %",
}
NOTES = {
    "what is written, by series and step": {
        "the run's --series and --time": "or the column step, which counts the steps, where it has no times",
        "y": "the median of the target y",
        "y-lo-80, y-hi-80": "the bounds of the interval that has the number in 80 % of cases; a pair for each of "
        "--levels",
    }
}


def run(argv: Sequence[str]) -> int:
    """Write the forecast to a file or to standard output, and draw it if a picture is named."""
    if argv and not argv[0].startswith("-") and not Path(argv[0]).is_dir():
        refuse_covariates(argv)
    args = _parser().parse(argv)
    out, picture = (None if name is None else Path(name) for name in (args.out, args.picture))
    if is_panel(args.run):
        return of_panel(args, out)
    check_output("forecast", "out", out, WRITTEN_ENDINGS)
    check_output("forecast", "picture", picture, (".png",))
    torch.set_num_threads(1)  # windows are short
    if not Path(args.run).is_dir():
        return of_table(args, out, picture)
    from scanl.learning.forecasting.forecasts import Forecasts  # with all that a run may need

    for name in OF_TABLE:
        if (value := getattr(args, name)) is not None:
            raise ConfigError(f"forecast: {name} is {value}, expected none because a run has its own; name a table")
    if args.follow:
        for name in ("future_data", "out", "picture", "freq"):
            if getattr(args, name) is not None:
                raise ConfigError(
                    f"forecast: {name} is {getattr(args, name)}, expected none because --follow writes rows to the "
                    "standard output as they come"
                )
        followed = Forecasts.open(args.run).follow(lines_of(args.data), args.horizon, args.levels or None)
        for number, frame in enumerate(followed):
            frame.to_csv(sys.stdout, index=False, header=number == 0)
            sys.stdout.flush()
        return 0
    forecasts = Forecasts.open(args.run, args.data)
    with noting():
        frame = forecasts.after(
            args.data, args.future_data, horizon=args.horizon, levels=args.levels or None, freq=args.freq
        )
    if picture is not None:
        from scanl.learning.forecasting.picture import save_forecasts

        rows = forecasts.dated(forecasts.rows(args.data)[0])
        save_forecasts(picture, rows, forecasts.dated(frame), forecasts.table)
        print(picture, file=sys.stderr)
    write(frame, out)
    return 0


def of_table(args: Any, out: Path | None, picture: Path | None) -> int:
    """Forecast a table by the model in the package."""
    from scanl.learning.forecasting.untrained import HistoryTable, UntrainedForecasts, guessed

    if args.data is not None and not args.follow:
        raise ConfigError(
            f"forecast: data is {args.data}, expected none because {args.run} is a table, whose own rows are read; put "
            f"all rows into one table, or give --follow to read the rows of {args.data} one by one"
        )
    given = (args.target, args.time, args.series)
    target, time_, series = guessed(Path(args.run), *given)
    told = [f"{n} {v}" for n, v, g in zip(OF_TABLE, (target, time_, series), given, strict=False) if v != g]
    if told:
        print(f"scanl: guessed: {', '.join(told)}", file=sys.stderr)
    table = HistoryTable(
        [args.run], "forecast", target, time=time_, series=series, season=args.season, freq=args.freq,
        horizon=args.horizon or HistoryTable.horizon, distribution="quantiles",
    )  # fmt: skip
    with noting():
        forecasts = UntrainedForecasts.of(table)
        if args.follow:
            for name in ("out", "picture"):
                if getattr(args, name) is not None:
                    raise ConfigError(
                        f"forecast: {name} is {getattr(args, name)}, expected none because --follow writes rows to the "
                        "standard output as they come"
                    )
            for number, frame in enumerate(forecasts.follow(lines_of(args.data), args.levels or None)):
                frame.to_csv(sys.stdout, index=False, header=number == 0)
                sys.stdout.flush()
            return 0
        frame = forecasts.after(args.levels or None)
    if picture is not None:
        from scanl.learning.forecasting.picture import save_forecasts

        save_forecasts(picture, forecasts.dated(table.read(table.path)), forecasts.dated(frame), table)
        print(picture, file=sys.stderr)
    write(frame, out)
    return 0


def of_panel(args: Any, out: Path | None) -> int:
    """Forecast a folder of Parquet files by the model in the package."""
    from scanl.learning.forecasting.panels import PanelFolder
    from scanl.learning.forecasting.untrained import HistoryTable

    if out is None:
        raise ConfigError(f"forecast: out is missing, expected a folder for the forecasts of {args.run}")
    for name in ("data", "future_data", "picture", "follow"):
        if (value := getattr(args, name)) not in (None, False):
            raise ConfigError(f"forecast: {name} is {value}, expected none because {args.run} is a folder of tables")
    given = {name: getattr(args, name) for name in (*OF_TABLE, "freq")}
    torch.set_num_threads(1)  # windows are short
    with noting():
        panel = PanelFolder(Path(args.run), out, args.horizon or HistoryTable.horizon, args.levels or None, **given)
        print(f"scanl: columns: {', '.join(f'{n} {panel.columns[n]}' for n in OF_TABLE[:3])}", file=sys.stderr)
        for file in panel.run():
            print(file)
    return 0


def refuse_covariates(argv: Sequence[str]) -> None:
    """Raise ConfigError for options of covariates beside a table."""
    for word in argv:
        name = word.partition("=")[0].lstrip("-").replace("-", "_")
        if word.startswith("--") and name in COVARIATES:
            raise ConfigError(
                f"forecast: {name} is given, expected none because the model in the package reads no covariates; train "
                f"one that does: scanl train --data {argv[0]} --question forecast --target COLUMN "
                f"--{name.removesuffix('_data')} COLUMN"
            )


def lines_of(file: str | None) -> Iterator[list[str]]:
    """Yield the lines of a growing file, or of the standard input until it ends. Lines that are there come at once."""
    try:
        descriptor = sys.stdin.fileno() if file in (None, "-") else os.open(file, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"forecast: data is {file}, which cannot be read: {error.strerror}") from error
    unfinished = b""
    while True:
        text = os.read(descriptor, PIECE_BYTES)
        if not text and file not in (None, "-"):
            time.sleep(POLL)
            continue
        *lines, unfinished = (unfinished + text).split(b"\n")
        lines += [unfinished] if not text else []  # the end, which need not end a line
        try:
            texts = [line.decode().rstrip("\r") for line in lines if line.strip()]
        except UnicodeDecodeError as error:
            odd = error.object[error.start]
            raise DataError(f"forecast: data is not UTF-8: it has the invalid byte {odd:#x}") from error
        if texts:
            yield texts
        if not text:
            return


@contextmanager
def noting() -> Iterator[None]:
    """Print the warnings about a table as lines, once the block succeeds."""
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        yield
    for text in dict.fromkeys(str(note.message) for note in notes if str(note.message).startswith("table: ")):
        print(f"scanl: {text}", file=sys.stderr)


def write(frame: Any, out: Path | None) -> None:
    """Write a frame to a file, whose path is printed, or to standard output."""
    if out is None:
        frame.to_csv(sys.stdout, index=False)
    else:
        write_table(frame, out)
        print(out)


def check_output(who: str, name: str, path: Path | None, endings: Sequence[str]) -> None:
    """Raise ConfigError for a file of another format, and for one that cannot be written."""
    if path is None:
        return
    if path.suffix.lower() not in endings:
        raise ConfigError(f"{who}: {name} is {path}, expected a file of {' or '.join(endings)}")
    check_new_file(who, name, path)


def add_output(parser: Parser) -> None:
    """Add the options of what is written: --levels and --out."""
    parser.add("--levels", float, "per cents of the intervals (default: 80 95)", [], nargs="+", metavar="PER_CENT")
    parser.add("--out", str | None, "file to write, .csv or .parquet (default: standard output)", metavar="PATH")


def _parser() -> Parser:
    description = "Forecast the steps after a run's table, or after any table, with intervals."
    parser = Parser("forecast", description, examples=EXAMPLES, notes=NOTES)
    parser.add_argument("run", type=str, help="run folder; a table or a folder of Parquet: the model in the package")
    parser.add("--target", str | None, "of a table: column to forecast (default: the only one of numbers)")
    parser.add("--time", str | None, "of a table: column of times (default: the only one)")
    parser.add("--series", str | None, "of a table: column of the series' names (default: the only one)")
    parser.add("--season", int | None, "of a table: steps of a season (default: by the calendar or the numbers)")
    parser.add(
        "--data",
        str | None,
        "table of newer rows, which follow those of the run's table; nothing is trained",
        metavar="PATH",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="forecast after each row that comes, of the standard input or of the growing file of --data",
    )
    parser.add(
        "--future-data", str | None, "table with the columns of --future at the steps that are forecast", metavar="PATH"
    )
    parser.add("--horizon", PositiveOrNone, "steps to write (default: those of the run; 12)")
    parser.add("--freq", str | None, "frequency of the steps, as pandas names it: h, D, B, ME (default: the table's)")
    add_output(parser)
    parser.add(
        "--picture", str | None, "file of a picture, .png: the end of each series, and its forecast", metavar="PATH"
    )
    return parser
