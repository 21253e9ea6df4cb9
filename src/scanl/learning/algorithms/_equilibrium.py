"""Base of the algorithms for equilibria: the state at a held input, and its gradient from a solver."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State, detach, flatten, index, leaves, repeat, unflatten
from scanl.learning.algorithms.base import Algorithm, Loss, with_gradients
from scanl.learning.questions import Model
from scanl.ops import backend, fixed_point
from scanl.options import at_least, who

Weight = Annotated[
    float,
    at_least(0),
    "weight of the Lipschitz coefficient penalty, which keeps the step contracting; 0 for none. The authors take 10",
]
Limit = Annotated[float, at_least(0), "a column sum of the Jacobian above this limit is penalized"]
Tolerance = Annotated[
    float | None, "relative residual of the equilibrium and of its gradient; None for eps^(5/6) of the dtype"
]
Iterations = Annotated[int, at_least(1), "applications of the step at most, and as many products for the gradient"]
Method = Annotated[
    Literal["iteration", "anderson", "broyden"],
    "how the equilibrium is sought: by running the model, which ends at a stable one, or by a faster method of "
    "`scanl.ops.fixed_point`, which may end at any",
]
Product = Callable[[Tensor], Tensor]  # of a Jacobian with one vector a row, (rows, e) -> (rows, e)


class Application(NamedTuple):
    """One application of the model's step at the equilibrium: F(s*), with a graph from s*. Both are (rows, e)."""

    point: Tensor
    image: Tensor

    def transposed(self, z: Tensor) -> Tensor:
        """Return Jᵀ z."""
        return self._product(self.image, self.point, z)

    def forward(self, v: Tensor) -> Tensor:
        """Return J v: the map z -> Jᵀ z is linear, and its own transpose is J."""
        z = torch.zeros_like(self.image).requires_grad_()
        along = torch.autograd.grad(
            self.image, self.point, z, create_graph=True, allow_unused=True, materialize_grads=True
        )[0]
        return self._product(along, z, v)

    @staticmethod
    def _product(outputs: Tensor, inputs: Tensor, cotangent: Tensor) -> Tensor:
        if not outputs.requires_grad:
            return torch.zeros_like(inputs)
        return torch.autograd.grad(
            outputs, inputs, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
        )[0]


class HeldModel:
    """A model at held inputs: each step is an equilibrium of its own, and all steps are rows of one batch.

    It stands where a question reads the model. All other attributes are the model's.
    """

    def __init__(self, model: Model, **options: Any) -> None:
        self._model, self._options = model, options
        self.applications: list[Application] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, x: Tensor, state: State = None, **others: Tensor | None) -> tuple[Tensor, State]:
        """Return the outputs at the equilibria (B, T, ...), and the equilibria of the last step."""
        size, length = x.shape[:2]
        rows = x.flatten(0, 1)[:, None]
        named = {name: value.flatten(0, 1)[:, None] for name, value in others.items() if value is not None}
        start = repeat(state, length)

        def step(s: Tensor, x: Tensor) -> Tensor:
            return flatten(self._model(x, unflatten(s, start), **named)[1])

        with torch.no_grad():
            equilibrium = fixed_point(step, rows, flatten(start), **self._options).state
        point = equilibrium.requires_grad_()
        y, after = self._model(rows, unflatten(point, start), **named)
        self.applications.append(Application(point, flatten(after)))
        last = index(unflatten(point.detach(), start), slice(length - 1, None, length)) if length else state
        return y.reshape(size, length, *y.shape[2:]), last


class Equilibrium(Algorithm):
    """An algorithm whose model runs to an equilibrium s* = F(s*, x) at each input. Abstract.

    A subclass says how it solves (I - Jᵀ) z = g.
    """

    every_step: ClassVar = True
    works_for = "models whose state converges at a held input, and which answer at every step"

    def __init__(
        self,
        loss: Loss,
        tolerance: Tolerance = None,
        max_iterations: Iterations = 1000,
        method: Method = "iteration",
        penalty: Weight = 0.0,
        limit: Limit = 0.9,
    ) -> None:
        super().__init__(loss)
        self.tolerance, self.max_iterations, self.method = tolerance, max_iterations, method
        self.penalty, self.limit = penalty, limit

    def solve(self, application: Application, g: Tensor) -> Tensor:
        """Return z (rows, e)."""
        raise NotImplementedError(f"{who(type(self))}: its class defines no solve")

    def init(self, model: Model, batch_size: int) -> State:
        """Return the state from which the first equilibrium is sought.

        Raises ConfigError for a model whose state counts steps, since it has no equilibrium.
        """
        state = detach(model.init_state(batch_size, device=next(model.parameters()).device))
        tensors = list(leaves(state))
        counters = [path for path, leaf in tensors if not (leaf.is_floating_point() or leaf.is_complex())]
        if counters or not tensors:
            what = f"has integers at {counters[0]}" if counters else "is empty"
            raise ConfigError(
                f"{who(type(self))}: the model's state {what}, expected numbers that converge; take an Elman network "
                "or a gated layer such as gru"
            )
        return state

    def update(self, model: Model, learner: State, batch: Batch) -> tuple[Tensor, State]:
        self.check(model, batch)
        equilibria = HeldModel(model, tolerance=self.tolerance, max_iterations=self.max_iterations, method=self.method)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad(), backend("parallel", "reference"):
            loss, state = self.loss(equilibria, batch, learner)
            (application,) = equilibria.applications
            if self.penalty:
                loss = loss + self.penalty * self._excess(application)
            points = [application.point, *parameters]
            g, *direct = torch.autograd.grad(loss, points, retain_graph=True, allow_unused=True)
            if g is None:
                return with_gradients(loss, parameters, direct), state
            z = self.solve(application, g)
            through = torch.autograd.grad(application.image, parameters, z, allow_unused=True)
        gradients = [
            one if other is None else other if one is None else one + other
            for one, other in zip(direct, through, strict=True)
        ]
        return with_gradients(loss, parameters, gradients), state

    def _excess(self, application: Application) -> Tensor:
        """Return the mean of ((1ᵀJ - limit)⁺)² over all column sums of J."""
        point, image = application
        sums = torch.autograd.grad(
            image, point, torch.ones_like(image), create_graph=True, allow_unused=True, materialize_grads=True
        )[0]
        return (sums - self.limit).clamp_min(0).square().mean()


PENALTY = (
    'the Lipschitz coefficient penalty: Linsley et al., "Stable and Expressive Recurrent Vision Models", '
    "arXiv:2005.11362"
)
