"""Random linear recurrences, and a linear readout of how often, when and how long their outputs exceed thresholds."""

import math
from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers.packing import pack
from scanl.layers.state import Device, DType, loadable
from scanl.models.embedding import check_tensor
from scanl.models.inputs import Features
from scanl.models.presets import whole
from scanl.models.reader import Standard
from scanl.models.saving import Saved
from scanl.ops.fused.exceedances import Exceedances, exceedances
from scanl.options import above, at_least

POLES = 4  # most of a filter
TALLIES = 3  # of a threshold: how often, when, and how long in a row
MIN_TIME_CONSTANT = 0.4  # steps: the shortest time constant, with which a filter forgets at once
CYCLES = 2.0  # most oscillations of a pole within its time constant
REAL = 0.25  # share of the poles that do not oscillate
SAMPLES, SERIES = 1000, 100  # outputs from which thresholds are drawn, and from at most how many series
TAIL = 0.02  # thresholds are no quantiles nearer than this to 0 or 1


loadable(Exceedances)


@whole("random_filters")
class RandomFilters(Saved):
    r"""Map a sequence to numbers: random linear recurrences, tallies of their outputs, and a linear readout.

    .. math::
       o = A \, [n / T, \; 2 m / T (T + 1), \; L / T] + a

    r are K filters of up to four random poles, each twice: time constants from a step up to `longest` steps,
    log-uniform, with up to two oscillations in each. The tallies of y, or of its change from step to step, for every
    other two filters, are those of `scanl.ops.fused.exceedances`: how often a threshold is exceeded, when, and how long
    in a row. Every other filter has E such that it does not respond to a constant. Only A and a are
    learnt. `prepare` draws the thresholds from data. A sequence begins in the state that its first step would leave if
    it had always been there.

    Tallies above thresholds, of the outputs of many random filters and of their changes, are features of MultiRocket:
    Tan, Dempster, Bergmeir and Webb, arXiv:2102.00457. Differs: its filters are convolutions of nine steps, ours are
    recurrences, so a series can be read step by step.

    outputs: (B, O), float64.   State: `Exceedances`; the outputs cover everything read so far.
    """

    name = "random_filters"
    decay: Tensor  # (2, F, K), real and imaginary part of the poles
    mix: Tensor  # (C, F, K)
    weight: Tensor  # (2, F, K), real and imaginary part of c
    direct: Tensor  # (C, K): E
    change: Tensor  # (K,): 1 where the change of y is tallied, 0 where y is
    thresholds: Tensor  # (Q, K)

    def __init__(
        self,
        outputs: Annotated[int, at_least(1), "O"],
        inputs: Annotated[Features, "what is read; a number that is missing is read as the mean"],
        filters: Annotated[int, at_least(1), "K"] = 2048,
        levels: Annotated[int, at_least(1), "Q, thresholds of a filter"] = 4,
        longest: Annotated[float, above(MIN_TIME_CONSTANT), "longest time constant, in steps"] = 64.0,
        leave_out: Annotated[bool, "leave out the steps of which no feature is known, and read no zeros"] = False,
        known: Annotated[bool, "one more channel has the share of the features that are known"] = False,
    ) -> None:
        super().__init__()
        self.inputs, self.leave_out, self.known = inputs, leave_out, known
        self.standard = Standard(self._who(), inputs.channels, inputs.scales)
        channels, shape = inputs.channels + known, (POLES, filters)
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
        self.register_buffer("change", (torch.arange(filters) % 4 > 1).float())
        self.register_buffer("thresholds", torch.zeros(levels, filters))
        self.readout = nn.Linear(TALLIES * levels * filters, outputs, dtype=torch.float64)

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Exceedances:
        like = torch.empty(0, device=device or self.decay.device, dtype=dtype or self.decay.dtype)
        return Exceedances(
            like.new_zeros(batch_size, 4, *self.decay.shape[1:]),
            like.new_zeros(batch_size, self.decay.shape[2]),
            like.new_zeros(batch_size, 4, *self.thresholds.shape),
            torch.zeros(batch_size, device=like.device, dtype=torch.int64),
        )

    @torch.no_grad()
    def prepare(self, x: Tensor) -> None:
        """Scale the filters by random steps of series x (B, T, C), and draw the thresholds from their outputs there."""
        rows = torch.randperm(len(x))[:SERIES]
        steps, bounds = self._steps(x[rows])
        if not len(steps):
            return
        cuts = torch.rand(-(-SAMPLES // len(rows))).sort().values
        responses = [self.weight * state.filters[:, 2:] for _, state in self._at(steps, bounds, cuts)]
        spread = torch.cat(responses).sum(1).std(0, correction=0)  # of each pole: Re(c̄ r)
        self.weight /= torch.where(spread > 0, spread, 1)
        gain = (torch.complex(*self.weight).conj() / (1 - torch.complex(*self.decay)) ** 2).real  # of a constant
        balanced = torch.arange(gain.shape[1], device=gain.device) % 2 == 0
        self.direct.copy_(-(self.mix * gain).sum(1) * balanced)
        z = torch.cat([state.past - self.change * before for before, state in self._at(steps, bounds, cuts)])
        levels = len(self.thresholds)
        places = (torch.arange(levels)[:, None] + torch.rand(self.thresholds.shape)) / levels
        places = (places.clamp(TAIL, 1 - TAIL) * (len(z) - 1)).long().to(z.device)
        z = z.sort(0).values
        self.thresholds.copy_((z.gather(0, places) + z.gather(0, (places + 1).clamp(max=len(z) - 1))) / 2)

    def _at(self, steps: Tensor, bounds: Tensor, cuts: Tensor) -> Iterator[tuple[Tensor, Exceedances]]:
        """Yield the state of all sequences that have steps after the share `cuts` of them, and y a step before it."""
        lengths = bounds.diff()
        begun, ends = lengths > 0, bounds[:-1]
        state = self._resting(self.init_state(len(lengths)), steps, bounds)
        past = state.past
        for cut in cuts:
            begins, ends = ends, bounds[:-1] + (lengths * cut).long().clamp(min=1).minimum(lengths)
            last = torch.maximum(begins, ends - 1)
            before = self._read(*_pieces(steps, begins, last), state)
            past = torch.where((ends > begins)[:, None], before.past, past)
            state = self._read(*_pieces(steps, last, ends), before)
            yield past[begun], Exceedances(*(part[begun] for part in state))

    def features(
        self,
        x: Tensor,
        state: Exceedances | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Exceedances]:
        """Return the features of everything read so far, (B, 3 Q K), and the state.

        They are the tallies of each threshold as parts of their largest value.   mask, cu_seqlens: as in `forward`.
        """
        steps, bounds = self._steps(x, mask, cu_seqlens)
        state = self.init_state(len(bounds) - 1) if state is None else state
        state = self._read(steps, bounds, self._resting(state, steps, bounds))
        count = state.steps.clamp(min=1).to(state.tallies.dtype)[:, None, None]
        many, when, _, longest = state.tallies.unbind(1)
        return torch.cat([many / count, when * (2 / (count * (count + 1))), longest / count], 1).flatten(1), state

    def forward(
        self,
        x: Tensor,
        state: Exceedances | None = None,
        *,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Exceedances]:
        """Map features (B, T, C) to outputs (B, O), or (N, O) if packed, and the state.

        mask: (B, T) bool, True at valid steps.   cu_seqlens: (N+1,) offsets of N sequences packed over B == 1.
        """
        features, state = self.features(x, state, mask=mask, cu_seqlens=cu_seqlens)
        return self.readout(features.to(self.readout.weight.dtype)), state

    def _steps(self, x: Tensor, mask: Tensor | None = None, cu_seqlens: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the inputs of the filters at all valid steps (N, C), and the offsets of the sequences (B + 1,)."""
        shape = f"(B, T, {self.inputs.channels})"
        check_tensor(self._who(), "x", x, shape)
        if x.ndim != 3 or x.shape[2] != self.inputs.channels:
            raise ShapeError(f"{self._who()}: x has shape {tuple(x.shape)}, expected {shape}")
        known = ~x.isnan()
        z = torch.where(known, self.standard(x), 0).to(self.decay.dtype)
        if self.known:
            z = torch.cat([z, known.to(z.dtype).mean(2, keepdim=True)], 2)
        valid = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        valid = valid & known.any(2) if self.leave_out else valid
        packed, bounds = pack(z, valid)
        if cu_seqlens is not None:
            bounds = F.pad(valid[0].cumsum(0), (1, 0))[cu_seqlens]
        return packed[0], bounds

    def _resting(self, state: Exceedances, steps: Tensor, bounds: Tensor) -> Exceedances:
        """Return the state in which a sequence that now begins has always been at its first step."""
        new = (state.steps == 0) & (bounds.diff() > 0)
        if not new.any():
            return state
        first = steps[bounds[:-1][new]]
        drive = (first[:, :, None, None] * self.mix).sum(1)  # rounds alike in batches of any size
        once = drive / (1 - torch.complex(*self.decay))
        twice = once / (1 - torch.complex(*self.decay))
        filters, past = state.filters.clone(), state.past.clone()
        filters[new] = torch.stack([once.real, once.imag, twice.real, twice.imag], 1)
        past[new] = (self.weight * filters[new, 2:]).sum((1, 2)) + (first[:, :, None] * self.direct).sum(1)
        return state._replace(filters=filters, past=past)

    def _read(self, steps: Tensor, bounds: Tensor, state: Exceedances) -> Exceedances:
        operands = (self.decay, self.mix, self.weight, self.direct, self.change, self.thresholds)
        return exceedances(steps, *operands, state, bounds)


def _pieces(steps: Tensor, begins: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return the steps from `begins` to before `ends` of each sequence one after the other, and their offsets."""
    pieces = [steps[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return torch.cat(pieces), torch.tensor([0, *map(len, pieces)]).cumsum(0)
