"""Recurrent backpropagation by a Neumann series."""

from typing import Annotated, Any, ClassVar

from torch import Tensor

from scanl.learning.algorithms._equilibrium import (
    PENALTY,
    Application,
    Equilibrium,
)
from scanl.learning.algorithms.base import Loss, algorithm
from scanl.options import at_least


@algorithm("neumann_rbp")
class NeumannRBP(Equilibrium):
    r"""Recurrent backpropagation by the first K terms of a Neumann series.

    .. math:: z = \sum_{k=0}^{K-1} (J^\top)^k g

    This is backpropagation through K + 1 applications of F at the equilibrium, in the memory of one: the answer is read
    after one application, and each term adds one. K = 0 is the gradient of that one step. All else is as in `rbp`. It
    never fails to converge, and costs K products whatever the numbers are.
    """

    id = "A-nrbp"
    aliases = ("neumann_recurrent_backpropagation",)
    equation = "z = sum_{k<K} (J^T)^k dl/ds*,  dl/dtheta = z^T dF/dtheta"
    source = 'Liao et al., "Reviving and Improving Recurrent Back-Propagation", arXiv:1803.06396; ' + PENALTY
    computes: ClassVar = "truncation"
    error = "terms from (J^T)^K on are left out; they fall with the K-th power of the spectral radius of J"
    memory = "B*e*(T + 1)"
    operations = "B*T*p*(max_iterations + terms + 2)"

    def __init__(
        self,
        loss: Loss,
        terms: Annotated[int, at_least(0), "K"] = 15,
        **options: Any,
    ) -> None:
        super().__init__(loss, **options)
        self.terms = terms

    def solve(self, application: Application, g: Tensor) -> Tensor:
        if self.terms == 0:
            return g * 0
        term = z = g
        for _ in range(self.terms - 1):
            term = application.transposed(term)
            z = z + term
        return z
