"""Local representation alignment."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State, detach
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm, with_gradients
from scanl.learning.questions.base import answered
from scanl.models.whole.aligned import AlignedStack
from scanl.options import above, at_least


@algorithm("lra")
class LRA(Algorithm):
    r"""Local representation alignment: each layer learns from a target that error weights make, from the top down.

    .. math:: y^\ell = \phi(h^\ell - \beta E^{\ell+1} e^{\ell+1}), \quad e^\ell = z^\ell - y^\ell, \quad
        \partial W^\ell = e^\ell z^{\ell-1\top}, \quad \partial V^\ell = e^\ell z^{\ell\top}_{t-1}, \quad
        \partial E^\ell = \gamma (\partial W^\ell)^\top

    The top layer's pull is the gradient of the loss that reaches it through the model's norm and head. The map of the
    input gets E¹ e¹. W needs no transport to the backward pass: E drifts towards W^T. Nothing is unrolled in time.

    It trains models whose stack is a `scanl.models.AlignedStack`. Differs: the network is recurrent, biases are
    trained, and the released program's update of the square E, which is not transposed, is transposed.
    """

    id = "A-lra"
    aliases = ("local_representation_alignment",)
    equation = "y^l = phi(h^l - beta E^(l+1) e^(l+1)),  e^l = z^l - y^l,  dW^l = e^l z^(l-1), dE^l = gamma dW^l^T"
    source = (
        'Ororbia and Mali, "Biologically Motivated Algorithms for Propagating Local Target Representations", '
        "arXiv:1805.11703, LRA-E"
    )
    computes: ClassVar = "estimate"
    error = (
        "a descent direction of local mismatches: a layer's update is about beta to the power of the layers above and "
        "itself times a gradient through E in place of W^T; effects through former states are left out"
    )
    memory = "B*T*e*2"
    operations = "B*T*p*2"
    masks: ClassVar = False
    works_for = "models with an AlignedStack"

    def __init__(
        self,
        loss: Loss,
        beta: Annotated[float, above(0), "β, strength of the pull on the targets"] = 0.1,
        gamma: Annotated[float, at_least(0), "γ, speed of E; 0 for constant random error weights"] = 1.0,
    ) -> None:
        super().__init__(loss)
        self.beta, self.gamma = beta, gamma

    def init(self, model: Any, batch_size: int) -> State:
        self._stack(model)
        return model.init_state(batch_size, device=next(model.parameters()).device)

    def update(self, model: Any, learner: State, batch: Batch) -> tuple[Tensor, State]:
        self.check(model, batch)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad(), self._stack(model).align(self.beta, self.gamma):
            loss, answers, state = answered(self.loss, model, batch, learner)
            scale = answers.clamp(1, batch.size * batch.length)  # a step pulls the same, however many have answers
            sums = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
        changes = [None if one is None else one / scale for one in sums]
        return with_gradients(loss, parameters, changes), detach(state)

    @staticmethod
    def _stack(model: Any) -> AlignedStack:
        stack = getattr(model, "stack", None)
        if not isinstance(stack, AlignedStack):
            what = type(model).__name__ if stack is None else f"{type(model).__name__} of a {type(stack).__name__}"
            raise ConfigError(f"lra: the model is a {what}, expected one of a scanl.models.AlignedStack")
        return stack
