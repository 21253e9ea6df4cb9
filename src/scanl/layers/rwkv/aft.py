r"""Attention free transformer: averages of values. Their weights depend on keys and positions, not on queries.

.. math::
   y_t = W_o \Big(\sigma(q_t) \odot
   \frac{\sum_{i \le t} e^{k_i + w_{t,i}} \odot v_i}{\sum_{i \le t} e^{k_i + w_{t,i}}}\Big)
"""

import math
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from scanl.errors import ConfigError, ShapeError, nearest
from scanl.layers.base import Layer, preset, register, widen
from scanl.layers.packing import sequence_index
from scanl.layers.state import Device, DType
from scanl.layers.state import to as move
from scanl.ops import associative_scan, linear_scan, weighted_average

VARIANTS = ("simple", "full", "local", "conv")


class AFTState(NamedTuple):
    """State of the variants with positions: the last S steps, and a sum over all earlier steps.

    average: p and z of the earlier steps, divided by e^m, and m (B, 3, E); () in "full", whose window has all steps.
    keys, values: those of the last S steps, oldest first (B, S, E).   steps: number of steps read (B, 1) int64.
    """

    average: Tensor | tuple[()]
    keys: Tensor
    values: Tensor
    steps: Tensor


@register("aft")
class AFT(Layer):
    """Causal AFT: y = W_o (σ(q) ⊙ average of v); each channel has its own weights e^{k_i + w_{t,i}}.

    Args:
        dim: D, model width.
        variant: "simple": w = 0. "full": w is learned for each pair of positions. "local": w is learned for pairs with
            t - i < s, and is 0 for others. "conv": w is learned for each distance t - i < s, and is 0 beyond.
        hidden_dim: E, channels of the average; by default D.
        max_length: number of positions for which "full" and "local" have w. A longer sequence raises ShapeError; on a
            GPU and under torch.compile the result is NaN instead.
        window: s, steps that "local" and "conv" weigh by position; at least 2 in "conv".
        num_heads: H of "conv": the E/H channels of a head have a common key and w.

    Parameters as in PyPI's aft-pytorch: to_q, to_k, to_v (E, D) and project (D, E), with biases; wbias (max_length,
    max_length), of which "local" reads a band. That program has no "conv"; its parameters here are to_k (H, D), wbias
    (H, s), newest first, gamma and beta (H), with w = gamma (wbias - mean) / std + beta, as in the paper.
    Initialisation: as in PyTorch; wbias Xavier uniform, in "conv" N(0, 1); gamma and beta 0.
    State: in "simple" (B, 3, E), see `weighted_average`; otherwise AFTState, S = max_length in "full" and s elsewhere.
    Large keys do not overflow: sums are stored divided by their largest weight. The bias of to_k multiplies all weights
    by the same factor, so it has no effect. A window costs S·E numbers per step.
    """

    id = "S-aft-simple"
    equation = "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t,i}} v_i / sum_{i<=t} e^{k_i + w_{t,i}})"
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, eq. (2) to (5)'
    op = "weighted_average"
    sample: ClassVar = {"hidden_dim": 8}
    residual_out = "project"

    wbias: nn.Parameter

    def __init__(
        self,
        dim: int,
        variant: str = "simple",
        hidden_dim: int | None = None,
        max_length: int = 1024,
        window: int = 32,
        num_heads: int = 1,
    ) -> None:
        super().__init__()
        size = dim if hidden_dim is None else hidden_dim
        if variant not in VARIANTS:
            raise nearest(f"variant of {self._who()}", variant, VARIANTS)
        if min(dim, size, max_length) < 1:
            raise ConfigError(
                f"{self._who()}: dim is {dim}, hidden_dim is {size} and max_length is {max_length}, expected at least 1"
            )
        if window < (2 if variant == "conv" else 1):
            raise ConfigError(
                f"{self._who()}: window is {window}, expected at least 1, and 2 because of variant 'conv'"
            )
        if variant == "conv" and (num_heads < 1 or size % num_heads):
            raise ConfigError(f"{self._who()}: num_heads is {num_heads}, expected a divisor of hidden_dim={size}")
        self.dim, self.variant, self.hidden_dim = dim, variant, size
        self.max_length = max_length
        self.window = max_length if variant == "full" else window
        self.to_q = nn.Linear(dim, size)
        self.to_k = nn.Linear(dim, num_heads if variant == "conv" else size)
        self.to_v = nn.Linear(dim, size)
        self.project = nn.Linear(size, dim)
        if variant in ("full", "local"):
            self.wbias = nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_length, max_length)))
        elif variant == "conv":
            self.wbias = nn.Parameter(torch.randn(num_heads, window))
            self.gamma = nn.Parameter(torch.zeros(num_heads))
            self.beta = nn.Parameter(torch.zeros(num_heads))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor | AFTState:
        zeros = self._zeros(batch_size, 3, self.hidden_dim, device=device, dtype=dtype, at_least=torch.float32)
        average = torch.cat([zeros[:, :2], zeros[:, 2:] - math.inf], 1)  # zero sums; the largest exponent is -inf
        if self.variant == "simple":
            return average
        window = zeros.new_zeros(batch_size, self.window, self.hidden_dim)
        steps = zeros.new_zeros(batch_size, 1, dtype=torch.int64)
        return AFTState(() if self.variant == "full" else average, window, window.clone(), steps)

    def forward(
        self, x: Tensor, state: Tensor | AFTState | None = None, *, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor | AFTState]:
        self._check(x, state, cu_seqlens)
        k, v = self.to_k(x), self.to_v(x)
        k = k.repeat_interleave(self.hidden_dim // k.shape[2], -1)
        if self.variant == "simple":
            assert not isinstance(state, AFTState)
            o, after = weighted_average(k, v, None, None, state, cu_seqlens=cu_seqlens)
        else:
            assert not isinstance(state, Tensor)
            o, after = self._with_positions(widen(k), widen(v), state, cu_seqlens)
        return self.project(self.to_q(x).sigmoid() * o.to(x.dtype)), after

    def _with_positions(
        self, k: Tensor, v: Tensor, state: AFTState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, AFTState]:
        (batch, length, _), size = k.shape, self.window
        every = torch.arange(batch * length, device=k.device)
        if cu_seqlens is None:
            starts = torch.arange(batch, device=k.device) * length
            lengths, owner = torch.full_like(starts, length), every // max(length, 1)
        else:
            starts, lengths, owner = cu_seqlens[:-1], cu_seqlens.diff(), sequence_index(cu_seqlens, length)
        step = every - starts[owner]  # index in its sequence, within this call
        if state is None:
            before = self.init_state(starts.shape[0], device=k.device, dtype=k.dtype)
        else:
            before = move(state, dtype=k.dtype)
        assert isinstance(before, AFTState)
        steps = before.steps + lengths[:, None]
        self._check_length(steps)
        # The pool has the steps of this call, then those carried in the state. The step `back` steps before `step` of
        # sequence `owner` is row `reach(...)`.
        pool_k, pool_v = (
            torch.cat([here.flatten(0, 1), carried.flatten(0, 1)])
            for here, carried in ((k, before.keys), (v, before.values))
        )

        def reach(step: Tensor, owner: Tensor, back: Tensor) -> Tensor:
            at = step[:, None] - back
            return torch.where(at >= 0, starts[owner, None] + at, every.shape[0] + (owner[:, None] + 1) * size + at)

        position = (step + before.steps[owner, 0])[:, None]
        back = torch.arange(min(size, length) if state is None else size, device=k.device)
        near = reach(step, owner, back)
        logits = (pool_k[near] + self._bias(position, back)).masked_fill((position < back)[..., None], -math.inf)
        most = (
            logits.detach().amax(1) if back.shape[0] else k.detach().flatten(0, 1)
        )  # any value: the quotient does not depend on it
        average = before.average
        if isinstance(average, Tensor):
            left = reach(step, owner, step.new_full((1,), size))[:, 0]
            older = pool_k[left].masked_fill(position < size, -math.inf), pool_v[left]
            p, z, m, average = _older(*older, average, k.shape, step, owner, lengths, cu_seqlens)
            most = torch.maximum(m.detach(), most)
            p, z = (m - most).exp() * p, (m - most).exp() * z
        else:
            p = z = torch.zeros_like(most)
        weights = (logits - most[:, None]).exp()
        o = ((p + (weights * pool_v[near]).sum(1)) / (z + weights.sum(1))).view(k.shape)
        sequences = torch.arange(starts.shape[0], device=k.device)
        kept = reach(lengths - 1, sequences, torch.arange(size - 1, -1, -1, device=k.device))
        return o, AFTState(average, pool_k[kept], pool_v[kept], steps)

    def _check_length(self, steps: Tensor) -> None:
        if self.variant == "conv" or torch.compiler.is_compiling() or steps.device.type != "cpu" or not steps.shape[0]:
            return
        if steps.max() > self.max_length:
            raise ShapeError(
                f"{self._who()}: x ends at step {int(steps.max())}, expected at most max_length={self.max_length}; "
                "build the layer with a larger one"
            )

    def _bias(self, position: Tensor, back: Tensor) -> Tensor:
        """Return w between each step and the steps `back` before it: (steps, back, E), or broadcastable to it."""
        if self.variant == "conv":
            centred = self.wbias - self.wbias.mean(1, keepdim=True)
            w = self.gamma[:, None] * centred / self.wbias.std(1, keepdim=True) + self.beta[:, None]
            return widen(w).repeat_interleave(self.hidden_dim // len(w), 0).t()[back]
        row, column = position.clamp(max=self.max_length - 1), (position - back).clamp(0, self.max_length - 1)
        return torch.where(position < self.max_length, widen(self.wbias[row, column]), math.nan)[..., None]


def _older(
    k: Tensor,
    v: Tensor,
    state: Tensor,
    shape: torch.Size,
    step: Tensor,
    owner: Tensor,
    lengths: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return p, z and m (steps, E) at every step, and their last values in each sequence.

    k and v are those that leave the window at the step.
    """
    first, width = (step == 0)[:, None], k.shape[1]
    start = torch.where(first, torch.maximum(k, state[owner, 2]), k)
    if cu_seqlens is None:
        m = start.view(shape).cummax(1).values.flatten(0, 1) if shape[1] else start
    else:
        m = associative_scan(_largest, (first.to(k.dtype).expand_as(k), start), 0)[1]
    pool = torch.cat([m, state[:, 2]])
    every, sequences = (torch.arange(count, device=k.device) for count in (k.shape[0], state.shape[0]))
    earlier = pool[torch.where(step > 0, every - 1, k.shape[0] + owner)]
    last = pool[torch.where(lengths > 0, lengths.cumsum(0) - 1, k.shape[0] + sequences)]
    finite = m.masked_fill(m == -math.inf, 0)
    new, decay = (k - finite).exp(), (earlier - finite).exp()
    scanned, sums = linear_scan(
        torch.cat([new * v, new], 1).view(*shape[:2], 2 * width),
        torch.cat([decay, decay], 1).view(*shape[:2], 2 * width),
        state[:, :2].flatten(1),
        cu_seqlens=cu_seqlens,
    )
    p, z = scanned.flatten(0, 1).split(width, 1)
    return p, z, m, torch.cat([sums.view(state.shape[0], 2, width), last[:, None]], 1)


def _largest(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Combine two steps of a running maximum. It restarts where the first element of a pair is 1."""
    return torch.maximum(left[0], right[0]), torch.where(right[0] > 0, right[1], torch.maximum(left[1], right[1]))


@preset("aft_simple", variant="simple")
class AFTSimple(AFT):
    """AFT-simple: an average of the values with weights that depend only on the keys."""

    id = "S-aft-simple"
    equation = "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i} v_i / sum_{i<=t} e^{k_i})"
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, sec. 3.2'


@preset("aft_full", variant="full")
class AFTFull(AFT):
    """AFT-full: an average of the values, with a learned weight for each pair of positions up to `max_length`."""

    id = "S-aft-full"
    equation = "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t,i}} v_i / sum_{i<=t} e^{k_i + w_{t,i}})"
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, eq. (2)'
    op = None
    sample: ClassVar = {"hidden_dim": 8, "max_length": 80}
    excused: ClassVar = {"default_sizes_are_in_proportion": "w has a number for each pair of positions"}
    own_path = True


@preset("aft_local", variant="local")
class AFTLocal(AFT):
    """AFT-local: an average of the values, with learned weights for pairs of positions less than `window` apart."""

    id = "S-aft-local"
    equation = (
        "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t,i}} v_i / sum_{i<=t} e^{k_i + w_{t,i}}),  "
        "w_{t,i} = 0 where t - i >= s"
    )
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, sec. 3.2'
    op = "linear_scan"
    sample: ClassVar = {"hidden_dim": 8, "max_length": 80, "window": 3}
    excused: ClassVar = {"default_sizes_are_in_proportion": "w has a number for each pair of positions"}
    own_path = True


@preset("aft_conv", variant="conv")
class AFTConv(AFT):
    """AFT-conv: an average of the values, with learned weights for the last `window` distances, in heads."""

    id = "S-aft-conv"
    equation = (
        "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t-i}} v_i / sum_{i<=t} e^{k_i + w_{t-i}}),  "
        "w_j = 0 where j >= s"
    )
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, sec. 3.2'
    op = "linear_scan"
    sample: ClassVar = {"hidden_dim": 8, "window": 3, "num_heads": 2}
    own_path = True
