"""Backpropagation through time."""

from typing import Any, ClassVar

from torch import Tensor

from scanl.data.batch import Batch
from scanl.layers.state import State, detach
from scanl.learning.algorithms.base import Algorithm, algorithm
from scanl.learning.questions import Model


@algorithm("bptt")
class BPTT(Algorithm):
    r"""Backpropagation through time: the gradient of the loss over all steps of an update.

    .. math:: \nabla_\theta \sum_{t=1}^{T} \ell_t(s_t), \quad s_t = f_\theta(s_{t-1}, x_t)

    For a whole sequence in one update the gradient is exact. The learner is the state s_T, detached from the graph: a
    second update goes on from it, and its gradient ignores the effect of the parameters on s_0 (truncated
    backpropagation through time).
    """

    id = "A-bptt"
    equation = "dL/dtheta = sum_t sum_{j<=t} (dl_t/ds_t) (prod_{r=j+1..t} ds_r/ds_{r-1}) (ds_j/dtheta)"
    source = (
        'Werbos, "Backpropagation Through Time: What It Does and How to Do It", Proc. IEEE 78(10), 1990; truncated: '
        'Williams and Peng, "An Efficient Gradient-Based Algorithm for On-Line Training of Recurrent Network '
        'Trajectories", Neural Computation 2(4), 1990'
    )
    computes: ClassVar = "exact"
    error = "over several updates, the effect of the parameters through the state before an update is left out"
    memory = "B*T*e"
    operations = "2*B*T*p"

    def init(self, model: Model, batch_size: int) -> State:
        return model.init_state(batch_size, device=next(model.parameters()).device)

    def update(self, model: Model, learner: State, batch: Batch) -> tuple[Tensor, Any]:
        loss, state = self.loss(model, batch, learner)
        return loss, detach(state)
