"""Training as a Lightning module: batches, the algorithm's updates, the optimizer, and what a checkpoint saves."""

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from scanl.data.base import PackedDocuments, Source
from scanl.data.batch import Batch
from scanl.errors import CheckpointError, DivergenceError
from scanl.layers.base import Layer
from scanl.layers.state import leaves, map_leaves
from scanl.learning.algorithms import Algorithm
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.questions import Model
from scanl.learning.questions.base import counted
from scanl.learning.run.config import TrainConfig, make_algorithm, rows_in_a_step, update_steps
from scanl.learning.run.plan import UNKNOWN_PLAN, RunLength, rate
from scanl.learning.run.sharing import PATIENCE, own, shard, share_sequences, undivided_tensor
from scanl.learning.run.strategy import ShardedStrategy
from scanl.models import Stack
from scanl.parallel.context import meet
from scanl.parallel.ranks import RankGroup
from scanl.parallel.stretches import bounds


class Learning(pl.LightningModule):
    """Train a model on a source. A batch is cut into the algorithm's updates; `accumulate` updates make a step.

    An update without an answer changes the learner alone, and the next one goes on with the same step.

    Resuming is exact. The parameters, the optimizer, the learner and the place in the data are saved; everything else
    is a pure function of (seed, step): the data order, the learning rate, and the random numbers, which are seeded
    again for every update.

    Between the forward and the backward pass the processes agree on four things: whether to stop, whether to save, the
    number of steps, and whether to give up because a loss is not finite. The callbacks read the result from `agreed`.
    They also exchange their losses: what is learnt is the mean over all answers of the batch, wherever they are.
    """

    def __init__(self, model: Model, config: TrainConfig, source: Source, algorithm: Algorithm | None = None) -> None:
        super().__init__()
        self.model = model
        self.config = config
        self.source = source
        self.algorithm = algorithm or make_algorithm(config, source)
        self.plan = UNKNOWN_PLAN if config.training.steps is None else RunLength(config.training.steps)
        self.seconds = 0.0  # duration of the run so far
        self.learner: Any = None
        self.restored: dict[str, Tensor] | None = None
        self.wishes: dict[str, float] = {"stop": False, "save": False, "steps": 0}
        self.agreed = {"stop": False, "save": False}
        self.loss_sum, self.loss_count = 0.0, 0  # since the last row of the metrics
        self.tokens = 0  # read by this process since then
        self.read = 0  # updates of the present step
        self.place = (0, 0)  # the batch of the next update, and the step of its sequences with which that begins
        self.batch: Batch | None = None  # the batch of the place, once an update of it was made
        self.answered = True  # whether the present step has an answer

    def configure_model(self) -> None:
        run, strategy = self.config.run, self.trainer.strategy
        for stack in self.model.modules():
            if isinstance(stack, Stack):
                stack.recompute = self.config.training.recompute
        if self.trainer.world_size > 1:
            mesh = (self.trainer.world_size // run.sequence_parallel, run.sequence_parallel)
            digest = hashlib.sha256(self.config.to_yaml().encode()).hexdigest()
            meet(RankGroup(timeout=PATIENCE), False, strategy.root_device, mesh=mesh, configuration=digest)
        if run.sequence_parallel > 1:
            device = strategy.root_device.type
            share_sequences(self.model, device, self.trainer.world_size, run.sequence_parallel)
        if isinstance(strategy, ShardedStrategy):
            shard(self.model, strategy.mesh)

    @property
    def sharded(self) -> bool:
        """Whether each process has only a shard of the model."""
        return isinstance(self.trainer.strategy, ShardedStrategy)

    @property
    def shared(self) -> bool:
        """Whether the model cannot run in one process as it is now."""
        return self.sharded or self.config.run.sequence_parallel > 1

    def train_dataloader(self) -> "Batches":
        return Batches(self)

    def on_train_start(self) -> None:
        size = self.config.source.batch_size
        if self.config.source.carry_state or self.algorithm.outlives or self.place[1]:
            self.learner = self.algorithm.init(self.model, size)
        if self.restored is not None:
            rows = iter([leaf[self.global_rank * size :][:size] for leaf in self.restored.values()])
            self.learner = map_leaves(lambda like: next(rows).to(like), self.learner)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.read %= self.config.training.accumulate
        count = self.global_step * self.config.training.accumulate + self.read
        torch.manual_seed(((self.config.run.seed * 1_000_003 + count) * 4099 + self.global_rank) % 2**63)

    @property
    def rows(self) -> int:
        """Number of rows that all processes have read so far."""
        return self.place[0] * rows_in_a_step(self.config)

    @property
    def stepped(self) -> bool:
        """Whether the last update was the last of a step."""
        return self.read == self.config.training.accumulate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Make updates up to the next one with an answer in any process, or to the end of the batch."""
        loss, count, answers = self._next_update(batch)
        while not answers and self.place[1]:
            loss, count, answers = self._next_update(batch)
        self.answered = answers > 0 or (self.read > 0 and self.answered)
        self.read += 1
        return loss * (count * self.trainer.world_size / max(answers, 1))  # the processes' gradients are averaged

    def _next_update(self, batch: Any) -> tuple[Tensor, float, float]:
        """Make an update, and return its loss, how many answers it has in this process, and in all."""
        part, last = self._part(batch)
        with counted() as counts:
            loss, learner = self._update(part)
        value, count = loss.item(), float(sum(counts)) if counts else _rows(part)
        finite = math.isfinite(value)
        stop, save, steps, failed, total, answers = self.sum(*self.wishes.values(), not finite, count * value, count)
        self.agreed = {"stop": stop > 0, "save": save > 0}
        mean = total / max(answers, 1)
        if failed:
            where = self._first_not_finite(part)
            self._give_up(f"loss is {mean}", "of another process" if finite else where)
        if steps:
            self.plan = self.plan.revised(self.global_step, int(steps))
        if answers:
            self.loss_sum += mean
            self.loss_count += 1
        self.tokens += part.size * part.length
        kept = not last or self.config.source.carry_state or self.algorithm.outlives
        self.learner = learner if kept else None
        self.place = (self.place[0] + 1, 0) if last else (self.place[0], self.place[1] + part.length)
        self.batch = None if last else self.batch
        return loss, count, answers

    def _part(self, batch: Any) -> tuple[Batch, bool]:
        """Return the steps of the next update, and whether they end the batch."""
        steps, (number, begin) = update_steps(self.config, self.algorithm), self.place
        if steps is None:
            return batch, True
        if self.batch is None:
            rows = self.read_batch(number).tensors(self.device)
            self.batch = self.trainer.precision_plugin.convert_input(rows)
        assert self.batch is not None
        return self.batch.part(begin, steps, gradual=self.algorithm.gradual), begin + steps >= self.batch.length

    def read_batch(self, number: int) -> Batch:
        """Return a batch of the source. Processes in a row of the mesh read the same rows, each its stretch of them."""
        size, stretches = self.config.source.batch_size, self.config.run.sequence_parallel
        (rank, stretch), world = divmod(self.global_rank, stretches), self.trainer.world_size // stretches
        batch = self.source.batch(number, size, rank, world)
        if stretches > 1:
            batch = batch.steps(*bounds(batch.length, stretch, stretches), targets=True)
        return batch

    def _update(self, batch: Batch) -> tuple[Tensor, Any]:
        """Make an update of the algorithm. Unless it goes on where the last one ended, it begins sequences."""
        learner = self.learner
        if not (self.config.source.carry_state or self.place[1]):
            learner = self.algorithm.renew(self.model, learner, batch.size)
        return self.algorithm.update(self.model, learner, batch)

    def settle(self) -> None:
        """Let the algorithm bring the parameters to what is measured, and at the end kept."""
        if self.learner is not None:
            self.learner = self.algorithm.settle(self.model, self.learner)

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if self.config.training.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.config.training.clip_value)
        if not self.answered:  # the optimizer makes no step then
            for parameter in self.model.parameters():
                parameter.grad = None
        norm = undivided_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip))
        if not norm.isfinite():
            gradients = {name: own(leaf.grad) for name, leaf in self.model.named_parameters() if leaf.grad is not None}
            bad = (name for name, gradient in gradients.items() if not gradient.isfinite().all())
            alone = "none alone, but all together" + " or one of another process" * self.sharded
            self._give_up(f"the gradient's norm is {norm.item()}", next(bad, alone))

    def configure_optimizers(self) -> Any:
        chosen = self.config.training
        optimizer = OPTIMIZERS[chosen.optimizer](self.model, chosen.lr, chosen.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def rate(self, step: int) -> float:
        """Return the learning rate of a step as a fraction of the peak."""
        return rate(self.plan, self.config.training.warmup, step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        carried = {path: self._gather(leaf) for path, leaf in leaves(self.learner)}
        checkpoint["scanl"] = {
            "config": asdict(self.config),
            "corpus": self.source.digest(),
            "rows": rows_in_a_step(self.config),
            "plan": asdict(self.plan),
            "seconds": self.seconds,
            "loss_sum": self.loss_sum,
            "loss_count": self.loss_count,
            "carried": carried,
            "place": {"batch": self.place[0], "step": self.place[1]},
            "position": dict(self.source.position(self.rows)) if isinstance(self.source, PackedDocuments) else None,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        stored = checkpoint["scanl"]
        rows = rows_in_a_step(self.config)
        if stored["rows"] != rows:
            raise CheckpointError(
                f"train: batch_size * devices is {rows}, expected {stored['rows']} because of the checkpoint; "
                "give --batch-size and --devices with that product"
            )
        self.plan, self.seconds = RunLength(**stored["plan"]), stored["seconds"]
        self.loss_sum, self.loss_count = stored["loss_sum"], stored["loss_count"]
        self.restored = stored["carried"] or None
        self.place = (stored["place"]["batch"], stored["place"]["step"])
        if isinstance(self.source, PackedDocuments):
            self.source.resume(stored["position"])

    def sum(self, *numbers: float) -> list[float]:
        """Sum each number over the processes."""
        if self.trainer.world_size == 1:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(sums)
        return sums.tolist()

    def _gather(self, leaf: Tensor) -> Tensor:
        """Gather the rows of all processes, as raw bytes because gloo supports neither bool nor complex tensors."""
        if self.trainer.world_size == 1:
            return leaf
        data = leaf.contiguous().flatten().view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.trainer.world_size)]
        torch.distributed.all_gather(parts, data)
        return torch.cat([piece.view(leaf.dtype).view(leaf.shape) for piece in parts])

    @torch.no_grad()
    def _first_not_finite(self, batch: Any) -> str:
        """Run the forward pass again and name the first module whose output is not finite."""
        names: list[str] = []

        def watch(name: str, module: nn.Module) -> Any:
            def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
                if not names and any(not t.isfinite().all() for _, t in leaves(output) if t.is_floating_point()):
                    names.append(f"{name} ({type(module).__name__})")

            return module.register_forward_hook(hook)

        layers = [module for module in self.model.modules() if isinstance(module, Layer)]
        internal = {module for layer in layers for module in layer.read_modules()}  # a layer refuses hooks on these
        hooks = [watch(name, module) for name, module in self.model.named_modules() if name and module not in internal]
        try:
            self._update(batch)
        finally:
            for hook in hooks:
                hook.remove()
        return names[0] if names else "the loss itself"

    def _give_up(self, what: str, where: str) -> None:
        raise DivergenceError(
            f"train: {what} at step {self.global_step + 1}; first not finite: {where}. "
            "The last checkpoint is from before; try a smaller --lr or a longer --warmup"
        )


class Batches:
    """Endless batches, from the present place on. Iteration begins only after a checkpoint is restored.

    If batches are cut into updates, these are zeros: how far a step reads is known only once its updates are made.
    """

    def __init__(self, learning: Learning) -> None:
        self.learning = learning

    def __iter__(self) -> Iterator[Any]:
        learning = self.learning
        for number in itertools.count(learning.place[0]):
            cut = update_steps(learning.config, learning.algorithm) is not None
            yield 0 if cut else learning.read_batch(number).tensors()


def _rows(batch: Batch) -> float:
    """Return the number of rows that have an answer."""
    return batch.size if batch.weights is None else float((batch.weights > 0).sum())
