"""Random linear recurrences, and a linear readout of how often their outputs exceed thresholds."""

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ShapeError
from scanl.layers.packing import pack
from scanl.layers.state import Device, DType, loadable
from scanl.models.embedding import check_tensor
from scanl.models.inputs import Features
from scanl.models.presets import whole
from scanl.models.reader import Standard
from scanl.models.saving import Saved
from scanl.ops.fused.exceedances import exceedances
from scanl.options import above, at_least

POLES = 4  # most of a filter
MIN_TIME_CONSTANT = 0.4  # steps: the shortest time constant, with which a filter forgets at once
CYCLES = 2.0  # most oscillations of a pole within its time constant
REAL = 0.25  # share of the poles that do not oscillate
SAMPLES, SERIES = 1000, 100  # outputs from which thresholds are drawn, and from at most how many series
TAIL = 0.02  # thresholds are no quantiles nearer than this to 0 or 1


@loadable
class FilterState(NamedTuple):
    """State of the filters.

    filters: (B, 4, F, K), of the recurrences.   counts: (B, Q, K), steps in which a filter was above each threshold.
    steps: (B,), number of steps read.
    """

    filters: Tensor
    counts: Tensor
    steps: Tensor


@whole("random_filters")
class RandomFilters(Saved):
    r"""Map a sequence to numbers: random linear recurrences, the share of steps above thresholds, and a linear readout.

    .. math::
       o = A \, \frac1T \sum_t [y_t > b] + A' y'_T + a, \quad y'_{t,k} = \mathrm{Re} \sum_f \bar c_f r_{t,f}, \quad
       y_t = y'_t + E x_t

    r are K filters of up to four random poles, each twice (`scanl.ops.fused.exceedances`): time constants from a step
    up to `longest` steps, log-uniform, with up to two oscillations in each. Every other filter has E such that it does
    not respond to a constant. Only A, A' and a are learnt, and A' is there with `last` only. `prepare` draws the
    thresholds b from data. A sequence begins in the state that its first step would leave if it had always been there.

    The shares of many random filters above thresholds are the features of MiniRocket: Dempster, Schmidt and Webb,
    arXiv:2012.08791. Differs: its filters are convolutions of nine steps, ours are recurrences, so a series can be read
    step by step.

    outputs: (B, O), float64.   State: FilterState; the outputs cover everything read so far.
    """

    name = "random_filters"
    decay: Tensor  # (2, F, K), real and imaginary part of the poles
    mix: Tensor  # (C, F, K)
    weight: Tensor  # (2, F, K), real and imaginary part of c
    direct: Tensor  # (C, K): E
    thresholds: Tensor  # (Q, K)

    def __init__(
        self,
        outputs: Annotated[int, at_least(1), "O"],
        inputs: Annotated[Features, "what is read; with `missing`, one more channel has the share of known features"],
        filters: Annotated[int, at_least(1), "K"] = 1024,
        levels: Annotated[int, at_least(1), "Q, thresholds of a filter"] = 4,
        longest: Annotated[float, above(MIN_TIME_CONSTANT), "longest time constant, in steps"] = 64.0,
        leave_out: Annotated[bool, "leave out the steps of which no feature is known, and read no zeros"] = False,
        last: Annotated[bool, "the readout also has the last outputs of the recurrences"] = False,
    ) -> None:
        super().__init__()
        self.inputs, self.leave_out, self.last = inputs, leave_out, last
        self.standard = Standard(self._who(), inputs.channels, inputs.scales)
        channels, shape = inputs.channels + inputs.missing, (POLES, filters)
        constant = MIN_TIME_CONSTANT * (longest / MIN_TIME_CONSTANT) ** torch.rand(shape)
        cycles = CYCLES * torch.rand(shape) * (torch.rand(shape) > REAL)
        pole = torch.polar((-1 / constant).exp(), (2 * math.pi * cycles / constant).clamp(max=math.pi))
        mix = torch.randn(channels, *shape) if channels > 1 else torch.ones(1, *shape)
        heard = ((channels + 1) ** torch.rand(1, 1, filters)).long()  # channels of a filter, few more often than many
        mix *= (torch.rand(channels, 1, filters).argsort(0).argsort(0) < heard) / heard.sqrt()
        self.register_buffer("decay", torch.stack([pole.real, pole.imag]))
        self.register_buffer("mix", mix)
        used = torch.arange(POLES)[:, None] < torch.randint(1, POLES + 1, (filters,))
        self.register_buffer("weight", torch.randn(2, *shape) * used)
        self.register_buffer("direct", torch.zeros(channels, filters))
        self.register_buffer("thresholds", torch.zeros(levels, filters))
        self.readout = nn.Linear((levels + last) * filters, outputs, dtype=torch.float64)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> FilterState:
        like = torch.empty(0, device=device or self.decay.device, dtype=dtype or self.decay.dtype)
        return FilterState(
            like.new_zeros(batch_size, 4, *self.decay.shape[1:]),
            like.new_zeros(batch_size, *self.thresholds.shape),
            torch.zeros(batch_size, device=like.device, dtype=torch.int64),
        )

    @torch.no_grad()
    def prepare(self, x: Tensor) -> None:
        """Scale the filters by random steps of series x (B, T, C), and draw the thresholds from their outputs there."""
        rows = torch.randperm(len(x))[:SERIES]
        steps, bounds = self._steps(x[rows], None)
        cuts = torch.rand(-(-SAMPLES // len(rows))).sort().values
        lengths, ends = bounds.diff(), bounds[:-1]
        state, inputs, responses = self._resting(self.init_state(len(rows)), steps, bounds), [], []
        for cut in cuts:
            begins, ends = ends, bounds[:-1] + (lengths * cut).long().clamp(min=1).minimum(lengths)
            pieces = [steps[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
            offsets = torch.tensor([0, *(len(piece) for piece in pieces)]).cumsum(0)
            state = self._read(torch.cat(pieces), offsets, state)
            begun = lengths > 0
            inputs.append(steps[ends[begun] - 1])
            responses.append((self.weight * state.filters[begun, 2:]).sum(1))  # of each pole: Re(c̄ r)
        inputs, responses = torch.cat(inputs), torch.cat(responses)
        if not len(inputs):
            return
        spread = responses.std(0, correction=0)
        self.weight /= torch.where(spread > 0, spread, 1)
        gain = (torch.complex(*self.weight).conj() / (1 - torch.complex(*self.decay)) ** 2).real  # of a constant
        balanced = torch.arange(gain.shape[1], device=gain.device) % 2 == 0
        self.direct.copy_(-(self.mix * gain).sum(1) * balanced)
        y = (responses / torch.where(spread > 0, spread, 1)).sum(1) + inputs @ self.direct
        levels = len(self.thresholds)
        places = (torch.arange(levels)[:, None] + torch.rand(self.thresholds.shape)) / levels
        places = (places.clamp(TAIL, 1 - TAIL) * (len(y) - 1)).long().to(y.device)
        y = y.sort(0).values
        self.thresholds.copy_((y.gather(0, places) + y.gather(0, (places + 1).clamp(max=len(y) - 1))) / 2)

    def features(
        self, x: Tensor, state: FilterState | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, FilterState]:
        """Return the features of everything read so far, (B, Q * K) or, with `last`, (B, (Q + 1) * K), and the state.

        They are the shares of steps above each threshold, and the last outputs of the recurrences.
        """
        steps, bounds = self._steps(x, mask)
        state = self.init_state(len(x)) if state is None else state
        state = self._read(steps, bounds, self._resting(state, steps, bounds))
        shares = (state.counts / state.steps.clamp(min=1)[:, None, None]).flatten(1)
        if not self.last:
            return shares, state
        return torch.cat([shares, (self.weight * state.filters[:, 2:]).sum((1, 2))], 1), state

    def forward(
        self, x: Tensor, state: FilterState | None = None, *, mask: Tensor | None = None
    ) -> tuple[Tensor, FilterState]:
        """Map features (B, T, C) to outputs (B, O), and the state. mask: (B, T) bool, True at valid steps."""
        features, state = self.features(x, state, mask=mask)
        return self.readout(features.to(self.readout.weight.dtype)), state

    def _steps(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the inputs of the filters at all valid steps (N, C), and the offsets of the sequences (B + 1,)."""
        shape = f"(B, T, {self.inputs.channels})"
        check_tensor(self._who(), "x", x, shape)
        if x.ndim != 3 or x.shape[2] != self.inputs.channels:
            raise ShapeError(f"{self._who()}: x has shape {tuple(x.shape)}, expected {shape}")
        known = ~x.isnan()
        z = torch.where(known, self.standard(x), 0).to(self.decay.dtype)
        if self.inputs.missing:
            z = torch.cat([z, known.to(z.dtype).mean(2, keepdim=True)], 2)
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        packed, bounds = pack(z, valid & known.any(2) if self.leave_out else valid)
        return packed[0], bounds

    def _resting(self, state: FilterState, steps: Tensor, bounds: Tensor) -> FilterState:
        """Return the state in which a sequence that now begins has always been at its first step."""
        new = (state.steps == 0) & (bounds.diff() > 0)
        if not new.any():
            return state
        drive = (steps[bounds[:-1][new]][:, :, None, None] * self.mix).sum(1)  # rounds alike in batches of any size
        once = drive / (1 - torch.complex(*self.decay))
        twice = once / (1 - torch.complex(*self.decay))
        filters = state.filters.clone()
        filters[new] = torch.stack([once.real, once.imag, twice.real, twice.imag], 1)
        return state._replace(filters=filters)

    def _read(self, steps: Tensor, bounds: Tensor, state: FilterState) -> FilterState:
        operands = (self.decay, self.mix, self.weight, self.direct, self.thresholds)
        counts, filters = exceedances(steps, *operands, state.filters, bounds)
        return FilterState(filters, state.counts + counts, state.steps + bounds.diff())
