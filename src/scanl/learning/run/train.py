"""Run training: from a configuration to a folder of results."""

import warnings
from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from scanl.errors import CheckpointError, ProcessError, ScanlError
from scanl.learning.questions import Model, answerer
from scanl.learning.run.checkpoint import read_checkpoint
from scanl.learning.run.config import TrainConfig, build_model, check_resumable
from scanl.learning.run.folder import check_tensors
from scanl.learning.run.metrics import MetricsLength, read_metrics
from scanl.learning.run.module import Learning
from scanl.learning.run.picture import save_loss_curve
from scanl.learning.run.run import Run
from scanl.learning.run.shards import check_shards
from scanl.learning.run.sharing import undivided_tensor


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


def train(run: Run, steps: int | None = None) -> Outcome:
    """Train as the run's configuration says, and write the results. The caller holds the lock of the folder.

    steps: the result of `planned`, to resume from the folder's checkpoint; None to begin. Afterwards the run's model is
    whole, in every process. Raises ProcessError when another process of the run has ended.
    """
    config, folder, source, model, trainer = run.config, run.folder, run.source, run.model, run.trainer
    assert folder is not None
    recorder, _, keeper = run.callbacks
    learning = Learning(model, config, source, run.algorithm)
    trainer.fit_loop.epoch_loop.max_steps = steps or learning.plan.steps
    with warnings.catch_warnings():
        # Lightning 2.6 calls torch's tree functions in a way that torch 2.13 deprecates.
        warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")
        # The states that a block returns may be views, and nobody writes into them.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        try:
            trainer.fit(learning, ckpt_path=folder.checkpoint if steps else None)
        except SystemExit as error:  # Lightning raises it on Ctrl-C while it starts, and on a second Ctrl-C
            raise KeyboardInterrupt from error
        except RuntimeError as error:
            if not _by_processes(error):
                raise
            raise ProcessError(
                f"train: another process of the run has ended, or does not answer: {str(error).splitlines()[0]}; "
                f"go on with: scanl train --resume {folder.path}"
            ) from error
    best = recorder.best
    if best.weights or learning.shared:
        weights = {name: undivided_tensor(value).cpu() for name, value in (best.weights or model.state_dict()).items()}
        if learning.shared:
            run.model = model = build_model(config, source.question)
        model.load_state_dict(weights)
    model = model.cpu()
    best_step = best.step if best.weights else None
    outcome = Outcome(model, trainer.global_step, keeper.interrupted, recorder.ended, best_step)
    if trainer.is_global_zero:
        folder.save_model(model, source.digest())
        if rows := read_metrics(folder):
            title = f"{config.entry.name}: {config.stack.layer}, dim {config.stack.dim}, depth {config.stack.depth}"
            save_loss_curve(folder, rows, title, run.report)
        if not keeper.interrupted:
            answerer(source.question).show(model.eval(), source, folder.path, config.run.seed)
    return outcome


def _by_processes(error: RuntimeError) -> bool:
    """Return whether an error says that processes lost each other. gloo raises a plain RuntimeError."""
    if isinstance(error, ScanlError):
        return isinstance(error, ProcessError)
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def planned(run: Run, *, joined: bool = False) -> int | None:
    """Return the total number of steps in the checkpoint of the run's folder, None without one.

    Raises CheckpointError for a damaged checkpoint, or one of another model or other data, and ConfigError for another
    configuration. Only the first process reads all shards to find damage.
    """
    folder = run.folder
    assert folder is not None
    if not folder.checkpoint.exists():
        return None
    stored = read_checkpoint(folder.checkpoint)
    if not joined:
        check_shards(stored, folder.checkpoint)
    stored_config = TrainConfig.from_values(stored["scanl"]["config"], folder.checkpoint)
    check_resumable(
        stored_config, run.config, f"{folder.checkpoint}; put back the {folder.config_file.name} of the run"
    )
    shapes = {name.removeprefix("model."): tuple(t.shape) for name, t in stored["state_dict"].items()}
    check_tensors(folder.checkpoint, shapes, run.model, run.config)
    if stored["scanl"]["corpus"] != run.source.digest():
        raise CheckpointError(
            f"train: the data of {folder.path} has changed since the checkpoint; put it back to resume; if its files "
            "have moved, named as before, name their new path: --data PATH"
        )
    MetricsLength(**stored["metrics"]).read(folder)
    return stored["scanl"]["plan"]["steps"]
