"""What a run learns from, as the trainer sees it: text, or a synthetic task."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import CheckpointError
from scanl.layers.state import State
from scanl.learning.evaluation import answer, bits_per_byte, score, spread
from scanl.learning.run.config import Model, TrainConfig
from scanl.models import LanguageModel
from scanl.tasks import Corpus, FreshExamples, Streams, Task, Windows
from scanl.tasks.base import WHILE_TRAINING

Data = Corpus | Task


class Objective(ABC):
    """Batches, their loss, and how good the model is on what it has not been trained on: pure functions of the step."""

    columns: ClassVar[tuple[str, ...]]  # of metrics.csv
    measured: ClassVar[str]  # which of them holds the measurements
    source: ClassVar[str]  # what a digest is of
    elsewhere: ClassVar[str] = ""  # what may be done when it is not where it was
    length: int  # steps of a training sequence

    @abstractmethod
    def batch(self, step: int, rank: int = 0, world: int = 1) -> Any:
        """What one process reads in a step: a tensor, or a tuple of them."""

    @abstractmethod
    def loss(self, model: Model, batch: Any, state: State) -> tuple[Tensor, State]:
        """The mean loss of a batch, and the model's state after it."""

    @abstractmethod
    def measure(self, model: Model, step: int) -> float:
        """What is written down as `measured` after a step."""

    @abstractmethod
    def digest(self) -> str:
        """A fingerprint of what is learnt from."""

    @abstractmethod
    def line(self, row: Mapping[str, Any], measured: float | None) -> str:
        """A row of the metrics and the last measurement, for the progress line."""

    def derived(self, loss: float) -> dict[str, float]:
        """Columns that follow from the loss."""
        return {}

    def reached(self, measured: float) -> bool:
        """Whether training may end early."""
        return False

    def refuse_other(self, digest: str) -> None:
        """CheckpointError unless a run with this digest learnt from the same."""
        if digest != self.digest():
            raise CheckpointError(
                f"train: the {self.source} has changed since the checkpoint; put back the {self.source} to resume"
                f"{self.elsewhere}"
            )


class TextObjective(Objective):
    """Cross entropy of the next byte, over windows of a corpus, or over streams whose state is carried."""

    columns = ("step", "loss", "bits_per_byte", "tokens_per_second", "lr", "held_out_bits_per_byte")
    measured = "held_out_bits_per_byte"
    source = "text"
    elsewhere = ", or name where it has moved, its files and folders named as before: --data PATH"

    def __init__(self, config: TrainConfig, corpus: Corpus) -> None:
        self.config = config
        self.corpus = corpus
        self.length = config.sequence_length
        order = Streams if config.carry_state else Windows
        self.order = order(corpus.train, config.sequence_length, config.seed)
        self.sample = spread(corpus.held_out, config.eval_bytes)

    def batch(self, step: int, rank: int = 0, world: int = 1) -> Tensor:
        """(B, length + 1): the last byte is the last target."""
        return torch.from_numpy(self.order.batch(step, self.config.batch_size, rank, world))

    def loss(self, model: Model, batch: Tensor, state: State) -> tuple[Tensor, State]:
        logits, state = model(batch[:, :-1], state)
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten()), state

    def measure(self, model: Model, step: int) -> float:
        return bits_per_byte(cast(LanguageModel, model), self.sample)

    def digest(self) -> str:
        return self.corpus.digest()

    def derived(self, loss: float) -> dict[str, float]:
        return {"bits_per_byte": loss / math.log(2)}

    def line(self, row: Mapping[str, Any], measured: float | None) -> str:
        held_out = "" if measured is None else f"  held-out sample {measured:.3f}"
        return f"loss {row['loss']:.3f}  bits/byte {row['bits_per_byte']:.3f}{held_out}"


class TaskObjective(Objective):
    """Cross entropy of the tokens that a task asks for, or the squared error of the number; fresh examples always."""

    columns = ("step", "loss", "tokens_per_second", "lr", "score")
    measured = "score"
    source = "task"

    def __init__(self, config: TrainConfig, task: Task) -> None:
        self.config = config
        self.task = task
        self.order = FreshExamples(task, config.seed)
        self.length = task.generate(1, config.seed).inputs.shape[1]

    def batch(self, step: int, rank: int = 0, world: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets, as in `Examples`."""
        inputs, targets = self.order.batch(step, self.config.batch_size, rank, world)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def loss(self, model: Model, batch: tuple[Tensor, Tensor], state: State) -> tuple[Tensor, State]:
        outputs, targets, state = answer(model, *batch, state)
        measure = F.mse_loss if targets.is_floating_point() else F.cross_entropy
        return measure(outputs.float(), targets), state

    def measure(self, model: Model, step: int) -> float:
        return score(model, self.task, self.config.eval_examples, (self.config.seed, WHILE_TRAINING, step))

    def digest(self) -> str:
        """Of the first example: numpy does not promise the same random numbers in all its versions."""
        first = self.task.generate(1, self.config.seed)
        return hashlib.sha256(first.inputs.tobytes() + first.targets.tobytes()).hexdigest()

    def line(self, row: Mapping[str, Any], measured: float | None) -> str:
        found = "" if measured is None else f"  score {measured:.4g} (chance {self.task.chance:.4g})"
        return f"loss {row['loss']:.4g}{found}"

    def reached(self, measured: float) -> bool:
        return self.config.until is not None and self.task.reaches(measured, self.config.until)


def make_objective(config: TrainConfig, data: Data) -> Objective:
    """Of a corpus or of a task."""
    return TextObjective(config, data) if isinstance(data, Corpus) else TaskObjective(config, data)
