"""The inputs of a forecaster: checks of the columns of series, and their standardised numbers at each step."""

from typing import NamedTuple

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.layers.packing import pack, sequence_index
from scanl.layers.parts.timespans import check_timespans
from scanl.models.embedding import check_tensor
from scanl.models.inputs import Channels
from scanl.ops._frame.context import traced
from scanl.ops.offsets import sequences
from scanl.series_columns import SeriesColumns


class StepInputs(NamedTuple):
    """The inputs of a forecaster at each step, in float64 and standardised.

    y: (B, T, C), the targets.   covariates: each (B, T, ·).   spans: (B, T), durations of the steps, if they have any.
    """

    y: Tensor
    covariates: tuple[Tensor, ...]
    spans: Tensor | None

    @classmethod
    def of(
        cls, columns: SeriesColumns, location: Tensor, scale: Tensor, reach: tuple[int, int], cu_seqlens: Tensor | None
    ) -> "StepInputs":
        """Standardise columns by the location and scale of their channels.

        reach: the number of steps ahead that are read after each step, and of those that the columns have, H.
        """
        x, (ahead, horizon) = columns.target, reach
        sizes = [0 if values is None else values.shape[-1] for values in columns[:4]]
        groups = zip(columns[:4], location.split(sizes), scale.split(sizes), strict=True)
        y, past, static, future = (
            None if values is None else (values.double() - where) / unit for values, where, unit in groups
        )
        assert y is not None
        steps = torch.arange(x.shape[1], device=x.device)
        owner = None if cu_seqlens is None else sequence_index(cu_seqlens, x.shape[1])
        if static is not None:
            static = static[:, None].expand(-1, x.shape[1], -1) if owner is None else static[owner][None]
        now = steps if owner is None else steps + owner * horizon  # H steps follow each packed sequence
        after = now[:, None] + 1 + torch.arange(ahead, device=x.device)
        known = [] if future is None else [future[:, after]]
        spans = None
        if columns.timespans is not None:
            spans = columns.timespans[:, now]
            known.append((columns.timespans[:, after].double().cumsum(2) / horizon)[..., None])
        covariates = [covariate for covariate in (past, static) if covariate is not None]
        if known:
            covariates.append(torch.cat(known, -1).flatten(2) if len(known) > 1 else known[0].flatten(2))
        return cls(y, tuple(covariates), spans)

    def packed(self, mask: Tensor) -> "StepInputs":
        """Return the steps where `mask` is True, packed into one row."""
        spans = None if self.spans is None else pack(self.spans, mask)[0]
        return StepInputs(pack(self.y, mask)[0], tuple(pack(values, mask)[0] for values in self.covariates), spans)


def check_columns(columns: SeriesColumns, channels: Channels, horizon: int, cu_seqlens: Tensor | None) -> None:
    """Raise ShapeError unless columns have the shapes of a model, and finite numbers, or NaN where one is missing.

    An infinite number would make all later statistics NaN.
    """
    x = columns.target
    check_tensor("forecaster", "x", x, f"(B, T, {channels.target})")
    if x.ndim != 3 or x.shape[2] != channels.target or not x.is_floating_point():
        raise ShapeError(
            f"forecaster: x is {x.dtype} {tuple(x.shape)}, expected a floating dtype and (B, T, {channels.target})"
        )
    rows = sequences(x, cu_seqlens)
    batch, steps = x.shape[:2]
    reached = steps + horizon * (1 if cu_seqlens is None else rows)
    for name, values, size, shape in (
        ("past", columns.past, channels.past, (batch, steps, channels.past)),
        ("static", columns.static, channels.static, (rows, channels.static)),
        ("future", columns.future, channels.future, (batch, reached, channels.future)),
        ("timespans", columns.timespans, channels.timed, (batch, reached)),
    ):
        if values is not None:
            check_tensor("forecaster", name, values, str(shape))
        if values is None and size:
            raise ShapeError(f"forecaster: {name} is None, expected {shape} because the model was made with {name}")
        if values is not None and (tuple(values.shape) != shape or (name == "timespans" and not size)):
            expected = shape if size else "None because the model was made without"
            raise ShapeError(f"forecaster: {name} has shape {tuple(values.shape)}, expected {expected}")
    check_timespans("forecaster", None if columns.timespans is None else columns.timespans[:, :steps], x)
    if traced():
        return
    for name, numbers in zip(("x", "past", "static", "future"), columns[:4], strict=True):
        if numbers is not None and bool(numbers.isinf().any()):
            raise ShapeError(
                f"forecaster: {name} has an infinite number, expected finite ones, and NaN where one is missing"
            )
