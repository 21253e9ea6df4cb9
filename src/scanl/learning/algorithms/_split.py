"""Base of algorithms with the states as variables: a problem whose constraints are the model's steps."""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State, detach, flatten, leaves, repeat, unflatten
from scanl.learning.algorithms._pieces import InPieces
from scanl.learning.algorithms.base import Algorithm, Loss, with_gradients
from scanl.learning.questions import Model
from scanl.learning.questions.base import answered
from scanl.ops import backend
from scanl.options import who


class Variables(NamedTuple):
    """Variables that are optimized beside the parameters. Both are (B, T, e).

    states: s_1, ..., s_T.   multipliers: λ, one for each number of a state.
    """

    states: Tensor
    multipliers: Tensor


class SplitModel:
    """A model that applies all its steps at once, each to a state that does not come from the step before it.

    It stands where a question reads the model. All other attributes are the model's.   states: s_1, ..., s_T.
    """

    def __init__(self, model: Model, states: Tensor) -> None:
        self._model, self._states = model, states
        self.images = states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, x: Tensor, state: State, **others: Tensor | None) -> tuple[Tensor, State]:
        """Return the outputs (B, T, ...) and s_T. F(s_{t-1}, x_t) is in `images` then."""
        size, length = x.shape[:2]
        starts = torch.cat([flatten(state)[:, None], self._states[:, :-1]], 1).flatten(0, 1)
        rows = {name: value.flatten(0, 1)[:, None] for name, value in others.items() if value is not None}
        y, after = self._model(x.flatten(0, 1)[:, None], unflatten(starts, repeat(state, length)), **rows)
        self.images = flatten(after).view(size, length, -1)
        return y.reshape(size, length, *y.shape[2:]), unflatten(self._states[:, -1], state)


class Problem:
    """The loss of an update over states that are variables, and its constraints s_t = F(s_{t-1}, x_t).

    The loss is the mean over the answers times their number, so that an answer weighs the same in a long update.
    Several numbers of a step are one answer.
    """

    def __init__(self, loss: Loss, model: Model, batch: Batch, state: State) -> None:
        self._loss, self._model, self._batch, self._state = loss, model, batch, state
        self.scale: Tensor | float = 1.0  # the number of answers, from the first call on
        self._steps = batch.size * batch.length

    def __call__(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and the residuals s_t - F(s_{t-1}, x_t) (B, T, e)."""
        apart = SplitModel(self._model, states)
        loss, answers, _ = answered(self._loss, apart, self._batch, self._state)
        self.scale = answers.clamp(1, self._steps)
        return self.scale * loss, states - apart.images


class Split(Algorithm):
    """An algorithm that makes the states of an update variables, and the model's steps constraints. Abstract.

    A subclass says how it optimizes the variables for constant parameters, and the objective of the parameters.
    """

    computes: ClassVar = "estimate"
    every_step: ClassVar = True
    works_for = "layers whose state is numbers alone, in a model that answers at every step"

    def optimize(self, problem: Problem, variables: Variables) -> Variables:
        """Return better variables. They begin at the states of the forward pass, and multipliers of 0."""
        raise NotImplementedError(f"{who(type(self))}: its class defines no optimize")

    def objective(self, loss: Tensor, residual: Tensor, multipliers: Tensor) -> Tensor:
        """Return the augmented Lagrangian."""
        raise NotImplementedError(f"{who(type(self))}: its class defines no objective")

    def init(self, model: Model, batch_size: int) -> State:
        """Return the learner; raises ConfigError for a model whose state counts steps, which are no variables."""
        state = detach(model.init_state(batch_size, device=next(model.parameters()).device))
        for path, leaf in leaves(state):
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise ConfigError(
                    f"{who(type(self))}: the model's state has integers at {path}, expected numbers, which become "
                    "variables; predictive_coding keeps the order of the steps"
                )
        return state

    def update(self, model: Model, learner: State, batch: Batch) -> tuple[Tensor, State]:
        self.check(model, batch)
        path: list[Tensor] = []

        def run(x: Tensor, state: State, **others: Tensor) -> tuple[Tensor, State]:
            y, after = model(x, state, **others)
            path.append(flatten(after))
            return y, after

        with backend("parallel", "reference"):
            with torch.no_grad():
                loss, state = self.loss(InPieces(who(type(self)), model, 1, run), batch, learner)
                states = torch.stack(path, 1)
            with torch.enable_grad():
                problem = Problem(self.loss, model, batch, learner)
                states, multipliers = self.optimize(problem, Variables(states, torch.zeros_like(states)))
                parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
                value = self.objective(*problem(states), multipliers) / problem.scale
                changes = torch.autograd.grad(value, parameters, allow_unused=True)
        return with_gradients(loss, parameters, changes), state
