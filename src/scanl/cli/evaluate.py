"""`scanl eval RUN`: bits per byte beside what compressors need, or the score of a task beside chance and best."""

import gzip
import lzma
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from scanl.cli.parser import Parser
from scanl.cli.tasks import described
from scanl.data.text import Bytes, read_text
from scanl.errors import CheckpointError, ConfigError
from scanl.learning import RunFolder, TrainConfig, bits_per_byte, score
from scanl.learning.run.config import Model
from scanl.models import LanguageModel
from scanl.tasks import Task, read_corpus
from scanl.tasks.base import AFTER_TRAINING

COUNT = 1000  # examples, unless told


def run(argv: Sequence[str]) -> int:
    """Measure a run on all of its held-out text, or on fresh examples of its task."""
    parser = Parser("eval", "Bits per byte of a run on its held-out text, or its score on fresh examples of its task.")
    parser.add_argument("run", type=str, help="run folder")
    parser.add_argument(
        "--data", type=str, nargs="*", default=[], metavar="PATH", help="the run's text where it has moved, or another"
    )
    parser.add_argument("--length", type=int | None, default=None, help="of a task: another length; none: the run's")
    parser.add_argument("--count", type=int | None, default=None, help=f"of a task: examples; none: {COUNT}")
    args = parser.parse(argv)
    folder = RunFolder.open(args.run)
    config = folder.config()
    task = config.build_task()
    if args.data and task is not None:
        raise ConfigError(f"eval: data is {args.data}, expected none because {args.run} was trained on {config.task}")
    for name in ("length", "count"):
        value = getattr(args, name)
        if value is not None and task is None:
            raise ConfigError(f"eval: {name} is {value}, expected none because {args.run} was trained on text")
    if args.count is not None and args.count < 1:
        raise ConfigError(f"eval: count is {args.count}, expected at least 1")
    if task is not None and args.length is not None:
        task = replace(task, length=args.length)
    model, digest = folder.load_model_and_digest()
    if task is None:
        assert isinstance(model, LanguageModel)
        text, what = _text(config, digest, args.data, args.run)
        print(compared(bits_per_byte(model, text), text, what))
    else:
        print(scored(model, task, COUNT if args.count is None else args.count, config.seed))
    return 0


def _text(config: TrainConfig, digest: str | None, paths: list[str], run: str) -> tuple[Bytes, str]:
    """What to measure on: what a run's text holds out, or all of another text; and what to call it."""
    corpus = read_corpus(paths or config.data, config.held_out)
    if corpus.digest() == digest:
        return corpus.held_out, "held-out bytes"
    if not paths or [str(Path(path).resolve()) for path in paths] == config.data:
        found = "has changed since" if digest is not None else "may be another than that with which"
        raise CheckpointError(
            f"eval: the text of {run}, or its split, {found} it was trained: what is held out now may have been "
            "trained on; put it back, name where it has moved, its files and folders named as before, "
            "or measure another text: --data PATH"
        )
    return read_text(paths), "bytes of another text than the run's"


def compressed(data: Bytes) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz`, each given these bytes alone."""
    text = data.tobytes()
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text)) / len(text),
    }


def compared(bits: float, data: Bytes, what: str = "held-out bytes") -> str:
    """A table of the model and the compressors."""
    rows = {"this model": bits, **compressed(data)}
    lines = [f"bits per byte on {len(data):,} {what}:"]
    return "\n".join(lines + [f"  {name:<12}{value:.3f}" for name, value in rows.items()])


def scored(model: Model, task: Task, count: int, seed: int) -> str:
    """A table of the model's score on fresh examples, chance, and the best there is."""
    rows = {"this model": score(model, task, count, (seed, AFTER_TRAINING)), "chance": task.chance, "best": task.best}
    lines = [f"{task.metric} on {count:,} fresh examples of {described(task)}:"]
    return "\n".join(lines + [f"  {name:<12}{value:.4g}" for name, value in rows.items()])
