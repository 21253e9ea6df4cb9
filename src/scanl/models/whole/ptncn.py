"""A network of layers that predict the layer below, and correct themselves by the errors of their predictions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers.state import Device, DType
from scanl.models.presets import whole
from scanl.models.saving import Saved
from scanl.options import at_least

if TYPE_CHECKING:
    from scanl.data.batch import Batch


class CorrectedState(NamedTuple):
    """The state of a `PTNCN` after a step: what its layers read at the next one.

    units: y^1 (B, H), ..., y^L, the lowest first.   input: x (B, D).
    """

    units: tuple[Tensor, ...]
    input: Tensor


class Expectation(NamedTuple):
    """The units at a step, made before its input is known. All go from the lowest to the highest.

    drives: h^1 (B, H), ..., h^L.   units: z = tanh(h).   predictions: ẑ⁰ (B, D), ẑ¹ (B, H), ..., of the layers below.
    """

    drives: tuple[Tensor, ...]
    units: tuple[Tensor, ...]
    predictions: tuple[Tensor, ...]


@whole("ptncn", "P-TNCN", "parallel_temporal_neural_coding_network", "temporal_neural_coding_network")
class PTNCN(Saved):
    r"""Parallel temporal neural coding network. It predicts the next input, and learns without backpropagation.

    .. math:: h^\ell_t = U^\ell y^{\ell+1}_{t-1} + V^\ell y^\ell_{t-1} + M^\ell y^{\ell-1}_{t-1}, \quad
        z^\ell_t = \tanh h^\ell_t, \quad \hat z^{\ell-1}_t = W^\ell z^\ell_t

    .. math:: y^\ell_t = \tanh(h^\ell_t - \beta d^\ell_t), \quad d^\ell_t = E^\ell e^{\ell-1}_t - \alpha e^\ell_t, \quad
        e^0_t = \phi(\hat z^0_t) - x_t, \quad e^\ell_t = \hat z^\ell_t - z^\ell_t

    y⁰ is x. All layers read step t - 1, so they run in parallel. The top layer has no U, and its d no second term. The
    prediction φ(ẑ⁰) is made before x_t is known. Then the errors correct the units, and the corrected ones are the
    state. `p_tncn` trains it.

    Parameters of a layer: W, E, V, M, and U except in the top one; normal numbers of standard deviation `std`.

    Source: Ororbia, Mali, Giles and Kifer, "Continual Learning of Recurrent Neural Networks by Locally Aligning
    Distributed Representations", arXiv:1810.07411, and the authors' program.
    """

    name = "ptncn"

    def __init__(
        self,
        channels: Annotated[int, at_least(1), "D, numbers of an input"],
        dim: Annotated[int, at_least(1), "H, units of a layer"],
        depth: Annotated[int, at_least(1), "L, number of layers"] = 2,
        *,
        output: Annotated[Literal["identity", "sigmoid"], "φ, of the predicted input"] = "identity",
        beta: Annotated[float, at_least(0), "β, strength of the correction"] = 0.1,
        alpha: Annotated[float, at_least(0), "α, weight of a layer's own error in its correction"] = 0.001,
        std: Annotated[float, at_least(0), "standard deviation of the initial weights"] = 0.05,
    ) -> None:
        super().__init__()
        self.channels, self.dim, self.depth = channels, dim, depth
        self.output, self.beta, self.alpha = output, beta, alpha

        def matrices(shapes: Sequence[tuple[int, int]]) -> nn.ParameterList:
            return nn.ParameterList(nn.Parameter(torch.randn(shape) * std) for shape in shapes)

        below = [channels, *[dim] * (depth - 1)]
        self.W = matrices([(size, dim) for size in below])
        self.E = matrices([(dim, size) for size in below])
        self.M = matrices([(dim, size) for size in below])
        self.V = matrices([(dim, dim)] * depth)
        self.U = matrices([(dim, dim)] * (depth - 1))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> CorrectedState:
        kind = {"device": device, "dtype": self.V[0].dtype if dtype is None else dtype}
        units = tuple(torch.zeros(batch_size, self.dim, **kind) for _ in range(self.depth))
        return CorrectedState(units, torch.zeros(batch_size, self.channels, **kind))

    def expect(self, state: CorrectedState) -> Expectation:
        """Return the units of the next step, and what they predict."""
        y = [state.input, *state.units]
        drives = []
        for layer in range(self.depth):
            h = F.linear(y[layer], self.M[layer]) + F.linear(y[layer + 1], self.V[layer])
            drives.append(h + F.linear(y[layer + 2], self.U[layer]) if layer + 1 < self.depth else h)
        z = tuple(torch.tanh(h) for h in drives)
        predictions = [F.linear(units, W) for units, W in zip(z, self.W, strict=True)]
        if self.output == "sigmoid":
            predictions[0] = torch.sigmoid(predictions[0])
        return Expectation(tuple(drives), z, tuple(predictions))

    def errors(self, expectation: Expectation, x: Tensor) -> tuple[Tensor, ...]:
        """Return e⁰ (B, D), e¹ (B, H), ..., of the layers that are predicted, for the input x (B, D)."""
        targets = (x, *expectation.units)
        return tuple(p - target for p, target in zip(expectation.predictions, targets, strict=False))

    def correct(self, expectation: Expectation, x: Tensor) -> CorrectedState:
        """Return the state after the input x (B, D) is known."""
        errors = self.errors(expectation, x)
        units = []
        for layer, h in enumerate(expectation.drives):
            d = F.linear(errors[layer], self.E[layer])
            if layer + 1 < self.depth:
                d = d - self.alpha * errors[layer + 1]
            units.append(torch.tanh(h - self.beta * d))
        return CorrectedState(tuple(units), x)

    def forward(self, x: Tensor, state: CorrectedState | None = None) -> tuple[Tensor, CorrectedState]:
        """Map inputs x (B, T, D) to predictions of the next ones (B, T, D), and the state.

        Raises ShapeError for a wrong shape of x.
        """
        if x.ndim != 3 or x.shape[2] != self.channels:
            raise ShapeError(f"ptncn: x has shape {tuple(x.shape)}, expected (B, T, {self.channels})")
        state = self.init_state(len(x), device=x.device) if state is None else state
        x, answers = x.to(state.input.dtype), []
        expectation = self.expect(state)
        for t in range(x.shape[1]):
            state = self.correct(expectation, x[:, t])
            expectation = self.expect(state)
            answers.append(expectation.predictions[0])
        return (torch.stack(answers, 1) if answers else x.clone()), state


def ptncn_loss(model: PTNCN, batch: "Batch", state: CorrectedState | None) -> tuple[Tensor, CorrectedState]:
    """Return the mean squared error at the targets (B, T, D) that are not NaN, and the state."""
    y, state = model(batch.inputs, state)
    valid = batch.targets.isfinite()
    error = torch.where(valid, batch.targets.to(y), y) - y
    return error.square().sum() / valid.sum().clamp_min(1), state
