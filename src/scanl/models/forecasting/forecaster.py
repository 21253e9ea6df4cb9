"""A forecaster of series that can use any layer."""

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.errors import ConfigError, ShapeError
from scanl.layers import state as states
from scanl.layers.base import as_widened
from scanl.layers.packing import pack, unpack
from scanl.layers.state import Device, DType, State, loadable
from scanl.models.decoding.compiled_step import CompiledStep
from scanl.models.decoding.generation import Generation, without_gradients
from scanl.models.decoding.sampling import as_limit, check_options
from scanl.models.embedding import check_tensor
from scanl.models.forecasting.calibration import calibrated
from scanl.models.forecasting.inputs import StepInputs, check_columns
from scanl.models.forecasting.lags import Lags
from scanl.models.forecasting.normalization import Normalization
from scanl.models.forecasting.recent_errors import further_lags, recent_factor
from scanl.models.forecasting.running import Running, nothing_read, running
from scanl.models.forecasting.share import Forecast
from scanl.models.heads.distributions import LEVELS, Distribution, as_levels, check_counts, make_head
from scanl.models.inputs import Channels
from scanl.models.reader import FeatureEmbedding, Standard
from scanl.models.saving import Saved
from scanl.models.stack import Backbone, check_causal
from scanl.ops._frame.context import traced
from scanl.ops.offsets import sequences
from scanl.options import at_least
from scanl.series_columns import SeriesColumns
from scanl.whole import whole_number

EPSILON = 1e-5  # added to the variance of a series that has not varied


@loadable
class ForecasterState(NamedTuple):
    """State of a `Forecaster`.

    stack: state of the blocks.   running: running mean and variance of the targets, in float64.   lags: state of
    `Lags`, in float64.   pretrained: state of the pretrained forecaster, (B, C, ...); None without one, and after
    `forward`, which does not run it.
    """

    stack: State
    running: Running
    lags: Tensor
    pretrained: State = None


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
    section 4. Differs: a factor, which suits series of different scales, in place of a summand. With lags, another
    factor widens the intervals of a series whose errors have grown (`recent_errors`). `usual_errors` (C, H) has the
    errors that the map of lags usually has, in units of s_t. While they are NaN, the factor is 1.

    Numbers are standardised and normalised in float64, and then cast to the dtype of the model. So a series may vary by
    1 about 1e9. What comes out is in float64.

    With `Normalization(beside=PretrainedShare(0.5))` a forecast is the mean of this one and of that of the model in the
    package. Training and `forward` do not know it.

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
        ] = Normalization(),  # noqa: B008 (frozen)
    ) -> None:
        super().__init__()
        check_causal(self._who(), stack)
        self.stack, self.channels = stack, channels
        self.horizon, self.distribution = horizon, distribution
        self.recursive, self.normalization = recursive, normalization
        self.targets, self.past, self.static = channels.target, channels.past, channels.static
        self.future, self.timed = channels.future, channels.timed
        self.form = normalization or Normalization()  # what is not the running mean and variance
        self.ahead = 1 if recursive else horizon
        once = self.targets + self.past + self.static
        self.standard = Standard("forecaster", once + self.future, channels.scales)
        self.input = FeatureEmbedding(
            once + (self.future + self.timed) * self.ahead + self.timed, stack.dim, missing=True
        )
        self.head = make_head(distribution, stack.dim, self.ahead * self.targets)
        further = further_lags(horizon) if self.form.calibrated and not recursive else 0
        self.lags = Lags(lags, self.ahead, further) if lags else None
        if self.form.log and distribution not in ("points", "quantiles"):
            raise ConfigError(
                f"forecaster: distribution is {distribution}, expected points or quantiles because of log"
            )
        if self.form.log and not bool((self.standard.location[: self.targets] > 0).all()):
            raise ConfigError(
                f"forecaster: scales has the location {self.standard.location[: self.targets].min().item():g} of a "
                "target, expected more than 0 because of log"
            )
        self._compiled: CompiledStep | None = None
        self.calibration: Tensor | None
        self.usual_errors: Tensor | None
        self.register_buffer("calibration", torch.ones(horizon, len(LEVELS)) if self.form.calibrated else None)
        unknown = torch.full((self.targets, horizon), torch.nan)
        self.register_buffer("usual_errors", unknown if self.form.calibrated else None)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> ForecasterState:
        weight = self.input.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        location, scale = (values[: self.targets].to(device) for values in self._standards())
        mean = (self.standard.location[: self.targets].to(location) - location) / scale
        lag_steps = 0 if self.lags is None else self.lags.kept
        return ForecasterState(
            self.stack.init_state(batch_size, device=device, dtype=dtype),
            nothing_read(mean.repeat(batch_size, 1)),
            torch.zeros(batch_size, lag_steps, 3 * self.targets, device=device, dtype=torch.float64),
            None if self.form.beside is None else self.form.beside.init_state(batch_size, self.targets),
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
        inputs = self._inputs(SeriesColumns(x, past, static, future, timespans), cu_seqlens)
        if mask is not None:
            if cu_seqlens is not None:
                raise ShapeError("forecaster: mask and cu_seqlens are both given, expected one of them")
            _, cu_seqlens = pack(x, mask)
            inputs = inputs.packed(mask)
        parameters, location, scale, state = self._read(inputs, state, cu_seqlens)
        parameters = self._unlogged(self.head.in_units(parameters.double(), location, scale))
        return (parameters if mask is None else unpack(parameters, mask)), state

    def loss(
        self, inputs: SeriesColumns | Tensor, targets: Tensor, state: ForecasterState | None = None
    ) -> tuple[Tensor, ForecasterState]:
        """Return the mean loss of the forecasts after each step, and the state.

        inputs: `SeriesColumns`, or the targets x (B, T, C) alone.   targets: (B, T, H, C), NaN where there is none.
        With `recursive` only the first of the H steps is learnt. The loss of points and quantiles is in units of a
        running scale: that after the last step, or that after the step of the forecast where it is larger. In the first
        steps the scale is hardly known, and an error in units of it could have any size. A likelihood has the same
        gradient in any unit. For counts it is the likelihood of the counts themselves. Forecasts that no series of the
        batch asks for are not computed.
        """
        columns = _as_columns(inputs)
        expected = (*columns.target.shape[:2], self.horizon, self.targets)
        if targets.shape != expected:
            raise ShapeError(
                f"forecaster: targets has shape {tuple(targets.shape)}, expected {expected} because of x and the model"
            )
        if not torch.compiler.is_compiling():
            if bool(targets.isinf().any()):
                raise ShapeError("forecaster: targets has an infinite number, expected finite ones, and NaN for none")
            if self.head.counts:
                check_counts("forecaster", "targets", targets)
        steps = self._inputs(columns)
        targets = self._logged(targets[:, :, : self.ahead])
        after = (~targets.isnan()).any(3).any(2).any(0).nonzero()[:, 0]
        parameters, location, scale, state = self._read(steps, state, after=after)
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
        inputs: SeriesColumns | Tensor,
        state: ForecasterState | None = None,
        *,
        levels: Sequence[float] = LEVELS,
        paths: int = 200,
        seed: int = 0,
    ) -> tuple[Forecast, ForecasterState]:
        """Read T steps, at least one, and forecast the H steps after the last one.

        Pass the state to the next call, together with the new samples: one or several. The forecasts are the same as
        from the whole history.

        inputs: `SeriesColumns`, or the targets x (B, T, C) alone.   levels: of the quantiles.
        paths: if recursive, how many futures are drawn. Each number is drawn from the distribution that follows from
        the numbers before it. The forecast is the mean and the quantiles of the futures. With "points" there is one
        future: the means. In a future, covariates of the past are missing.   seed: of the draws.
        """
        columns = _begun("forecaster", inputs)
        paths, seed = whole_number("forecaster", "paths", paths, 1), whole_number("forecaster", "seed", seed)
        probabilities = as_levels(levels, self.standard.scale)
        before, pretrained = state, None
        forecast, state = self._trained(columns, state, probabilities, paths, seed)
        if self.form.beside is not None:
            if before is None:
                before = self.init_state(len(columns.target))
            elif before.pretrained is None:
                raise ShapeError(
                    "forecaster: state has no pretrained part, expected a state of init_state or predict, because "
                    "forward does not run the pretrained model"
                )
            forecast, pretrained = self.form.beside.mixed(
                forecast, columns.target, before.pretrained, self.horizon, levels
            )
        return Forecast(*map(self.form.allowed, forecast)), state._replace(pretrained=pretrained)

    def _trained(
        self, columns: SeriesColumns, state: ForecasterState | None, probabilities: Tensor, paths: int, seed: int
    ) -> tuple[Forecast, ForecasterState]:
        """Return the forecast of the stack and the lags, and the state without that of the pretrained forecaster."""
        parameters, state = self._after(self._inputs(columns), state)
        if not self.recursive:
            quantiles = self._calibrated(
                self.head.quantiles(parameters, probabilities.to(parameters)), parameters, probabilities, state
            )
            return Forecast(self.head.mean(parameters), quantiles), state
        paths = 1 if self.distribution == "points" else paths
        x, length = columns.target, columns.target.shape[1]
        generator = torch.Generator(x.device).manual_seed(seed)
        self._step().expect(len(x) * paths, self.horizon)
        later, ahead = states.repeat(state, paths), parameters.repeat_interleave(paths, 0)
        known = [None if values is None else values[:, length:] for values in (columns.future, columns.timespans)]
        static, *known = (
            None if values is None else values.repeat_interleave(paths, 0) for values in (columns.static, *known)
        )
        numbers = []
        for step in range(self.horizon):
            drawn = self.head.mean(ahead) if paths == 1 else self.head.sample(ahead, generator)
            numbers.append(drawn[:, 0])
            if step + 1 < self.horizon:
                two = (None if values is None else values[:, step : step + 2] for values in known)
                ahead, later = self._decoded(SeriesColumns(drawn, None, static, *two), later)
        drawn = torch.stack(numbers, 1).unflatten(0, (len(x), paths))
        quantiles = drawn.quantile(probabilities.to(drawn), dim=1).movedim(0, -1)
        return Forecast(drawn.mean(1), quantiles), state

    def generate(
        self,
        inputs: SeriesColumns | Tensor,
        state: ForecasterState | None = None,
        *,
        following: Iterator[Tensor] | None = None,
        lasting: Iterator[Tensor] | None = None,
        max_steps: int | None = None,
        temperature: float = 1.0,
        seed: int | torch.Generator | None = None,
    ) -> Generation:
        """Read T steps, at least one, and draw the numbers (B, C) of step after step, in constant memory.

        Each step is drawn from the distribution that follows from all steps before it, including the drawn ones. To
        generate from nothing, let x be one step of NaN. As in `predict`, covariates of the past are missing in the
        drawn steps.

        inputs: `SeriesColumns`, or the targets x (B, T, C) alone; of the steps ahead, the first alone is read.
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
        columns = _begun("generate", inputs)
        check_options("generate", temperature)
        max_steps = as_limit("generate", "max_steps", max_steps)
        if self.future and following is None and max_steps != 1:
            raise ConfigError(f"generate: following is None, expected covariates because future is {self.future}")
        x, static, steps = columns.target, columns.static, self._inputs(columns)
        if max_steps is not None:
            self._step().expect(len(x), max_steps)
        ones = None if columns.timespans is None else columns.timespans.new_ones(len(x))
        # Of the step that is drawn next.
        ahead, lasts = (
            None if values is None else values[:, x.shape[1]] for values in (columns.future, columns.timespans)
        )
        first = True

        @without_gradients
        def draw(pending: Tensor, state: Any, _: Tensor | None, generator: torch.Generator | None) -> Any:
            nonlocal first, ahead, lasts
            if first:
                parameters, after = self._after(steps, state)
            else:
                known, spans = ahead, lasts
                ahead = None if following is None else next(following)
                lasts = ones if lasting is None else next(lasting)
                now = SeriesColumns(pending, None, static, _both(known, ahead), _both(spans, lasts))
                parameters, after = self._decoded(now, state)
            first = False
            drawn = self.head.sample(parameters, generator, temperature)
            return drawn[:, 0], drawn, after

        return Generation(draw, x, state, max_steps=max_steps, seed=seed)

    def _decoded(self, columns: SeriesColumns, state: ForecasterState) -> tuple[Tensor, ForecasterState]:
        """Compute `_next`, by the compiled step where it pays."""
        step = self._step()
        return (step if step.pays(len(columns.target)) else self._next)(columns, state)

    def _step(self) -> CompiledStep:
        if self._compiled is None:
            self._compiled = CompiledStep(self, _widened, self._next, self._example)
        return self._compiled

    def _example(self, rows: int) -> SeriesColumns:
        """Return the columns of a step as `_next` reads them."""
        zeros = functools.partial(torch.zeros, device=self.input.weight.device)
        static, future = (zeros(rows, *shape) if shape[-1] else None for shape in ((self.static,), (2, self.future)))
        spans = zeros(rows, 2) if self.timed else None
        return _widened(SeriesColumns(zeros(rows, 1, self.targets), None, static, future, spans))

    def _next(self, columns: SeriesColumns, state: ForecasterState) -> tuple[Tensor, ForecasterState]:
        """Read one step of a recursive forecast, in which the covariates of the past are missing.

        Of the steps ahead, the next one is known.
        """
        x = columns.target
        past = x.new_full((len(x), 1, self.past), torch.nan)
        return self._after(self._joined(columns._replace(past=past)), state)

    def _standards(self) -> tuple[Tensor, Tensor]:
        """Return location and scale of every channel; the location of targets that are counts is 0."""
        location = self.standard.location
        if self.head.counts:
            location = torch.cat([torch.zeros_like(location[: self.targets]), location[self.targets :]])
        return location, self.standard.scale

    def _inputs(self, columns: SeriesColumns, cu_seqlens: Tensor | None = None) -> StepInputs:
        """Check columns, and return the numbers at each step."""
        check_columns(columns, self.channels, self.horizon, cu_seqlens)
        if self.head.counts and not traced():
            check_counts("forecaster", "x", columns.target)
        return self._joined(columns, cu_seqlens)

    def _joined(self, columns: SeriesColumns, cu_seqlens: Tensor | None = None) -> StepInputs:
        columns = columns._replace(target=self._logged(columns.target))
        return StepInputs.of(columns, *self._standards(), (self.ahead, self.horizon), cu_seqlens)

    def _read(
        self,
        inputs: StepInputs,
        state: ForecasterState | None,
        cu_seqlens: Tensor | None = None,
        after: Tensor | slice = slice(None),
    ) -> tuple[Tensor, Tensor, Tensor, ForecasterState]:
        """Return the parameters (B, ·, H, C, P) after some steps in units of the running scale, location and scale
        (B, T, 1, C), and the state."""
        y, covariates, spans = inputs
        first_state = self.init_state(sequences(y, cu_seqlens), device=y.device) if state is None else state
        wide = torch.promote_types(self.input.weight.dtype, torch.float32)
        with as_widened(y):
            mean, spread, read_so_far = self._statistics(y, first_state.running, cu_seqlens)
            shift, lag_state = None, first_state.lags
            if self.lags is not None:
                lagged, lag_state = self.lags(y, mean, spread, first_state.lags, cu_seqlens, after)
                shift = lagged.to(wide).flatten(2)
        durations = [] if spans is None else [spans[..., None]]
        hidden, stack = self.stack(
            self.input(torch.cat([(y - mean) / spread, *covariates, *durations], -1).to(wide)),
            None if state is None else state.stack,
            cu_seqlens=cu_seqlens,
            timespans=spans if self.stack.timed else None,
        )
        location, scale = (values[: self.targets] for values in self._standards())
        return (
            self.head(hidden[:, after], shift).unflatten(2, (self.ahead, self.targets)),
            (location + scale * mean)[:, :, None],
            (scale * spread)[:, :, None],
            ForecasterState(stack, read_so_far, lag_state),
        )

    def _after(self, inputs: StepInputs, state: ForecasterState | None) -> tuple[Tensor, ForecasterState]:
        """Return the parameters (B, H, C, P) after the last step, in the units of the targets, and the state."""
        parameters, location, scale, state = self._read(inputs, state, after=slice(-1, None))
        parameters = self.head.in_units(parameters.double(), location[:, -1:], scale[:, -1:])[:, 0]
        return self._unlogged(parameters), state

    def _logged(self, y: Tensor) -> Tensor:
        return self.form.logged(y, self.standard.location[: self.targets])

    def _unlogged(self, numbers: Tensor) -> Tensor:
        return self.form.unlogged(numbers, self.standard.location[: self.targets])

    def _calibrated(self, quantiles: Tensor, parameters: Tensor, levels: Tensor, state: ForecasterState) -> Tensor:
        """Return quantiles (B, H, C, Q) at levels (Q,) with calibrated distances from the median.

        state: after the last step.
        """
        if self.calibration is None:
            return quantiles
        median = self.head.quantiles(parameters, levels.new_tensor([0.5]).to(parameters))
        quantiles, median = (self._logged(values.movedim(-2, -1)).movedim(-1, -2) for values in (quantiles, median))
        widened = median + self._widening(state)[:, None, :, None] * (quantiles - median)
        return self._unlogged(calibrated(widened, median, levels, self.calibration))

    def _widening(self, state: ForecasterState) -> Tensor:
        """Return the factors (B, C) by which recent errors are larger than usual ones."""
        if self.lags is None or self.usual_errors is None:
            return torch.ones_like(state.running.mean)
        values, known, location = state.lags.transpose(1, 2).unflatten(1, (3, -1)).unbind(1)  # (B, C, steps) each
        values = torch.where(known > 0, values, torch.nan)
        scale = self._units(state.running.mean, state.running.total(EPSILON))[1]
        usual = self.usual_errors.to(values).repeat(len(values), 1)
        values, location = values.flatten(0, 1), location.flatten(0, 1)
        weight = self.lags.weight.to(values)
        return recent_factor(values, location, scale.flatten(), weight, usual).unflatten(0, scale.shape)

    def _statistics(self, y: Tensor, state: Running, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Running]:
        """Return location and scale of standardised targets y (B, T, C) after each step, and the last statistics."""
        mean, variance, after = running(y, state, self.form.span, cu_seqlens, EPSILON)
        return *self._units(mean, variance), after

    def _units(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Return location and scale by which numbers with a running mean and variance are normalised."""
        if self.normalization is None:
            return torch.zeros_like(mean), torch.ones_like(mean)
        if self.head.counts:
            return torch.zeros_like(mean), mean + 1 / self.standard.scale[: self.targets]
        return mean, variance.sqrt()


def _widened(columns: SeriesColumns) -> SeriesColumns:
    """Return the columns of a step in float64, but for durations."""
    numbers = {name: values for name, values in columns._asdict().items() if name != "timespans" and values is not None}
    return columns._replace(**{name: values.double() for name, values in numbers.items()})


def _as_columns(inputs: SeriesColumns | Tensor) -> SeriesColumns:
    return inputs if isinstance(inputs, SeriesColumns) else SeriesColumns(inputs)


def _begun(who: str, inputs: SeriesColumns | Tensor) -> SeriesColumns:
    """Return columns that have a step. Raises ShapeError for others."""
    columns = _as_columns(inputs)
    x = columns.target
    check_tensor(who, "x", x, "(B, T, C)")
    if x.ndim == 3 and x.shape[1] == 0:
        raise ShapeError(f"{who}: x has shape {tuple(x.shape)}, expected (B, T, C) with T at least 1")
    return columns


def _both(now: Tensor | None, after: Tensor | None) -> Tensor | None:
    """Stack what belongs to a step and to the next one along time."""
    return None if now is None or after is None else torch.stack([now, after], 1)
