"""Real-time recurrent learning, and what it has in common with its sparse approximations."""

from contextlib import AbstractContextManager
from typing import Annotated, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State, detach, flatten, unflatten
from scanl.learning.algorithms._influence import Influence
from scanl.learning.algorithms._pieces import InPieces
from scanl.learning.algorithms._structure import Structures
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm, with_gradients
from scanl.learning.questions import Model
from scanl.ops import backend
from scanl.options import at_least, who


class InfluencedState(NamedTuple):
    """A state, and the influence of the parameters on it, in blocks (B, groups, numbers, parameters)."""

    state: State
    influence: tuple[Tensor, ...]


class InfluenceAlgorithm(Algorithm):
    """An algorithm that carries the influence of the parameters on the state forward. Abstract.

    In a block of steps the gradient is that of backpropagation through the block, plus dL/ds_0 times the influence on
    the state s_0 before it. `block` is the number of steps of a block, `steps` how far a parameter is followed.
    """

    block: int | None = None
    steps: int | None = None
    update_steps: ClassVar = 1

    def __init__(self, loss: Loss) -> None:
        super().__init__(loss)
        self._structures = Structures(who(type(self)), self.within)
        self._influences: WeakKeyDictionary[Any, Influence] = WeakKeyDictionary()

    def within(self) -> AbstractContextManager[Any]:
        """Return the context in which the model runs: plain torch, whose backward passes can run many at a time."""
        return backend("parallel", "reference")

    def run_loss(self, model: Model, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        """Return the loss, what is differentiated in its place, and the state after the batch."""
        loss, state = self.loss(model, batch, state)
        return loss, loss, state

    def init(self, model: Model, batch_size: int) -> InfluencedState:
        """Return the learner; raises ConfigError for a model without a state of constant size."""
        state = model.init_state(batch_size, device=next(model.parameters()).device)
        influence = self._influence(model).zeros(batch_size, flatten(state).dtype)
        return InfluencedState(detach(state), influence)

    def check(self, model: Model, batch: Batch) -> None:
        super().check(model, batch)
        if self._in_blocks(batch) and not batch.answered_each_step:
            raise ConfigError(
                f"{who(type(self))}: the batch has {batch.length} steps and one answer for each sequence, expected at "
                f"most {self.block} steps because the algorithm's block is {self.block}; cut it into such updates"
            )

    def _in_blocks(self, batch: Batch) -> bool:
        return self.block is not None and batch.length > self.block

    def update(self, model: Model, learner: InfluencedState, batch: Batch) -> tuple[Tensor, InfluencedState]:
        self.check(model, batch)
        blocks: list[tuple[Tensor, Tensor]] = []

        def enter(state: State) -> State:
            before = flatten(state).detach().requires_grad_()
            blocks.append((before, before))
            return unflatten(before, state)

        def leave(state: State) -> State:
            blocks[-1] = (blocks[-1][0], flatten(state))
            return detach(state)

        def run(x: Tensor, state: State, **others: Tensor) -> tuple[Tensor, State]:
            y, after = model(x, enter(state), **others)
            return y, leave(after)

        with torch.enable_grad(), self.within():
            if not self._in_blocks(batch):
                loss, of, after = self.run_loss(model, batch, enter(learner.state))
                state = leave(after)
            else:
                assert self.block is not None
                pieces = InPieces(who(type(self)), model, self.block, run)
                loss, of, state = self.run_loss(pieces, batch, learner.state)
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            named = dict(model.named_parameters())
            starts = [before for before, _ in blocks]
            grads = torch.autograd.grad(of, [*parameters, *starts], retain_graph=True, allow_unused=True)
            gradients = dict(zip(map(id, parameters), grads, strict=False))
            influence = self._influence(model)
            reaching = [named[name] for name in self._structures.of(model).names]
            carried = learner.influence
            for (before, after), by_state in zip(blocks, grads[len(parameters) :], strict=True):
                if by_state is not None:
                    for parameter, more in zip(reaching, influence.gradient(by_state, carried), strict=True):
                        known = gradients[id(parameter)]
                        more = more.reshape_as(parameter).to(parameter.dtype)
                        gradients[id(parameter)] = more if known is None else known + more
                single = 1 in (self.block, batch.length)
                carried = influence.advance(carried, before, after, reaching, single=single)
        return with_gradients(loss, parameters, list(gradients.values())), InfluencedState(state, carried)

    def _influence(self, model: Model) -> Influence:
        device = next(model.parameters()).device
        if model not in self._influences or self._influences[model].device != device:
            self._influences[model] = Influence(self._structures.of(model), self.steps, device)
        return self._influences[model]


@algorithm("rtrl")
class RTRL(InfluenceAlgorithm):
    r"""Real-time recurrent learning: the exact gradient, from the influence M of the parameters on the state.

    .. math:: M_t = J_t M_{t-1} + \bar M_t, \quad \nabla_\theta \ell_t = \frac{\partial \ell_t}{\partial s_t} M_t

    J_t = ds_t/ds_{t-1}, and M̄_t = ds_t/dθ for a constant s_{t-1}. The gradient of each step is there at once, and
    nothing grows with the length of the stream. With constant parameters the sum of all gradients is that of
    backpropagation through time over the stream.

    An update of T steps is computed in blocks. In a block, backward passes replace the products of Jacobians, and M
    advances once: M_C = (Π J) M_0 + ds_C/dθ. From about e steps on, a step costs e times less than in blocks of one.

    Each number of the state of each row has a backward pass of its own, which runs over all rows of the batch: so the
    operations grow with B². They are fewest for a stream, where B is 1.

    M is kept only where a parameter reaches the state at all, in any number of steps. In a diagonal recurrence that is
    one channel, and in a stack the layers from its own upwards.
    """

    id = "A-rtrl"
    aliases = ("real_time_recurrent_learning",)
    equation = "M_t = J_t M_{t-1} + ds_t/dtheta,  dl_t/dtheta = (dl_t/ds_t) M_t"
    source = (
        'Williams and Zipser, "A Learning Algorithm for Continually Running Fully Recurrent Neural Networks", Neural '
        'Computation 1(2), 1989; blocks: Schmidhuber, "A Fixed Size Storage O(n^3) Time Complexity Learning Algorithm '
        'for Fully Recurrent Continually Running Networks", Neural Computation 4(2), 1992'
    )
    computes: ClassVar = "exact"
    error = (
        "while the parameters are constant; after an optimizer's step M still has the influence of the former "
        "parameters. Parameters that are the first state, as in titans, get no gradient for it"
    )
    memory = "B*e*(p + 1)"
    operations = "2*B**2*e*p*T + B*e**2*p"
    works_for = "every layer with a state of constant size; M is at most of this size"

    def __init__(
        self,
        loss: Loss,
        block: Annotated[
            int | None, at_least(1), "steps of a block, whose activations are in memory; None for all of an update"
        ] = None,
    ) -> None:
        super().__init__(loss)
        self.block = block
