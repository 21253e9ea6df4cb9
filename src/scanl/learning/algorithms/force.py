"""Recursive least squares for the readout, while the network runs."""

from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.packing import unpack
from scanl.layers.state import State, detach
from scanl.learning.algorithms._pieces import InPieces
from scanl.learning.algorithms._readout import readout
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm, with_gradients
from scanl.learning.questions import Model
from scanl.options import above, between, who


class ForceLearner(NamedTuple):
    """Learner of `FORCE` for B sequences.

    state: of the model.   weight: C, (B, O, E), and inverse: P, (B, E, E), in float64, the same for all sequences.
    output: (B, O), the last answers, which the model reads next; O is 0 without feedback.
    """

    state: State
    weight: Tensor
    inverse: Tensor
    output: Tensor


@algorithm("force")
class FORCE(Algorithm):
    r"""FORCE learning: recursive least squares for the readout, which may be in the loop that drives the network.

    .. math:: e_t = C_{t-1} r_t - y_t, \quad k_t = \frac{P_{t-1} r_t}{\lambda + r_t^\top P_{t-1} r_t}, \quad
        P_t = (P_{t-1} - k_t r_t^\top P_{t-1}) / \lambda, \quad C_t = C_{t-1} - e_t k_t^\top, \quad P_0 = I / \alpha

    r has the features that the readout reads, and a 1 where it has a bias. After T steps from C_0 = 0 without
    forgetting, C is that of ridge regression on all steps: C = (Σ y r^T) (Σ r r^T + α I)^-1. All outputs share P. The
    rows of a batch are one regression: a step adds them together and forgets once. A step without numbers for all
    outputs changes nothing. With λ below 1, P grows without bound in directions in which r does not move.

    The learner has C in float64, and `update` writes it into the readout after each step. So any optimizer can be
    called: all parameters are without a gradient from the loss, which is that of the answers before they were learnt
    from. With `feedback` the model reads its last answer in place of its input, also while it learns. The readout of
    the model is C_0; that of the paper is 0. C and P outlive a sequence: `renew` begins new ones.

    Source: eq. (2) to (5). Differs: every step is learnt, and the weights inside the network stay as they are.
    """

    id = "A-force"
    aliases = ("first_order_reduced_and_controlled_error", "FORCE_learning")
    equation = "k = P r / (lambda + r^T P r),  P <- (P - k r^T P) / lambda,  C <- C - (C r - y) k^T"
    source = (
        'Sussillo and Abbott, "Generating Coherent Patterns of Activity from Chaotic Neural Networks", Neuron 63(4), '
        '2009, eq. (2) to (5); forgetting: Haykin, "Adaptive Filter Theory", Prentice Hall, 1986, chapter on recursive '
        "least squares"
    )
    computes: ClassVar = "truncation"
    error = (
        "exact least squares for the readout over all steps so far; the gradient of all other parameters is left out"
    )
    memory = "B*(e + (e + 1)*(e + 1 + d))"  # of as many outputs as inputs, from the e numbers of the state
    operations = "B*T*(p + 3*(e + 1)**2)"
    shares: ClassVar = False
    outlives: ClassVar = ("weight", "inverse")
    works_for = "every layer, in a model whose `head` is a linear map and whose answers are numbers at every step"

    def __init__(
        self,
        loss: Loss,
        penalty: Annotated[
            float, above(0), "α, the ridge penalty on all weights of the readout, also on its bias"
        ] = 1.0,
        forgetting: Annotated[
            float, above(0), between(0, 1), "λ, by which the past counts less with each step; 1 forgets nothing"
        ] = 1.0,
        feedback: Annotated[
            bool, "the model reads its own last answer in place of its input; it has as many inputs as outputs"
        ] = False,
    ) -> None:
        super().__init__(loss)
        self.penalty, self.forgetting, self.feedback = penalty, forgetting, feedback

    def init(self, model: Model, batch_size: int) -> ForceLearner:
        """Return the learner; raises ConfigError for a model whose answers are not a linear map's."""
        head = readout(who(type(self)), model)
        if not isinstance(head.weight, nn.Parameter):
            raise ConfigError(
                f"{who(type(self))}: the weight of the model's head is computed, as after pruning, expected a "
                "parameter because it is written; reservoir learns it by its gradient"
            )
        parts: list[Tensor] = [head.weight] if head.bias is None else [head.weight, head.bias[:, None]]
        weight = torch.cat(parts, 1).detach().double()
        inverse = torch.eye(weight.shape[1]).to(weight) / self.penalty
        return ForceLearner(
            model.init_state(batch_size, device=head.weight.device),
            weight.repeat(batch_size, 1, 1),
            inverse.repeat(batch_size, 1, 1),
            head.weight.new_zeros(batch_size, head.out_features if self.feedback else 0),
        )

    def check(self, model: Model, batch: Batch) -> None:
        name, head = who(type(self)), readout(who(type(self)), model)
        expected = (batch.size, batch.length, head.out_features)
        targets = batch.targets
        if isinstance(targets, tuple) or targets.shape != expected or not targets.is_floating_point():
            what = "of several parts" if isinstance(targets, tuple) else f"{targets.dtype} of shape {(*targets.shape,)}"
            raise ConfigError(
                f"{name}: batch.targets is {what}, expected numbers {expected} because of the model's head"
            )
        if self.feedback and batch.inputs.shape != expected:
            raise ConfigError(
                f"{name}: batch.inputs has shape {tuple(batch.inputs.shape)}, expected {expected} because of feedback"
            )

    def update(self, model: Model, learner: ForceLearner, batch: Batch) -> tuple[Tensor, Any]:
        self.check(model, batch)
        name, head = who(type(self)), readout(who(type(self)), model)
        if not batch.size:
            return self.loss(model, batch, learner.state)[0], learner
        features: list[Tensor] = []
        output, start = learner.output, 0
        weight, inverse = learner.weight[0], learner.inverse[0]

        def run(x: Tensor, state: State, **others: Tensor) -> tuple[Tensor, State]:
            nonlocal output, weight, inverse, start
            y, state = model(output[:, None] if self.feedback else x, state, **others)
            r, targets = features.pop(), batch.targets[:, start : start + x.shape[1]]
            known, mask = targets.isfinite().all(-1), others.get("mask")
            if mask is not None:
                r, known = unpack(r, mask), known & mask
            for t in range(x.shape[1]):
                if known[:, t].any():
                    weight, inverse = self._learn(weight, inverse, r[known[:, t], t], targets[known[:, t], t])
            _write(weight, head)
            output, start = y[:, -1, : output.shape[1]], start + x.shape[1]
            return y, state

        hook = head.register_forward_pre_hook(lambda _module, inputs: features.append(inputs[0]))
        try:
            with torch.no_grad():
                _write(weight, head)
                size = 1 if self.feedback else max(batch.length, 1)
                loss, state = self.loss(InPieces(name, model, size, run), batch, learner.state)
        finally:
            hook.remove()
        parameters = list(model.parameters())
        shared = [matrix.repeat(batch.size, 1, 1) for matrix in (weight, inverse)]
        after = ForceLearner(detach(state), shared[0], shared[1], output)
        return with_gradients(loss, parameters, [None] * len(parameters)), after

    def _learn(self, weight: Tensor, inverse: Tensor, r: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return C and P after one step, from the features r (n, E) and the targets (n, O) of n rows."""
        r = r.double()
        if r.shape[1] < weight.shape[1]:
            r = torch.cat([r, r.new_ones(len(r), 1)], 1)
        inverse = inverse / self.forgetting
        pulled = r @ inverse
        factor = torch.linalg.cholesky(torch.eye(len(r)).to(r) + pulled @ r.T)
        half = torch.linalg.solve_triangular(factor, pulled, upper=False)
        gain = torch.linalg.solve_triangular(factor.T, half, upper=True)
        return weight - (r @ weight.T - targets.double()).T @ gain, inverse - half.T @ half


def _write(weight: Tensor, head: nn.Linear) -> None:
    """Write C (O, E) into the readout, its last column as the bias if there is one."""
    head.weight.copy_(weight[:, : head.in_features])
    if head.bias is not None:
        head.bias.copy_(weight[:, -1])
