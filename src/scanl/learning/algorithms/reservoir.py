"""Training of the readout alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.layers.state import State, detach
from scanl.learning.algorithms._readout import readout
from scanl.learning.algorithms.base import Algorithm, algorithm
from scanl.learning.questions import Model
from scanl.options import who


@algorithm("reservoir")
class Reservoir(Algorithm):
    r"""Training of the readout alone: the gradient of the linear map that makes the answers from the features.

    .. math:: y_t = C r_t + d, \quad \nabla_C L = \sum_t \frac{\partial L}{\partial y_t} r_t^\top, \quad
        \nabla_d L = \sum_t \frac{\partial L}{\partial y_t}

    The features r come from a model that stays as it is: its other parameters get no gradient, and nothing is
    propagated back through time or through layers. The learner is the state. `force` fits the same map by least
    squares, and `fit_readout` in one pass over data that are at hand.
    """

    id = "A-reservoir"
    aliases = ("reservoir_computing",)
    equation = "dL/dC = sum_t (dL/dy_t) r_t^T,  no gradient for the recurrence"
    source = (
        'Jaeger, "The echo state approach to analysing and training recurrent neural networks", GMD report 148, 2001; '
        "Lukosevicius and Jaeger, Computer Science Review 3, 2009"
    )
    computes: ClassVar = "truncation"
    error = "exact for the readout; all other parameters have a gradient of zero"
    memory = "B*e"
    operations = "B*T*(p + 2*e)"
    works_for = "every layer, in a model whose `head` is a linear map"

    def init(self, model: Model, batch_size: int) -> State:
        """Return the learner; raises ConfigError for a model whose answers are not a linear map's."""
        head = readout(who(type(self)), model)
        return model.init_state(batch_size, device=head.weight.device)

    def update(self, model: Model, learner: State, batch: Batch) -> tuple[Tensor, Any]:
        with _alone(model, readout(who(type(self)), model)), torch.enable_grad():
            loss, state = self.loss(model, batch, learner)
        return loss, detach(state)


@contextmanager
def _alone(model: nn.Module, head: nn.Linear) -> Iterator[None]:
    """Let only the readout have gradients."""
    others = [p for p in {*model.parameters()} - {*head.parameters()} if p.requires_grad]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_()
