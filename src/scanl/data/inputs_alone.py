"""Self-pretraining: the inputs of a source without its answers. What is learnt is to predict them."""

from collections.abc import Iterator, Sequence

import numpy as np

from scanl.data.base import IGNORED, Exam, RepeatedIterable, Source
from scanl.data.batch import Batch
from scanl.data.questions import Inputs, Vocabulary
from scanl.errors import ConfigError

HIDDEN_SHARE = 0.25  # of the steps, for layers that read both directions


class InputSource(Source):
    """The inputs of another source, as questions to themselves.

    Causal layers predict at each step the next input. Layers of both directions predict inputs that are hidden: a
    quarter of the steps, at random. A hidden token is another one at random, hidden features are their means, or
    missing. Features are predicted in units of their scales.

    Source: Amos, Berant and Gupta, "Never Train from Scratch: Fair Comparison of Long-Sequence Models Requires
    Data-Driven Priors", arXiv:2310.02980, section 3: self-pretraining on the inputs of the task's own training part.

    source: whose inputs these are.   both: whether the layers read both directions.   seed: of what is hidden.
    Raises ConfigError for a source that asks for its inputs already.
    """

    def __init__(self, source: Source, both: bool, seed: int) -> None:
        asked = source.question
        alone = asked.of_inputs()
        if alone is None:
            raise ConfigError(
                f"train: inputs_alone is True, expected False because {source.name} asks for its inputs already"
            )
        self.name, self.inner, self.both, self.seed = source.name, source, both, seed  # pyright: ignore[reportAttributeAccessIssue]
        self.inputs: Inputs = asked.inputs  # pyright: ignore[reportAttributeAccessIssue]: of all other questions
        self.question, self.metric = alone

    def check(self) -> None:
        self.inner.check()

    def batch(self, step: int, size: int, rank: int = 0, world: int = 1) -> Batch:
        return self._asked(self.inner.batch(step, size, rank, world), (0, step, rank))

    def unseen(self, step: int) -> Iterator[Batch]:
        for number, batch in enumerate(self.inner.unseen(step)):
            yield self._asked(batch, (1, number))

    def exam(self, *, sample: bool = False) -> Exam:
        exam = self.inner.exam(sample=sample)

        def examples() -> Iterator[Batch]:
            for number, batch in enumerate(exam.examples):
                yield self._asked(batch, (2, number))

        return Exam(f"{self.metric} of the inputs alone of {self.name}:", RepeatedIterable(examples), {}, ".4g")

    def __str__(self) -> str:
        return f"{self.inner}; the inputs alone"

    def digest(self) -> str:
        return f"{self.inner.digest()} inputs"

    def _asked(self, batch: Batch, key: Sequence[int]) -> Batch:
        """Return a batch whose targets are inputs. key: of what is hidden, with the seed."""
        inputs = np.asarray(batch.inputs)
        known = np.ones(inputs.shape[:2], bool) if batch.mask is None else np.asarray(batch.mask)
        if isinstance(self.inputs, Vocabulary):
            at, values, targets = None, inputs, np.full(inputs.shape, IGNORED, np.int64)
        else:
            at, scale = np.array(self.inputs.scales or [(0.0, 1.0)] * self.inputs.count, np.float64).T
            values, targets = (inputs - at) / scale, np.full(inputs.shape, np.nan, np.float32)
        if not self.both:
            following = known[:, 1:] if batch.starts is None else known[:, 1:] & ~np.asarray(batch.starts)[:, 1:]
            targets[:, :-1][following] = values[:, 1:][following]
            return batch._replace(targets=targets)
        random = np.random.default_rng((self.seed, *key))
        hidden = known & (random.random(known.shape) < HIDDEN_SHARE)
        targets[hidden], inputs = values[hidden], inputs.copy()
        if isinstance(self.inputs, Vocabulary):
            inputs[hidden] = random.integers(0, self.inputs.size, int(hidden.sum()))
        else:
            inputs[hidden] = np.nan if self.inputs.missing else at
        return batch._replace(inputs=inputs, targets=targets)
