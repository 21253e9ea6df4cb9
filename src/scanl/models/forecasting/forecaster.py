"""A forecaster of series that can use any layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.layers import state as states
from scanl.layers.base import as_widened
from scanl.layers.packing import pack, sequence_index, unpack
from scanl.layers.parts.timespans import check_timespans
from scanl.layers.state import Device, DType, State, loadable
from scanl.models.decoding.generation import Generation
from scanl.models.decoding.sampling import as_limit, check_options
from scanl.models.embedding import check_tensor
from scanl.models.forecasting.lags import Lags
from scanl.models.forecasting.running import Running, nothing_read, running
from scanl.models.heads.distributions import LEVELS, Distribution, as_levels, check_counts, make_head
from scanl.models.inputs import Channels
from scanl.models.reader import FeatureEmbedding, Standard
from scanl.models.saving import ModelPart, Saved
from scanl.models.stack import Backbone, check_causal
from scanl.ops.offsets import sequences
from scanl.options import WORDS, Configured, above, at_least
from scanl.whole import whole_number

EPSILON = 1e-5  # added to the variance of a series that has not varied
MOST_LOG = 80.0  # of a forecast, in units of the location: its exponential is finite in float32


@loadable
class ForecasterState(NamedTuple):
    """State of a `Forecaster`.

    stack: state of the blocks.   running: running mean and variance of the targets, in float64.   lags: (B, lags - 1,
    2 C), the last values of the targets and whether each is known, in float64.
    """

    stack: State
    running: Running
    lags: Tensor


class Forecast(NamedTuple):
    """A forecast of the next H steps of C targets, in their units and in float64.

    mean: (B, H, C).   quantiles: (B, H, C, Q), at the levels of the call.
    """

    mean: Tensor
    quantiles: Tensor


@dataclass(frozen=True)
class Normalization(ModelPart, metaclass=Configured):
    """Normalisation of a series by the running mean and variance of its past."""

    span: Annotated[
        float | None,
        above(1),
        "after this many further numbers, a number has lost about two thirds of its weight in mean and variance. None: "
        "it keeps its weight",
    ] = None
    log: Annotated[
        bool,
        "normalise the logarithm of the targets, for series whose steps are ratios. A number that is not above 0 is "
        "then missing",
    ] = False
    rounded: Annotated[bool, "round the forecasts to whole numbers"] = False
    least: Annotated[float | None, "no forecast is below this number; None: no limit"] = None
    calibrated: Annotated[
        bool, "multiply the distances of the quantiles from the median by the factors in `calibration`"
    ] = False


WORDS[Normalization] = "Normalization()"


class _Read(NamedTuple):
    """The inputs of a forecaster at each step, in float64 and standardised.

    y: (B, T, C), the targets.   covariates: each (B, T, ·).   spans: (B, T), durations of the steps, if they have any.
    """

    y: Tensor
    covariates: tuple[Tensor, ...]
    spans: Tensor | None

    def packed(self, mask: Tensor) -> "_Read":
        """Return the steps where `mask` is True, packed into one row."""
        spans = None if self.spans is None else pack(self.spans, mask)[0]
        return _Read(pack(self.y, mask)[0], tuple(pack(covariate, mask)[0] for covariate in self.covariates), spans)


class Forecaster(Saved):
    r"""Forecast the next numbers of series: a stack reads the normalised series, and a head gives distributions.

    .. math::
        z_t = (y_t - m_t) / s_t, \quad h_t = \mathrm{stack}(W [z_t, \mathrm{covariates}_t]), \quad
        p_t = \mathrm{head}(h_t) + \mathrm{lags}(y_{\le t})

    p_t are the parameters of the distributions of y_{t+1} ... y_{t+H}, in units of s_t about m_t.

    Reversible normalisation (`normalization`): m_t and s_t are the running mean and the root of the running variance of
    the targets up to step t. The forecast from step t is scaled back by the same m_t and s_t. Source: Kim et al.,
    "Reversible Instance Normalization", ICLR 2022, eq. (1) to (3). Differs: they compute the statistics over the whole
    input window. These are causal, so a series gives the same forecasts sample by sample as at once. While few numbers
    are known, the scale of `scales` counts too (`running`). RevIN adds 1e-5 to every variance; here it is added only
    while a series is constant, because in units of `scales` a series may be smaller than that. The affine map of RevIN
    is left out, because the linear maps before and behind the stack contain it. For counts m_t = 0 and s_t is the
    running mean plus one (Salinas et al., arXiv:1704.04110, sec. 3.3).

    With `Normalization(log=True)` the model reads and forecasts L + L log(y / L) instead of y, where L is the location
    of the channel, above 0. At L this map has the value L and the slope 1. Quantiles are mapped back exactly.

    With `Normalization(calibrated=True)` the distance of a quantile from the median is multiplied by a factor for
    each step ahead and each level, in `calibration` (H, 11). Between two of `LEVELS` the factor is
    interpolated. Source: Romano, Patterson and Candès, "Conformalized Quantile Regression", NeurIPS 2019,
    section 4. Differs: a factor, which suits series of different scales, in place of a summand.

    Numbers are standardised and normalised in float64, and then cast to the dtype of the model. So a series may vary by
    1 about 1e9. What comes out is in float64.

    A NaN in the input is a missing number. A flag says so to the model, and mean, variance and lags leave it out. With
    `timed`, the time until each step ahead is read with its covariates.
    x: (B, T, C).   parameters: (B, T, H, C, P); H is 1 if recursive.
    State: ForecasterState, of constant size.
    """

    name: ClassVar[str] = "forecaster"

    def __init__(
        self,
        horizon: Annotated[int, at_least(1), "H, number of steps to forecast"],
        stack: Annotated[Backbone, 'the causal layers between the input and the head: `Stack(32, 2, "hawk")`'],
        channels: Annotated[Channels, "how many targets are forecast, and the covariates"] = Channels(),  # noqa: B008 (frozen)
        *,
        distribution: Distribution = "gaussian",
        recursive: Annotated[
            bool,
            "True: the head forecasts one step, and a longer forecast reads its own steps from the kept state. False: "
            "the head forecasts all H steps at once",
        ] = False,
        lags: Annotated[
            int, at_least(0), "q, number of last values that a linear map adds to the forecast; 0 for no such map"
        ] = 1,
        normalization: Annotated[
            Normalization | None,
            "how the targets are normalised by their past, and what forecasts may be; None: only the scales of the "
            "channels",
        ] = Normalization(),
    ) -> None:
        super().__init__()
        check_causal(self._who(), stack)
        self.stack = stack
        self.horizon, self.distribution = horizon, distribution
        self.targets, self.past, self.static = channels.target, channels.past, channels.static
        self.future, self.timed = channels.future, channels.timed
        self.recursive, self.normalization = recursive, normalization
        kind = normalization or Normalization()
        self.rounded, self.least, self.log = kind.rounded, kind.least, kind.log
        self.ahead = 1 if recursive else horizon
        once = self.targets + self.past + self.static
        self.standard = Standard("forecaster", once + self.future, channels.scales)
        self.input = FeatureEmbedding(
            once + (self.future + self.timed) * self.ahead + self.timed, stack.dim, missing=True
        )
        self.head = make_head(distribution, stack.dim, self.ahead * self.targets)
        self.lags = Lags(lags, self.ahead) if lags else None
        if self.log and distribution not in ("points", "quantiles"):
            raise ConfigError(
                f"forecaster: distribution is {distribution}, expected points or quantiles because of log"
            )
        if self.log and not bool((self.standard.location[: self.targets] > 0).all()):
            raise ConfigError(
                f"forecaster: scales has the location {self.standard.location[: self.targets].min().item():g} of a "
                "target, expected more than 0 because of log"
            )
        self.calibration: Tensor | None
        self.register_buffer("calibration", torch.ones(horizon, len(LEVELS)) if kind.calibrated else None)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> ForecasterState:
        weight = self.input.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        location, scale = (values[: self.targets].to(device) for values in self._standards())
        mean = (self.standard.location[: self.targets].to(location) - location) / scale
        lag_steps = max(0, 0 if self.lags is None else self.lags.lags - 1)
        return ForecasterState(
            self.stack.init_state(batch_size, device=device, dtype=dtype),
            nothing_read(mean.repeat(batch_size, 1)),
            torch.zeros(batch_size, lag_steps, 2 * self.targets, device=device, dtype=torch.float64),
        )

    def forward(
        self,
        x: Tensor,
        state: ForecasterState | None = None,
        *,
        past: Tensor | None = None,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ForecasterState]:
        """Map x (B, T, C) to the parameters (B, T, H, C, P) of the forecasts after each step, and the state.

        past: (B, T, P).   static: (B, S).   future: (B, T + H, F), the covariates of the T steps and of the H steps
        after them.   timespans: (B, T + H), the durations of these steps; NaN ahead where they are not known.
        mask: (B, T) bool, True at valid steps; parameters are zero at the others.   cu_seqlens: (N+1,) offsets of N
        sequences packed over B == 1; `static` then has N rows, and in `future` and `timespans` H steps follow each
        sequence.
        """
        inputs = self._columns(x, past, static, future, timespans, cu_seqlens)
        if mask is not None:
            if cu_seqlens is not None:
                raise ShapeError("forecaster: mask and cu_seqlens are both given, expected one of them")
            _, cu_seqlens = pack(x, mask)
            inputs = inputs.packed(mask)
        parameters, location, scale, state = self._read(inputs, state, cu_seqlens)
        parameters = self._as_read(self.head.in_units(parameters.double(), location, scale))
        return (parameters if mask is None else unpack(parameters, mask)), state

    def loss(
        self,
        x: Tensor,
        targets: Tensor,
        state: ForecasterState | None = None,
        *,
        past: Tensor | None = None,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, ForecasterState]:
        """Return the mean loss of the forecasts after each step, and the state.

        targets: (B, T, H, C), NaN where there is no target. With `recursive` only the first of the H steps is learnt.
        The loss of points and quantiles is in units of a running scale: that after the last step, or that after the
        step of the forecast where it is larger. In the first steps the scale is hardly known, and an error in units of
        it could have any size. A likelihood has the same gradient in any unit. For counts it is the likelihood of the
        counts themselves. Forecasts that no series of the batch asks for are not computed.
        """
        expected = (*x.shape[:2], self.horizon, self.targets)
        if targets.shape != expected:
            raise ShapeError(
                f"forecaster: targets has shape {tuple(targets.shape)}, expected {expected} because of x and the model"
            )
        if not torch.compiler.is_compiling():
            if bool(targets.isinf().any()):
                raise ShapeError("forecaster: targets has an infinite number, expected finite ones, and NaN for none")
            if self.head.counts:
                check_counts("forecaster", "targets", targets)
        inputs = self._columns(x, past, static, future, timespans, None)
        targets = self._logged(targets[:, :, : self.ahead])
        after = (~targets.isnan()).any(3).any(2).any(0).nonzero()[:, 0]
        parameters, location, scale, state = self._read(inputs, state, None, after)
        targets, dtype = targets[:, after].double(), parameters.dtype
        is_target = ~targets.isnan()
        if self.head.counts:
            parameters = self.head.in_units(parameters.double(), location[:, after], scale[:, after])
        else:
            targets = ((targets - location[:, after]) / scale[:, after]).to(dtype)
        # Missing targets are replaced before the loss, because 0 times NaN is NaN in a gradient.
        losses = self.head.loss(parameters, torch.where(is_target, targets, 0))
        if self.head.degree:
            losses = losses * (scale[:, after] / scale[:, -1:]).clamp(max=1).to(dtype) ** self.head.degree
        return (torch.where(is_target, losses, 0).sum() / is_target.sum().clamp(min=1)).to(dtype), state

    @torch.no_grad()
    def predict(
        self,
        x: Tensor,
        state: ForecasterState | None = None,
        *,
        past: Tensor | None = None,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
        levels: Sequence[float] = LEVELS,
        paths: int = 200,
        seed: int = 0,
    ) -> tuple[Forecast, ForecasterState]:
        """Read x (B, T, C), T at least 1, and forecast the H steps after the last one.

        Pass the state to the next call, together with the new samples: one or several. The forecasts are the same as
        from the whole history.

        past, static, future, timespans: as in `forward`.   levels: of the quantiles.
        paths: if recursive, how many futures are drawn. Each number is drawn from the distribution that follows from
        the numbers before it. The forecast is the mean and the quantiles of the futures. With "points" there is one
        future: the means. In a future, covariates of the past are missing.   seed: of the draws.
        """
        check_tensor("forecaster", "x", x, "(B, T, C)")
        if x.ndim == 3 and x.shape[1] == 0:
            raise ShapeError(f"forecaster: x has shape {tuple(x.shape)}, expected (B, T, C) with T at least 1")
        paths, seed = whole_number("forecaster", "paths", paths, 1), whole_number("forecaster", "seed", seed)
        probabilities = as_levels(levels, self.standard.scale)
        inputs = self._columns(x, past, static, future, timespans, None)
        parameters, state = self._after(inputs, state)
        if not self.recursive:
            mean, quantiles = self.head.mean(parameters), self.head.quantiles(parameters, probabilities.to(parameters))
            quantiles = self._calibrated(quantiles, parameters, probabilities)
            return Forecast(self._allowed(mean), self._allowed(quantiles)), state
        paths = 1 if self.distribution == "points" else paths
        generator = torch.Generator(x.device).manual_seed(seed)
        ahead = states.repeat(state, paths)
        repeated = parameters.repeat_interleave(paths, 0)
        constant = None if static is None else static.repeat_interleave(paths, 0)
        numbers = []
        for step in range(self.horizon):
            drawn = self.head.mean(repeated) if paths == 1 else self.head.sample(repeated, generator)
            numbers.append(drawn[:, 0])
            if step + 1 == self.horizon:
                break
            known, lasts = (
                None if tensor is None else tensor[:, x.shape[1] + step :][:, :2].repeat_interleave(paths, 0)
                for tensor in (future, timespans)
            )
            repeated, ahead = self._next(drawn, ahead, constant, known, lasts)
        drawn = torch.stack(numbers, 1).unflatten(0, (len(x), paths))
        quantiles = drawn.quantile(probabilities.to(drawn), dim=1).movedim(0, -1)
        return Forecast(self._allowed(drawn.mean(1)), self._allowed(quantiles)), state

    def generate(
        self,
        x: Tensor,
        state: ForecasterState | None = None,
        *,
        past: Tensor | None = None,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
        following: Iterator[Tensor] | None = None,
        lasting: Iterator[Tensor] | None = None,
        max_steps: int | None = None,
        temperature: float = 1.0,
        seed: int | torch.Generator | None = None,
    ) -> Generation:
        """Read x (B, T, C), T at least 1, and draw the numbers (B, C) of step after step, in constant memory.

        Each step is drawn from the distribution that follows from all steps before it, including the drawn ones. To
        generate from nothing, let x be one step of NaN. As in `predict`, covariates of the past are missing in the
        drawn steps.

        past, static, future, timespans: as in `forward`; of the steps ahead, the first alone is read.
        following: with `future`, an iterator over the covariates (B, F) of the second drawn step, of the third, and so
        on. Generation ends where it ends.   lasting: with `timespans`, likewise over the durations (B,) of these steps;
        None: each lasts 1.   max_steps: None for no limit.   temperature: see `Head.sample`.
        seed: a whole number, or a generator to draw from.
        Raises ConfigError for a model whose head forecasts several steps at once.
        """
        if self.ahead > 1:
            raise ConfigError(
                f"generate: the model forecasts {self.ahead} steps at once, expected one; make it recursive"
            )
        check_tensor("generate", "x", x, "(B, T, C)")
        if x.ndim == 3 and x.shape[1] == 0:
            raise ShapeError(f"generate: x has shape {tuple(x.shape)}, expected (B, T, C) with T at least 1")
        check_options("generate", temperature)
        max_steps = as_limit("generate", "max_steps", max_steps)
        if self.future and following is None and max_steps != 1:
            raise ConfigError(f"generate: following is None, expected covariates because future is {self.future}")
        inputs = self._columns(x, past, static, future, timespans, None)
        steps, ones = x.shape[1], None if timespans is None else timespans.new_ones(len(x))
        ahead = None if future is None else future[:, steps]  # of the step that is drawn next
        lasts = None if timespans is None else timespans[:, steps]
        first = True

        def draw(pending: Tensor, state: Any, _: Tensor | None, generator: torch.Generator | None) -> Any:
            nonlocal first, ahead, lasts
            if first:
                parameters, after = self._after(inputs, state)
            else:
                known, spans = ahead, lasts
                ahead = None if following is None else next(following)
                lasts = ones if lasting is None else next(lasting)
                parameters, after = self._next(pending, state, static, _both(known, ahead), _both(spans, lasts))
            first = False
            drawn = self.head.sample(parameters, generator, temperature)
            return drawn[:, 0], drawn, after

        return Generation(draw, x, state, max_steps=max_steps, seed=seed)

    def _next(
        self, x: Tensor, state: ForecasterState, static: Tensor | None, known: Tensor | None, spans: Tensor | None
    ) -> tuple[Tensor, ForecasterState]:
        """Read one step x (B, 1, C) of a recursive forecast, in which the covariates of the past are missing.

        known: (B, 2, F), the covariates of this step and of the next.   spans: (B, 2), their durations.
        """
        past = x.new_full((len(x), 1, self.past), torch.nan)
        return self._after(self._joined(x, past, static, known, spans, None), state)

    def _standards(self) -> tuple[Tensor, Tensor]:
        """Return location and scale of every channel; the location of targets that are counts is 0."""
        location = self.standard.location
        if self.head.counts:
            location = torch.cat([torch.zeros_like(location[: self.targets]), location[self.targets :]])
        return location, self.standard.scale

    def _columns(
        self,
        x: Tensor,
        past: Tensor | None,
        static: Tensor | None,
        future: Tensor | None,
        timespans: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> "_Read":
        """Check the inputs, and return the numbers at each step."""
        self._check(x, past, static, future, timespans, cu_seqlens)
        return self._joined(x, past, static, future, timespans, cu_seqlens)

    def _joined(
        self,
        x: Tensor,
        past: Tensor | None,
        static: Tensor | None,
        future: Tensor | None,
        timespans: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> "_Read":
        """Return the inputs at each step, standardised in float64. `_next` gives it one step ahead, not H."""
        sizes = (self.targets, self.past, self.static, self.future)
        inputs = (self._logged(x), past, static, future)
        groups = zip(*(values.split(sizes) for values in self._standards()), inputs, strict=True)
        y, past, static, future = (
            None if values is None else (values.double() - location) / scale for location, scale, values in groups
        )
        assert y is not None
        steps = torch.arange(x.shape[1], device=x.device)
        owner = None if cu_seqlens is None else sequence_index(cu_seqlens, x.shape[1])
        if static is not None:
            static = static[:, None].expand(-1, x.shape[1], -1) if owner is None else static[owner][None]
        now = steps if owner is None else steps + owner * self.horizon  # H steps follow each packed sequence
        after = now[:, None] + 1 + torch.arange(self.ahead, device=x.device)
        spans = None
        ahead = [] if future is None else [future[:, after]]
        if timespans is not None:
            spans = timespans[:, now]
            ahead.append((timespans[:, after].double().cumsum(2) / self.horizon)[..., None])
        covariates = [covariate for covariate in (past, static) if covariate is not None]
        if ahead:
            covariates.append(torch.cat(ahead, -1).flatten(2) if len(ahead) > 1 else ahead[0].flatten(2))
        return _Read(y, tuple(covariates), spans)

    def _read(
        self,
        inputs: "_Read",
        state: ForecasterState | None,
        cu_seqlens: Tensor | None,
        after: Tensor | slice = slice(None),
    ) -> tuple[Tensor, Tensor, Tensor, ForecasterState]:
        """Return the parameters (B, ·, H, C, P) after some steps in units of the running scale, location and scale
        (B, T, 1, C), and the state."""
        hidden, lagged, location, scale, state = self._hidden(inputs, state, cu_seqlens, after)
        return self._distributions(hidden, lagged), location[:, :, None], scale[:, :, None], state

    def _after(self, inputs: "_Read", state: ForecasterState | None) -> tuple[Tensor, ForecasterState]:
        """Return the parameters (B, H, C, P) after the last step, in the units of the targets, and the state."""
        hidden, lagged, location, scale, state = self._hidden(inputs, state, None, slice(-1, None))
        parameters = self._distributions(hidden, lagged)
        parameters = self.head.in_units(parameters.double(), location[:, -1:, None], scale[:, -1:, None])[:, 0]
        return self._as_read(parameters), state

    def _logged(self, y: Tensor) -> Tensor:
        """Return L + L log(y / L) of targets y (..., C), NaN where y is not above 0; without `log` y itself."""
        if not self.log:
            return y
        location, y = self.standard.location[: self.targets], y.double()
        return location + location * (torch.where(y > 0, y, torch.nan) / location).log()

    def _as_read(self, parameters: Tensor) -> Tensor:
        """Return the targets whose `_logged` are numbers (..., C, P)."""
        if not self.log:
            return parameters
        location = self.standard.location[: self.targets, None]
        return location * (parameters / location - 1).clamp(max=MOST_LOG).exp()

    def _allowed(self, y: Tensor) -> Tensor:
        """Return forecasts as `rounded` and `least` of the normalisation say."""
        y = y if self.least is None else y.clamp(min=self.least)
        return y.round() if self.rounded else y

    def _calibrated(self, quantiles: Tensor, parameters: Tensor, levels: Tensor) -> Tensor:
        """Return quantiles (B, H, C, Q) at levels (Q,) with calibrated distances from the median."""
        if self.calibration is None:
            return quantiles
        median = self.head.quantiles(parameters, levels.new_tensor([0.5]).to(parameters))
        known = levels.new_tensor(LEVELS)
        at = levels.clamp(known[0], known[-1]).contiguous()
        upper = torch.searchsorted(known, at).clamp(1, len(LEVELS) - 1)
        weight = ((at - known[upper - 1]) / (known[upper] - known[upper - 1])).to(quantiles)
        table = self.calibration.to(quantiles)
        factors = table[:, upper - 1].lerp(table[:, upper], weight)[:, None]
        if self.log:
            quantiles, median = (self._logged(values.movedim(-2, -1)).movedim(-1, -2) for values in (quantiles, median))
        order = levels.argsort()
        widened = (median + factors * (quantiles - median))[..., order].cummax(-1).values
        return self._as_read(widened[..., order.argsort()])

    def _distributions(self, hidden: Tensor, lagged: Tensor | None) -> Tensor:
        shift = None if lagged is None else lagged.flatten(2)
        return self.head(hidden, shift).unflatten(2, (self.ahead, self.targets))

    def _hidden(
        self,
        inputs: "_Read",
        state: ForecasterState | None,
        cu_seqlens: Tensor | None,
        after: Tensor | slice,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, ForecasterState]:
        """Return the features of the stack and the lags' contribution, both after the steps `after`; location and scale
        of the targets at all steps, (B, T, C); and the state."""
        y, covariates, spans = inputs
        rows = sequences(y, cu_seqlens)
        first_state = self.init_state(rows, device=y.device) if state is None else state
        with as_widened(y):
            mean, spread, read_so_far = self._statistics(y, first_state.running, cu_seqlens)
            lagged, lag_state = None, first_state.lags
            if self.lags is not None:
                lagged, lag_state = self.lags(y, mean, spread, first_state.lags, cu_seqlens, after)
        wide = torch.promote_types(self.input.weight.dtype, torch.float32)
        durations = [] if spans is None else [spans[..., None]]
        hidden, stack = self.stack(
            self.input(torch.cat([(y - mean) / spread, *covariates, *durations], -1).to(wide)),
            None if state is None else state.stack,
            cu_seqlens=cu_seqlens,
            timespans=spans if self.stack.timed else None,
        )
        location, scale = (values[: self.targets] for values in self._standards())
        lagged = None if lagged is None else lagged.to(wide)
        return (
            hidden[:, after],
            lagged,
            location + scale * mean,
            scale * spread,
            ForecasterState(stack, read_so_far, lag_state),
        )

    def _statistics(self, y: Tensor, state: Running, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Running]:
        """Return location and scale of standardised targets y (B, T, C) after each step, and the last statistics."""
        span = None if self.normalization is None else self.normalization.span
        mean, variance, after = running(y, state, span, cu_seqlens, EPSILON)
        if self.normalization is None:
            return torch.zeros_like(mean), torch.ones_like(mean), after
        if self.head.counts:
            return torch.zeros_like(mean), mean + 1 / self.standard.scale[: self.targets], after
        return mean, variance.sqrt(), after

    def _check(
        self,
        x: Tensor,
        past: Tensor | None,
        static: Tensor | None,
        future: Tensor | None,
        timespans: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        check_tensor("forecaster", "x", x, f"(B, T, {self.targets})")
        if x.ndim != 3 or x.shape[2] != self.targets or not x.is_floating_point():
            raise ShapeError(
                f"forecaster: x is {x.dtype} {tuple(x.shape)}, expected a floating dtype and (B, T, {self.targets})"
            )
        rows = sequences(x, cu_seqlens)
        batch, steps = x.shape[:2]
        reached = steps + self.horizon * (1 if cu_seqlens is None else rows)
        for name, values, size, shape in (
            ("past", past, self.past, (batch, steps, self.past)),
            ("static", static, self.static, (rows, self.static)),
            ("future", future, self.future, (batch, reached, self.future)),
            ("timespans", timespans, self.timed, (batch, reached)),
        ):
            if values is not None:
                check_tensor("forecaster", name, values, str(shape))
            if values is None and size:
                raise ShapeError(f"forecaster: {name} is None, expected {shape} because the model was made with {name}")
            if values is not None and (tuple(values.shape) != shape or (name == "timespans" and not size)):
                expected = shape if size else "None because the model was made without"
                raise ShapeError(f"forecaster: {name} has shape {tuple(values.shape)}, expected {expected}")
        check_timespans("forecaster", None if timespans is None else timespans[:, :steps], x)
        if not torch.compiler.is_compiling():
            self._check_numbers(x, past, static, future)

    def _check_numbers(self, x: Tensor, past: Tensor | None, static: Tensor | None, future: Tensor | None) -> None:
        """Raise ShapeError for an infinite number, which would make all later statistics NaN, and for no count."""
        for name, numbers in (("x", x), ("past", past), ("static", static), ("future", future)):
            if numbers is not None and bool(numbers.isinf().any()):
                raise ShapeError(
                    f"forecaster: {name} has an infinite number, expected finite ones, and NaN where one is missing"
                )
        if self.head.counts:
            check_counts("forecaster", "x", x)


def _both(now: Tensor | None, after: Tensor | None) -> Tensor | None:
    """Stack what belongs to a step and to the next one along time."""
    return None if now is None or after is None else torch.stack([now, after], 1)
