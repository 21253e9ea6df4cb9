"""Online learning of long-range dependencies: traces in each recurrent layer, errors back-propagated in space alone."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.layers import options
from scanl.layers.state import detach
from scanl.learning.algorithms._channelwise import (
    EVERY_KIND,
    ByChannel,
    ChannelwiseLearner,
    FollowedModel,
    Kinds,
    channelwise,
    start,
)
from scanl.learning.algorithms.base import Loss, algorithm
from scanl.learning.questions import Model
from scanl.options import one_of

CARRIED_KINDS: dict[str, Kinds] = {
    "full": EVERY_KIND,
    "full_rec": frozenset({"vector"}),
    "one_step": frozenset(),
    "spatial": frozenset(),
}


@algorithm("online_lru")
class OnlineLRU(ByChannel):
    r"""Online learning of long-range dependencies: at each step, the errors of that step times traces of the past.

    .. math::
       e^\lambda_t = \lambda \odot e^\lambda_{t-1} + s_{t-1}, \quad
       e^B_t = \lambda \odot e^B_{t-1} + \gamma x_t^\top, \quad \frac{dL_t}{d\theta} = \delta_t \odot e^\theta_t

    δ_t is the error of step t at the state of a layer. It comes from above at the same step, through all layers, and
    goes through no recurrent link. The traces are `diagonal_rtrl`'s, and it is the same algorithm for an update
    of one step. For one recurrent layer it is exact. Over several layers it leaves out the paths in time through the
    states of upper layers, also within an update of many steps, which are taken one by one.

    The equations are those of the LRU; other layers whose channels are apart have the traces of their own recurrences.
    Differs: the gain γ belongs to the input map here, so "full_rec" has no trace for it. A layer that reads a window
    of steps (hawk, mamba, qrnn) sends its errors to all steps of the window that are in the update.
    """

    id = "A-onlinelru"
    aliases = ("online_learning_of_long_range_dependencies",)
    equation = "e_t = lambda * e_{t-1} + ds_t/dtheta,  dL_t/dtheta = delta_t * e_t,  delta_t from step t alone"
    source = (
        'Zucchet, Meier, Schug, Mujika and Sacramento, "Online Learning of Long-Range Dependencies", arXiv:2305.15947, '
        "eq. (4) to (6)"
    )
    computes: ClassVar = "truncation"
    error = (
        "exact for the parameters of one recurrent layer; in a stack the paths in time through the states of upper "
        "layers are left out, and for parameters below a layer those through its state"
    )
    memory = "B*(T*e + p)"
    operations = "B*T*4*p"
    works_for = "layers whose channels have recurrences of their own (`Layer.left_out` is not None)"

    def __init__(
        self,
        loss: Loss,
        variant: Annotated[
            options.Variant,
            one_of(CARRIED_KINDS),
            '"full", traces of all parameters; "full_rec", of those of the channels (λ) alone, the input map learns '
            'from the same step; "one_step", no traces, truncated after one step; "spatial", as this, and the '
            "parameters of the channels do not learn",
        ] = "full",
    ) -> None:
        super().__init__(loss)
        self.variant = variant

    def init(self, model: Model, batch_size: int) -> ChannelwiseLearner:
        layers = channelwise(model, type(self))
        state = model.init_state(batch_size, device=next(model.parameters()).device)
        return ChannelwiseLearner(state, start(model, layers, batch_size, CARRIED_KINDS[self.variant]))

    def update(self, model: Model, learner: ChannelwiseLearner, batch: Batch) -> tuple[Tensor, ChannelwiseLearner]:
        self.check(model, batch)
        followed = FollowedModel(
            channelwise(model, type(self)),
            learner.influences,
            CARRIED_KINDS[self.variant],
            by_step=True,
            constant=self.variant == "spatial",
        )
        with followed.watching(), torch.enable_grad():
            loss, state = self.loss(model, batch, learner.state)
        return loss, ChannelwiseLearner(detach(state), followed.influences())
