"""Recurrent backpropagation."""

from typing import ClassVar

from torch import Tensor

from scanl.learning.algorithms._equilibrium import PENALTY, Application, Equilibrium
from scanl.learning.algorithms.base import algorithm
from scanl.ops import fixed_point
from scanl.ops.fixed_point import ConvergenceError, sizes


@algorithm("rbp")
class RBP(Equilibrium):
    r"""Recurrent backpropagation: the gradient of the equilibrium at a held input, by iteration.

    .. math:: s^* = F_\theta(s^*, x), \quad z \leftarrow J^\top z + g, \quad
        \nabla_\theta \ell = \frac{\partial \ell}{\partial \theta} + z^\top \frac{\partial F}{\partial \theta}

    J = ∂F/∂s at s*, and g = ∂ℓ/∂s*, where the answer is read after one more application of F. The iteration converges
    where F contracts. Elsewhere `cg_rbp` does.

    The input of each step is held until the state is at its equilibrium, so a step's answer does not depend on the
    steps before it. The learner is the equilibrium of the last step, from which the next search starts.

    With `penalty` the loss has the Lipschitz coefficient penalty w mean(((1ᵀJ)_j - λ)⁺)². Column sums bound the norm of
    J only where J has no negative numbers, so it makes contraction likely and does not prove it. Differs: its gradient
    is exact, through the equilibrium too, where the authors hold s* constant.

    Raises ConvergenceError where there is no equilibrium, or the iteration for z does not converge.
    """

    id = "A-rbp"
    aliases = (
        "recurrent_backpropagation",
        "almeida_pineda",
        "C_RBP",
        "contractor_rbp",
        "contractor_recurrent_backpropagation",
    )
    equation = "s* = F(s*, x),  z = J^T z + dl/ds*,  dl/dtheta = z^T dF/dtheta"
    source = (
        'Almeida, "A Learning Rule for Asynchronous Perceptrons with Feedback in a Combinatorial Environment", ICNN '
        '1987; Pineda, "Generalization of Back-Propagation to Recurrent Neural Networks", Phys. Rev. Lett. 59, 1987; '
        + PENALTY
    )
    computes: ClassVar = "exact"
    error = "exact up to the tolerance of the equilibrium and of z"
    memory = "B*e*(T + 1)"
    operations = "2*B*T*p*max_iterations"

    def solve(self, application: Application, g: Tensor) -> Tensor:
        def step(z: Tensor, g: Tensor) -> Tensor:
            return application.transposed(z) + g

        size = sizes(g)
        options = {"tolerance": self.tolerance, "max_iterations": self.max_iterations}
        try:
            return size * fixed_point(step, g / size, method="iteration", **options).state
        except ConvergenceError as error:
            raise ConvergenceError(
                f"rbp: the step does not contract, so z has no limit; take cg_rbp ({error})"
            ) from error
