"""Local propagation."""

from typing import Annotated

import torch
from torch import Tensor

from scanl.learning.algorithms._split import Problem, Split, Variables
from scanl.learning.algorithms.base import Loss, algorithm
from scanl.options import above, at_least


@algorithm("local_propagation")
class LocalPropagation(Split):
    r"""Local propagation: states and multipliers are variables, and a saddle point is sought by local steps.

    .. math:: \mathcal{L} = \ell + \sum_t \lambda_t^\top G(s_t - F_\theta(s_{t-1}, x_t))
        + \frac{\rho}{2} \|G(s_t - F_\theta(s_{t-1}, x_t))\|^2, \quad
        \dot s = -\nabla_s \mathcal{L}, \quad \dot\lambda = \nabla_\lambda \mathcal{L}

    G(r) = ReLU(r - ε) - ReLU(-r - ε), the identity for ε = 0. Then at the saddle point λ_t is minus what
    backpropagation through time brings to s_t, and the gradient of L equals that of backpropagation. All steps of an
    update are applied at once, and a variable reads only its neighbors in time.

    Differs: the variables belong to the samples of an update, begin at the forward pass and λ = 0, and are optimized
    for `iterations` steps before the parameters' step. The authors keep one set for a constant graph over the updates,
    begin at 0, and change all three at once, with one multiplier for all numbers of a state.
    """

    id = "A-localprop"
    equation = "L = loss + sum_t lambda_t G(s_t - F(s_{t-1}, x_t)),  descent in s and theta, ascent in lambda"
    source = (
        'Marra, Tiezzi, Melacci, Betti, Maggini and Gori, "Local Propagation in Constraint-based Neural Network", '
        "arXiv:2002.07720; Tiezzi et al., "
        '"Deep Constraint-based Propagation in Graph Neural Networks", arXiv:2005.02392'
    )
    error = "no variance; the bias falls geometrically with iterations, where the rates are small enough to converge"
    memory = "2*B*T*e"
    operations = "2*B*T*p*(iterations + 1)"

    def __init__(
        self,
        loss: Loss,
        iterations: Annotated[int, at_least(0), "steps of the states and multipliers in an update"] = 200,
        state_rate: Annotated[float, above(0), "size of a step of the states"] = 0.1,
        multiplier_rate: Annotated[float, above(0), "size of a step of the multipliers"] = 1.0,
        rho: Annotated[float, at_least(0), "ρ, weight of the squared residuals"] = 4.0,
        epsilon: Annotated[float, at_least(0), "ε, residuals up to this size count as 0"] = 0.0,
    ) -> None:
        super().__init__(loss)
        self.iterations, self.state_rate, self.multiplier_rate = iterations, state_rate, multiplier_rate
        self.rho, self.epsilon = rho, epsilon

    def objective(self, loss: Tensor, residual: Tensor, multipliers: Tensor) -> Tensor:
        g = self._tolerant(residual)
        return loss + (multipliers * g).sum() + self.rho / 2 * g.square().sum()

    def optimize(self, problem: Problem, variables: Variables) -> Variables:
        states, multipliers = variables
        for _ in range(self.iterations):
            states = states.detach().requires_grad_()
            loss, residual = problem(states)
            (slope,) = torch.autograd.grad(self.objective(loss, residual, multipliers), states)
            states = states.detach() - self.state_rate * slope
            multipliers = multipliers + self.multiplier_rate * self._tolerant(residual.detach())
        return Variables(states, multipliers)

    def _tolerant(self, residual: Tensor) -> Tensor:
        """Return G."""
        return residual - residual.clamp(-self.epsilon, self.epsilon)
