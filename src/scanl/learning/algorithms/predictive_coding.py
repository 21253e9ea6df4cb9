"""Predictive coding."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.layers.state import State, detach, flatten, unflatten
from scanl.learning.algorithms._pieces import InPieces
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm, with_gradients
from scanl.learning.questions import Model
from scanl.ops import backend
from scanl.options import above, at_least, between


@algorithm("predictive_coding")
class PredictiveCoding(Algorithm):
    r"""Predictive coding: prediction errors of the states relax, one step after another, backwards in time.

    .. math:: \dot v_t = -\varepsilon_t + \Big(\frac{\partial \hat v_{t+1}}{\partial v_t}\Big)^{\!\top}
        \varepsilon_{t+1} + \Big(\frac{\partial \hat y_{t+1}}{\partial v_t}\Big)^{\!\top} \varepsilon^y_{t+1}, \quad
        \varepsilon_t = v_t - \hat v_t, \quad \Delta\theta = \sum_t \varepsilon_t^\top
        \frac{\partial \hat v_t}{\partial \theta} + \varepsilon^{y\top}_t \frac{\partial \hat y_t}{\partial \theta}

    The nodes of the network in time are the states v_t and the answers y_t, which a step predicts from the state before
    it. The answers are clamped to the targets: ε^y = -∂ℓ/∂y, the error T - y for half the squared error. Each v_t
    begins at its prediction and relaxes for K steps of `rate`. Predictions and their derivatives are not
    renewed after the forward pass. At equilibrium ε_t is minus the error that backpropagation brings to s_t.

    Within a step autograd computes the derivatives; the paper has nodes at the gates of an LSTM too. The
    gradient is minus Δθ.
    """

    id = "A-pc"
    aliases = ("PC",)
    equation = "dv_t = rate (-e_t + (ds_{t+1}/dv_t)^T e_{t+1} + (dy_{t+1}/dv_t)^T e^y_{t+1}),  e_t = v_t - s_t"
    source = (
        'Millidge, Tschantz and Buckley, "Predictive Coding Approximates Backprop along Arbitrary Computation Graphs", '
        'arXiv:2006.04182; Whittington and Bogacz, "An Approximation of the Error Backpropagation '
        'Algorithm in a Predictive Coding Network with Local Hebbian Synaptic Plasticity", Neural Computation 29(5), '
        "2017"
    )
    computes: ClassVar = "estimate"
    error = "no variance; an error that is n steps back is multiplied by (1 - (1 - rate)^iterations)^n"
    memory = "B*T*e*2"
    operations = "B*T*(2*p + e*iterations)"
    every_step: ClassVar = True
    works_for = "every layer, in a model that answers at every step"

    def __init__(
        self,
        loss: Loss,
        iterations: Annotated[int, at_least(1), "K, steps of a state's relaxation"] = 100,
        rate: Annotated[float, above(0), between(0, 1), "size of such a step"] = 0.1,
    ) -> None:
        super().__init__(loss)
        self.iterations, self.rate = iterations, rate

    def init(self, model: Model, batch_size: int) -> State:
        return detach(model.init_state(batch_size, device=next(model.parameters()).device))

    def update(self, model: Model, learner: State, batch: Batch) -> tuple[Tensor, State]:
        self.check(model, batch)
        starts: list[Tensor] = []
        states: list[Tensor] = []
        predictions: list[Tensor] = []
        answers: list[Tensor] = []

        def run(x: Tensor, state: State, **others: Tensor) -> tuple[Tensor, State]:
            starts.append(flatten(state).detach().requires_grad_())
            y, after = model(x, unflatten(starts[-1], state), **others)
            states.append(flatten(after))
            predictions.append(y)
            answers.append(y.detach().requires_grad_())
            return answers[-1], detach(after)

        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad(), backend("parallel", "reference"):
            loss, state = self.loss(InPieces("predictive_coding", model, 1, run), batch, learner)
            slopes = torch.autograd.grad(loss, answers, materialize_grads=True)
            error = torch.zeros_like(states[-1]) if states else loss
            total: list[Any] = [None] * len(parameters)
            for start, after, prediction, slope in reversed(
                list(zip(starts, states, predictions, slopes, strict=True))
            ):
                nodes = [node for node in (after, prediction) if node.requires_grad]
                errors = [one for one, node in ((error, after), (-slope, prediction)) if node.requires_grad]
                message, *changes = torch.autograd.grad(nodes, [start, *parameters], errors, allow_unused=True)
                total = [
                    one if more is None else -more if one is None else one - more
                    for one, more in zip(total, changes, strict=True)
                ]
                error = torch.zeros_like(start)
                if message is not None:
                    for _ in range(self.iterations):
                        error = error + self.rate * (message - error)
        return with_gradients(loss, parameters, total), state
