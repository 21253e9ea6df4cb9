"""Lifted learning: auxiliary coordinates, and alternating directions of multipliers."""

from typing import Annotated, Literal

import torch
from torch import Tensor

from scanl.configured import above, at_least
from scanl.learning.algorithms._split import Problem, Split, Variables
from scanl.learning.algorithms.base import Loss, algorithm


@algorithm("lifted")
class Lifted(Split):
    r"""Lifted learning: the states are variables, optimized by turns with the parameters under a penalty.

    .. math:: \min_{\theta, s} \ell(s, \theta) + \sum_t \lambda_t^\top r_t + \frac{\mu}{2} \|r_t\|^2, \quad
        r_t = s_t - F_\theta(s_{t-1}, x_t)

    `mac` (auxiliary coordinates) has λ = 0, and μ grows by `growth` after each round. `admm` has a constant μ, and
    λ ← λ + μ r after each round. In a round the states are minimized by a quasi-Newton method with a line search, which
    never raises the objective. Residuals go to 0 with the rounds, and the gradient goes to that of backpropagation
    through time, so both have the same stationary points.

    The states of an update need memory of their own, which is the methods' main cost. Differs: the parameters take one
    step of the optimizer where the papers solve for them, since a general layer has no closed form.
    """

    id = "A-lifted"
    aliases = ("lifted_method", "lifted_network", "ADMM", "method_of_auxiliary_coordinates", "MAC")
    equation = "min over theta, s: loss + sum_t lambda_t r_t + mu/2 |r_t|^2,  r_t = s_t - F(s_{t-1}, x_t)"
    source = (
        'Carreira-Perpinan and Wang, "Distributed Optimization of Deeply Nested Systems", arXiv:1212.5921; '
        'Taylor et al., "Training Neural Networks Without Gradients: A Scalable ADMM Approach", arXiv:1605.02026'
    )
    error = "no variance; the bias is of the order of the residuals: 1/mu for mac, falling geometrically for admm"
    memory = "2*B*T*e"
    operations = "2*B*T*p*(rounds*iterations + 1)"

    def __init__(
        self,
        loss: Loss,
        method: Annotated[Literal["mac", "admm"], "penalty alone, or with multipliers"] = "admm",
        penalty: Annotated[float, above(0), "μ of the first round"] = 1.0,
        growth: Annotated[float, at_least(1), "factor of μ between two rounds of mac"] = 10.0,
        rounds: Annotated[int, at_least(1), "minimizations of the states in an update"] = 5,
        iterations: Annotated[int, at_least(1), "steps of such a minimization at most"] = 20,
    ) -> None:
        super().__init__(loss)
        self.method, self.penalty, self.growth = method, penalty, growth
        self.rounds, self.iterations = rounds, iterations
        self._mu = penalty

    def objective(self, loss: Tensor, residual: Tensor, multipliers: Tensor) -> Tensor:
        return loss + (multipliers * residual).sum() + self._mu / 2 * residual.square().sum()

    def optimize(self, problem: Problem, variables: Variables) -> Variables:
        states, multipliers = variables
        self._mu = self.penalty
        for number in range(self.rounds):
            if number and self.method == "mac":
                self._mu *= self.growth
            states = self.minimize(problem, states, multipliers)
            if self.method == "admm" and number + 1 < self.rounds:
                with torch.no_grad():
                    multipliers = multipliers + self._mu * problem(states)[1]
        return Variables(states, multipliers)

    def minimize(self, problem: Problem, states: Tensor, multipliers: Tensor) -> Tensor:
        """Return states with an objective that is not higher."""
        points = states.detach().clone().requires_grad_()
        fine = torch.finfo(states.dtype).eps
        solver = torch.optim.LBFGS(
            [points],
            max_iter=self.iterations,
            tolerance_grad=fine,
            tolerance_change=fine,
            line_search_fn="strong_wolfe",
        )

        def value() -> Tensor:
            total = self.objective(*problem(points), multipliers)
            (points.grad,) = torch.autograd.grad(total, points)
            return total.detach()

        first = value()
        solver.step(value)
        return points.detach() if value() <= first else states
