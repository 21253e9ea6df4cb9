"""`scanl train`."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from scanl.cli.evaluate import examined
from scanl.cli.layers import options_of
from scanl.cli.parser import Parser
from scanl.cli.tasks import task_help
from scanl.data.base import Source
from scanl.errors import ConfigError, DivergenceError
from scanl.layers import get, names
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.questions import Model
from scanl.learning.run.config import OPTIONS, check_resumable, fitting_precision, flattened, seeded_model
from scanl.models import presets

RUN = "SCANL_RUN"  # passes the run folder to the processes that lightning starts


def run(argv: Sequence[str]) -> int:
    """Train, or resume with `--resume RUN`. Return exit code 130 when a signal ended the run."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return _join()
    config, resumed = parse(argv)
    folder, config, source, model = prepare(config, resumed)
    if not start(folder, config, source, model):
        return 130
    print(examined(model, source, source.exam_after_training()))
    return 0


def prepare(config: TrainConfig, resumed: RunFolder | None = None) -> tuple[RunFolder, TrainConfig, Source, Model]:
    """Check the options, the data and the model before anything is written. Then make the run folder."""
    if resumed is None and config.run.out is not None:
        RunFolder(config.run.out).refuse_if_used()
    source, model = checked(config)
    if config.run.init is not None and resumed is None:
        start_from(config.run.init, model)
    config.data.paths = [str(Path(path).resolve()) for path in config.data.paths]
    return resumed or RunFolder.create(config), config, source, model


def checked(config: TrainConfig) -> tuple[Source, Model]:
    """Check the options, the data and the model, and return the last two. Fill in what `auto` stands for."""
    config.check()
    if config.optimiser.steps is None and config.optimiser.minutes is None:
        config.optimiser.steps = 1000
    if config.run.precision == "auto":
        config.run.precision = fitting_precision(config.run.accelerator)
    model = seeded_model(config)
    source = config.source()
    source.check()
    # Importing Lightning takes seconds, so all checks that do not need it come first.
    from scanl.learning.run.train import make_trainer

    make_trainer(config)
    return source, model


def start(folder: RunFolder, config: TrainConfig, source: Source, model: Model) -> bool:
    """Train in the folder. If a signal ends the run, print how to resume and return False."""
    from scanl.learning.run.train import planned, train

    with folder.locked():
        steps = planned(folder, config, model, source)
        folder.remove_leftovers()
        folder.write_text(folder.config_file, config.to_yaml())  # the number of devices may have changed
        print(f"run folder {folder.path}: {_describe(config, model, source)}", file=sys.stderr, flush=True)
        os.environ[RUN] = str(folder.path.resolve())
        outcome = train(config, model, source, folder, steps)
    if outcome.interrupted:
        print(
            f"scanl: interrupted after step {outcome.step}; saved. Go on with:\n  scanl train --resume {folder.path}",
            file=sys.stderr,
        )
    elif outcome.ended == "until":
        print(f"scanl: the score is as good as --until {config.run.until:g} after step {outcome.step}", file=sys.stderr)
    elif outcome.ended == "patience":
        ended = f"{config.run.patience} measurements without a better one; ended after step {outcome.step}"
        print(f"scanl: {ended}", file=sys.stderr)
    if outcome.best_step is not None:
        kept = f"{folder.weights} has the weights of step {outcome.best_step}, the best measured"
        print(f"scanl: {kept}", file=sys.stderr)
    return not outcome.interrupted


def parse(argv: Sequence[str]) -> tuple[TrainConfig, RunFolder | None]:
    """Return the configuration, and the folder of the run to resume, if any."""
    argv, fresh = flat(argv), TrainConfig()
    args = _parser(fresh).parse(argv)
    if args.resume is None:
        return config_of(args, fresh), None
    folder = RunFolder.open(args.resume)
    config = folder.config()
    wanted = config_of(_parser(config).parse(argv), config)
    check_resumable(config, wanted)
    return wanted, folder


def _join() -> int:
    """Train as a further process of a distributed run.

    If the run diverges, all processes stop and the first one reports it. This process then exits with code 0, because
    lightning would otherwise kill the first one.
    """
    from scanl.learning.run.train import planned, train

    if RUN not in os.environ:
        raise ConfigError("train: started by another launcher; start it once, with --strategy ddp --devices N")
    folder = RunFolder.open(os.environ[RUN])
    config = folder.config()
    model, source = seeded_model(config), config.source()
    with suppress(DivergenceError):
        train(config, model, source, folder, planned(folder, config, model, source))
    return 0


def start_from(init: str, model: Model) -> None:
    """Load the weights of a run into a model. Raises ConfigError when the shapes differ."""
    weights, own = RunFolder.open(init).load_model().state_dict(), model.state_dict()
    for name in sorted(weights.keys() | own.keys()):
        found, expected = (tuple(d[name].shape) if name in d else None for d in (weights, own))
        if found != expected:
            raise ConfigError(
                f"train: init is {init}, in which {name} has shape {found}, expected {expected} because of this model; "
                "give the options of the model in that run"
            )
    model.load_state_dict(weights)


def _describe(config: TrainConfig, model: Model, source: Source) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    steps, minutes = config.optimiser.steps, config.optimiser.minutes
    length = f"{steps:,} steps" if steps is not None else f"{minutes:g} minutes"
    sequences = config.data.batch_size * config.run.devices * config.optimiser.accumulate
    return f"{config.stack.layer}, {parameters:,} parameters, {length} of {sequences} {source.describe()}"


def flat(argv: Sequence[str]) -> list[str]:
    """Return the arguments, with each `--config FILE` in parts (like config.yaml) replaced by flat option names."""
    given, left = [], iter(argv)
    for argument in left:
        joined = f"--config={next(left, '')}" if argument == "--config" else argument
        option, _, file = joined.partition("=")
        given.append(f"--config={_flat_file(file)}" if option == "--config" else argument)
    return given


def _flat_file(file: str) -> str:
    """Return the file's path if its options are flat, else its options as flat YAML text."""
    found = None
    if os.path.isfile(file):
        with suppress(yaml.YAMLError, UnicodeDecodeError):  # the parser reports the error
            found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    return file if found == flattened(found) else yaml.safe_dump(flattened(found), allow_unicode=True)


def _parser(defaults: TrainConfig) -> Parser:
    parser = options_parser("train", "Train a byte-level language model, or a model on a task.", defaults)
    parser.add_argument("--resume", type=str | None, default=None, metavar="RUN", help="go on with a run, exactly")
    return parser


def options_parser(command: str, description: str, defaults: TrainConfig) -> Parser:
    """Return a parser of the options of training."""
    parser = Parser(command, description, below=lambda: f"{_layer_help()}\n\n{task_help()}")
    parser.add_argument("paths", type=str, nargs="*", default=[], metavar="PATH", help="text to train on, as --data")
    parser.add_argument("--config", action="config", help="YAML file of these options")
    # Stored paths are not the default of --data, because positional paths would be added to them; they replace them.
    values = {**defaults.options(), "data": []}
    for name, option in OPTIONS.items():
        how: dict[str, Any] = {"type": option.kind}
        if option.kind is bool:
            how = {"action": "store_true"}
        elif option.kind == list[str]:
            how = {"type": str, "nargs": "*", "metavar": "PATH" if name == "data" else "COLUMN"}
        parser.add_argument(f"--{name.replace('_', '-')}", default=values[name], help=option.meaning, **how)
    return parser


def config_of(args: Any, defaults: TrainConfig) -> TrainConfig:
    """Return the configuration that parsed options say."""
    values = args.as_dict() if hasattr(args, "as_dict") else vars(args)
    given = {name: values[name] for name in OPTIONS}
    return TrainConfig(**{**given, "data": [*values["paths"], *values["data"]] or defaults.data.paths})


def _layer_help() -> str:
    lines = ["layers and their options (--layer-options.NAME VALUE):"]
    for name in names():
        if not get(name).bidirectional:
            options = "  ".join(f"{option.name}={option.default}" for option in options_of(name))
            lines.append(f"  {name}: {options}")
            lines += [f"      {option.name}: {option.meaning}." for option in options_of(name)]
    lines.append("whole models, with options by layer (--layer-options '{LAYER: {NAME: VALUE}}'):")
    lines += [f"  {name}: {', '.join(presets.get(name).layers)}" for name in presets.names()]
    return "\n".join(lines)
