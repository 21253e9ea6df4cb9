"""Lightning callbacks: signals, checkpoints, the time budget, metrics and progress."""

import math
import os
import signal
import stat
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor

from scanl.errors import DivergenceError
from scanl.files import writing
from scanl.learning.evaluation import measure
from scanl.learning.questions import Model
from scanl.learning.report import ScoreReport
from scanl.learning.run.checkpoint import write_checkpoint
from scanl.learning.run.folder import RunFolder
from scanl.learning.run.metrics import MetricsLength, ProgressBar, as_csv
from scanl.learning.run.module import Learning
from scanl.learning.run.shards import read_shards
from scanl.learning.run.sharing import own
from scanl.parallel.context import undivided

# SIGHUP comes when the terminal closes; Windows has none.
HANG_UP_SIGNALS = tuple(number for number in signal.Signals if number.name == "SIGHUP")


def leave_closed_terminal() -> None:
    """Send to nowhere what would be written to a terminal that is closed: writing there raises OSError."""
    for output in (1, 2):
        if stat.S_ISCHR(os.fstat(output).st_mode) and not os.isatty(output):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)


class AtomicCheckpointIO(CheckpointIO):
    """Write checkpoints atomically, and read them without unpickling objects."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read_shards(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        path.unlink()


class Keeper(pl.Callback):
    """Save a checkpoint before the first step, at intervals and at the end.

    On SIGINT, SIGTERM or SIGHUP, finish the step, save and stop; `interrupted` is then True. A SIGHUP that is ignored,
    as under nohup, stays ignored.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.interrupted = False
        self._handlers: dict[int, Any] = {}
        self._saved = time.monotonic()

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if threading.current_thread() is not threading.main_thread():  # which alone gets signals
            return
        # Before Lightning sets handlers of its own, which it takes away before `teardown`
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, *HANG_UP_SIGNALS)}
        self._handlers = {number: handler for number, handler in handlers.items() if handler is not None}

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Learning)

        def ask_to_stop(number: int, _frame: Any) -> None:
            if pl_module.wishes["stop"]:  # the second signal: stop at once, without saving
                raise KeyboardInterrupt
            pl_module.wishes["stop"] = True
            if number in HANG_UP_SIGNALS:
                leave_closed_terminal()

        # Replace Lightning's handlers, which would exit without saving.
        for number, handler in self._handlers.items():
            if number not in HANG_UP_SIGNALS or handler != signal.SIG_IGN:
                signal.signal(number, ask_to_stop)
        if trainer.global_step == 0:
            trainer.save_checkpoint(self.folder.checkpoint)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learning)
        overdue = time.monotonic() - self._saved >= pl_module.config.run.save_seconds
        pl_module.wishes["save"] = trainer.is_global_zero and overdue

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learning)
        if not pl_module.stepped:
            return
        self.interrupted = pl_module.agreed["stop"] and trainer.global_step < pl_module.plan.steps
        if pl_module.agreed["save"] or self.interrupted or trainer.global_step >= pl_module.plan.steps:
            parameters = pl_module.model.named_parameters()
            bad = next((name for name, parameter in parameters if not own(parameter).isfinite().all()), None)
            if any(pl_module.sum(bad is not None)):
                raise DivergenceError(
                    f"train: {bad or 'a weight of another process'} is not finite after step {trainer.global_step}; "
                    "the last checkpoint is from before; try a smaller --lr or a longer --warmup"
                )
            trainer.save_checkpoint(self.folder.checkpoint)
            self._saved = time.monotonic()
        trainer.should_stop = self.interrupted

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


class Clock(pl.Callback):
    """Turn a budget of minutes into a number of steps. Revise the number until nine tenths of the run are done."""

    FIRST = 8  # steps before the first estimate; compilation happens in the very first step

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Learning)
        self._began = time.monotonic() - pl_module.seconds
        self._times: list[float] = []

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learning)
        if pl_module.read % pl_module.config.training.accumulate:  # a step is under way
            return
        now = time.monotonic()
        self._times.append(now)
        pl_module.seconds = now - self._began
        pl_module.wishes["steps"] = 0
        minutes, done = pl_module.config.training.minutes, pl_module.plan.progress(trainer.global_step)
        if minutes is not None and trainer.is_global_zero and len(self._times) > self.FIRST and done < 0.9:
            a_step = (now - self._times[2]) / (len(self._times) - 3)
            remaining = max(1, round((60 * minutes - pl_module.seconds) / a_step))
            pl_module.wishes["steps"] = trainer.global_step + remaining

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learning)
        if pl_module.stepped:
            trainer.fit_loop.epoch_loop.max_steps = pl_module.plan.steps


class BestWeights:
    """The weights at the best measurement so far, and the number of measurements since then."""

    def __init__(self) -> None:
        self.value, self.step, self.since = math.inf, 0, 0
        self.weights: dict[str, Tensor] = {}

    def see(self, value: float, step: int, model: Model, report: ScoreReport) -> None:
        """Record a measurement of the model after a step. Copy the weights if it is the best so far."""
        self.since += 1
        if not self.weights or report.better(value, self.value):
            self.value, self.step, self.since = value, step, 0
            self.weights = {name: leaf.detach().to("cpu", copy=True) for name, leaf in model.state_dict().items()}


class Recorder(pl.Callback):
    """Write metrics.csv, measure, end the run early, and show progress.

    Only the first process writes. It measures alone too, unless each process has only a shard of the model.
    """

    def __init__(self, folder: RunFolder, report: ScoreReport) -> None:
        self.folder, self.report = folder, report
        self.measured: float | None = None  # the last measurement
        self.ended: Literal["until", "patience"] | None = None  # the option that has ended the run
        self.best = BestWeights()
        self._written: MetricsLength | None = None  # metrics.csv at the checkpoint that is resumed
        self._bar: ProgressBar | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["metrics"] = asdict(MetricsLength.now(self.folder)) if trainer.is_global_zero else None
        checkpoint["best"] = vars(self.best)

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._written = MetricsLength(**checkpoint["metrics"])
        vars(self.best).update(checkpoint["best"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Learning)
        if not trainer.is_global_zero:
            return
        # Steps after the checkpoint run again and write their rows again, so those rows are dropped.
        rows = b"" if self._written is None else self._written.read(self.folder)
        self.folder.write_text(self.folder.metrics, rows or ",".join(self.report.columns) + "\n")
        self._bar = ProgressBar(trainer.global_step)
        self._since = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Learning)
        if not pl_module.stepped:
            return
        step, config, report = trainer.global_step, pl_module.config, self.report
        last = step >= pl_module.plan.steps
        if config.run.eval_every is None:  # by default ten times in a run
            previous, now = (int(10 * pl_module.plan.progress(done)) for done in (step - 1, step))
            evaluate = last or now > previous
        else:
            evaluate = last or step % config.run.eval_every == 0
        if not (evaluate or step % config.run.log_every == 0):
            return
        loss = pl_module.loss_sum / max(pl_module.loss_count, 1)
        pl_module.loss_sum, pl_module.loss_count = 0.0, 0
        tokens, pl_module.tokens = pl_module.tokens, 0
        if evaluate:
            self._measure(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        row = report.row(loss) | {
            "step": step,
            "tokens_per_second": round(tokens * trainer.world_size / (time.monotonic() - self._since)),
            "lr": config.training.lr * pl_module.rate(step - 1),
        }
        if evaluate:
            row[report.measured] = self.measured
        with writing(self.folder.metrics), self.folder.metrics.open("a", encoding="utf-8") as file:
            file.write(as_csv([row], report.columns))
        for logger in trainer.loggers:
            logger.log_metrics({name: float(row[name]) for name in row if name != "step" and row[name] != ""}, step)
        assert self._bar is not None
        self._bar.show(row, report.line(row, self.measured), pl_module.plan.steps)
        self._since = time.monotonic()

    def _measure(self, trainer: pl.Trainer, learning: Learning) -> None:
        """Measure whole sequences. Tell all processes whether the run ends here or has diverged."""
        step, patience = trainer.global_step, learning.config.run.patience
        source, until, failed = learning.source, learning.config.run.until, False
        learning.settle()
        if trainer.is_global_zero or learning.sharded:
            with undivided():
                self.measured = measure(learning.model, source, source.unseen(step))
            failed = not math.isfinite(self.measured)
            if until is not None and not self.report.better(until, self.measured):
                self.ended = "until"
            if patience is not None:
                self.best.see(self.measured, step, learning.model, self.report)
                if self.best.since >= patience:
                    self.ended = "patience"
        ended, failures = learning.sum(self.ended is not None, failed)
        if failures:
            raise DivergenceError(
                f"train: {self.report.measured} is {self.measured} after step {step}; "
                "the last checkpoint is from before; try a smaller --lr or a longer --warmup"
            )
        if ended:
            learning.plan = learning.plan.cut(step)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._bar is not None:
            self._bar.close()
