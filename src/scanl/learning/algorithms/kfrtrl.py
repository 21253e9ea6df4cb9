"""Kronecker-factored real-time recurrent learning."""

from collections.abc import Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers import LSTM, Elman
from scanl.layers.state import State, detach, flatten, unflatten
from scanl.learning.algorithms._flat import products
from scanl.learning.algorithms._pieces import InPieces
from scanl.learning.algorithms._signs import new_seeds, signs
from scanl.learning.algorithms.base import Algorithm, algorithm, with_gradients
from scanl.learning.questions import Model
from scanl.models.block import BlockState
from scanl.ops import backend
from scanl.options import who

WEIGHTS = ("weight_hh_l0", "weight_ih_l0", "bias_hh_l0", "bias_ih_l0")


class Kronecker(NamedTuple):
    """A state, and the estimate u ⊗ A of the influence of each layer's weights on its state.

    sources: u of each layer, (B, width + dim + 1), in the order h, x, 1.   factors: A, (B, e, gates * width).
    seeds: (B, 2), see `_signs`.
    """

    state: State
    sources: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]
    seeds: Tensor


@algorithm("kfrtrl")
class KFRTRL(Algorithm):
    r"""Kronecker-factored real-time recurrent learning: the influence is estimated by one Kronecker product.

    .. math:: u_t = c_1 p_1 u_{t-1} + c_2 p_2 \hat s_t, \quad A_t = \frac{c_1}{p_1} J_t A_{t-1} + \frac{c_2}{p_2} D_t,
        \quad \mathrm{E}\,u_t \otimes A_t = M_t

    The weights enter by z = W ŝ, ŝ_t = [h_{t-1}; x_t; 1], and D_t = ds_t/dz. c_1 and c_2 are random signs, new ones at
    each step. p_1 = √(|J A| / |u|) and p_2 = √(|D| / |ŝ|) make the variance small; the norms are Frobenius'.

    The gradient of a step is taken before u and A change: backpropagation through the step, plus
    u_{t-1} ⊗ (dl_t/ds_{t-1} A_{t-1}). Each layer of a stack has a pair (u, A) of its own, which is 0 at first, and p_1
    is 1 while |J A| or |u| is 0. J and D take a backward pass over all rows for each number of each row's state, so the
    operations grow with B².
    """

    id = "A-kfrtrl"
    aliases = ("kronecker_factored_rtrl",)
    equation = "u <- c1 p1 u + c2 p2 [h; x; 1],  A <- (c1/p1) J A + (c2/p2) D,  M estimated by u (x) A"
    source = (
        'Mujika, Meier and Steger, "Approximating Real-Time Recurrent Learning with Random Kronecker Factors", '
        "arXiv:1805.10842, algorithm 1. Differs: the last step's part of the gradient is exact instead of estimated"
    )
    computes: ClassVar = "estimate"
    error = (
        "unbiased in one layer while the parameters are constant, with less variance than `uoro`. Left out are the "
        "effects through time of what is below a layer, and of a layer on the states of the layers above it"
    )
    memory = "B*(e**2 + 3*e + 3)"
    operations = "B*T*(2*B*p*e + e**3)"
    update_steps: ClassVar = 1
    every_step: ClassVar = True
    masks: ClassVar = False
    works_for = (
        "elman and lstm with biases, in a model that answers at every step of rows of one length; the memory is that "
        "of an elman layer"
    )

    def init(self, model: Model, batch_size: int) -> Kronecker:
        """Return the learner; raises ConfigError unless all layers are Elman networks or LSTMs with biases."""
        layers = model.stack.mixers()
        for layer in layers:
            if not isinstance(layer, Elman | LSTM) or not layer.bias:
                raise ConfigError(
                    f"{who(type(self))}: the stack has a layer {who(type(layer))!r}, expected elman or lstm with bias, "
                    "whose weights enter by one product; uoro is for every layer"
                )
            own = dict(layer.named_parameters(recurse=False))
            if changed := [name for name in WEIGHTS if name not in own]:
                raise ConfigError(
                    f"{who(type(self))}: {changed[0]} of {who(type(layer))} is not a parameter of the layer itself, as "
                    "after pruning, expected one because its gradient is written; uoro reads the model as it is"
                )
        device = next(model.parameters()).device
        state = detach(model.init_state(batch_size, device=device))
        if not all(isinstance(block, BlockState) for block in state):
            raise ConfigError(
                f"{who(type(self))}: the model is a {type(model).__name__}, expected one that answers at every step"
            )
        like = flatten(state)
        places = list(_places(state))
        return Kronecker(
            state,
            tuple(like.new_zeros(batch_size, layer.width + layer.dim + 1) for layer in layers),
            tuple(
                like.new_zeros(batch_size, at.stop - at.start, layer.gates * layer.width)
                for at, layer in zip(places, layers, strict=True)
            ),
            new_seeds(batch_size, device),
        )

    def update(self, model: Model, learner: Kronecker, batch: Batch) -> tuple[Tensor, Kronecker]:
        self.check(model, batch)
        layers = model.stack.mixers()
        steps: list[tuple[Tensor, Tensor, list[Tensor]]] = []  # the states before and after, and the layers' inputs
        inputs: list[Tensor] = []

        def run(x: Tensor, state: State, **others: Tensor) -> tuple[Tensor, State]:
            inputs.clear()
            before = flatten(state).detach().requires_grad_()
            y, after = model(x, unflatten(before, state), **others)
            steps.append((before, flatten(after), [seen[:, 0].detach() for seen in inputs]))
            return y, detach(after)

        hooks = [layer.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for layer in layers]
        with torch.enable_grad(), backend("parallel", "reference"):
            try:
                loss, state = self.loss(InPieces(who(type(self)), model, 1, run), batch, learner.state)
            finally:
                for hook in hooks:
                    hook.remove()
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
            starts = [before for before, _, _ in steps]
            grads = torch.autograd.grad(
                loss, [*parameters, *starts], retain_graph=True, allow_unused=True, materialize_grads=True
            )
            gradients = dict(zip(map(id, parameters), grads, strict=False))
            learner = learner._replace(state=state)
            for step, by_state in zip(steps, grads[len(parameters) :], strict=True):
                for i, (at, layer) in enumerate(zip(_places(state), layers, strict=True)):
                    self._add(gradients, layer, learner.sources[i], learner.factors[i], by_state[:, at])
                learner = self._advanced(layers, learner, step)
        return with_gradients(loss, parameters, list(gradients.values())), learner

    def _add(
        self, gradients: dict[int, Tensor], layer: Elman | LSTM, source: Tensor, factor: Tensor, by_state: Tensor
    ) -> None:
        """Add the estimate of the gradient through the past to the gradients of a layer's weights."""
        signal = torch.einsum("be,bem->bm", by_state, factor)
        of_h, of_x, of_one = (signal.T @ source).split([layer.width, layer.dim, 1], 1)
        for name, more in zip(WEIGHTS, (of_h, of_x, of_one[:, 0], of_one[:, 0]), strict=True):
            parameter = layer.get_parameter(name)
            if id(parameter) in gradients:
                gradients[id(parameter)] = gradients[id(parameter)] + more.to(parameter.dtype)

    def _advanced(
        self, layers: list[Elman | LSTM], learner: Kronecker, step: tuple[Tensor, Tensor, list[Tensor]]
    ) -> Kronecker:
        """Return the learner with u and A after a step."""
        before, after, inputs = step
        rows, numbers = after.shape
        biases = [layer.bias_ih_l0 for layer in layers]
        every = torch.eye(rows * numbers, dtype=after.dtype, device=after.device).view(-1, rows, numbers)
        jacobian, *by_bias = products(after, [before, *biases], every, batched=True)  # D is the derivative by a bias
        jacobian = jacobian.view(rows, numbers, rows, numbers).diagonal(dim1=0, dim2=2).movedim(-1, 0)
        draws, seeds = signs(learner.seeds, 2 * len(layers), after.dtype)
        sources, factors = [], []
        for i, (at, layer) in enumerate(zip(_places(learner.state), layers, strict=True)):
            h = before.detach()[:, at][:, : layer.width]
            new_source = torch.cat([h, inputs[i].to(h), h.new_ones(rows, 1)], 1)
            new_factor = by_bias[i].view(rows, numbers, -1)[:, at].to(h)
            pushed = jacobian[:, at, at] @ learner.factors[i]
            c_1, c_2 = draws[:, 2 * i, None], draws[:, 2 * i + 1, None]
            p_1, p_2 = _balance(pushed, learner.sources[i]), _balance(new_factor, new_source)
            sources.append(c_1 * p_1 * learner.sources[i] + c_2 * p_2 * new_source)
            factors.append((c_1 / p_1)[:, :, None] * pushed + (c_2 / p_2)[:, :, None] * new_factor)
        return Kronecker(learner.state, tuple(sources), tuple(factors), seeds)


def _balance(factor: Tensor, source: Tensor) -> Tensor:
    """Return the square root of the ratio of the norms in each row, (B, 1); 1 where one of them is 0."""
    upper, lower = factor.flatten(1).norm(dim=1, keepdim=True), source.norm(dim=1, keepdim=True)
    return torch.where((upper > 0) & (lower > 0), (upper / lower.clamp(min=torch.finfo(lower.dtype).tiny)).sqrt(), 1)


def _places(state: State) -> Iterator[slice]:
    """Yield the places of each layer's numbers in the flat state."""
    begin = 0
    for block in state:
        end = begin + flatten(block.mixer).shape[1]
        yield slice(begin, end)
        begin = end + flatten(block.channel).shape[1]
