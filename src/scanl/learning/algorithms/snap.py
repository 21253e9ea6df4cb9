"""Sparse n-step approximation of real-time recurrent learning."""

from typing import Annotated, ClassVar

from scanl.learning.algorithms.base import Loss, algorithm
from scanl.learning.algorithms.rtrl import InfluenceAlgorithm
from scanl.options import at_least


@algorithm("snap")
class SnAp(InfluenceAlgorithm):
    r"""Sparse n-step approximation: the influence of a parameter on what it reaches within n steps.

    .. math:: M_t = P_n \odot (J_t M_{t-1} + \bar M_t), \quad
        \nabla_\theta \ell_t = \frac{\partial \ell_t}{\partial s_t} (J_t M_{t-1} + \bar M_t)

    P_n is 1 where a parameter reaches a number of the state within n steps, and 0 elsewhere. It follows from the
    structure of the model, which does not change with its values; zeros of a pruned weight matrix belong to it.

    With n = 1 a weight is followed in its own unit only, by a trace that decays with dh_k/dh_k: this is exact in
    diagonal recurrences. In a dense recurrence n = 2 is already `rtrl`; with sparse weights 2 and 3 lie between. None
    for n is `rtrl`.

    Differs: the gradient of a step is taken before P_n is applied to it, where the authors' program takes it after. So
    the last step is exact. And P_n is constant, where theirs drops the weights of inputs that are 0 at the moment.
    """

    id = "A-snap"
    aliases = ("SnAp_1", "SnAp_2", "SnAp_n", "sparse_n_step_approximation")
    equation = "M_t = P_n * (J_t M_{t-1} + ds_t/dtheta),  dl_t/dtheta = (dl_t/ds_t) (J_t M_{t-1} + ds_t/dtheta)"
    source = (
        'Menick et al., "Practical Real Time Recurrent Learning with a Sparse Approximation to the Jacobian", '
        "arXiv:2006.07232"
    )
    computes: ClassVar = "truncation"
    error = (
        "paths on which a parameter reaches a number of the state that it does not reach within n steps are left out; "
        "exact in diagonal recurrences"
    )
    memory = "B*(e + p*Min(e, 1 + (n - 1)*e) + e**2*(d + 2))"
    operations = "2*B**2*T*e*p + B*T*p*Min(e, 1 + (n - 1)*e)**2"
    works_for = (
        "every layer with a state of constant size; the formulas are of a dense layer with a number a unit, over a "
        "norm and a map of d inputs. B^2: as in rtrl"
    )

    def __init__(
        self,
        loss: Loss,
        n: Annotated[
            int | None, at_least(1), "steps within which a parameter must reach a number of the state; None: any number"
        ] = 1,
    ) -> None:
        super().__init__(loss)
        self.n = self.steps = n
        self.block = None if n is None else 1
