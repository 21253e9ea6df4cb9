"""TiRex-2: a forecaster of several series together, whose xLSTM blocks read patches."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError, ShapeError
from scanl.layers import state as states
from scanl.layers.parts.norm import RMSNorm
from scanl.layers.state import State, loadable
from scanl.models.forecasting.share import Forecast, as_series
from scanl.models.forecasting.tirex2_blocks import ACTIVATIONS, TiRexBlock, TiRexMap, TiRexTimeMixer
from scanl.models.heads.distributions import as_levels
from scanl.ops.products.functions import large_products
from scanl.options import above, at_least, checked, one_of, unknown
from scanl.whole import whole_number

LEAST_VALUES, LEAST_FIT, LEAST_SLOPE = 4, 0.87, 1.5  # of a series with a trend
SINH_LIMIT = 20.0  # of what sinh is taken of
# Powers of the time ahead by which distances from the median grow, and the squares of their factors.
RAW_POWER, RAW_SQUARE, DIFFERENCE_POWER, DIFFERENCE_SQUARE = 0.02, 0.90, 0.01, 1.68


@loadable
class TiRex2State(NamedTuple):
    """State of a `TiRex2` of B groups of V variates, or of 2 V with `flips`: each of them and its negative.

    mean, scale: (B, V), of the first call's steps.   binary: (B, V) bool, variates that are neither shifted nor scaled.
    differenced: (B, V) bool, variates whose differences are read.   last: (B, V), the last step.   level: (B, V), the
    last value that is not missing.   blocks: (B, V, ...), one state for each block.
    """

    mean: Tensor
    scale: Tensor
    binary: Tensor
    differenced: Tensor
    last: Tensor
    level: Tensor
    blocks: tuple[State, ...]


class TiRex2(nn.Module):
    r"""TiRex-2: xLSTM blocks read patches of several series together, and attention mixes the series at each patch.

    A series is divided into patches that end where it ends; before it come patches without values, up to `context`
    steps. A token is a patch of normalised values, and of ones where there is a value. The output at a token is the
    quantiles of the next patch. Patches beyond it follow from the outputs at tokens without a value.

    A series is normalised by its mean and deviation, then by arcsinh. Of a target with a trend the differences are
    read; its quantiles are summed up again. Both need the whole series, so a later step changes what the blocks read of
    earlier ones. A state keeps the mean, the deviation and the trend of the first call. With these kept, the blocks are
    causal, and a patch is one step of theirs. Columns whose future is known are read backwards too, so they have none.
    A call without a state reads the last `context` steps; a state is of all steps since.

    Podest et al., "TiRex-2: Generalizing TiRex to Multivariate Data and Streaming", arXiv:2607.01204, and the authors'
    program, tirex-2 0.4. Weights start as random numbers of any size, because they are read from a checkpoint.
    """

    name: ClassVar[str] = "tirex2"

    @checked("tirex2")
    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, channels of the blocks"] = 512,
        kinds: Annotated[Sequence[str], "xLSTM of each block: slstm or mlstm"] = ("slstm", "mlstm") * 6,
        heads: Annotated[Sequence[int], "heads of the xLSTM of each block"] = (4,) * 12,
        attention_heads: Annotated[Sequence[int], "heads of the attention of each block"] = (8,) * 12,
        unit: Annotated[bool, "keys and queries of the attention have unit length"] = True,
        activation: Annotated[str, one_of(ACTIVATIONS), "of the maps but those after the xLSTM"] = "relu",
        patch: Annotated[int, at_least(1), "P, steps of a patch"] = 32,
        context: Annotated[int, at_least(1), "steps that the first call reads at most"] = 2048,
        future: Annotated[int, at_least(1), "steps that can be forecast, a multiple of P"] = 320,
        hidden_in: Annotated[int, at_least(1), "hidden numbers of the map of a patch"] = 2048,
        hidden_out: Annotated[int, at_least(1), "hidden numbers of the map to quantiles"] = 2048,
        norm_eps: Annotated[float | None, above(0), "of the norm after the last block; None for no norm"] = 1e-6,
        least_scale: Annotated[float, above(0), "of a series"] = 1e-8,
        arcsinh: Annotated[bool, "arcsinh of normalised values"] = True,
        keeps_binary: Annotated[bool, "a series of 0 and 1 alone is not normalised"] = True,
        differences: Annotated[bool, "differences are read where there is a trend"] = True,
        flips: Annotated[bool, "the negative is read too, and the mean of both forecasts is the forecast"] = False,
        quantiles: Annotated[Sequence[float], "levels that are learnt"] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    ) -> None:
        super().__init__()
        if not len(kinds) == len(heads) == len(attention_heads) > 0:
            raise ConfigError(
                f"{self.name}: kinds, heads and attention_heads are of {len(kinds)}, {len(heads)} and "
                f"{len(attention_heads)} blocks, expected as many each, at least one"
            )
        for kind in kinds:
            if kind not in TiRexTimeMixer.kinds:
                raise ConfigError(f"{self.name}: {unknown('kinds', kind, TiRexTimeMixer.kinds)}")
        widths = [dim // 2 if kind == "mlstm" else dim for kind in kinds]
        for each, width in zip((*heads, *attention_heads), (*widths, *[dim] * len(kinds)), strict=True):
            if each < 1 or width % each:
                raise ConfigError(f"{self.name}: heads are {each}, expected a divisor of {width} because of dim={dim}")
        if future % patch:
            raise ConfigError(f"{self.name}: future is {future}, expected a multiple of patch={patch}")
        self.levels = tuple(quantiles)
        as_levels(self.levels, torch.zeros(1))
        if len(self.levels) < 2 or any(low >= high for low, high in zip(self.levels, self.levels[1:], strict=False)):
            raise ConfigError(f"{self.name}: quantiles are {list(quantiles)}, expected at least two, each larger")
        if flips and any(abs(low + high - 1) > 1e-6 for low, high in zip(self.levels, self.levels[::-1], strict=True)):
            raise ConfigError(
                f"{self.name}: quantiles are {list(quantiles)}, expected 1 - q for each q because of flips"
            )
        self.patch, self.context, self.future = patch, context, future
        self.least_scale, self.arcsinh, self.keeps_binary = least_scale, arcsinh, keeps_binary
        self.differences, self.flips = differences, flips
        self.input_patch_embedding = TiRexMap(2 * patch, hidden_in, dim, activation)
        self.stack = nn.ModuleList(
            TiRexBlock(dim, *each, unit, activation) for each in zip(kinds, heads, attention_heads, strict=True)
        )
        self.stack_out_norm = nn.Identity() if norm_eps is None else RMSNorm(dim, norm_eps)
        self.output_patch_embedding = TiRexMap(dim, hidden_out, len(self.levels) * patch, activation)

    def predict(
        self,
        x: Tensor,
        state: TiRex2State | None = None,
        *,
        horizon: int,
        targets: int | None = None,
        levels: Sequence[float] | None = None,
    ) -> tuple[Forecast, TiRex2State]:
        """Read T steps of the variates x (B, T, V), at least one, and forecast the next H of the first ones.

        The variates of a row are forecast together. NaN is a missing value.   state: of the steps before. Then T must
        be a multiple of P, and steps are normalised as those of the first call were.   horizon: H, at most `future`.
        targets: how many of the variates are forecast, None for all; the others are read as well. All calls of a stream
        have the same.   levels: of the quantiles; None for those that are learnt. Between these a quantile is on the
        line from one to the next, and the mean is the quantile of 0.5. Raises ShapeError, and ConfigError for other
        arguments.
        """
        columns, horizon, targets, asked = self._checked(x, horizon, targets, levels)
        series = self._with_negatives(columns)
        if state is None:
            rows, about = self._begin(series, x.shape[1], targets)
        else:
            rows, about = self._go_on(series, state)
        end = rows.shape[-1] - self.future
        # the last token forecasts a patch
        steps = end - self.patch - horizon // -self.patch * self.patch
        with large_products(rows[..., :steps].numel() // self.patch):
            hidden, blocks = self._read(
                self._scaled(rows[..., :steps], about), about.blocks, end // self.patch, targets
            )
            forecast = self._forecast(hidden, about, horizon, targets, asked)
        return forecast, about._replace(blocks=blocks)

    def predict_known(
        self,
        x: Tensor,
        known: Tensor,
        *,
        horizon: int,
        targets: int | None = None,
        levels: Sequence[float] | None = None,
    ) -> Forecast:
        """Forecast as `predict` does, with columns known (B, T + H, K) beside, whose future is known.

        A known column that has a value in the future is read backwards too, from the last step of the future on. So
        there is no state, and further steps need the whole series again.
        """
        columns, horizon, targets, asked = self._checked(x, horizon, targets, levels)
        length = x.shape[1]
        if known.ndim != 3 or known.shape[:2] != (len(x), length + horizon) or not known.shape[2]:
            raise ShapeError(
                f"{self.name}: known has shape {tuple(known.shape)}, expected (B, T + H, K) with B={len(x)} and "
                f"T + H={length + horizon} because of x and horizon"
            )
        as_series(f"{self.name}: known", beside := known.to(x))
        columns = torch.cat([F.pad(columns, (0, horizon), value=torch.nan), beside.transpose(1, 2)], 1)
        series = self._with_negatives(columns)
        rows, about = self._begin(series, length, targets)
        end = (rows.shape[-1] - self.future) // self.patch
        backwards = (~series[..., length:].isnan().all(-1)).flatten().nonzero()[:, 0]
        with large_products(rows.numel() // self.patch):
            hidden, _ = self._read(self._scaled(rows, about), (), end, targets, backwards)
            return self._forecast(hidden, about, horizon, targets, asked)

    def _checked(
        self, x: Tensor, horizon: int, targets: int | None, levels: Sequence[float] | None
    ) -> tuple[Tensor, int, int, Tensor]:
        """Return x as (B, V, T), the horizon, the number of targets, and the levels."""
        as_series(self.name, x)
        columns = x.transpose(1, 2)
        horizon = whole_number(self.name, "horizon", horizon, 1, self.future + 1)
        targets = whole_number(self.name, "targets", x.shape[2] if targets is None else targets, 1, x.shape[2] + 1)
        return columns, horizon, targets, as_levels(self.levels if levels is None else levels, columns)

    def _with_negatives(self, columns: Tensor) -> Tensor:
        return torch.cat([columns, -columns], 1) if self.flips else columns

    def _targets(self, of: Tensor, targets: int) -> Tensor:
        """Return what belongs to the targets of (B, S V, ...), as (B, S, targets, ...)."""
        return of.unflatten(1, (1 + self.flips, -1))[:, :, :targets]

    def _begin(self, series: Tensor, length: int, targets: int) -> tuple[Tensor, TiRex2State]:
        """Return the steps that the blocks read, and a state whose blocks have read nothing.

        series: (B, S V, T), or with the known future (B, S V, T + H).   length: T. Before the steps that are returned
        come those without a value, up to `context`, and after them the future.
        """
        differenced = torch.zeros_like(series[..., 0], dtype=torch.bool)
        if self.differences:
            self._targets(differenced, targets)[:] = _has_trend(self._targets(series[..., :length], targets))
        steps = F.pad(series.diff(dim=-1), (1, 0))
        rows = torch.where(differenced[..., None], steps, series)
        # rows of one length, so that sums have the order that they have in the authors' program
        rows = F.pad(rows, (max(0, self.context - length), self.future - series.shape[-1] + length), value=torch.nan)
        rows = rows[..., -self.context - self.future :]
        mean = rows.nanmean(-1).nan_to_num(0.0)
        scale = (rows - mean[..., None]).square().nanmean(-1).sqrt().nan_to_num(1.0).clamp(min=self.least_scale)
        binary = ((rows == 0) | (rows == 1) | rows.isnan()).all(-1) & self.keeps_binary
        mean, scale = mean.masked_fill(binary, 0.0), scale.masked_fill(binary, 1.0)
        past = series[..., :length]
        about = TiRex2State(mean, scale, binary, differenced, past[..., -1], _last_value(past), ())
        return F.pad(rows, (-self.context % self.patch, 0), value=torch.nan), about

    def _go_on(self, series: Tensor, state: TiRex2State) -> tuple[Tensor, TiRex2State]:
        """Return as `_begin` the steps that the blocks read, after those of a state."""
        (groups, variates), signs = state.mean.shape, 1 + self.flips
        if state.mean.shape != series.shape[:2]:
            raise ShapeError(
                f"{self.name}: state is of {groups} groups of {variates // signs} variates, expected {len(series)} of "
                f"{series.shape[1] // signs} because of x"
            )
        if series.shape[-1] % self.patch:
            raise ShapeError(
                f"{self.name}: x has {series.shape[-1]} steps, expected a multiple of patch={self.patch} because of "
                "state; without a state, all steps are read anew"
            )
        before = torch.cat([state.last[..., None], series[..., :-1]], -1)
        rows = torch.where(state.differenced[..., None], series - before, series)
        level = _last_value(torch.cat([state.level[..., None], series], -1))
        return F.pad(rows, (0, self.future), value=torch.nan), state._replace(last=series[..., -1], level=level)

    def _scaled(self, rows: Tensor, about: TiRex2State) -> Tensor:
        found = (rows - about.mean[..., None]) / about.scale[..., None]
        return torch.where(about.binary[..., None], found, found.arcsinh()) if self.arcsinh else found

    def _read(
        self, values: Tensor, blocks: Sequence[State], end: int, targets: int, backwards: Tensor | None = None
    ) -> tuple[Tensor, tuple[State, ...]]:
        """Return the outputs (B, S V, L, D) from token `end` - 1 on, and the state after the first `end` tokens.

        values: (B, S V, L P), normalised, NaN for none.   blocks: () at the beginning.   backwards: as of the blocks.
        """
        patches = values.to(self.input_patch_embedding.hidden_layer.weight).unflatten(-1, (-1, self.patch))
        x = self.input_patch_embedding(torch.cat([patches.nan_to_num(0.0), (~patches.isnan()).to(patches)], -1))
        batch = x.shape[:2]
        signs = 1 + self.flips
        x = x.reshape(batch[0] * signs, batch[1] // signs, *x.shape[2:])
        is_target = torch.arange(x.shape[1], device=x.device) < targets
        mask = None if targets == x.shape[1] else is_target[:, None] | ~is_target
        after = []
        for number, block in enumerate(self.stack):
            before = states.map_leaves(lambda leaf: leaf.flatten(0, 1), blocks[number]) if blocks else None
            first = end - 1 if number == len(self.stack) - 1 else 0
            x, state = block(x, before, mask, end=end, first=first, backwards=backwards)
            after.append(states.map_leaves(lambda leaf: leaf.unflatten(0, batch), state))
        return x.reshape(*batch, *x.shape[2:]), tuple(after)

    def _forecast(self, hidden: Tensor, about: TiRex2State, horizon: int, targets: int, asked: Tensor) -> Forecast:
        mean, scale, binary, differenced, _, level = (
            self._targets(each, targets)[..., None, None] for each in about[:6]
        )
        found = self.output_patch_embedding(self.stack_out_norm(self._targets(hidden, targets))).to(mean)
        found = found.unflatten(-1, (len(self.levels), self.patch)).transpose(-3, -2).flatten(-2)[..., :horizon]
        if self.arcsinh:
            found = torch.where(binary, found, found.clamp(-SINH_LIMIT, SINH_LIMIT).sinh())
        found = found * scale + mean
        middle = found[..., len(self.levels) // 2, None, :]
        off, steps = found - middle, torch.arange(1, horizon + 1, dtype=found.dtype, device=found.device)
        around = middle + RAW_SQUARE**0.5 * steps**RAW_POWER * off
        # the square root of 0 has no gradient; a sum of 0 has no sign
        spread = off.square().cumsum(-1).clamp(min=torch.finfo(off.dtype).tiny).sqrt()
        spread = spread * off.sum(-1, keepdim=True).sign()
        summed = middle.cumsum(-1) + DIFFERENCE_SQUARE**0.5 * steps**DIFFERENCE_POWER * spread + level
        found = torch.where(differenced, summed, around)
        found = (found[:, 0] - found[:, 1].flip(-2)) / 2 if self.flips else found[:, 0]
        found = found.permute(0, 3, 1, 2)
        return Forecast(self._between(found, asked.new_tensor([0.5]))[..., 0], self._between(found, asked))

    def _between(self, quantiles: Tensor, asked: Tensor) -> Tensor:
        """Return quantiles at the levels that are asked for, on lines between the learnt ones (..., Q)."""
        levels = asked.new_tensor(self.levels)
        high = torch.searchsorted(levels, asked).clamp(1, len(levels) - 1)
        share = ((asked - levels[high - 1]) / (levels[high] - levels[high - 1])).clamp(0, 1)
        return quantiles[..., high - 1].lerp(quantiles[..., high], share.to(quantiles))


def _last_value(series: Tensor) -> Tensor:
    """Return the last value of each series (..., T) that is not missing, 0 if there is none."""
    places = torch.arange(series.shape[-1], device=series.device)
    last = torch.where(series.isnan(), 0, places).amax(-1, keepdim=True)
    return series.gather(-1, last)[..., 0].nan_to_num(0.0)


def _has_trend(series: Tensor) -> Tensor:
    """Return whether a line fits each series (..., T): its share of the variance, and the deviations that it rises."""
    known = ~series.isnan()
    count = known.sum(-1, keepdim=True)
    places = torch.arange(series.shape[-1], dtype=torch.float64, device=series.device).expand(series.shape)
    t, y = (torch.where(known, each, 0.0) for each in (places, series.double()))
    t, y = (torch.where(known, each - each.sum(-1, keepdim=True) / count, 0.0) for each in (t, y))
    squares, times, both = y.square().sum(-1), t.square().sum(-1), (t * y).sum(-1)
    deviation = (squares / (count[..., 0] - 1)).sqrt()
    rise = (both / times / deviation).abs() * series.shape[-1]
    fits = both.square() / (times * squares) >= LEAST_FIT
    return (count[..., 0] >= LEAST_VALUES) & (deviation >= 1e-12) & (rise >= LEAST_SLOPE) & fits
