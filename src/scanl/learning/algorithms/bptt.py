"""Backpropagation through time."""

from functools import partial
from typing import Annotated, Any, ClassVar

from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scanl.data.batch import Batch
from scanl.layers import auxiliary
from scanl.layers.state import State, detach
from scanl.learning.algorithms._pieces import InPieces
from scanl.learning.algorithms.base import Algorithm, Loss, algorithm
from scanl.learning.questions import Model
from scanl.options import at_least


@algorithm("bptt")
class BPTT(Algorithm):
    r"""Backpropagation through time: the gradient of the loss over all steps of an update.

    .. math:: \nabla_\theta \sum_{t=1}^{T} \ell_t(s_t), \quad s_t = f_\theta(s_{t-1}, x_t)

    For a whole sequence in one update the gradient is exact. The learner is the state s_T, detached from the graph: a
    second update goes on from it, and its gradient ignores the effect of the parameters on s_0 (truncated
    backpropagation through time).

    With `segments` above 1 the forward pass keeps only the states between segments, and the backward pass runs each
    segment again. √T segments need the least memory, of order √T. The gradient is the same. Dropout draws the same
    numbers again, and buffers such as running means are changed once.
    """

    id = "A-bptt"
    aliases = ("backpropagation_through_time",)
    equation = "dL/dtheta = sum_t sum_{j<=t} (dl_t/ds_t) (prod_{r=j+1..t} ds_r/ds_{r-1}) (ds_j/dtheta)"
    source = (
        'Werbos, "Backpropagation Through Time: What It Does and How to Do It", Proc. IEEE 78(10), 1990; truncated: '
        'Williams and Peng, "An Efficient Gradient-Based Algorithm for On-Line Training of Recurrent Network '
        'Trajectories", Neural Computation 2(4), 1990; segments: Chen et al., "Training Deep Nets with Sublinear '
        'Memory Cost", arXiv:1604.06174'
    )
    computes: ClassVar = "exact"
    error = "over several updates, the effect of the parameters through the state before an update is left out"
    memory = "B*e*(T/segments + segments - 1)"
    operations = "B*T*p*(2 + Min(segments - 1, 1))"

    def __init__(
        self,
        loss: Loss,
        segments: Annotated[
            int,
            at_least(1),
            "parts of the steps of an update that the backward pass runs again, one after another, so that the "
            "activations of only one are in memory; 1 keeps those of all steps",
        ] = 1,
    ) -> None:
        super().__init__(loss)
        self.segments = segments

    def init(self, model: Model, batch_size: int) -> State:
        return model.init_state(batch_size, device=next(model.parameters()).device)

    def renew(self, model: Model, learner: State, batch_size: int) -> State:
        """Return None: the model begins at its own initial state, which costs nothing where a state is a long cache."""
        return None

    def _computed(self, steps: int | None) -> str:
        return self.computes if steps is None else "truncation"

    def update(self, model: Model, learner: State, batch: Batch) -> tuple[Tensor, Any]:
        if self.segments == 1:
            loss, state = self.loss(model, batch, learner)
            return loss, detach(state)

        def run(x: Tensor, state: State, **others: Tensor) -> tuple[Tensor, State]:
            contexts = partial(auxiliary.checkpoint_contexts, model)
            return checkpoint(partial(model, **others), x, state, use_reentrant=False, context_fn=contexts)

        size = -(-batch.length // self.segments)
        loss, state = self.loss(InPieces("bptt", model, size, run), batch, learner)
        return loss, detach(state)
