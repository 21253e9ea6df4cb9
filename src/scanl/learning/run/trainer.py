"""Make Lightning's trainer."""

import logging
from collections.abc import Sequence

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import TensorBoardLogger

from scanl.errors import ConfigError
from scanl.learning.run.callbacks import AtomicCheckpointIO
from scanl.learning.run.config import FSDP, TrainConfig
from scanl.learning.run.folder import RunFolder
from scanl.learning.run.strategy import ShardedStrategy
from scanl.learning.run.torchrun import machines


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
    logger = False
    if config.run.tensorboard:
        try:
            logger = TensorBoardLogger("" if folder is None else folder.path, name="tensorboard", version="")
        except ModuleNotFoundError as error:
            raise ConfigError("train: tensorboard is not installed: pip install 'scanl[tensorboard]'") from error
    try:
        sharded, nodes = config.run.strategy == FSDP, machines()
        return pl.Trainer(
            accelerator=config.run.accelerator,
            devices=config.run.devices // nodes,
            num_nodes=nodes,
            strategy=ShardedStrategy(config.run.devices, 1) if sharded else config.run.strategy,
            precision=config.run.precision,  # pyright: ignore[reportArgumentType]
            max_steps=steps,
            accumulate_grad_batches=config.training.accumulate,
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
    except (ValueError, RuntimeError, MisconfigurationException) as error:
        raise ConfigError(f"train: {str(error).splitlines()[0]}") from error
