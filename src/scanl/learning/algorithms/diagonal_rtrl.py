"""Real-time recurrent learning where the channels of the recurrence are apart."""

from typing import ClassVar

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.layers.state import detach
from scanl.learning.algorithms._channelwise import ByChannel, ChannelwiseLearner, FollowedModel, channelwise, start
from scanl.learning.algorithms.base import algorithm
from scanl.learning.questions import Model


@algorithm("diagonal_rtrl")
class DiagonalRTRL(ByChannel):
    r"""Real-time recurrent learning of layers whose channels do not act on each other, a block of steps at once.

    .. math::
       \nabla_\theta = \Big(\frac{\partial L}{\partial \theta}\Big)_{s_0} + \frac{\partial L}{\partial s_0} M_0,
       \quad M_C = \Big(\prod_{t=1}^{C} a_t\Big) M_0 + \sum_{t=1}^{C} \Big(\prod_{j>t} a_j\Big) u_t x_t^\top

    with s_t = f(p_t, v, s_{t-1}) in each channel, p = W x, a_t = ∂s_t/∂s_{t-1} and u_t = ∂s_t/∂p_t. A parameter acts on
    one channel alone, so M has the size of the parameters, and not that times the size of the state. The products of
    later a_j come from the backward pass of the recurrence itself, as the derivative of s_C.

    An update is a block of C steps, of any size. Within it the gradient is backpropagation; M_0 adds what came before.
    While the parameters stay as they are, the sum over blocks does not depend on where they are cut.
    """

    id = "A-diagrtrl"
    aliases = ("RTU", "recurrent_trace_unit")
    equation = (
        "M_t = a_t * M_{t-1} + u_t x_t^T,  dL/dtheta = sum_t delta_t * M_t,  a_t = ds_t/ds_{t-1},  u_t = ds_t/dp_t"
    )
    source = (
        'Williams and Zipser, "A Learning Algorithm for Continually Running Fully Recurrent Neural Networks", Neural '
        'Computation 1(2), 1989; for diagonal recurrences: Mozer, "A Focused Backpropagation Algorithm for Temporal '
        'Pattern Recognition", Complex Systems 3, 1989; Zucchet et al., "Online Learning of Long-Range Dependencies", '
        "arXiv:2305.15947, eq. (4) and (5)"
    )
    computes: ClassVar = "exact"
    error = (
        "of parameters below a layer (the model's input map, norms, lower layers), and of those that a layer lists in "
        "left_out, the effect through the state before an update is left out; M is that of the parameters as they were"
    )
    memory = "B*(T*e + p)"
    operations = "B*(3*T*p + 2*p)"
    works_for = "layers whose channels have recurrences of their own (`Layer.left_out` is not None)"

    def init(self, model: Model, batch_size: int) -> ChannelwiseLearner:
        layers = channelwise(model, type(self))
        state = model.init_state(batch_size, device=next(model.parameters()).device)
        return ChannelwiseLearner(state, start(model, layers, batch_size))

    def update(self, model: Model, learner: ChannelwiseLearner, batch: Batch) -> tuple[Tensor, ChannelwiseLearner]:
        self.check(model, batch)
        followed = FollowedModel(channelwise(model, type(self)), learner.influences)
        with followed.watching(), torch.enable_grad():
            loss, state = self.loss(model, batch, learner.state)
        return loss, ChannelwiseLearner(detach(state), followed.influences())
