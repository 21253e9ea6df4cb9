"""Forward propagation through time."""

from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.layers.state import State, detach
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm, with_gradients
from scanl.learning.questions import Model
from scanl.options import above, at_least, between


class AveragedState(NamedTuple):
    """A state, and the running averages that outlive it, the same for all rows.

    means: θ̄ of each parameter that is trained, (B, *shape).   slopes: λ, an estimate of the gradient of the loss.
    seen: θ at the last update.
    """

    state: State
    means: tuple[Tensor, ...]
    slopes: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]


@algorithm("fptt")
class FPTT(Algorithm):
    r"""Forward propagation through time: the loss of the present steps, and a penalty for leaving the running average.

    .. math:: \bar\ell_t(\theta) = \ell_t(\theta) - \lambda_t \cdot \theta
        + \frac{\alpha w}{2} \lVert\theta - \bar\theta_t\rVert^2

    The state is carried on as a constant, and each update changes the parameters. After the optimizer's step

    .. math:: \lambda_{t+1} = \lambda_t - \alpha (\theta_{t+1} - \bar\theta_t), \quad \bar\theta_{t+1} =
        (1 - \beta) \bar\theta_t + \beta \theta_{t+1} - \frac{\beta}{\alpha} \lambda_{t+1}

    An update is a part of a sequence. A sequence of n steps in K updates of n/K steps, with an optimizer's step after
    each, is FPTT-K: K = n updates at every step, and K = 1 is `bptt`. θ̄ and λ outlive a sequence: `renew` begins new
    ones. At the end of an epoch the authors put θ̄ in the place of the parameters, which `settle` does.

    Where a sequence has one answer y, each of its parts has a loss too: part p of P, which `Batch.parts` weighs p/P,

    .. math:: \ell_p = \frac{p}{P} \ell(y, \hat P_p)
        + \Big(1 - \frac{p}{P}\Big) \operatorname{mean}_c (-Q_c \log \hat P_p(c)), \quad Q_c = 1/C

    with the second term for classes alone. The last part has the loss of the question.

    The value of the loss is that of ℓ_t, without the penalty. θ̄ and λ are brought up to date when an update begins, if
    the optimizer made a step since the last one.

    Differs: the paper's penalty has the gradient of the last loss where the authors' program, and we, have λ, of which
    it is the limit. Q stays uniform, as in the authors' first 20 epochs; then they take what the network last answered
    wrongly at that part for a sequence of that class.
    """

    id = "A-fptt"
    aliases = ("FPTT_K", "forward_propagation_through_time")
    equation = "minimize l_t(theta) - lambda theta + (alpha w / 2) |theta - mean|^2 at each part of a sequence"
    source = (
        'Kag and Saligrama, "Training Recurrent Neural Networks via Forward Propagation Through Time", ICML 2021, '
        "algorithm 1, and the authors' program"
    )
    computes: ClassVar = "truncation"
    error = (
        "the effect of the parameters through the state before an update is left out; the penalty keeps the parameters "
        "near those for which the earlier parts were learned"
    )
    memory = "B*(T*e + 3*p)"
    operations = "B*(2*T + 6)*p"
    update_steps: ClassVar = 1
    gradual: ClassVar = True
    outlives: ClassVar = ("means", "slopes", "seen")

    def __init__(
        self,
        loss: Loss,
        alpha: Annotated[float, above(0), "α, strength of the penalty; 0.1 to 0.5 in the paper's experiments"] = 0.1,
        beta: Annotated[float, between(0, 1), "β, share of the newest parameters in their average"] = 0.5,
        weight: Annotated[
            float, at_least(0), "w, of the squared distance: 1 for images, 2 for text in the paper"
        ] = 1.0,
    ) -> None:
        super().__init__(loss)
        self.alpha, self.beta, self.weight = alpha, beta, weight

    def init(self, model: Model, batch_size: int) -> AveragedState:
        """Return the learner, with θ̄ = θ and λ = 0."""
        parameters = [parameter.detach() for parameter in _trained(model)]
        means = _spread([parameter.clone() for parameter in parameters], batch_size)
        slopes = _spread([torch.zeros_like(parameter) for parameter in parameters], batch_size)
        state = detach(model.init_state(batch_size, device=next(model.parameters()).device))
        return AveragedState(state, means, slopes, means)

    def update(self, model: Model, learner: AveragedState, batch: Batch) -> tuple[Tensor, AveragedState]:
        parameters, rows = _trained(model), batch.size
        learner = self._up_to_date(model, learner, rows)
        with torch.enable_grad():
            if batch.weights is None or batch.targets.is_floating_point():
                loss, state = self.loss(model, batch, learner.state)
            else:
                watched = _WatchedModel(model)
                loss, state = self.loss(watched, batch, learner.state)
                loss = loss + _spread_out(watched.outputs[-1], batch.weights)
            grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        gradients = [
            of_loss - slope[0] + self.alpha * self.weight * (parameter.detach() - mean[0])
            for of_loss, slope, parameter, mean in zip(grads, learner.slopes, parameters, learner.means, strict=True)
        ]
        return with_gradients(loss, parameters, gradients), learner._replace(state=detach(state))

    @torch.no_grad()
    def settle(self, model: Model, learner: AveragedState) -> AveragedState:
        """Copy θ̄ into the parameters, and return the learner with λ = 0: at the end of an epoch, before evaluation."""
        rows = len(learner.means[0])
        learner = self._up_to_date(model, learner, rows)
        for parameter, mean in zip(_trained(model), learner.means, strict=True):
            parameter.copy_(mean[0])
        slopes = _spread([torch.zeros_like(slope[0]) for slope in learner.slopes], rows)
        return learner._replace(slopes=slopes, seen=learner.means)

    def _up_to_date(self, model: Model, learner: AveragedState, rows: int) -> AveragedState:
        """Return the learner with the averages after the optimizer's last step, if it made one since the last update.

        It makes none after an update without answers, nor while it collects the gradients of several.
        """
        parameters = [parameter.detach() for parameter in _trained(model)]
        moved = torch.stack([(now != old[0]).any() for now, old in zip(parameters, learner.seen, strict=True)]).any()
        means, slopes = [], []
        for parameter, mean, slope in zip(parameters, learner.means, learner.slopes, strict=True):
            after = slope[0] - self.alpha * (parameter - mean[0])
            average = (1 - self.beta) * mean[0] + self.beta * parameter - self.beta / self.alpha * after
            slopes.append(torch.where(moved, after, slope[0]))
            means.append(torch.where(moved, average, mean[0]))
        seen = [parameter.clone() for parameter in parameters]
        return learner._replace(means=_spread(means, rows), slopes=_spread(slopes, rows), seen=_spread(seen, rows))


class _WatchedModel:
    """A model that keeps its outputs. It stands where a question reads the model; all other attributes are its own."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.outputs: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, State]:
        outputs, state = self._model(*args, **options)
        self.outputs.append(outputs)
        return outputs, state


def _spread_out(logits: Tensor, weights: Tensor) -> Tensor:
    """Return the mean of (1 - weight) times the mean over classes of -log P / C; of the rows with an answer."""
    entropy = -logits.log_softmax(-1).mean(-1) / logits.shape[-1]
    present = weights > 0
    return torch.where(present, (1 - weights.to(entropy)) * entropy, 0).sum() / present.sum().clamp(min=1)


def _trained(model: Model) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _spread(values: list[Tensor], rows: int) -> tuple[Tensor, ...]:
    """Return the values with an axis of rows, which share their memory."""
    return tuple(value.expand(rows, *value.shape) for value in values)
