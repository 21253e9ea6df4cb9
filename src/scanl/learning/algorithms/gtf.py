"""Generalized teacher forcing."""

from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import detach
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm
from scanl.models.whole.dynamics import Dynamics
from scanl.options import at_least, between


class GTFLearner(NamedTuple):
    """Learner of generalized teacher forcing for B orbits.

    state: z (B, D), detached.   begun: (B,) int64, 1 once the orbits have begun; else they begin at the data.
    forcing: (B,), α, the same for all.   updates: (B,) int64, updates so far.
    """

    state: Tensor
    begun: Tensor
    forcing: Tensor
    updates: Tensor


@algorithm("gtf")
class GTF(Algorithm):
    r"""Generalized teacher forcing: backpropagation through an orbit that is drawn to the data by α at each step.

    .. math:: z_t = F(\tilde z_{t-1}), \quad \tilde z_t = (1 - \alpha) z_t + \alpha \hat z_t, \quad
              \alpha^* = \max(0, 1 - 1/\kappa), \quad \kappa = \max_{b} \prod_t \|J(\hat z_t)\|_2^{1/T}

    The loss is that of the unforced states. Each Jacobian of the orbit is multiplied by 1 - α, so gradients do not
    explode on chaotic data. α follows its estimate from the Jacobians at the data: at once upwards, by a factor
    downwards. No gradient passes through α. α and the count of updates outlive an orbit: `renew` begins new ones.

    It trains `Dynamics`, with targets that are the next observations.
    """

    id = "A-gtf"
    aliases = ("generalized_teacher_forcing", "generalised_teacher_forcing", "teacher_forcing")
    equation = "z~_t = (1 - alpha) z_t + alpha zhat_t,  alpha = max(0, 1 - 1/kappa)"
    source = (
        'Hess, Monfared, Brenner and Durstewitz, "Generalized Teacher Forcing for Learning Chaotic Dynamics", '
        "arXiv:2306.04406, eq. (5) and (12)"
    )
    computes: ClassVar = "truncation"
    error = "the gradient is that of the forced orbit: products of n Jacobians are multiplied by (1 - alpha)^n"
    memory = "B*T*e"
    operations = "2*B*T*p + B*T*e*p/every"
    every_step: ClassVar = True
    masks: ClassVar = False
    shares: ClassVar = False
    outlives: ClassVar = ("forcing", "updates")
    works_for = "Dynamics"

    def __init__(
        self,
        loss: Loss,
        forcing: Annotated[float | None, between(0, 1), "α; None for the estimate from the data, from 1 on"] = None,
        every: Annotated[int, at_least(1), "updates between two estimates"] = 5,
        fade: Annotated[float, between(0, 1), "part of α that stays where its estimate is lower"] = 0.999,
    ) -> None:
        super().__init__(loss)
        self.forcing, self.every, self.fade = forcing, every, fade

    def init(self, model: Any, batch_size: int) -> GTFLearner:
        if getattr(model, "forced", None) is None:
            raise ConfigError(f"gtf: model is a {type(model).__name__}, expected a scanl.models.Dynamics")
        device = next(model.parameters()).device
        first = 1.0 if self.forcing is None else self.forcing
        zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
        state = model.init_state(batch_size, device=device)
        return GTFLearner(state, zeros, torch.full((batch_size,), first, device=device), zeros)

    def update(self, model: Any, learner: GTFLearner, batch: Batch) -> tuple[Tensor, GTFLearner]:
        self.check(model, batch)
        forcing, updates = learner.forcing, learner.updates
        count = int(updates[0]) if len(updates) else 0
        if self.forcing is None and len(updates) and count % self.every == 0:
            estimate = 1 - 1 / growth(model, batch.inputs)
            alpha = forcing[0].item()
            alpha = estimate if estimate > alpha else self.fade * alpha + (1 - self.fade) * max(0.0, estimate)
            forcing = torch.full_like(forcing, alpha)
        first, model.forcing = model.forcing, forcing[0].item() if len(forcing) else 0.0
        try:
            loss, state = self.loss(model, batch, learner.state if learner.begun.any() else None)
        finally:
            model.forcing = first
        return loss, GTFLearner(detach(state), torch.ones_like(learner.begun), forcing, updates + 1)


def growth(model: Dynamics, x: Tensor) -> float:
    """Return κ: over the orbits x (B, T, N), the largest geometric mean of the Jacobians' spectral norms at the data.

    The units that are not observed are 0 there.
    """
    with torch.enable_grad():
        start = model.init_state(1, device=x.device).detach().expand(x.shape[0] * x.shape[1], -1)
        points = model.forced(start, x.detach().flatten(0, 1), 1.0).detach().requires_grad_()
        following = model.step(points)
        rows = [
            torch.autograd.grad(following[:, unit].sum(), points, retain_graph=unit + 1 < following.shape[1])[0]
            for unit in range(following.shape[1])
        ]
    norms = torch.linalg.matrix_norm(torch.stack(rows, 1), ord=2).clamp_min(torch.finfo(x.dtype).tiny)
    return norms.view(x.shape[:2]).log().mean(1).max().exp().item()
