"""A forecaster of series that can use any layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from scanl.configured import WORDS, Configured, above, at_least
from scanl.errors import ConfigError, ShapeError
from scanl.layers import state as states
from scanl.layers.base import as_widened
from scanl.layers.packing import pack, unpack
from scanl.layers.parts.timespans import check_timespans
from scanl.layers.state import Device, DType, State
from scanl.models.block import check_tensor
from scanl.models.generation import Generation
from scanl.models.heads import LEVELS, Distribution, as_levels, check_counts, make_head
from scanl.models.inputs import Channels
from scanl.models.lags import Lags
from scanl.models.reader import FeatureMap, Standard
from scanl.models.running import Running, nothing_read, running
from scanl.models.sampling import as_limit, check_options
from scanl.models.saving import Part, Saved
from scanl.models.stack import Backbone, check_causal
from scanl.ops.offsets import sequences
from scanl.whole import whole_number

EPSILON = 1e-5  # added to the variance of a series that has not varied


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

    mean: (B, H, C).   quantiles: (B, H, C, Q), at the levels that were asked for.
    """

    mean: Tensor
    quantiles: Tensor


@dataclass(frozen=True)
class Normalization(Part, metaclass=Configured):
    """Normalisation of a series by the running mean and variance of its past."""

    span: Annotated[
        float | None,
        above(1),
        "after this many further numbers, a number has lost about two thirds of its weight in mean and variance. None: "
        "it keeps its weight",
    ] = None


WORDS[Normalization] = "Normalization()"


class Forecaster(Saved):
    r"""Forecast the next numbers of series: a stack reads the normalised series, and a head gives distributions.

    .. math::
        z_t = (y_t - m_t) / s_t, \quad h_t = \mathrm{stack}(W [z_t, \mathrm{covariates}_t]), \quad
        p_t = \mathrm{head}(h_t) + \mathrm{lags}(y_{\le t})

    p_t are the parameters of the distributions of y_{t+1} ... y_{t+H}, in units of s_t about m_t.

    Reversible normalisation (`normalization`): m_t and s_t are the running mean and the root of the running variance of
    the targets up to step t. The forecast from step t is scaled back by the same m_t and s_t. Source: Kim et al.,
    "Reversible Instance Normalization", ICLR 2022, eq. (1) to (3). Differs: their statistics are those of the whole
    input window. These are causal, so a series gives the same forecasts sample by sample as at once. While few numbers
    are known, the scale of `scales` counts too (`running`). RevIN adds 1e-5 to every variance; here it is added only
    while a series is constant, because in units of `scales` a series may be smaller than that. The affine map of RevIN
    is left out, because the linear maps before and behind the stack contain it. For counts m_t = 0 and s_t is the
    running mean plus one (Salinas et al., arXiv:1704.04110, sec. 3.3).

    Numbers are standardised and normalised in float64, and then cast to the dtype of the model. So a series may vary by
    1 about 1e9. What comes out is in float64.

    A NaN in the input is a missing number. A flag says so to the model, and mean, variance and lags leave it out.
    x: (B, T, C + past).   parameters: (B, T, H, C, P); H is 1 if recursive.
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
            "how the targets are normalised by their past; None: only by the scales of the channels",
        ] = Normalization(),
    ) -> None:
        super().__init__()
        check_causal(self._who(), stack)
        self.stack = stack
        self.horizon, self.distribution = horizon, distribution
        self.targets, self.past, self.static = channels.target, channels.past, channels.static
        self.future, self.timed = channels.future, channels.timed
        self.recursive, self.normalization = recursive, normalization
        self.ahead = 1 if recursive else horizon
        once = self.targets + self.past + self.static
        self.standard = Standard("forecaster", once + self.future, channels.scales)
        self.input = FeatureMap(once + self.future * self.ahead + self.timed, stack.dim, missing=True)
        self.head = make_head(distribution, stack.dim, self.ahead * self.targets)
        self.lags = Lags(lags, self.ahead) if lags else None

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> ForecasterState:
        weight = self.input.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        location, scale = (part[: self.targets].to(device) for part in self._standards())
        mean = (self.standard.location[: self.targets].to(location) - location) / scale
        kept = max(0, 0 if self.lags is None else self.lags.lags - 1)
        return ForecasterState(
            self.stack.init_state(batch_size, device=device, dtype=dtype),
            nothing_read(mean.repeat(batch_size, 1)),
            torch.zeros(batch_size, kept, 2 * self.targets, device=device, dtype=torch.float64),
        )

    def forward(
        self,
        x: Tensor,
        state: ForecasterState | None = None,
        *,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, ForecasterState]:
        """Map x (B, T, C + past) to the parameters (B, T, H, C, P) of the forecasts after each step, and the state.

        static: (B, S).   future: (B, T, H, F), the covariates of the H steps after each step.   timespans: (B, T).
        mask: (B, T) bool, True at valid steps; parameters are zero at the others.   cu_seqlens: (N+1,) offsets of N
        sequences packed over B == 1; `static` then has N rows.
        """
        read, spans = self._joined(x, static, future, timespans, cu_seqlens)
        if mask is not None:
            if cu_seqlens is not None:
                raise ShapeError("forecaster: mask and cu_seqlens are both given, expected one of them")
            spans = spans if spans is None else pack(spans, mask)[0]
            read, cu_seqlens = pack(read, mask)
        parameters, location, scale, state = self._read(read, spans, state, cu_seqlens)
        parameters = self.head.in_units(parameters.double(), location, scale)
        return (parameters if mask is None else unpack(parameters, mask)), state

    def loss(
        self,
        x: Tensor,
        targets: Tensor,
        state: ForecasterState | None = None,
        *,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
    ) -> tuple[Tensor, ForecasterState]:
        """Return the mean loss of the forecasts after each step, and the state.

        targets: (B, T, H, C), NaN where no answer is wanted. With `recursive` only the first of the H steps is learnt.
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
        read, spans = self._joined(x, static, future, timespans, None)
        targets = targets[:, :, : self.ahead]
        after = (~targets.isnan()).any(3).any(2).any(0).nonzero()[:, 0]
        parameters, location, scale, state = self._read(read, spans, state, None, after)
        targets, dtype = targets[:, after].double(), parameters.dtype
        asked = ~targets.isnan()
        if self.head.counts:
            parameters = self.head.in_units(parameters.double(), location[:, after], scale[:, after])
        else:
            targets = ((targets - location[:, after]) / scale[:, after]).to(dtype)
        # Numbers that are not asked for are replaced before the loss, because 0 times NaN is NaN in a gradient.
        losses = self.head.loss(parameters, torch.where(asked, targets, 0))
        if self.head.degree:
            losses = losses * (scale[:, after] / scale[:, -1:]).clamp(max=1).to(dtype) ** self.head.degree
        return (torch.where(asked, losses, 0).sum() / asked.sum().clamp(min=1)).to(dtype), state

    @torch.no_grad()
    def predict(
        self,
        x: Tensor,
        state: ForecasterState | None = None,
        *,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
        levels: Sequence[float] = LEVELS,
        paths: int = 200,
        seed: int = 0,
    ) -> tuple[Forecast, ForecasterState]:
        """Read x (B, T, C + past), T at least 1, and forecast the H steps after the last one.

        Pass the state to the next call, together with the new samples: one or several. The forecasts are the same as
        those from the whole history.

        static, future, timespans: as in `forward`.   levels: of the quantiles.
        paths: if recursive, how many futures are drawn. Each number is drawn from the distribution that follows from
        the numbers before it. The forecast is the mean and the quantiles of the futures. With "points" there is one
        future, that of the means. In a future, covariates of the past are missing, and a step lasts 1.   seed: of the
        draws.
        """
        check_tensor("forecaster", "x", x, "(B, T, C)")
        if x.ndim == 3 and x.shape[1] == 0:
            raise ShapeError(f"forecaster: x has shape {tuple(x.shape)}, expected (B, T, C) with T at least 1")
        paths, seed = whole_number("forecaster", "paths", paths, 1), whole_number("forecaster", "seed", seed)
        wanted = as_levels(levels, self.standard.scale)
        read, spans = self._joined(x, static, future, timespans, None)
        parameters, state = self._after(read, spans, state)
        if not self.recursive:
            mean, quantiles = self.head.mean(parameters), self.head.quantiles(parameters, wanted.to(parameters))
            return Forecast(mean, quantiles), state
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
            known = None if future is None else future[:, -1, step + 1].repeat_interleave(paths, 0)
            repeated, ahead = self._next(self._alone(drawn[:, 0]), ahead, constant, known)
        drawn = torch.stack(numbers, 1).unflatten(0, (len(x), paths))
        quantiles = drawn.quantile(wanted.to(drawn), dim=1).movedim(0, -1)
        return Forecast(drawn.mean(1), quantiles), state

    def generate(
        self,
        x: Tensor,
        state: ForecasterState | None = None,
        *,
        static: Tensor | None = None,
        future: Tensor | None = None,
        timespans: Tensor | None = None,
        following: Iterator[Tensor] | None = None,
        max_steps: int | None = None,
        temperature: float = 1.0,
        seed: int | torch.Generator | None = None,
    ) -> Generation:
        """Read x (B, T, C + past), T at least 1, and draw the numbers (B, C) of step after step, in constant memory.

        Each step is drawn from the distribution that follows from all steps before it, including the drawn ones. To
        generate from nothing, let x be one step of NaN. As in `predict`, covariates of the past are missing in the
        drawn steps, and a step lasts 1.

        static, future, timespans: as in `forward`.
        following: with `future`, an iterator over the covariates (B, F) of the second drawn step, of the third, and so
        on. Generation ends where it ends.   max_steps: None for no limit.   temperature: see `Head.sample`.
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
        read, spans = self._joined(x, static, future, timespans, None)
        first = True

        def draw(pending: Tensor, before: Any, _: Tensor | None, generator: torch.Generator | None) -> Any:
            nonlocal first
            if first:
                parameters, after = self._after(read, spans, before)
            else:
                known = None if following is None else next(following)
                parameters, after = self._next(pending, before, static, known)
            first = False
            drawn = self.head.sample(parameters, generator, temperature)[:, 0]
            return drawn, self._alone(drawn), after

        return Generation(draw, x, state, max_steps=max_steps, seed=seed)

    def _alone(self, numbers: Tensor) -> Tensor:
        """Return a step (B, 1, C + past) of numbers (B, C), in which the covariates of the past are missing."""
        return torch.cat([numbers, numbers.new_full((len(numbers), self.past), torch.nan)], -1)[:, None]

    def _next(
        self, x: Tensor, state: ForecasterState, static: Tensor | None, known: Tensor | None
    ) -> tuple[Tensor, ForecasterState]:
        """Read one step x (B, 1, C + past) of a recursive forecast. known: (B, F), covariates of the step after it."""
        future = None
        if known is not None:
            future = x.new_zeros(len(x), 1, self.horizon, self.future)  # of which the first step alone is read
            future[:, 0, 0] = known
        read, spans = self._joined(x, static, future, x.new_ones(len(x), 1) if self.timed else None, None)
        return self._after(read, spans, state)

    def _standards(self) -> tuple[Tensor, Tensor]:
        """Return location and scale of every channel; the location of targets that are counts is 0."""
        location = self.standard.location
        if self.head.counts:
            location = torch.cat([torch.zeros_like(location[: self.targets]), location[self.targets :]])
        return location, self.standard.scale

    def _joined(
        self,
        x: Tensor,
        static: Tensor | None,
        future: Tensor | None,
        timespans: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Check the inputs, and return all numbers that are read at each step, (B, T, ·) in float64, and the
        durations."""
        self._check(x, static, future, timespans, cu_seqlens)
        parts = [x.double()]
        if static is not None:
            lengths = None if cu_seqlens is None else cu_seqlens.diff()
            rows = (
                static[:, None].expand(-1, x.shape[1], -1)
                if lengths is None
                else static.repeat_interleave(lengths, 0)[None]
            )
            parts.append(rows.double())
        if future is not None:
            parts.append(future[:, :, : self.ahead].flatten(2).double())
        return torch.cat(parts, -1), timespans

    def _read(
        self,
        read: Tensor,
        spans: Tensor | None,
        state: ForecasterState | None,
        cu_seqlens: Tensor | None,
        after: Tensor | slice = slice(None),
    ) -> tuple[Tensor, Tensor, Tensor, ForecasterState]:
        """Return the parameters (B, ·, H, C, P) after some steps in units of the running scale, location and scale
        (B, T, 1, C), and the state."""
        hidden, lagged, location, scale, state = self._hidden(read, spans, state, cu_seqlens, after)
        return self._distributions(hidden, lagged), location[:, :, None], scale[:, :, None], state

    def _after(
        self, read: Tensor, spans: Tensor | None, state: ForecasterState | None
    ) -> tuple[Tensor, ForecasterState]:
        """Return the parameters (B, H, C, P) after the last step, in the units of the targets, and the state."""
        hidden, lagged, location, scale, state = self._hidden(read, spans, state, None, slice(-1, None))
        parameters = self._distributions(hidden, lagged)
        return self.head.in_units(parameters.double(), location[:, -1:, None], scale[:, -1:, None])[:, 0], state

    def _distributions(self, hidden: Tensor, lagged: Tensor | None) -> Tensor:
        shift = None if lagged is None else lagged.flatten(2)
        return self.head(hidden, shift).unflatten(2, (self.ahead, self.targets))

    def _hidden(
        self,
        read: Tensor,
        spans: Tensor | None,
        state: ForecasterState | None,
        cu_seqlens: Tensor | None,
        after: Tensor | slice,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, ForecasterState]:
        """Return the features of the stack and what the lags add, both after the steps `after`; location and scale of
        the targets at all steps, (B, T, C); and the state."""
        rows = sequences(read, cu_seqlens)
        before = self.init_state(rows, device=read.device) if state is None else state
        location, scale = self._standards()
        once = self.targets + self.past + self.static  # channels that are there once, not for every step ahead
        ahead = [part[once:].repeat(self.ahead) for part in (location, scale)]
        read = (read - torch.cat([location[:once], ahead[0]])) / torch.cat([scale[:once], ahead[1]])
        y, more = read[..., : self.targets], read[..., self.targets :]
        with as_widened(read):
            mean, spread, read_so_far = self._statistics(y, before.running, cu_seqlens)
            lagged, kept = None, before.lags
            if self.lags is not None:
                lagged, kept = self.lags(y, mean, spread, before.lags, cu_seqlens, after)
        wide = torch.promote_types(self.input.weight.dtype, torch.float32)
        durations = [] if spans is None else [spans[..., None]]
        hidden, stack = self.stack(
            self.input(torch.cat([(y - mean) / spread, more, *durations], -1).to(wide)),
            None if state is None else state.stack,
            cu_seqlens=cu_seqlens,
            timespans=spans if self.stack.timed else None,
        )
        own, unit = (part[: self.targets] for part in (location, scale))
        lagged = None if lagged is None else lagged.to(wide)
        return hidden[:, after], lagged, own + unit * mean, unit * spread, ForecasterState(stack, read_so_far, kept)

    def _statistics(self, y: Tensor, before: Running, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Running]:
        """Return location and scale of standardised targets y (B, T, C) after each step, and the last statistics."""
        span = None if self.normalization is None else self.normalization.span
        mean, variance, after = running(y, before, span, cu_seqlens, EPSILON)
        if self.normalization is None:
            return torch.zeros_like(mean), torch.ones_like(mean), after
        if self.head.counts:
            return torch.zeros_like(mean), mean + 1 / self.standard.scale[: self.targets], after
        return mean, variance.sqrt(), after

    def _check(
        self,
        x: Tensor,
        static: Tensor | None,
        future: Tensor | None,
        timespans: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        channels = self.targets + self.past
        check_tensor("forecaster", "x", x, f"(B, T, {channels})")
        if x.ndim != 3 or x.shape[2] != channels or not x.is_floating_point():
            raise ShapeError(
                f"forecaster: x is {x.dtype} {tuple(x.shape)}, expected a floating dtype and (B, T, {channels})"
            )
        rows = sequences(x, cu_seqlens)
        for name, given, size, shape in (
            ("static", static, self.static, (rows, self.static)),
            ("future", future, self.future, (*x.shape[:2], self.horizon, self.future)),
            ("timespans", timespans, self.timed, tuple(x.shape[:2])),
        ):
            if given is not None:
                check_tensor("forecaster", name, given, str(shape))
            if given is None and size:
                raise ShapeError(f"forecaster: {name} is None, expected {shape} because the model was made with {name}")
            if given is not None and (not size or tuple(given.shape) != shape):
                expected = shape if size else "None because the model was made without"
                raise ShapeError(f"forecaster: {name} has shape {tuple(given.shape)}, expected {expected}")
        check_timespans("forecaster", timespans, x)
        if not torch.compiler.is_compiling():
            self._check_numbers(x, static, future)

    def _check_numbers(self, x: Tensor, static: Tensor | None, future: Tensor | None) -> None:
        """Raise ShapeError for an infinite number, which would make all later statistics NaN, and for no count."""
        for name, numbers in (("x", x), ("static", static), ("future", future)):
            if numbers is not None and bool(numbers.isinf().any()):
                raise ShapeError(
                    f"forecaster: {name} has an infinite number, expected finite ones, and NaN where one is missing"
                )
        if self.head.counts:
            check_counts("forecaster", "x", x[..., : self.targets])
