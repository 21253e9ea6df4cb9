"""`scanl eval RUN`: measure a run's model on data that it was not trained on, and compare with other scores."""

from collections.abc import Mapping, Sequence

from scanl.cli.parser import Parser
from scanl.data.base import Exam, Source
from scanl.errors import ConfigError
from scanl.learning import RunFolder
from scanl.learning.evaluation import measures
from scanl.learning.questions import Model
from scanl.tasks.base import COUNT


def run(argv: Sequence[str]) -> int:
    """Measure a run on all of its held-out text, or on fresh examples of its task."""
    parser = Parser("eval", "Bits per byte of a run on its held-out text, or its score on fresh examples of its task.")
    parser.add_argument("run", type=str, help="run folder")
    parser.add_argument(
        "--data", type=str, nargs="*", default=[], metavar="PATH", help="new path of the run's text, or another text"
    )
    parser.add_argument("--length", type=int | None, default=None, help="of a task: another length; none: the run's")
    parser.add_argument("--count", type=int | None, default=None, help=f"of a task: examples; none: {COUNT}")
    args = parser.parse(argv)
    folder = RunFolder.open(args.run)
    config = folder.config()
    source = config.source()
    given = {name: value for name in ("data", "length", "count") if (value := getattr(args, name)) not in (None, [])}
    for name, value in given.items():
        if name not in source.examined_by:
            raise ConfigError(
                f"eval: {name} is {value}, but the run was trained on {config.source_name}, which does not use it; "
                f"leave out --{name}"
            )
    model, digest = folder.load_model_and_digest()
    print(examined(model, source, source.exam(digest, **given)))
    return 0


def examined(model: Model, source: Source, exam: Exam) -> str:
    """Return a table of the model's scores and the scores to compare with. Several scores have their names above."""
    found = measures(model, source, exam.examples)
    rows = {"this model": found}
    rows |= {name: dict(at) if isinstance(at, Mapping) else {source.metric: at} for name, at in exam.beside.items()}
    lines = [exam.title]
    if len(found) > 1:
        lines.append("  " + " " * 16 + "".join(f"{name:>16}" for name in found))
        for name, row in rows.items():
            cells = (f"{row[score]:{exam.digits}}" if score in row else "" for score in found)
            lines.append(f"  {name:<16}" + "".join(f"{cell:>16}" for cell in cells))
        return "\n".join(lines)
    return "\n".join([*lines, *(f"  {name:<12}{row[source.metric]:{exam.digits}}" for name, row in rows.items())])
