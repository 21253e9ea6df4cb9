"""Recurrent backpropagation by conjugate gradients."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from scanl.learning.algorithms._equilibrium import (
    PENALTY,
    Application,
    Equilibrium,
    Product,
)
from scanl.learning.algorithms.base import Loss, algorithm
from scanl.ops.fixed_point import ConvergenceError, sizes
from scanl.options import at_least


@algorithm("cg_rbp")
class CGRBP(Equilibrium):
    r"""Recurrent backpropagation by conjugate gradients, which need no contraction: I - J must be invertible.

    .. math:: \big((I - J)(I - J^\top) + \eta I\big)\, z = (I - J)\, g

    All else is as in `rbp`. The system's condition number is the square of that of I - J. Each row has its own step
    sizes, so its gradient does not depend on the other rows. Differs: g is read one application later than in the
    paper, so η acts on the effect through the past only; and the authors' program leaves out the step by
    which it converges.

    Raises ConvergenceError where it does not converge in `max_iterations`.
    """

    id = "A-cgrbp"
    aliases = ("conjugate_gradient_rbp", "conjugate_gradient_recurrent_backpropagation")
    equation = "((I - J)(I - J^T) + eta I) z = (I - J) dl/ds*,  dl/dtheta = z^T dF/dtheta"
    source = 'Liao et al., "Reviving and Improving Recurrent Back-Propagation", arXiv:1803.06396; ' + PENALTY
    computes: ClassVar = "exact"
    error = "exact for eta = 0, up to the tolerance; eta > 0 shortens z along small singular values of I - J"
    memory = "B*e*(T + 1)"
    operations = "6*B*T*p*max_iterations"

    def __init__(
        self,
        loss: Loss,
        eta: Annotated[float, at_least(0), "η, which keeps the system regular; the authors take 1e-5"] = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(loss, **options)
        self.eta = eta

    def solve(self, application: Application, g: Tensor) -> Tensor:
        def normal(z: Tensor) -> Tensor:
            u = z - application.transposed(z)
            return u - application.forward(u) + self.eta * z

        tolerance = torch.finfo(g.dtype).eps ** (5 / 6) if self.tolerance is None else self.tolerance
        size = sizes(g)
        unit = g / size
        return size * conjugate_gradients(normal, unit - application.forward(unit), tolerance, self.max_iterations)


def conjugate_gradients(product: Product, b: Tensor, tolerance: float, max_iterations: int) -> Tensor:
    """Return z with product(z) = b, for a symmetric positive map of each row of b (B, N).

    tolerance: of ‖b - product(z)‖ / ‖b‖ in every row. Raises ConvergenceError.

    Source: Hestenes and Stiefel, J. Res. Nat. Bur. Stand. 49 (1952), eq. (3:1).
    """
    z, residual = torch.zeros_like(b), b
    direction = residual
    size = residual.square().sum(1, keepdim=True)
    limit = tolerance**2 * size
    for _ in range(max_iterations):
        if (size <= limit).all():
            return z
        image = product(direction)
        curvature = (direction * image).sum(1, keepdim=True)
        going = size > limit
        length = torch.where(going, size / curvature, 0)
        z, residual = z + length * direction, residual - length * image
        following = residual.square().sum(1, keepdim=True)
        direction = residual + torch.where(going, following / size, 0) * direction
        size = following
    if (size <= limit).all():
        return z
    worst = (size / b.square().sum(1, keepdim=True)).max().sqrt().item()
    raise ConvergenceError(
        f"cg_rbp: the gradient did not converge in {max_iterations} iterations (max_iterations): relative residual "
        f"{worst:.3g}, tolerance {tolerance:.3g}. Raise eta, max_iterations or tolerance"
    )
