"""`scanl train`."""

import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from scanl.cli.evaluate import examined
from scanl.cli.parser import Parser
from scanl.data import Source, Table, sources
from scanl.data.series.source import SeriesSource
from scanl.data.series.table import ASKS
from scanl.data.shards.listing import absolute
from scanl.data.splits import TEST
from scanl.errors import ConfigError, DivergenceError, ScanlError
from scanl.files import PRETRAINED_NAME
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.progress import PrintedProgress
from scanl.learning.questions import Model, answerer
from scanl.learning.report import BYTES
from scanl.learning.run import torchrun
from scanl.learning.run.config import (
    OWN_SOURCES,
    RunConfig,
    TrainingConfig,
    check_resumable,
    rows_in_a_step,
    update_steps,
)
from scanl.learning.run.configuration import add_options, names_of
from scanl.learning.run.run import Run
from scanl.models.saving import QUANTIZED_KEY
from scanl.options import options

# The modules that choose a model for a table, by the question.
CHOOSERS = {
    "forecast": "scanl.learning.forecasting.choose",
    **dict.fromkeys(("classify", "label", "regress"), "scanl.learning.series.choose"),
}
TUNER = "scanl.learning.forecasting.tune"  # tunes the model in the package, by --init pretrained
# Options of the training loop: with one of them, a model is trained as the line says and nothing is chosen.
CHOICE_OPTIONS = {"minutes", "lr", "out", "seed"}  # of the same parts, but read by a choice too
LOOP_OPTIONS = (options(TrainingConfig).keys() | options(RunConfig).keys()) - CHOICE_OPTIONS
LOOP_OPTIONS |= {"recursive", "carry_state", "inputs_alone"}

CHOOSING_SHARE = 0.75  # share of the choosing in a run that chooses, as its progress shows it; the last fit follows
USE_COMMANDS: Mapping[str | None, str] = {  # by question
    BYTES: "generate {} --prompt 'It was'",
    "forecast": "forecast {} --out next.csv --picture next.png",
    "generate": "generate {}",
    **dict.fromkeys(("classify", "label", "regress"), "predict {} --data NEW"),
}
PRETRAINING = "pretraining"  # folder in a run's, of its self-pretraining
RUN = "SCANL_RUN"  # passes the run folder to the processes that lightning starts


# Options of other names with which a source says the same.
SIMILAR_OPTIONS = {
    "sequence_length": ("length", "max_length", "frames", "shots"),
    "eval_examples": ("eval_bytes",),
    "eval_bytes": ("eval_examples",),
    "held_out": ("test", "validation"),
}


def run(argv: Sequence[str]) -> int:
    """Train, or resume with `--resume RUN`. Return exit code 130 when a signal ended the run."""
    if torchrun.started():
        if torchrun.rank() > 0:
            return _join(torchrun.told())
        try:
            return _begin(argv)
        except ScanlError as error:
            torchrun.tell(error=str(error))
            raise
    if os.environ.get("LOCAL_RANK", "0") == "0":
        return _begin(argv)
    if RUN not in os.environ:
        raise ConfigError("train: started by another launcher; start it with torchrun, or once, with --devices N")
    return _join(os.environ[RUN])


def _begin(argv: Sequence[str]) -> int:
    """Train as the only process, or the first one."""
    config, resumed = parse(argv)
    if module := chooser(config, fixed := options_of_line(argv, config), resumed):
        if torchrun.started():
            raise ConfigError("train: torchrun has started it, expected one process, as a model is chosen")
        return choose_and_save(config, fixed, module, resumed)
    ready = prepare(config, resumed)
    if resumed is None:
        note(ready.source)
    if not pretrained(ready) or not start(ready):
        return 130
    print(examined(ready.model, ready.source, ready.source.exam(sample=True)))
    assert ready.folder is not None
    say_next(ready.folder, config, ready.source)
    return 0


def options_of_line(argv: Sequence[str], config: TrainConfig) -> dict[str, Any]:
    """Return the options that the command line or its `--config` has, by name, with their values in `config`."""
    values = _parser(TrainConfig()).parse(argv, defaults=False)
    every = config.options()
    return {name: every[name] for name, part in names_of(TrainConfig).items() if f"{part}.{name}" in values}


def chooser(config: TrainConfig, fixed: Mapping[str, Any], resumed: RunFolder | None = None) -> str | None:
    """Return the module that chooses what the line leaves open; None if the line sets the training loop.

    For a table, backtests choose a forecaster of quantiles, or how the model in the package is tuned, and the
    validation part chooses other models.
    """
    if config.run.init == PRETRAINED_NAME:
        importlib.import_module(TUNER).check(config, fixed)
        return TUNER
    question = config.source.question
    if resumed is not None or question not in CHOOSERS or config.entry.name != Table.name:
        return None
    by_loop = fixed.keys() & LOOP_OPTIONS
    if question == "forecast":
        by_loop |= fixed.keys() & {"split"}
        by_loop |= {"distribution"} if fixed.get("distribution", "quantiles") != "quantiles" else set()
    chosen_before = config.head.start or config.head.filters
    return None if by_loop and not chosen_before else CHOOSERS[question]


def choose_and_save(
    config: TrainConfig, fixed: Mapping[str, Any], module: str, resumed: RunFolder | None = None
) -> int:
    """Choose a model, write its run folder, and print its scores on the test part.

    module: chooses, as `chooser` says.   resumed: the folder of a run that was interrupted before it had weights.
    """
    by = importlib.import_module(module)
    config.check()
    refuse_unused(config)
    folder = resumed or RunFolder.fresh(config)
    source = cast(SeriesSource, config.open_source())
    source.check()
    note(source)
    with PrintedProgress() as progress:
        choice = by.choose(source, fixed, config.training.minutes or by.MINUTES, progress.part(0.0, CHOOSING_SHARE))
        config = config.changed({**choice.options, "minutes": None})
        config.check()
        config.source.data = [str(Path(path).resolve()) for path in config.source.data]
        collection, source = source.collection, cast(SeriesSource, config.open_source())
        source.collection = collection
        model = by.fitted(source, choice, config.run.seed, progress.part(CHOOSING_SHARE, 1.0))
    if resumed is None:
        folder.create(config)
    print(f"{choice.sentence}\nrun folder {folder.path}: config.yaml has the options", file=sys.stderr, flush=True)
    with folder.locked():
        folder.save_model(model, source.digest())
        folder.write_text(folder.choice, choice.table())
        if source.parts[TEST]:
            answerer(source.question).show(model, source, folder.path, config.run.seed)
    if source.parts[TEST]:
        print(examined(model, source, source.exam(sample=True)))
    say_next(folder, config, source)
    return 0


def say_next(folder: RunFolder, config: TrainConfig, source: Source) -> None:
    """Say by which command a run is used."""
    question = BYTES if source.metric == BYTES else config.source.question
    use = USE_COMMANDS.get(question, "inspect {}").format(shlex.quote(str(folder.path)))
    print(f"next: scanl {use}", file=sys.stderr)


def note(source: Source) -> None:
    """Print the lines that a source has on its data."""
    for line in source.notes:
        print(f"scanl: {line}", file=sys.stderr, flush=True)


def prepare(config: TrainConfig, resumed: RunFolder | None = None) -> Run:
    """Check the options, the data and the model before anything is written. Then make the run folder."""
    config.check()
    refuse_unused(config)
    folder = resumed or RunFolder.fresh(config)
    ready = _made(config, folder)
    _ = ready.trainer  # importing Lightning takes seconds, so the checks that do not need it come first
    if config.entry.name in OWN_SOURCES:
        config.source.data = [absolute(path) for path in config.source.data]
    if resumed is None:
        folder.create(config)
    return ready


def _made(config: TrainConfig, folder: RunFolder) -> Run:
    """Return a run whose model has the weights of `--init`, until a checkpoint has others."""
    ready = Run(config, folder)
    if config.run.init is not None and not folder.checkpoint.exists():
        start_from(config.run.init, ready.model)
    return ready


def refuse_unused(config: TrainConfig) -> None:
    """Raise ConfigError for an option that other sources use but this one does not."""
    entry, defaults = config.entry, TrainConfig().options()
    names, others = (
        entry.option_names(),
        {name for source_name in sources.names() for name in sources.get(source_name).option_names()},
    )
    for name, value in vars(config.source).items():
        if name == "data" or name not in others or name in names or value == defaults[name]:
            continue
        similar = [other for other in SIMILAR_OPTIONS.get(name, ()) if other in names]
        flags = [f"--{_flag(other)}" if other in defaults else f"--data-options.{other}" for other in similar]
        hint = f"give {' and '.join(flags)}" if flags else f"leave out --{_flag(name)}"
        if config.source.question is None and entry.name in OWN_SOURCES and name in Table.option_names():
            hint = f"to read a table, give --question too: {', '.join(ASKS)}"
        raise ConfigError(f"train: {name} is {value}, but {entry.name} does not use it; {hint}")


def pretrained(ready: Run) -> bool:
    """Take the steps of --pretrain, or go on with them, and start from their weights, unless the run has begun.

    Return False if a signal ends them.
    """
    config, folder = ready.config, ready.folder
    assert folder is not None
    if config.training.pretrain is None or folder.checkpoint.exists() or folder.weights.exists():
        return True
    first = RunFolder(folder.path / PRETRAINING)
    if not first.weights.exists():
        begun = first.config_file.exists()
        of_first = {"pretrain": None, "inputs_alone": True, "out": str(first.path), "minutes": None}
        changed = config.changed({**of_first, "steps": config.training.pretrain, "until": None, "patience": None})
        if not start(prepare(changed, first if begun else None), folder):
            return False
    body = {name: value for name, value in first.stored()[0].items() if not name.startswith("head.")}
    ready.model.load_state_dict({**ready.model.state_dict(), **body})
    return True


def start(ready: Run, resumable: RunFolder | None = None) -> bool:
    """Train in the folder. If a signal ends the run, print how to resume and return False.

    resumable: the folder to resume, by default the run's own.
    """
    from scanl.learning.run.train import planned, train

    config, folder = ready.config, ready.folder
    assert folder is not None
    with folder.locked():
        steps = planned(ready)
        folder.remove_leftovers()
        folder.write_text(folder.config_file, config.to_yaml())  # the number of devices may have changed
        print(f"run folder {folder.path}: {_describe(ready)}", file=sys.stderr, flush=True)
        updates = update_steps(config, ready.algorithm) or (
            config.source.sequence_length if config.source.carry_state else None
        )
        print(ready.algorithm.describe(updates), file=sys.stderr, flush=True)
        os.environ[RUN] = str(folder.path.resolve())
        if torchrun.started():
            torchrun.tell(folder=os.environ[RUN])
        outcome = train(ready, steps)
    if outcome.interrupted:
        path = (resumable or folder).path
        print(
            f"scanl: interrupted after step {outcome.step}; saved. Go on with:\n  scanl train --resume {path}",
            file=sys.stderr,
        )
    elif outcome.ended == "until":
        print(f"scanl: the score is as good as --until {config.run.until:g} after step {outcome.step}", file=sys.stderr)
    elif outcome.ended == "patience":
        ended = f"{config.run.patience} measurements without a better one; ended after step {outcome.step}"
        print(f"scanl: {ended}", file=sys.stderr)
    if outcome.best_step is not None:
        message = f"{folder.weights} has the weights of step {outcome.best_step}, the best measured"
        print(f"scanl: {message}", file=sys.stderr)
    return not outcome.interrupted


def parse(argv: Sequence[str]) -> tuple[TrainConfig, RunFolder | None]:
    """Return the configuration, and the folder of the run to resume, if any."""
    args = _parser(TrainConfig()).parse(argv)
    if args.resume is None:
        return by_launcher(TrainConfig.parsed(args), argv), None
    folder = RunFolder.open(args.resume)
    config = folder.config()
    if folder.weights.exists() and folder.stored()[1].get(QUANTIZED_KEY):
        raise ConfigError(
            f"train: {args.resume} has weights of whole numbers, which are not trained; go on with the float run"
        )
    if folder.choice.exists():
        raise ConfigError(
            f"train: {args.resume} is complete: its model was chosen; to choose again, leave out --resume"
        )
    changed = by_launcher(TrainConfig.parsed(_parser(config).parse(argv)), argv)
    if changed.run.out not in (config.run.out, args.resume):
        raise ConfigError(f"train: out is {changed.run.out}, expected none because --resume goes on in {args.resume}")
    check_resumable(config, changed)
    return changed, folder


def by_launcher(config: TrainConfig, argv: Sequence[str]) -> TrainConfig:
    """Return the configuration with torchrun's number of processes, if it is the launcher.

    Raises ConfigError if the command line has another number.
    """
    if not torchrun.started():
        return config
    processes = torchrun.processes()
    if "devices" in options_of_line(argv, config) and config.run.devices != processes:
        raise ConfigError(
            f"train: devices is {config.run.devices}, expected {processes} because torchrun has started as many "
            "processes; leave the option out"
        )
    return config.changed({"devices": processes})


def _join(path: str) -> int:
    """Train as a further process of a distributed run, whose folder the first one has made.

    If the run diverges, all processes stop and the first one reports it. This process then exits with code 0, because
    lightning would otherwise kill the first one.
    """
    from scanl.learning.run.train import planned, train

    folder = RunFolder.open(path)
    ready = _made(folder.config(), folder)
    with suppress(DivergenceError):
        train(ready, planned(ready, joined=True))
    return 0


def start_from(init: str, model: Model) -> None:
    """Load the weights of a run into a model. Raises ConfigError when the shapes differ."""
    weights, parameters = RunFolder.open(init).stored()[0], model.state_dict()
    for name in sorted({*weights, *parameters}):
        shape, expected = (tuple(d[name].shape) if name in d else "none" for d in (weights, parameters))
        if shape != expected:
            raise ConfigError(
                f"train: init is {init}, in which {name} has shape {shape}, expected {expected} because of this model; "
                "give the options of the model in that run"
            )
    model.load_state_dict(weights)


def _describe(ready: Run) -> str:
    config = ready.config
    parameters = sum(p.numel() for p in ready.model.parameters())
    steps, minutes = config.training.steps, config.training.minutes
    length = f"{steps:,} steps" if steps is not None else f"{minutes:g} minutes"
    sequences = rows_in_a_step(config) * config.training.accumulate
    return f"{config.stack.layer}, {parameters:,} parameters, {length} of {sequences} {ready.source}"


def _flag(name: str) -> str:
    return name.replace("_", "-")


EXAMPLES = {
    "scanl train --data book.txt --minutes 10": "a text, which `scanl generate RUN` continues",
    "scanl train --data sales.csv --question forecast --target sold --time day --horizon 7": (
        "a table, for `scanl forecast RUN`"
    ),
    "scanl train --data moves.csv --question classify --target kind --series id": "series, for `scanl predict RUN`",
    "scanl train --data sounds --question classify --out runs/sounds": "recordings or pictures, in a folder a class",
    "scanl train --data parity --layer deltanet --dim 64 --depth 2 --steps 500": "a task that a layer can solve or not",
}


def _parser(defaults: TrainConfig) -> Parser:
    elsewhere = {
        when: importlib.import_module(CHOOSERS[question]).DEFAULTS
        for when, question in (("to forecast", "forecast"), ("to classify", "classify"))
    }
    description = "Train a model on your files, a data set or a task; it is kept in a run folder."
    parser = options_parser("train", description, defaults, examples=EXAMPLES, elsewhere=elsewhere)
    parser.add("--resume", str | None, "go on with a run, exactly", metavar="RUN")
    return parser


def options_parser(command: str, description: str, defaults: TrainConfig, **manual: Any) -> Parser:
    """Return a parser of the options of training. manual: examples and other defaults, as `Manual` has them."""
    parser = Parser(command, description, words="--data", topics=TrainConfig.topics, **manual)
    parser.topics |= add_options(parser, defaults)
    parser.add_config_file("YAML file of these options, in parts like config.yaml")
    return parser
