"""`scanl eval RUN`: bits per byte beside what compressors need, or the score of a task beside chance and best."""

import gzip
import lzma
from collections.abc import Sequence
from dataclasses import replace

from scanl.cli.parser import Parser
from scanl.cli.tasks import described
from scanl.errors import ConfigError
from scanl.learning import RunFolder, bits_per_byte, score
from scanl.learning.config import Model
from scanl.models import LanguageModel
from scanl.tasks import Task, read_corpus
from scanl.tasks.base import AFTER_TRAINING
from scanl.tasks.text import Bytes

COUNT = 1000  # examples, unless told


def run(argv: Sequence[str]) -> int:
    """Measure a run on all of its held-out text, or on fresh examples of its task."""
    parser = Parser("eval", "Bits per byte of a run on its held-out text, or its score on fresh examples of its task.")
    parser.add_argument("run", type=str, help="run folder")
    parser.add_argument("--length", type=int | None, default=None, help="of a task: another length; none: the run's")
    parser.add_argument("--count", type=int | None, default=None, help=f"of a task: examples; none: {COUNT}")
    args = parser.parse(argv)
    folder = RunFolder.open(args.run)
    config = folder.config()
    task = config.build_task()
    for name in ("length", "count"):
        value = getattr(args, name)
        if value is not None and task is None:
            raise ConfigError(f"eval: {name} is {value}, expected none because {args.run} was trained on text")
    if args.count is not None and args.count < 1:
        raise ConfigError(f"eval: count is {args.count}, expected at least 1")
    if task is not None and args.length is not None:
        task = replace(task, length=args.length)
    model = folder.load_model()
    if task is None:
        assert isinstance(model, LanguageModel)
        held_out = read_corpus(config.data, config.held_out).held_out
        print(compared(bits_per_byte(model, held_out), held_out))
    else:
        print(scored(model, task, COUNT if args.count is None else args.count, config.seed))
    return 0


def compressed(data: Bytes) -> dict[str, float]:
    """Bits per byte of `gzip -9` and `xz`, each given these bytes alone."""
    text = data.tobytes()
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text)) / len(text),
    }


def compared(bits: float, data: Bytes) -> str:
    """A table of the model and the compressors."""
    rows = {"this model": bits, **compressed(data)}
    lines = [f"bits per byte on {len(data):,} held-out bytes:"]
    return "\n".join(lines + [f"  {name:<12}{value:.3f}" for name, value in rows.items()])


def scored(model: Model, task: Task, count: int, seed: int) -> str:
    """A table of the model's score on fresh examples, chance, and the best there is."""
    rows = {"this model": score(model, task, count, (seed, AFTER_TRAINING)), "chance": task.chance, "best": task.best}
    lines = [f"{task.metric} on {count:,} fresh examples of {described(task)}:"]
    return "\n".join(lines + [f"  {name:<12}{value:.4g}" for name, value in rows.items()])
