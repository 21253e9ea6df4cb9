"""Truncated backpropagation through time, with a window that is longer than the steps between two backward passes."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State, detach
from scanl.learning.algorithms._pieces import reads
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm
from scanl.learning.questions import Model
from scanl.learning.questions.base import answered
from scanl.models import Tokens
from scanl.options import at_least, at_least_option


class TruncatedWindow(NamedTuple):
    """Learner of `TBPTT` for each sequence.

    state: the state before the samples.   inputs: the last window - every samples, the newest last.   timespans: their
    durations.   mask: 1 where a row has them.   filled: how many samples there are; fewer at the beginning of a
    sequence.
    """

    state: State
    inputs: Tensor
    timespans: Tensor
    mask: Tensor
    filled: Tensor


@algorithm("tbptt")
class TBPTT(Algorithm):
    r"""Truncated backpropagation through time: after every K1 steps, the gradient of their loss through K2 steps.

    .. math:: \sum_{i} \nabla_\theta \sum_{t=iK_1+1}^{(i+1)K_1} \ell_t(s_t), \quad
        s_{(i+1)K_1-K_2} \text{ held constant}

    K1 is `every` and K2 is `window`. The state is carried on and never reset. Each step's loss counts once. With
    K1 = K2 = T the gradient is that of `bptt`. For K1 < K2 the learner keeps the last K2 - K1 inputs and the state
    before them, and runs them again with the present parameters, so every step is run about K2 / K1 times. The loss of
    an update is the mean over its answers; steps without a target count nothing.

    Differs: the steps of the window are run again after a change of the parameters, where the paper keeps the old
    activations.

    K1 steps are counted from the beginning of an update; the last part of an update may be shorter.
    """

    id = "A-tbptt"
    aliases = ("truncated_bptt", "truncated_backpropagation_through_time")
    equation = "every K1 steps: dL/dtheta of the last K1 losses through the last K2 steps"
    source = (
        'Williams and Peng, "An Efficient Gradient-Based Algorithm for On-Line Training of Recurrent Network '
        "Trajectories\", Neural Computation 2(4), 1990, where K2 and K1 are h and h'"
    )
    computes: ClassVar = "truncation"
    error = "the effect of the parameters through states more than K2 steps before the newest one is left out"
    memory = "B*(window*e + (window - every)*(d + 2) + 1)"
    operations = "2*B*T*p*window/every"
    works_for = "every layer, in a model that reads tokens or features"

    def __init__(
        self,
        loss: Loss,
        every: Annotated[int, at_least(1), "K1, steps between two backward passes"] = 1,
        window: Annotated[int, at_least(1), at_least_option("every"), "K2, steps that a backward pass goes back"] = 32,
    ) -> None:
        super().__init__(loss)
        self.every, self.window = every, window

    def init(self, model: Model, batch_size: int) -> TruncatedWindow:
        """Return the learner; raises ConfigError for a model that reads neither tokens nor features."""
        like = next(model.parameters())
        kept = self.window - self.every
        inputs = _empty(model, batch_size, kept, like)
        return TruncatedWindow(
            model.init_state(batch_size, device=like.device),
            inputs,
            torch.zeros(batch_size, kept, device=like.device),
            torch.ones(batch_size, kept, device=like.device),
            torch.zeros(batch_size, dtype=torch.int64, device=like.device),
        )

    def update(self, model: Model, learner: TruncatedWindow, batch: Batch) -> tuple[Tensor, TruncatedWindow]:
        counts = learner.filled.unique().tolist()
        if len(counts) != 1:
            raise ConfigError(f"tbptt: the rows have kept {counts} samples, expected the same number in all")
        losses, answers = [], []
        for part in batch.parts(self.every):
            loss, number, learner = self._part(model, learner, part, int(counts[0]))
            losses.append(loss)
            answers.append(number)
            counts = [min(counts[0] + part.length, self.window - self.every)]
        if len(losses) == 1:
            return losses[0], learner
        weights = torch.stack(answers)
        return (torch.stack(losses) * (weights / weights.sum().clamp(min=1))).sum(), learner

    def _part(
        self, model: Model, learner: TruncatedWindow, part: Batch, count: int
    ) -> tuple[Tensor, Tensor, TruncatedWindow]:
        """Return the loss of a few steps, through the window, the number of its answers, and the learner after them."""
        kept = self.window - self.every
        past = [each[:, kept - count :] for each in (learner.inputs, learner.timespans, learner.mask)]
        state = learner.state

        def run(samples: list[Tensor], state: State) -> State:
            x, spans, mask = samples
            if not x.shape[1]:
                return state
            named = {} if part.timespans is None else {"timespans": spans.to(part.timespans)}
            return model(x, state, **named, **({} if part.mask is None else {"mask": mask > 0}))[1]

        loss, number, after = answered(self.loss, model, part, run(past, state))
        if not kept:
            return loss, number, learner._replace(state=detach(after))
        ones = past[1].new_ones(part.size, part.length)
        new = [part.inputs, *(ones if each is None else each for each in (part.timespans, part.mask))]
        past = [torch.cat([old, more.to(old)], 1) for old, more in zip(past, new, strict=True)]
        surplus = max(past[0].shape[1] - kept, 0)
        with torch.no_grad():
            state = run([each[:, :surplus] for each in past], state)
        length = past[0].shape[1] - surplus
        inputs, spans, mask = (
            torch.cat([old[:, length:], more[:, surplus:]], 1)
            for old, more in zip((learner.inputs, learner.timespans, learner.mask), past, strict=True)
        )
        return (
            loss,
            number,
            TruncatedWindow(detach(state), inputs, spans, mask, torch.full_like(learner.filled, length)),
        )


def _empty(model: Model, batch_size: int, steps: int, like: Tensor) -> Tensor:
    """Return inputs of zeros, as the model reads them."""
    inputs = reads("tbptt", model)
    if isinstance(inputs, Tokens):
        return torch.zeros(batch_size, steps, dtype=torch.int64, device=like.device)
    kind = torch.promote_types(like.dtype, torch.float32) if inputs.scales is None else torch.float64
    return torch.zeros(batch_size, steps, inputs.channels, dtype=kind, device=like.device)
