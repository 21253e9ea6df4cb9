"""Truncated backpropagation through time, with a window that is longer than the steps between two backward passes."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.configured import at_least, at_least_option
from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State, detach
from scanl.learning.algorithms._pieces import cut, reads
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm
from scanl.learning.questions import Model
from scanl.models import Tokens


class Window(NamedTuple):
    """What `TBPTT` keeps of each sequence.

    state: the state before the samples.   inputs: the last window - every samples, the newest last.   timespans: their
    durations.   filled: how many samples there are; fewer at the beginning of a sequence.
    """

    state: State
    inputs: Tensor
    timespans: Tensor
    filled: Tensor


@algorithm("tbptt")
class TBPTT(Algorithm):
    r"""Truncated backpropagation through time: after every K1 steps, the gradient of their loss through K2 steps.

    .. math:: \sum_{i} \nabla_\theta \sum_{t=iK_1+1}^{(i+1)K_1} \ell_t(s_t), \quad
        s_{(i+1)K_1-K_2} \text{ held constant}

    K1 is `every` and K2 is `window`. The state is carried on and never reset. Each step's loss counts once. With
    K1 = K2 = T the gradient is that of `bptt`. For K1 < K2 the learner keeps the last K2 - K1 inputs and the state
    before them, and runs them again with the present parameters, so every step is run about K2 / K1 times.

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
    memory = "B*(window*e + (window - every)*(d + 1) + 1)"
    operations = "2*B*T*p*window/every"
    works_for = "every layer, in a model that answers at every step"

    def __init__(
        self,
        loss: Loss,
        every: Annotated[int, at_least(1), "K1, steps between two backward passes"] = 1,
        window: Annotated[int, at_least(1), at_least_option("every"), "K2, steps that a backward pass goes back"] = 32,
    ) -> None:
        super().__init__(loss)
        self.every, self.window = every, window

    def init(self, model: Model, batch_size: int) -> Window:
        """Return the learner; raises ConfigError for a model that reads neither tokens nor features."""
        like = next(model.parameters())
        kept = self.window - self.every
        inputs = _empty(model, batch_size, kept, like)
        return Window(
            model.init_state(batch_size, device=like.device),
            inputs,
            torch.zeros(batch_size, kept, device=like.device),
            torch.zeros(batch_size, dtype=torch.int64, device=like.device),
        )

    def update(self, model: Model, learner: Window, batch: Batch) -> tuple[Tensor, Window]:
        if batch.mask is not None and self.window > self.every:
            raise ConfigError(
                "tbptt: batch.mask is given, expected none because window is longer than every; give steps without a "
                "target the target that the question ignores"
            )
        counts = learner.filled.unique().tolist()
        if len(counts) != 1:
            raise ConfigError(f"tbptt: the rows have kept {counts} samples, expected the same number in all")
        losses = []
        for begin in range(0, batch.length, self.every):
            part = cut(batch, begin, begin + self.every)
            loss, learner = self._part(model, learner, part, int(counts[0]))
            losses.append(loss * (part.length / batch.length))
            counts = [min(counts[0] + part.length, self.window - self.every)]
        return torch.stack(losses).sum(), learner

    def _part(self, model: Model, learner: Window, part: Batch, count: int) -> tuple[Tensor, Window]:
        """Return the loss of a few steps, through the window, and the learner after them."""
        kept = self.window - self.every
        past, spans = learner.inputs[:, kept - count :], learner.timespans[:, kept - count :]
        state = learner.state

        def run(x: Tensor, spans: Tensor, state: State) -> State:
            if not x.shape[1]:
                return state
            named = {} if part.timespans is None else {"timespans": spans.to(part.timespans)}
            return model(x, state, **named)[1]

        loss, after = self.loss(model, part, run(past, spans, state))
        if not kept:
            return loss, learner._replace(state=detach(after))
        new = spans.new_ones(len(spans), part.length) if part.timespans is None else part.timespans
        past, spans = torch.cat([past, part.inputs.to(past)], 1), torch.cat([spans, new.to(spans)], 1)
        surplus = max(past.shape[1] - kept, 0)
        with torch.no_grad():
            state = run(past[:, :surplus], spans[:, :surplus], state)
        length = past.shape[1] - surplus
        return loss, Window(
            detach(state),
            torch.cat([learner.inputs[:, length:], past[:, surplus:]], 1),
            torch.cat([learner.timespans[:, length:], spans[:, surplus:]], 1),
            torch.full_like(learner.filled, length),
        )


def _empty(model: Model, batch_size: int, steps: int, like: Tensor) -> Tensor:
    """Return inputs of zeros, as the model reads them."""
    inputs = reads("tbptt", model)
    if isinstance(inputs, Tokens):
        return torch.zeros(batch_size, steps, dtype=torch.int64, device=like.device)
    kind = torch.promote_types(like.dtype, torch.float32) if inputs.scales is None else torch.float64
    return torch.zeros(batch_size, steps, inputs.channels, dtype=kind, device=like.device)
