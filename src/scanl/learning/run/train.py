"""Run training: from a configuration to a folder of results."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger

from scanl.data.base import Source
from scanl.errors import ConfigError
from scanl.learning.questions import Model
from scanl.learning.run.callbacks import AtomicCheckpointIO, Clock, Keeper, Recorder
from scanl.learning.run.checkpoint import read_checkpoint
from scanl.learning.run.config import TrainConfig, check_resumable
from scanl.learning.run.folder import RunFolder, check_tensors
from scanl.learning.run.metrics import Written, read_metrics
from scanl.learning.run.module import Learning
from scanl.learning.run.picture import save_forecast, save_loss_curve
from scanl.models import Forecaster, LanguageModel

SAMPLE_BYTES = 600


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    step: last step.   interrupted: whether a signal ended the run.   ended: the option that ended it early, or None.
    model: the model as written to the folder: after the last step, or with `patience` after `best_step`.
    """

    model: Model
    step: int
    interrupted: bool
    ended: Literal["until", "patience"] | None
    best_step: int | None


def train(config: TrainConfig, model: Model, source: Source, folder: RunFolder, steps: int | None = None) -> Outcome:
    """Train as `config` says, and write the results to the folder. The caller holds its lock (`RunFolder.locked`).

    steps: the result of `planned`, to resume from the folder's checkpoint; None to begin.
    """
    learning = Learning(model, config, source)
    recorder, keeper = Recorder(folder), Keeper(folder)
    trainer = make_trainer(config, steps or learning.plan.steps, [recorder, Clock(), keeper], folder)
    with warnings.catch_warnings():
        # Lightning 2.6 calls torch's tree functions in a way that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        try:
            trainer.fit(learning, ckpt_path=folder.checkpoint if steps else None)
        except SystemExit as error:  # Lightning raises it on Ctrl-C while it starts, and on a second Ctrl-C
            raise KeyboardInterrupt from error
    model, best = model.cpu(), recorder.best
    if best.weights:
        model.load_state_dict(best.weights)
    best_step = best.step if best.weights else None
    outcome = Outcome(model, trainer.global_step, keeper.interrupted, recorder.ended, best_step)
    if trainer.is_global_zero:
        folder.save_model(model, source.digest())
        if rows := read_metrics(folder):
            title = f"{config.source_name}: {config.stack.layer}, dim {config.stack.dim}, depth {config.stack.depth}"
            save_loss_curve(folder, rows, title, source)
        if not keeper.interrupted and source.reads_bytes:
            assert isinstance(model, LanguageModel)
            folder.write_text(folder.sample, sample(model, SAMPLE_BYTES, config.run.seed))
        if not keeper.interrupted and isinstance(model, Forecaster):
            save_forecast(folder, source, model.eval())
    return outcome


def make_trainer(
    config: TrainConfig,
    steps: int = 1,
    callbacks: Sequence[pl.Callback] = (),
    folder: RunFolder | None = None,
    checkpoints: CheckpointIO | None = None,
) -> pl.Trainer:
    """Make Lightning's trainer, with everything switched off that scanl does itself.

    Raises ConfigError for options that Lightning refuses. folder: for TensorBoard's event files.   checkpoints: what
    writes and reads them; None: whole files.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # silence its start messages
    try:
        at = "" if folder is None else folder.path
        logger = TensorBoardLogger(at, name="tensorboard", version="") if config.run.tensorboard else False
        return pl.Trainer(
            accelerator=config.run.accelerator,
            devices=config.run.devices,
            strategy=config.run.strategy,
            precision=config.run.precision,  # pyright: ignore[reportArgumentType]
            max_steps=steps,
            accumulate_grad_batches=config.optimiser.accumulate,
            max_epochs=-1,
            callbacks=list(callbacks),
            plugins=[checkpoints or AtomicCheckpointIO()],
            logger=logger,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
        )
    except ModuleNotFoundError as error:
        raise ConfigError("train: tensorboard is not installed: pip install 'scanl[tensorboard]'") from error
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        raise ConfigError(f"train: {str(error).splitlines()[0]}") from error


def sample(model: LanguageModel, count: int, seed: int) -> bytes:
    """Generate `count` bytes from the beginning of a text: the prompt is the byte that separates files."""
    model.eval()
    tokens = model.generate(torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=count, temperature=0.8, seed=seed)
    return bytes(int(token) for token in tokens)


def planned(folder: RunFolder, config: TrainConfig, model: Model, source: Source) -> int | None:
    """Return the total number of steps in the folder's checkpoint, None without one.

    Raises CheckpointError for a checkpoint of another model or other data, ConfigError for another configuration.
    """
    if not folder.checkpoint.exists():
        return None
    stored = read_checkpoint(folder.checkpoint)
    before = TrainConfig.from_values(stored["scanl"]["config"], folder.checkpoint)
    check_resumable(before, config, f"{folder.checkpoint}; put back the {folder.config_file.name} of the run")
    shapes = {name.removeprefix("model."): tuple(t.shape) for name, t in stored["state_dict"].items()}
    check_tensors(folder.checkpoint, shapes, model, config)
    source.refuse_other(stored["scanl"]["corpus"])
    Written(**stored["metrics"]).read(folder)
    return stored["scanl"]["plan"]["steps"]
