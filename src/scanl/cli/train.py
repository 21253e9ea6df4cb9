"""`scanl train`."""

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from scanl.cli.evaluate import examined
from scanl.cli.layers import meanings, options_of
from scanl.cli.parser import Parser
from scanl.cli.tasks import task_help
from scanl.data.base import Source
from scanl.errors import ConfigError
from scanl.layers import get, names
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.questions import Model
from scanl.learning.run.config import check_resumable, fitting_precision, seeded_model
from scanl.models import presets

RUN = "SCANL_RUN"  # tells the processes that lightning starts which folder the first one has made


def run(argv: Sequence[str]) -> int:
    """Train, or go on with `--resume RUN`; exit code 130 when a signal ended it."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return _join()
    config, resumed = parse(argv)
    folder, config, source, model = prepare(config, resumed)
    if not start(folder, config, source, model):
        return 130
    print(examined(model, source, source.exam_after_training()))
    return 0


def prepare(config: TrainConfig, resumed: RunFolder | None = None) -> tuple[RunFolder, TrainConfig, Source, Model]:
    """Everything that can be refused, options, data and model, before anything is written; then the run folder."""
    config.check()
    if config.steps is None and config.minutes is None:
        config.steps = 1000
    if config.precision == "auto":
        config.precision = fitting_precision(config.accelerator)
    if resumed is None and config.out is not None:
        RunFolder(config.out).refuse_if_used()
    model = seeded_model(config)
    if config.init is not None and resumed is None:
        _start_from(config.init, model)
    source = config.source()
    source.check()
    # Lightning takes seconds to import: it comes after all that is refused without it.
    from scanl.learning.run.train import make_trainer

    make_trainer(config)
    config.data = [str(Path(path).resolve()) for path in config.data]
    return resumed or RunFolder.create(config), config, source, model


def start(folder: RunFolder, config: TrainConfig, source: Source, model: Model) -> bool:
    """Train in the folder; False when a signal ended it, after saying how to go on."""
    from scanl.learning.run.train import planned, train

    with folder.locked():
        steps = planned(folder, config, model, source)
        folder.remove_leftovers()
        folder.write_text(folder.config_file, config.to_yaml())  # a resumed run may have another number of devices
        print(f"run folder {folder.path}: {_describe(config, model, source)}", file=sys.stderr, flush=True)
        os.environ[RUN] = str(folder.path.resolve())
        outcome = train(config, model, source, folder, steps)
    if outcome.interrupted:
        print(
            f"scanl: interrupted after step {outcome.step}; saved. Go on with:\n  scanl train --resume {folder.path}",
            file=sys.stderr,
        )
    elif outcome.ended == "until":
        print(f"scanl: the score is as good as --until {config.until:g} after step {outcome.step}", file=sys.stderr)
    elif outcome.ended == "patience":
        ended = f"{config.patience} measurements without a better one; ended after step {outcome.step}"
        print(f"scanl: {ended}", file=sys.stderr)
    if outcome.best_step is not None:
        kept = f"{folder.weights} has the weights of step {outcome.best_step}, the best measured"
        print(f"scanl: {kept}", file=sys.stderr)
    return not outcome.interrupted


def parse(argv: Sequence[str]) -> tuple[TrainConfig, RunFolder | None]:
    """The configuration, and the folder of a run to go on with."""
    args = _parser(TrainConfig()).parse(argv)
    if args.resume is None:
        return _config(args), None
    folder = RunFolder.open(args.resume)
    config = folder.config()
    wanted = _config(_parser(config).parse(argv))
    check_resumable(config, wanted)
    return wanted, folder


def _join() -> int:
    """What a further process of a distributed run does.

    Its exit code is 0 for what all processes agree on, which the first one reports: lightning kills that one otherwise.
    """
    from scanl.learning.run.module import DivergenceError
    from scanl.learning.run.train import planned, train

    if RUN not in os.environ:
        raise ConfigError("train: started by another launcher; start it once, with --strategy ddp --devices N")
    folder = RunFolder.open(os.environ[RUN])
    config = folder.config()
    model, source = seeded_model(config), config.source()
    with suppress(DivergenceError):
        train(config, model, source, folder, planned(folder, config, model, source))
    return 0


def _start_from(init: str, model: Model) -> None:
    """Give a model the weights of a run; ConfigError for one of another shape."""
    weights, own = RunFolder.open(init).load_model().state_dict(), model.state_dict()
    for name in sorted(weights.keys() | own.keys()):
        found, expected = (tuple(d[name].shape) if name in d else None for d in (weights, own))
        if found != expected:
            raise ConfigError(f"train: init is {init}, whose {name} is {found}, expected {expected} of this model")
    model.load_state_dict(weights)


def _describe(config: TrainConfig, model: Model, source: Source) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    length = f"{config.steps:,} steps" if config.steps is not None else f"{config.minutes:g} minutes"
    start = f"{config.layer}, {parameters:,} parameters, {length} of {config.batch_size * config.devices}"
    return f"{start} {source.describe()}"


def _parser(defaults: TrainConfig) -> Parser:
    parser = Parser(
        "train", "Train a byte-level language model, or a model on a task.", epilog=f"{_layer_help()}\n\n{task_help()}"
    )
    parser.add_argument("paths", type=str, nargs="*", default=[], metavar="PATH", help="text to train on, as --data")
    parser.add_argument("--config", action="config", help="YAML file of these options")
    parser.add_argument("--resume", type=str | None, default=None, metavar="RUN", help="go on with a run, exactly")
    hints = get_type_hints(TrainConfig, include_extras=True)
    for f in fields(TrainConfig):
        kind, text = get_args(hints[f.name])
        how: dict[str, Any] = {"type": kind}
        if kind is bool:
            how = {"action": "store_true"}
        elif kind == list[str]:
            how = {"type": str, "nargs": "*", "metavar": "PATH"}
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=getattr(defaults, f.name), help=text, **how)
    return parser


def _config(args: Any) -> TrainConfig:
    values = args.as_dict() if hasattr(args, "as_dict") else vars(args)
    config = TrainConfig(**{f.name: values[f.name] for f in fields(TrainConfig)})
    config.data = [*values["paths"], *config.data]
    return config


def _layer_help() -> str:
    lines = ["layers and their options (--layer-options.NAME VALUE):"]
    for name in names():
        if not get(name).bidirectional:
            options = "  ".join(f"{option}={default}" for option, default in options_of(name).items())
            lines.append(f"  {name}: {options}")
            lines += [f"      {text}" for text in meanings(name)]
    lines.append("whole models, with options by layer (--layer-options '{LAYER: {NAME: VALUE}}'):")
    lines += [f"  {name}: {', '.join(presets.get(name).layers)}" for name in presets.names()]
    return "\n".join(lines)
