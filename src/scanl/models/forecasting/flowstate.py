"""FlowState: a forecaster of diagonal state spaces with any length of a step, and of basis functions of time."""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ConfigError
from scanl.layers.state import loadable
from scanl.models.forecasting.share import Forecast, as_series, check_series
from scanl.models.heads.distributions import as_levels
from scanl.ops import linear_scan
from scanl.options import above, at_least, checked, one_of
from scanl.whole import whole_number

LEAST_VARIANCE = 1e-5
LAST_TIME = 0.95  # of the basis, in which a piece of `patch` steps ends
BASIS_SIZE = 4.0  # divides the basis
EXPANSION = 2  # hidden numbers of a "transformer" map for each number of its input

BASES, MAPS, MEANS = ("legs", "hlegs", "four"), ("gated", "transformer"), ("mean", "median")


@loadable
class FlowStateState(NamedTuple):
    """State of a `FlowState` of N series.

    scale: (N,), s.   known, total, squares: (N,), the values so far, their sum, and that of the squares of their
    distances from the running mean.   blocks: (N, P) complex, one for each block.
    """

    scale: Tensor
    known: Tensor
    total: Tensor
    squares: Tensor
    blocks: tuple[Tensor, ...]


class FlowStateSpace(nn.Module):
    r"""A diagonal state space of D channels and P modes.

    .. math:: h_t = e^{s Λ Δ} h_{t-1} + Λ^{-1} (e^{s Λ Δ} - 1) B u_t,  y_t = g(Re(C h_t)) + d u_t

    Parameters: log_Lambda_real (P,), ln(-Re Λ), Lambda_imag, log_Delta (P,); B_tilde_r and B_tilde_i (P, D); C_tilde_r
    and C_tilde_i (D, P); D (D,). g is the identity, or with `gated` σ(W y) y.
    """

    def __init__(self, dim: int, modes: int, gated: bool) -> None:
        super().__init__()
        self.log_Lambda_real, self.Lambda_imag, self.log_Delta = (nn.Parameter(torch.randn(modes)) for _ in range(3))
        self.B_tilde_r, self.B_tilde_i = (nn.Parameter(torch.randn(modes, dim) / dim**0.5) for _ in range(2))
        self.C_tilde_r, self.C_tilde_i = (nn.Parameter(torch.randn(dim, modes) / modes**0.5) for _ in range(2))
        self.D = nn.Parameter(torch.randn(dim))
        self.output_gate = nn.Linear(dim, dim) if gated else None
        self._kept: tuple[Any, tuple[Tensor, Tensor, Tensor]] | None = None

    def forward(self, x: Tensor, scale: float, state: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Map x (B, T, D) to y of the steps from `first` on, and the state after the last one."""
        decay, into, out_of = self._discrete(scale)
        u = torch.view_as_complex(F.linear(x, into).unflatten(-1, (-1, 2)))
        h, state = linear_scan(u, decay, state)
        y = F.linear(torch.view_as_real(h[:, first:]).flatten(-2), out_of)
        if self.output_gate is not None:
            y = self.output_gate(y).sigmoid() * y
        return torch.addcmul(y, self.D, x[:, first:]), state

    def _discrete(self, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the decay (P,), and the maps to and from the modes: their real and imaginary parts side by side.

        They are kept until a parameter changes, because they take longer than a step. Torch counts the changes; one of
        `parameter.data` is not counted.
        """
        own = list(self.parameters(recurse=False))
        keeps = not torch.is_grad_enabled() and not any(each.is_inference() for each in own)
        key = (scale, *((each.data_ptr(), each._version) for each in own)) if keeps else None
        if key is not None and self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        rates = torch.complex(-self.log_Lambda_real.exp(), self.Lambda_imag)
        decay = (scale * self.log_Delta.exp() * rates).exp()
        into = ((decay - 1) / rates)[:, None] * torch.complex(self.B_tilde_r, self.B_tilde_i)
        pairs = torch.view_as_real(into).transpose(1, 2).flatten(0, 1).contiguous()
        found = decay, pairs, torch.stack([self.C_tilde_r, -self.C_tilde_i], -1).flatten(1)
        if key is not None:
            self._kept = key, found
        return found


class FlowStateMLP(nn.Module):
    """W3(silu(W1 x) * W2 x) of a normalised x, and a residual connection."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rms_weight = nn.Parameter(torch.ones(dim))
        self.w1, self.w2 = nn.Linear(dim, EXPANSION * dim), nn.Linear(dim, EXPANSION * dim)
        self.w3 = nn.Linear(EXPANSION * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        z = F.rms_norm(x, x.shape[-1:], self.rms_weight, 1e-6)
        return x + self.w3(F.silu(self.w1(z)) * self.w2(z))


class FlowStateBlock(nn.Module):
    """A diagonal state space, a map of the channels, a norm, and a residual connection."""

    def __init__(self, dim: int, modes: int, gated: bool, mlp: str) -> None:
        super().__init__()
        self.ssm = FlowStateSpace(dim, modes, gated)
        self.mlp = FlowStateMLP(dim) if mlp == "transformer" else None
        self.out = nn.Linear(dim, dim) if mlp == "gated" else None
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, scale: float, state: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Map x (B, T, D) to y of the steps from `first` on, and the state after the last one."""
        y, state = self.ssm(x, scale, state, first)
        if self.mlp is not None:
            y = self.mlp(y)
        if self.out is not None:
            y = F.selu(y)
            y = y * self.out(y).sigmoid()
        return x[:, first:] + self.norm(y), state


class FlowState(nn.Module):
    r"""FlowState: blocks of diagonal state spaces read a series, and their last output is a function of time ahead.

    .. math:: q(k) = m_T + σ_T \sum_n a_n f_n(t_k),  t_k = t_0 + k s (0.95 - t_0) / patch

    m_T and σ_T are the running mean and standard deviation of the series; a step is normalised by those of its own
    time. a is a linear map of the last output. s, `scale`, is the length of a step: for a series with a season of S
    steps, s = 24 / S. A piece of patch / s steps follows from the last output. Steps beyond it follow from the outputs
    after steps without a value.

    Graf, Ortner, Woźniak and Pantazi, "FlowState: Sampling Rate Invariant Time Series Forecasting", arXiv:2508.05287,
    and the authors' program, granite-tsfm 0.3. Theirs reads the last `context_length` / s steps again for each
    forecast; here the state is of all steps. Theirs cuts a horizon of patch (k + 1) - 1 short, for a whole k. Weights
    start as random numbers of any size, because they are read from a checkpoint.
    """

    name: ClassVar[str] = "flowstate"

    @checked("flowstate")
    def __init__(
        self,
        dim: Annotated[int, at_least(1), "D, channels of the blocks"] = 512,
        depth: Annotated[int, at_least(1), "blocks"] = 6,
        modes: Annotated[int, at_least(1), "P, numbers of the state of a block"] = 512,
        gated: Annotated[bool, "a gate after each state space"] = False,
        mlp: Annotated[str, one_of(MAPS), "map of the channels"] = "gated",
        patch: Annotated[int, at_least(1), "steps ahead at scale 1 that one output gives"] = 24,
        functions: Annotated[int, at_least(1), "N, functions of time"] = 256,
        basis: Annotated[str, one_of(BASES), "Legendre's polynomials on [-1, 1] or half of it, or waves"] = "legs",
        quantiles: Annotated[Sequence[float], "levels that are learnt"] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
        mean: Annotated[str, one_of(MEANS), "what the mean of a forecast is made of quantiles by"] = "mean",
        scale: Annotated[float, above(0), "s, if a call does not say it"] = 1.0,
    ) -> None:
        super().__init__()
        if basis == "four" and functions % 2 == 0:
            raise ConfigError(f'{self.name}: functions is {functions}, expected an odd number because basis is "four"')
        as_levels(quantiles, torch.zeros(1))
        if mean == "median" and 0.5 not in quantiles:
            raise ConfigError(
                f'{self.name}: quantiles are {list(quantiles)}, expected 0.5 among them for mean="median"'
            )
        self.dim, self.modes, self.patch, self.scale, self.mean = dim, modes, patch, scale, mean
        self.functions, self.levels = functions, tuple(quantiles)
        self.basis = basis
        self.embed = nn.Linear(2, dim)
        self.blocks = nn.ModuleList(FlowStateBlock(dim, modes, gated, mlp) for _ in range(depth))
        self.readout = nn.Linear(dim, functions * len(self.levels))

    def init_state(self, batch_size: int, *, scale: float | None = None) -> FlowStateState:
        """Return the state before any step of some series."""
        scale = self.scale if scale is None else scale
        if not 0 < scale < math.inf:
            raise ConfigError(f"{self.name}: scale is {scale}, expected a number above 0")
        like = self.embed.weight
        zeros = torch.zeros(batch_size, dtype=torch.float64, device=like.device)
        complex_dtype = torch.promote_types(like.dtype, torch.complex64)
        parts = (like.new_zeros(batch_size, self.modes, dtype=complex_dtype) for _ in self.blocks)
        return FlowStateState(zeros + scale, zeros, zeros, zeros, tuple(parts))

    def predict(
        self,
        x: Tensor,
        state: FlowStateState | None = None,
        *,
        horizon: int,
        scale: float | None = None,
        levels: Sequence[float] | None = None,
    ) -> tuple[Forecast, FlowStateState]:
        """Read T steps of series x (B, T, C), at least one, and forecast the next H after the last one.

        Each channel is a series of its own. NaN is a missing value.   state: of the steps before; it keeps its scale.
        horizon: H.   scale: s; None for the model's.   levels: of the quantiles; None for those that are learnt. A
        quantile is that of the learnt ones, as in the authors' program, so that none cross. Raises ShapeError, and
        ConfigError for other arguments.
        """
        series = as_series(self.name, x)
        horizon = whole_number(self.name, "horizon", horizon, 1)
        state = self.init_state(len(series), scale=scale) if state is None else state
        check_series(self.name, len(state.scale), len(series))
        asked = as_levels(self.levels if levels is None else levels, series)
        known = {float(one) for one in state.scale.tolist()}
        if len(known) > 1:
            raise ConfigError(f"{self.name}: state has the scales {sorted(known)}, expected one for all series")
        (step,) = known or {self.scale}
        hidden, after = self.hidden(series, state)
        piece = max(1, int(self.patch / step))
        blank = max(0, horizon - piece)
        if blank:
            more, _ = self.hidden(series.new_full((len(series), blank), torch.nan), after, first=0)
            hidden = torch.cat([hidden, more], 1)
        # A piece after another one, and the end of the last output's.
        at = torch.arange(horizon, device=x.device)
        origin = (at // piece * piece).clamp(max=blank)
        origins, places = origin.unique(return_inverse=True)
        values = self.readout(hidden[:, origins]).unflatten(-1, (len(self.levels), self.functions))
        functions = self._functions(step, piece, values)[at - origin]
        learnt = torch.einsum("bhqn,hn->bhq", values[:, places], functions)
        mean, deviation = _moments(after.known, after.total, after.squares)
        learnt = learnt * deviation[:, None, None] + mean[:, None, None]
        at_learnt = learnt.quantile(learnt.new_tensor(self.levels), -1).movedim(0, -1).to(x.dtype)
        found = learnt.quantile(asked.to(learnt), -1).movedim(0, -1).to(x.dtype)
        form = (len(x), x.shape[2])
        return Forecast(self._mean(at_learnt).unflatten(0, form).transpose(1, 2),
                        found.unflatten(0, form).transpose(1, 2)), after  # fmt: skip

    def hidden(self, series: Tensor, state: FlowStateState, first: int | None = None) -> tuple[Tensor, FlowStateState]:
        """Return the last block's output for series (N, T) from step `first` on, None for the last one alone."""
        missing = series.isnan()
        values = series.double().nan_to_num(0.0)
        count = state.known[:, None] + (~missing).cumsum(1)
        total = state.total[:, None] + values.cumsum(1)
        mean = total / count.clamp(min=1)
        off = torch.where(missing, 0.0, values - mean)
        squares = state.squares[:, None] + off.square().cumsum(1)
        _, deviation = _moments(count, total, squares)
        like = self.embed.weight
        h = self.embed(torch.stack([(off / deviation).to(like), missing.to(like)], -1))
        step, after = float(state.scale[0]) if len(series) else self.scale, []
        for number, (block, before) in enumerate(zip(self.blocks, state.blocks, strict=True), 1):
            places = 0 if number < len(self.blocks) else series.shape[1] - 1 if first is None else first
            h, last = block(h, step, before, places)
            after.append(last)
        return h, FlowStateState(state.scale, count[:, -1], total[:, -1], squares[:, -1], tuple(after))

    def _functions(self, scale: float, steps: int, like: Tensor) -> Tensor:
        """Return the functions (steps, N) at the steps ahead, in the dtype of the weights, as they were learnt with."""
        begin, end = {"legs": (-1.0, LAST_TIME), "hlegs": (0.0, LAST_TIME), "four": (0.0, 1.0)}[self.basis]
        steps_ahead = torch.arange(1, steps + 1, dtype=like.dtype, device=like.device)
        t = begin + steps_ahead * (scale * (end - begin) / self.patch)
        if self.basis == "four":
            angles = t[:, None] * (2 * math.pi * torch.arange(1, self.functions // 2 + 1, device=like.device))
            waves = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
            return torch.cat([torch.ones_like(t)[:, None], waves], 1) / BASIS_SIZE
        found = [torch.ones_like(t), t]
        for n in range(1, self.functions - 1):
            found.append(((2 * n + 1) * t * found[n] - n * found[n - 1]) / (n + 1))
        return torch.stack(found[: self.functions], 1) / BASIS_SIZE

    def _mean(self, quantiles: Tensor) -> Tensor:
        if self.mean == "median":
            return quantiles[..., self.levels.index(0.5)]
        weights = 0.5 - (0.5 - quantiles.new_tensor(self.levels)).abs()
        return quantiles @ (weights / weights.sum())


def _moments(known: Tensor, total: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation so far, from what a state has."""
    count = known.clamp(min=1)
    return total / count, (squares / count).clamp(min=LEAST_VARIANCE).sqrt()
