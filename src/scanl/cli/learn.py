"""`scanl learn`."""

import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from tqdm import tqdm

from scanl.cli.parser import Parser
from scanl.errors import DataError
from scanl.learning.descent import seeded
from scanl.learning.online.config import LearnConfig
from scanl.learning.online.folder import OnlineFolder
from scanl.learning.online.prequential import Prequential
from scanl.learning.online.run import OnlineRun, stderr
from scanl.learning.run.config import make_stack
from scanl.learning.run.configuration import add_options

PROGRESS_SAMPLES = 100  # samples between two looks at the clock for the progress line


def run(argv: Sequence[str]) -> int:
    """Learn from a stream, or go on with `--resume FOLDER`. Return exit code 130 when a signal ended the run."""
    config, folder = parse(argv)
    config.check()
    check_names(config)
    if folder is None and config.run.out is not None:
        folder = OnlineFolder.fresh(config)
    with nullcontext() if folder is None else folder.locked():
        ready = OnlineRun(config, folder, stderr)
        begun = 0 if ready.loop is None else ready.loop.count
        start = time.monotonic()
        with tqdm(unit=" samples", file=sys.stderr, disable=None, initial=begun, leave=False) as bar:

            def progress(count: int) -> None:
                if count - bar.n >= PROGRESS_SAMPLES and not bar.disable:
                    bar.set_postfix_str(_first(ready), refresh=False)
                    bar.update(count - bar.n)

            interrupted = ready.learn(progress)
        if ready.loop is not None:
            _summary(ready, ready.loop, begun, time.monotonic() - start)
        elif not interrupted:
            raise DataError(f"learn: data is {config.stream.data}, which has no samples")
    if interrupted:
        stderr(
            "interrupted"
            if folder is None
            else f"interrupted; saved. Go on with:\n  scanl learn --resume {folder.path}"
        )
    return 130 if interrupted else 0


def check_names(config: LearnConfig) -> None:
    """Raise ConfigError for an unknown layer, option of a layer or metric, before a sample is read."""
    with seeded(0):
        make_stack(config.stack)
    if config.scoring.metrics:
        from scanl.learning.online.scores import metric_class

        for name in config.scoring.metrics:
            metric_class(name)


def parse(argv: Sequence[str]) -> tuple[LearnConfig, OnlineFolder | None]:
    """Return the configuration, and the folder of the run to resume, if any."""
    args = _parser(LearnConfig()).parse(argv)
    if args.resume is None:
        config = LearnConfig.parsed(args)
        if args.source is not None:
            config.stream.data = args.source
        return config, None
    folder = OnlineFolder.open(args.resume)
    config = folder.config()
    changed = LearnConfig.parsed(_parser(config).parse(argv))
    if args.source is not None:
        changed.stream.data = args.source
    config.check_resumable(changed)
    return changed, folder


EXAMPLES = {
    "scanl learn readings.csv --target load": "a file of rows: predict a column of each from the other columns",
    "scanl learn readings.csv --target load --follow --out runs/load": "the same, of a file that grows",
    "scanl learn clicks.jsonl --target bought --question class --key id": "a class, whose truth comes in a later line",
    "scanl learn mackey_glass_regimes --layer gru --algorithm uoro --samples 5000": "a generated stream",
    "scanl learn --resume runs/load": "go on where a run ended",
}


def _parser(defaults: LearnConfig) -> Parser:
    parser = Parser(
        "learn",
        "Learn from a stream: answer each sample, score the answer, then learn.",
        examples=EXAMPLES,
        topics=LearnConfig.topics,
    )
    parser.add("source", str | None, "the stream, as --data has it", nargs="?", metavar="SOURCE")
    parser.topics |= {"source": "stream", **add_options(parser, defaults)}
    parser.add("--resume", str | None, "go on with a run, exactly", metavar="FOLDER")
    return parser


def _first(ready: OnlineRun) -> str:
    name, value = next(iter(ready.scores.get().items()))
    return f"{name} {value:.4g}"


def _summary(ready: OnlineRun, loop: Prequential, begun: int, seconds: float) -> None:
    """Print the scores."""
    read = loop.count - begun
    print(f"{loop.count:,} samples, {ready.scored:,} scored, {1000 * seconds / max(read, 1):.3g} ms a sample")
    for name, value in ready.scores.get().items():
        print(f"  {name:<20}{value:.4g}")
    if len(loop.bank.learners) > 1:
        print(f"  {'best rate':<20}{ready.config.learning.lr[loop.bank.best]:g}")
    if ready.skipped:
        print(f"  {'skipped lines':<20}{ready.skipped:,}")
    if ready.too_late:
        print(f"  {'truths that came too late':<27}{ready.too_late:,}")
    if loop.given_up:
        print(f"  {'truths that never came':<24}{loop.given_up:,}")
