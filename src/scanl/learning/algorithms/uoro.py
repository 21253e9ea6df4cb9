"""Unbiased online recurrent optimization."""

from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.layers.state import State, detach, flatten, unflatten
from scanl.learning.algorithms._flat import products
from scanl.learning.algorithms._signs import new_seeds, signs
from scanl.learning.algorithms._structure import Structures
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm, with_gradients
from scanl.learning.questions import Model
from scanl.ops import backend
from scanl.options import above, who


class RankOne(NamedTuple):
    """A state, and the estimate A ⊗ B of the influence of the parameters on it.

    by_state: A, (B, e).   by_parameter: B, (B, p).   seeds: (B, 2), see `_signs`.
    """

    state: State
    by_state: Tensor
    by_parameter: Tensor
    seeds: Tensor


@algorithm("uoro")
class UORO(Algorithm):
    r"""Unbiased online recurrent optimization: an estimate of rank one of the influence M of the parameters.

    .. math:: A_t = \rho_0 J_t A_{t-1} + \rho_1 \nu, \quad B_t = B_{t-1} / \rho_0 + \nu^\top \bar M_t / \rho_1, \quad
        \mathrm{E}\,A_t B_t^\top = M_t

    ν has random signs, new ones at every update. ρ_0 = √((|B| + ε) / (|J A| + ε)) and
    ρ_1 = √((|ν M̄| + ε) / (|ν| + ε)) keep the norms of A and B alike, which makes the variance small.

    The gradient of an update is taken before A and B change: backpropagation through its steps, plus
    (dL/ds_0 · A_{t-1}) B_{t-1}. An update of T steps draws ν once; J and M̄ are then those of all T steps. Each row of
    the batch has a pair (A, B) of its own, where the authors' program has one B for all rows. Its νᵀM̄ takes a
    backward pass over all rows, so the operations grow with B².
    """

    id = "A-uoro"
    aliases = ("unbiased_online_recurrent_optimization", "unbiased_online_recurrent_optimisation")
    equation = "A <- rho0 J A + rho1 nu,  B <- B/rho0 + nu^T (ds_t/dtheta)/rho1,  M estimated by A B^T"
    source = (
        'Tallec and Ollivier, "Unbiased Online Recurrent Optimization", arXiv:1702.05043, algorithm 1; the order of '
        "the steps and ε as in the authors' program"
    )
    computes: ClassVar = "estimate"
    error = (
        "unbiased while the parameters are constant; the standard deviation is of the order of √e times the gradient "
        "through the past, and grows with the length of the memory"
    )
    memory = "B*(2*e + p + 2)"
    operations = "6*B*T*p + 2*B**2*T*p"
    update_steps: ClassVar = 1
    works_for = "every layer with a state of constant size whose backward pass can be differentiated"

    def __init__(
        self,
        loss: Loss,
        epsilon: Annotated[float, above(0), "ε, added to the norms"] = 1e-5,
    ) -> None:
        super().__init__(loss)
        self.epsilon = epsilon
        self._structures = Structures(who(type(self)), lambda: backend("parallel", "reference"))

    def init(self, model: Model, batch_size: int) -> RankOne:
        """Return the learner; raises ConfigError for a model without a state of constant size."""
        device = next(model.parameters()).device
        state = detach(model.init_state(batch_size, device=device))
        flat = flatten(state)
        spans = self._structures.of(model).spans
        return RankOne(
            state, torch.zeros_like(flat), flat.new_zeros(batch_size, spans[-1].stop), new_seeds(batch_size, device)
        )

    def update(self, model: Model, learner: RankOne, batch: Batch) -> tuple[Tensor, RankOne]:
        shape = self._structures.of(model)
        with torch.enable_grad(), backend("parallel", "reference"):
            before = flatten(learner.state).detach().requires_grad_()
            loss, state = self.loss(model, batch, unflatten(before, learner.state))
            after = flatten(state)
            named = {name: p for name, p in model.named_parameters() if p.requires_grad}
            grads = torch.autograd.grad(
                loss, [before, *named.values()], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            by_state, gradients = grads[0], dict(zip(named, grads[1:], strict=True))
            weight = (by_state * learner.by_state).sum(1)
            past = (weight[:, None] * learner.by_parameter).sum(0)
            for name, span in zip(shape.names, shape.spans, strict=True):
                gradients[name] = gradients[name] + past[span].view_as(gradients[name]).to(gradients[name].dtype)

            nu, seeds = signs(learner.seeds, after.shape[1], after.dtype)
            forward = _jacobian_times(learner.by_state, before, after)
            rows = torch.diag_embed(nu.T).movedim(0, -1)  # (B, B, e): one row after another
            reaching = [named[name] for name in shape.names]
            fresh = torch.cat([part.flatten(1) for part in products(after, reaching, rows, batched=shape.batched)], 1)
            rho_0 = self._ratio(learner.by_parameter, forward)
            rho_1 = self._ratio(fresh, nu)
        return with_gradients(loss, list(named.values()), list(gradients.values())), RankOne(
            detach(state),
            rho_0 * forward + rho_1 * nu,
            learner.by_parameter / rho_0 + fresh.to(learner.by_parameter.dtype) / rho_1,
            seeds,
        )

    def _ratio(self, upper: Tensor, lower: Tensor) -> Tensor:
        """Return the square root of the ratio of the norms of each row, (B, 1)."""
        upper, lower = (each.norm(dim=1, keepdim=True) + self.epsilon for each in (upper, lower))
        return (upper / lower).sqrt()


def _jacobian_times(tangent: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return J times a tangent: the derivative of the backward pass by its cotangent."""
    cotangent = torch.zeros_like(after, requires_grad=True)
    (pulled,) = torch.autograd.grad(after, before, cotangent, create_graph=True, materialize_grads=True)
    if not pulled.requires_grad:
        return torch.zeros_like(after)
    (pushed,) = torch.autograd.grad(pulled, cotangent, tangent, retain_graph=True)
    return pushed
