"""Backpropagation through time."""

from torch import Tensor

from scanl.data.batch import Batch
from scanl.layers.state import State, detach
from scanl.learning.algorithms.base import Algorithm, Loss
from scanl.learning.questions import Model


class BPTT(Algorithm):
    r"""Backpropagation through time: the gradient of the loss over all steps of an update.

    .. math:: \nabla_\theta \sum_{t=1}^{T} \ell_t(s_t), \quad s_t = f_\theta(s_{t-1}, x_t)

    For whole sequences the gradient is exact, and the learner is None. With `carry`, each update reads the next chunk
    of a stream, and the learner is the state s_T, detached from the graph. The gradient then ignores the effect of the
    parameters on s_0 in earlier chunks (truncated backpropagation through time).

    Source: Werbos, "Backpropagation Through Time: What It Does and How to Do It", Proc. IEEE 78(10), 1990; truncated:
    Williams and Peng, "An Efficient Gradient-Based Algorithm for On-Line Training of Recurrent Network Trajectories",
    Neural Computation 2(4), 1990.
    """

    def __init__(self, loss: Loss, carry: bool = False) -> None:
        super().__init__(loss)
        self.carry = carry

    def init(self, model: Model, batch_size: int) -> State:
        device = next(model.parameters()).device
        return model.init_state(batch_size, device=device) if self.carry else None

    def update(self, model: Model, learner: State, batch: Batch) -> tuple[Tensor, State]:
        loss, state = self.loss(model, batch, learner)
        return loss, detach(state) if self.carry else None
