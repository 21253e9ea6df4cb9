"""Learning of columnar-constructive networks, stage by stage."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.designation import label
from scanl.layers.rnn.columnar_constructive import ColumnarConstructive
from scanl.layers.state import State, detach
from scanl.learning.algorithms._channelwise import ByChannel, FollowedModel, Influence, channelwise, start
from scanl.learning.algorithms.base import Loss, algorithm
from scanl.learning.questions import Model
from scanl.options import at_least, who


class CCNLearner(NamedTuple):
    """The state, the influences of each stage's parameters on it, and the updates so far, (B,) int64."""

    state: State
    influences: tuple[Influence, ...]
    updates: Tensor


@algorithm("ccn")
class CCN(ByChannel):
    r"""Columnar-constructive learning: real-time recurrent learning of one stage of columns after another.

    .. math:: \nabla_{\theta_k} = \frac{\partial L}{\partial h^k} M^k, \quad
              M^k_t = J_t M^k_{t-1} + \frac{\partial (h^k, c^k)_t}{\partial \theta_k}

    For `stage_updates` updates a stage learns. Then it is constant for good, and the next one begins, which reads it.
    What comes after the layer (the head, the last norm, the channel mixer) always learns; what comes before it learns
    with the first stage. An update is a block of steps, as in `diagonal_rtrl`. It sets the buffer `grown` of the layer.

    Differs: the authors' program lets a stage read the earlier ones a step later than the layer does here. The authors
    learn predictions by TD(λ), with one update a step; here the loss is that of the question.
    """

    id = "A-ccn"
    aliases = ("columnar_constructive_learning",)
    equation = "dL/dtheta_k = (dL/dh_k) M_k of the present stage k alone,  M_t = J_t M_{t-1} + ds_t/dtheta_k"
    source = (
        'Javed, Shah, Sutton and White, "Scalable Real-Time Recurrent Learning Using Columnar-Constructive Networks", '
        "JMLR 24, 2023, arXiv:2302.05326"
    )
    computes: ClassVar = "truncation"
    error = (
        "exact for the stage that learns; earlier stages are constant, and the influence of a stage begins at 0 with it"
    )
    memory = "B*(T*e + p + 1)"
    operations = "2*B*T*p"
    outlives: ClassVar = ("updates",)
    works_for = "stacks of one layer, columnar_constructive or constructive"

    def __init__(
        self,
        loss: Loss,
        stage_updates: Annotated[
            int, at_least(1), "updates for which a stage learns; the last one learns on"
        ] = 100_000,
    ) -> None:
        super().__init__(loss)
        self.stage_updates = stage_updates

    def init(self, model: Model, batch_size: int) -> CCNLearner:
        self._layer(model).grow(0)
        device = next(model.parameters()).device
        influences = start(model, channelwise(model, type(self)), batch_size)
        updates = torch.zeros(batch_size, dtype=torch.int64, device=device)
        return CCNLearner(model.init_state(batch_size, device=device), influences, updates)

    def update(self, model: Model, learner: CCNLearner, batch: Batch) -> tuple[Tensor, CCNLearner]:
        self.check(model, batch)
        layer = self._layer(model)
        stage = min(int(learner.updates.max()) // self.stage_updates, len(layer.stages) - 1)
        layer.grow(stage)
        followed = FollowedModel(channelwise(model, type(self)), learner.influences)
        with _constant(_before(model, layer, stage)), followed.watching(), torch.enable_grad():
            loss, state = self.loss(model, batch, learner.state)
        return loss, CCNLearner(detach(state), followed.influences(), learner.updates + 1)

    def _layer(self, model: Model) -> ColumnarConstructive:
        mixers = model.stack.mixers()
        if len(mixers) != 1 or not isinstance(mixers[0], ColumnarConstructive):
            names = ", ".join(map(str, map(label, mixers)))
            raise ConfigError(
                f"{who(type(self))}: the model has the layers {names}, expected a single columnar_constructive"
            )
        return mixers[0]


def _before(model: Model, layer: ColumnarConstructive, stage: int) -> list[nn.Parameter]:
    """Return the parameters that are constant while a stage learns."""
    (block,) = model.stack.blocks
    after = [model.head, model.stack.norm, *filter(None, (block.channel, block.channel_norm)), layer.stages[stage]]
    learning = {parameter for part in after for parameter in part.parameters()}
    stages = set(layer.parameters())
    return [each for each in model.parameters() if each not in learning and (stage or each in stages)]


@contextmanager
def _constant(parameters: list[nn.Parameter]) -> Iterator[None]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()
