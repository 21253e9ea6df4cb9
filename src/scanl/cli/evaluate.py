"""`scanl eval RUN`: measure a run's model on data that it was not trained on, and compare with other scores."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from scanl.cli.parser import Parser
from scanl.data.base import Exam, PlayedSource, Source
from scanl.data.shards.listing import absolute
from scanl.errors import CheckpointError, ConfigError, DataError
from scanl.learning import RunFolder
from scanl.learning.evaluation import baselines, measures, trained, written
from scanl.learning.questions import Model
from scanl.models import LanguageModel
from scanl.options import PositiveOrNone
from scanl.tasks.base import COUNT


def run(argv: Sequence[str]) -> int:
    """Measure a run on all of the data that it was not trained on, or on fresh examples of its task."""
    parser = Parser("eval", "Score of a run on data that it was not trained on: bits per byte, accuracy, ...")
    parser.add_argument("run", type=str, help="run folder")
    parser.add("--data", str, "new path of the run's files, or another text", [], nargs="*", metavar="PATH")
    parser.add("--length", int | None, "of a task: another length; none: the run's")
    parser.add("--count", PositiveOrNone, f"examples to measure; none: all, or {COUNT} of a task")
    parser.add_argument("--bits", action="store_true", help="of a text: the bytes that `scanl pack` makes of it too")
    args = parser.parse(argv)
    folder = RunFolder.open(args.run)
    config = folder.config()
    if args.bits and not folder.source.is_text:
        raise ConfigError(f"eval: bits is given, but the run is on {config.entry.name}, expected a run on text")
    accepted = {*config.entry.option_names(), *inspect.signature(type(folder.source).exam).parameters}
    for name in ("data", "length", "count"):
        if getattr(args, name) not in (None, []) and name not in accepted:
            raise ConfigError(
                f"eval: {name} is {getattr(args, name)}, but the run was trained on {config.entry.name}, which does "
                f"not use it; leave out --{name}"
            )
    digest = folder.stored()[1].get("corpus")
    paths = [absolute(path) for path in args.data] or config.source.data
    moved, config.source.data = paths != config.source.data, paths
    source = learnt = config.open_source() if moved else folder.source
    if digest == _digest(source, moved):
        if args.length is not None:
            config.source.data_options["length"] = args.length
            source = config.open_source()
        exam = source.exam(**({} if args.count is None else {"count": args.count}))
    elif moved and "held_out" in accepted:
        config.source.held_out, learnt = 1.0, folder.source
        exam = config.open_source().exam()
        exam = replace(exam, title=f"another text than the run's: {exam.title}")
    elif moved and folder.source.is_own and digest == folder.source.digest():
        learnt, source = folder.source, folder.source.elsewhere(Path(paths[0]))
        exam = source.exam()
        exam = replace(exam, title=f"other data than the run's: {exam.title.replace(' in the test part of', ' of')}")
    else:
        reason = "has changed since training" if digest is not None else "may differ from the data of training"
        advice = "put it back"
        if "data" in accepted:
            ways = (
                ", name its new path, or measure another text" if "held_out" in accepted else ", or name its new path"
            )
            advice += f"{ways}: --data PATH. At the new path its files and folders must have the same names"
        raise CheckpointError(
            f"eval: the data of the run, or its split, {reason}, so the run may have been trained on what is held out "
            f"now; {advice}"
        )
    folder.load_model(learnt.question)  # raises if the weights are not of config.yaml
    model = trained(folder)
    print(examined(model, source, exam))
    if args.bits:
        from scanl.packing import pack  # with numba, which takes a second

        text = source.held_out_bytes()
        packed = len(pack(text, cast(LanguageModel, model)))
        print(f"scanl pack: {len(text):,} bytes in {packed:,}, {8 * packed / len(text):{exam.digits}} bits per byte")
    if isinstance(source, PlayedSource) and (line := source.play(model)):
        print(line)
    if getattr(source.question, "written", ()):
        print(_written(model, source, exam))
    return 0


def _written(model: Model, source: Source, exam: Exam) -> str:
    if find_spec("sacrebleu") is None:
        return "BLEU is not measured: sacrebleu is not installed; pip install 'scanl[bleu]'"
    return "\n".join(
        f"{name} of what the model writes: {value:.2f}" for name, value in written(model, source, exam.examples).items()
    )


def _digest(source: Source, moved: bool) -> str | None:
    """Return the digest of the data; None for other data than the run's that cannot be learnt from."""
    try:
        return source.digest()
    except DataError:
        if moved:
            return None
        raise


def examined(model: Model, source: Source, exam: Exam) -> str:
    """Return a table of the model's scores and the scores to compare with."""
    return compared(measures(model, source, exam.examples, question=exam.question), source, exam)


def compared(scores: Mapping[str, float], source: Source, exam: Exam) -> str:
    """Return a table of scores and those to compare with. Several scores have their names above."""
    rows: dict[str, Mapping[str, float]] = {"this model": scores}
    rows |= {name: {source.metric: value} for name, value in exam.beside.items()}
    rows |= baselines(source, exam)
    lines, width = [exam.title], 2 + max(map(len, rows))
    if len(scores) > 1:
        lines.append("  " + " " * width + "".join(f"{name:>16}" for name in scores))
        for name, row in rows.items():
            cells = (f"{row[score]:{exam.digits}}" if score in row else "" for score in scores)
            lines.append(f"  {name:<{width}}" + "".join(f"{cell:>16}" for cell in cells))
        return "\n".join(lines)
    return "\n".join([*lines, *(f"  {name:<{width}}{row[source.metric]:{exam.digits}}" for name, row in rows.items())])
