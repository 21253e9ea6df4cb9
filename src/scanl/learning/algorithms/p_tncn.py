"""Local learning of a parallel temporal neural coding network."""

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import detach
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm, with_gradients
from scanl.models.whole.ptncn import PTNCN, CorrectedState, Expectation
from scanl.options import above, at_least


@algorithm("p_tncn")
class PTNCNLearning(Algorithm):
    r"""Local learning of a parallel temporal neural coding network: products of what the two ends of a weight have.

    .. math:: \partial W^\ell = v^{\ell-1} z^{\ell\top}, \quad \partial E^\ell = \gamma (\partial W^\ell)^\top, \quad
        \partial U^\ell = v^\ell y^{\ell+1\top}_{t-1}, \quad \partial V^\ell = v^\ell y^{\ell\top}_{t-1}, \quad
        \partial M^\ell = v^\ell y^{\ell-1\top}_{t-1}

    v^ℓ = z^ℓ - y^ℓ is what the correction took away from the units, and v⁰ = e⁰ is the error of the predicted input.
    Nothing is unrolled: a step needs the state before it and its input.

    It trains `scanl.models.PTNCN` and learns from the inputs as they arrive: targets are only compared with the answers
    for the loss. The update is the mean over the steps and the sequences; the authors make one a step. The paper's
    other rule for E, from the change of v, is switched off in the authors' program, and is left out here.
    """

    id = "A-ptncn"
    equation = "dW^l = v^(l-1) z^l, dE^l = gamma dW^l, dU^l, dV^l, dM^l = v^l y_(t-1)^(l+1, l, l-1)"
    source = (
        'Ororbia, Mali, Giles and Kifer, "Continual Learning of Recurrent Neural Networks by Locally Aligning '
        "Distributed Representations\", arXiv:1810.07411, and the authors' program"
    )
    computes: ClassVar = "estimate"
    error = "a descent direction of local errors, not a gradient of the loss; the bias is not known"
    memory = "B*(e + d)"
    operations = "2*B*T*p"
    every_step: ClassVar = True
    masks: ClassVar = False
    works_for = "PTNCN"

    def __init__(
        self,
        loss: Loss,
        gamma: Annotated[float, at_least(0), "γ, speed of the error weights E beside the prediction weights W"] = 1.0,
        radius: Annotated[
            float | None, above(0), "largest norm of a matrix's update, summed over the sequences; None for no limit"
        ] = 1.0,
    ) -> None:
        super().__init__(loss)
        self.gamma, self.radius = gamma, radius

    def init(self, model: Any, batch_size: int) -> CorrectedState:
        if getattr(model, "expect", None) is None:
            raise ConfigError(f"p_tncn: model is a {type(model).__name__}, expected a scanl.models.PTNCN")
        return model.init_state(batch_size, device=next(model.parameters()).device)

    @torch.no_grad()
    def update(self, model: PTNCN, learner: CorrectedState, batch: Batch) -> tuple[Tensor, CorrectedState]:
        self.check(model, batch)
        loss, _ = self.loss(model, batch, learner)
        totals: dict[Tensor, Tensor] = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        state = learner
        for x in batch.inputs.to(learner.input.dtype).unbind(1):
            expectation = model.expect(state)
            following = model.correct(expectation, x)
            for parameter, change in self.changes(model, state, expectation, following):
                totals[parameter] += change / (batch.size * batch.length)
            state = following
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with torch.enable_grad():
            return with_gradients(loss, parameters, [totals[one] for one in parameters]), detach(state)

    def changes(
        self, model: PTNCN, state: CorrectedState, expectation: Expectation, following: CorrectedState
    ) -> list[tuple[Tensor, Tensor]]:
        """Return each parameter with its update, a sum over the sequences, from a step between two states."""
        y = [state.input, *state.units]
        error = model.errors(expectation, following.input)[0]
        v = [error, *(z - units for z, units in zip(expectation.units, following.units, strict=True))]
        updates = []
        for layer in range(model.depth):
            prediction = self._limited(v[layer].T @ expectation.units[layer])
            updates += [
                (model.W[layer], prediction),
                (model.E[layer], self._limited(self.gamma * prediction.T)),
                (model.M[layer], self._limited(v[layer + 1].T @ y[layer])),
                (model.V[layer], self._limited(v[layer + 1].T @ y[layer + 1])),
            ]
            if layer + 1 < model.depth:
                updates.append((model.U[layer], self._limited(v[layer + 1].T @ y[layer + 2])))
        return updates

    def _limited(self, update: Tensor) -> Tensor:
        return update if self.radius is None else update * (self.radius / update.norm().clamp_min(self.radius))
