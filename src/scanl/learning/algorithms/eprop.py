"""Eligibility propagation, and random feedback local online learning, which is its form for rate units."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.errors import ConfigError
from scanl.layers.state import State
from scanl.learning.algorithms.base import Loss, algorithm
from scanl.learning.algorithms.rtrl import InfluenceAlgorithm
from scanl.learning.questions import Model
from scanl.ops import backend
from scanl.ops.cell import products_hold_inputs
from scanl.options import who

Feedback = Annotated[
    Literal["symmetric", "random"],
    "how the error at the output reaches the units: back through the weights of the readout, or through constant "
    "random weights; random is for a stack of one layer",
]
Seed = Annotated[int, "of the random feedback weights"]


class LocalRule(InfluenceAlgorithm):
    """An algorithm that follows a weight through its own unit's memory, and not through other units. Abstract.

    It is real-time recurrent learning of a model in which a unit's state is a constant for the other units.
    """

    def __init__(self, loss: Loss, feedback: str, seed: int) -> None:
        super().__init__(loss)
        self.feedback, self.seed = feedback, seed

    def within(self) -> AbstractContextManager[Any]:
        return _local()

    def check(self, model: Model, batch: Batch) -> None:
        super().check(model, batch)
        if self.feedback == "random" and (batch.mask is not None or not batch.answered_each_step):
            what = "a mask" if batch.answered_each_step else "one answer for each sequence"
            raise ConfigError(
                f"{who(type(self))}: the batch has {what}, expected an answer at every step of rows of one "
                "length because feedback is 'random'"
            )

    def run_loss(self, model: Model, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        if self.feedback == "symmetric":
            return super().run_loss(model, batch, state)
        return self._by_random_feedback(model, batch, state)

    def _by_random_feedback(self, model: Model, batch: Batch, state: State) -> tuple[Tensor, Tensor, State]:
        """Return the loss, what to differentiate in its place, and the state.

        The error at the model's outputs, times random weights, stands for the gradient by the layer's output. The
        parameters behind the layer have their own gradient.
        """
        layers = model.stack.mixers()
        if len(layers) != 1:
            raise ConfigError(
                f"{who(type(self))}: the stack has {len(layers)} layers, expected one because feedback is 'random'"
            )
        seen: list[Tensor] = []
        outputs: list[Tensor] = []

        def cut(_layer: Any, _inputs: Any, result: tuple[Tensor, State]) -> tuple[Tensor, State]:
            seen.append(result[0])
            return result[0].detach(), result[1]

        hooks = [layers[0].register_forward_hook(cut)]
        hooks += [model.register_forward_hook(lambda _model, _inputs, result: outputs.append(result[0]))]
        try:
            loss, state = self.loss(model, batch, state)
        finally:
            for hook in hooks:
                hook.remove()
        if not outputs:
            raise ConfigError(
                f"{who(type(self))}: the question does not read outputs of all steps, expected one that does "
                "because feedback is 'random'"
            )
        (error,) = torch.autograd.grad(loss, outputs[0], retain_graph=True)
        draw = torch.Generator().manual_seed(self.seed)
        weights = torch.randn(error.shape[-1], seen[0].shape[-1], generator=draw) / error.shape[-1] ** 0.5
        signal = error @ weights.to(error)
        return loss, loss + (signal.detach() * seen[0]).sum(), state


@contextmanager
def _local() -> Iterator[None]:
    with backend("parallel", "reference"), products_hold_inputs():
        yield


@algorithm("eprop")
class EProp(LocalRule):
    r"""Eligibility propagation: for each weight a trace of its own unit's state, times a learning signal of the unit.

    .. math:: \epsilon_{t,ji} = \frac{\partial s_{t,j}}{\partial s_{t-1,j}} \epsilon_{t-1,ji}
        + \frac{\partial s_{t,j}}{\partial W_{ji}}, \quad
        \nabla_{W_{ji}} \approx \sum_t L_{t,j} \frac{\partial z_{t,j}}{\partial s_{t,j}} \epsilon_{t,ji}

    s_j is the state of unit j (in an LSTM h and c; in an adaptive spiking unit v and a), and z_j is what other units
    see of it. The gradient is exact if z is a constant where it enters the other units' recurrence, and it is computed
    so: the products of a cell's step with its parameters hold their inputs constant.

    The learning signal L is the error that reaches the unit within the step, back through the readout and the layers
    above, or through random weights.
    """

    id = "A-eprop"
    aliases = ("eligibility_propagation",)
    equation = "e_t = (ds_t,j/ds_t-1,j) e_t-1 + ds_t,j/dW_ji,  dL/dW_ji = sum_t L_t,j (dz_t,j/ds_t,j) e_t,ji"
    source = (
        'Bellec et al., "A solution to the learning dilemma for recurrent networks of spiking neurons", Nature '
        "Communications 11, 2020"
    )
    computes: ClassVar = "truncation"
    error = (
        "paths through recurrent weights are left out, also that of a unit to itself; with random feedback, random "
        "weights stand for those of the readout too"
    )
    memory = "B*(e + p + e**2*(d + 2))"
    operations = "2*B**2*T*e*p"
    works_for = (
        "layers whose recurrence is a cell; exact in a layer without recurrent weights. The formulas are with a "
        "norm and a map of d inputs below the layer; the traces of the layer itself take 4*B^2*T*p"
    )

    def __init__(self, loss: Loss, feedback: Feedback = "symmetric", seed: Seed = 0) -> None:
        super().__init__(loss, feedback, seed)


@algorithm("rflo")
class RFLO(LocalRule):
    r"""Random feedback local online learning: a trace for each weight that decays with the leak of its unit.

    .. math:: P_t = (1 - 1/\tau) P_{t-1} + \tfrac{1}{\tau} \phi'(u_t) \otimes [h_{t-1}; x_t; 1], \quad
        \nabla_W \approx \sum_t \mathrm{diag}(B \epsilon_t) P_t

    h_t = (1 - 1/τ) h_{t-1} + φ(u_t) / τ is a leaky network of rate units, u_t = W h_{t-1} + W_in x_t + b, ε the
    gradient by the outputs and B constant random weights. The layer is `ctrnn` with substeps 1, tau 1 and dt 1/τ, or
    any other cell, of which the decay of a unit without the recurrent weights is kept.

    Differs: ε is the gradient of whatever loss the question has. The trace of W_in has x_t, where the authors' notebook
    has x_{t-1}.
    """

    id = "A-rflo"
    aliases = ("random_feedback_local_online", "random_feedback_local_online_learning")
    equation = "P_t = (1 - 1/tau) P_{t-1} + phi'(u_t) [h_{t-1}; x_t; 1]^T / tau,  dL/dW = sum_t diag(B eps_t) P_t"
    source = 'Murray, "Local online learning in recurrent networks with random feedback", eLife 8, 2019'
    computes: ClassVar = "truncation"
    error = (
        "paths through the recurrent weights are left out, also that of a unit to itself, and random weights stand for "
        "those of the readout"
    )
    memory = "B*(e + p + e**2*(d + 2))"
    operations = "2*B**2*T*e*p"
    works_for = (
        "layers whose recurrence is a cell, one in a stack unless feedback is symmetric; the formulas are as in eprop"
    )

    def __init__(self, loss: Loss, feedback: Feedback = "random", seed: Seed = 0) -> None:
        super().__init__(loss, feedback, seed)
