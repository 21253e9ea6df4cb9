"""A regressor of sequences that can use any layer."""

from typing import Annotated, ClassVar

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.models.heads.distributions import Distribution, check_counts, make_head
from scanl.models.inputs import Scales
from scanl.models.pooling import Filters, Pool, PooledReader, PooledState
from scanl.models.reader import AnyStack, Inputs, Standard
from scanl.options import at_least


class SequenceRegressor(PooledReader):
    """Predict numbers for a whole sequence: a stack of blocks, pooled over time, and a head of distributions.

    The distributions may be moved by what random filters say.

    parameters: (B, O, P) of the distributions, in the units of the numbers, in float64. `head` says what each parameter
    means.
    State: PooledState, as in `SequenceClassifier`.
    """

    name: ClassVar[str] = "regressor"

    def __init__(
        self,
        outputs: Annotated[int, at_least(1), "O, how many numbers"],
        stack: AnyStack,
        inputs: Inputs,
        *,
        pool: Pool = "last",
        distribution: Distribution = "points",
        output_scales: Annotated[
            Scales | None,
            "(location, scale) of each number; the head works in standardised units. The location of counts is not "
            "used",
        ] = None,
        filters: Filters = None,
    ) -> None:
        super().__init__(stack, inputs, pool, filters, outputs)
        self.outputs = outputs
        self.head = make_head(distribution, stack.dim, outputs)
        self.answer = Standard(self._who(), outputs, output_scales)
        if self.head.counts:
            self.answer.location.zero_()

    def forward(
        self,
        x: Tensor,
        state: PooledState | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, PooledState]:
        """Map tokens (B, T) or features (B, T, channels) to parameters (B, O, P), and the state.

        mask, cu_seqlens, timespans: as in `SequenceClassifier.forward`.
        """
        parameters, state = self._standardised(x, state, mask, cu_seqlens, timespans)
        scale = self.answer.scale.expand(parameters.shape[:-1])
        return self.head.in_units(parameters.double(), self.answer.location, scale), state

    def loss(
        self,
        x: Tensor,
        targets: Tensor,
        state: PooledState | None = None,
        *,
        mask: Tensor | None = None,
        timespans: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> tuple[Tensor, PooledState]:
        """Return the mean loss of the numbers targets (B, O), and the state. mask, timespans: as in `forward`.

        weights: (B,), by which the losses of each sequence are multiplied before the mean.

        Squared errors and pinball losses are in standardised units. The likelihood of counts is computed on the counts,
        not standardised.
        """
        if targets.shape != (len(x), self.outputs):
            raise ShapeError(
                f"regressor: targets has shape {tuple(targets.shape)}, expected {(len(x), self.outputs)} because of x"
            )
        if self.head.counts and not torch.compiler.is_compiling():
            check_counts("regressor", "targets", targets)
        if weights is not None and weights.shape != (len(x),):
            raise ShapeError(f"regressor: weights has shape {tuple(weights.shape)}, expected {(len(x),)} because of x")
        parameters, state = self._standardised(x, state, mask, None, timespans)
        if self.head.counts:
            scale = self.answer.scale.expand(targets.shape)
            losses = self.head.loss(self.head.in_units(parameters.double(), scale, scale), targets.double())
        else:
            losses = self.head.loss(parameters, self.answer(targets).to(parameters.dtype))
        if weights is not None:
            losses = losses * weights[:, None].to(losses.dtype)
        return losses.mean().to(parameters.dtype), state

    def _standardised(
        self,
        x: Tensor,
        state: PooledState | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        timespans: Tensor | None,
    ) -> tuple[Tensor, PooledState]:
        """Return the parameters (B, O, P) in standardised units, and the state."""
        feature, beside, state = self._feature(x, state, mask, cu_seqlens, timespans)
        return self.head(feature, None if beside is None else self.answer(beside)), state
