"""Attention free transformer: averages of values. Their weights depend on keys and positions, not on queries."""

import math
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.layers import options, registry
from scanl.layers.base import Layer, as_widened, widen
from scanl.layers.packing import each_alone
from scanl.layers.rwkv._weighed import WeighedSums, weighed
from scanl.layers.state import Device, DType, loadable
from scanl.layers.state import to as move
from scanl.ops import weighted_average
from scanl.ops._frame.context import holds
from scanl.ops._frame.nonfinite import faulty, readable, since, suspected
from scanl.ops._frame.opaque import opaque
from scanl.options import one_of

WINDOW_EXCUSE = "the steps of a call that are in a window are summed at once"

VARIANTS = ("simple", "full", "local", "conv")


@loadable
class AFTState(NamedTuple):
    """State of the variants with positions: the last S steps, and a sum over all earlier steps.

    average: p and z of the earlier steps, divided by e^m, and m (B, 3, E); () in "full", whose window has all steps.
    keys, values: of the last S steps, oldest first (B, S, E).   steps: number of steps read (B, 1) int64.
    """

    average: Tensor | tuple[()]
    keys: Tensor
    values: Tensor
    steps: Tensor


BLOCK_STEPS, WINDOW_BLOCK_STEPS = 256, 64  # steps that are computed together: without and with a window


def _shapes(
    keys: Tensor, values: Tensor, bias: Tensor, average: Tensor | None, steps: Tensor | None, length: int, *more: Any
) -> list[Tensor]:
    y = keys.new_empty(keys.shape[0], length, keys.shape[2])
    return [y] if average is None else [y, torch.empty_like(average)]


@opaque(
    "aft(Tensor keys, Tensor values, Tensor bias, Tensor? average, Tensor? steps, SymInt length, int window, "
    "bool pairs) -> Tensor[]",
    _shapes,
)
def _averaged(
    keys: Tensor,
    values: Tensor,
    bias: Tensor,
    average: Tensor | None,
    steps: Tensor | None,
    length: int,
    window: int,
    pairs: bool,
) -> list[Tensor]:
    """Return the averages (B, T, E), and the sums over the steps before the window unless `average` is None.

    keys, values: the carried ones, then this call's, (B, S + T, E).   bias: w of pairs of positions (max_length,
    max_length), or of distances (H, s).   average: sums over the steps before the carried ones; None where the window
    has all.   steps: (B, 1), steps read before this call; None for 0.
    """
    batch, carried, heads = keys.shape[0], keys.shape[1] - length, 1 if pairs else bias.shape[0]
    if batch * length == 0:
        return [values[:, carried:], *([] if average is None else [average])]
    spoil = None
    if suspected(keys, values):
        fault = faulty(keys) | faulty(values)
        spoil, keys, values = since(fault, 1), torch.where(fault, 0, keys), torch.where(fault, 0, values)
    # Rows of the batch at the same position have the same weights, so they are columns of one product.
    together = steps is None or (readable(steps) and bool((steps == steps[0]).all()))
    past = keys.new_zeros(1, dtype=torch.int64) if steps is None else steps[: 1 if together else batch, 0]
    blank = carried - past[:, None, None, None]  # slots of the window that hold no step yet
    start = max(0, int(blank.amin())) if readable(past) else 0

    def spread(x: Tensor) -> Tensor:
        """Return x (B, J, E) as (groups, J, channels)."""
        x = x.unflatten(2, (heads, -1))
        return x.permute(2, 1, 0, 3).flatten(2) if together else x.transpose(1, 2).flatten(0, 1)

    def gathered(x: Tensor) -> Tensor:
        """Invert `spread`."""
        if together:
            return x.unflatten(2, (batch, -1)).permute(2, 1, 0, 3).flatten(2)
        return x.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2)

    k, v = spread(keys), spread(values)
    older = None if average is None else WeighedSums(*(spread(tensor) for tensor in average.split(1, 1)))
    size, outputs = BLOCK_STEPS if older is None else WINDOW_BLOCK_STEPS, []
    for first in range(0, length, size):
        end = min(first + size, length)
        row = torch.arange(first, end, device=k.device)[:, None]
        seen = slice(start if older is None else first, carried + end)
        key = torch.arange(seen.start, seen.stop, device=k.device)
        back = carried + row - key
        if pairs:
            place, limit = past[:, None, None, None] + row, bias.shape[0]
            w = bias[place.clamp(max=limit - 1), (place - back).clamp(0, limit - 1)]
            w = torch.where(place < limit, w, torch.nan)
        else:
            w = bias[:, back.clamp(0, window - 1)]
        if older is not None:
            w = torch.where(back < window, w, 0)
        w = torch.where((back >= 0) & (key >= blank), w, -torch.inf).flatten(0, 1)
        sums = weighed(w, k[:, seen], v[:, seen])
        if older is not None:
            sums = older.plus(sums)
            leaving = torch.where(key[: end - first] >= blank, 0.0, -torch.inf).to(w.dtype)
            leaving = leaving.expand(-1, heads, -1, -1).flatten(0, 1)
            departed = weighed(leaving, k[:, first:end], v[:, first:end])
            largest = (k[:, first:end] + leaving.mT).amax(1, keepdim=True)
            older = older.plus(departed, torch.maximum(older.m, largest))
        outputs.append(sums.p / sums.z)
    y = gathered(torch.cat(outputs, 1))
    y = y if spoil is None else y * spoil[:, carried:]
    if older is None:
        return [y]
    average = torch.cat([gathered(tensor) for tensor in older], 1)
    return [y, average if spoil is None else average * spoil[:, length - 1 : length]]


@registry.register("aft")
class AFT(Layer):
    """Causal AFT: y = W_o (σ(q) ⊙ average of v); each channel has its own weights e^{k_i + w_{t,i}}.

    On a GPU and under torch.compile, a sequence longer than `max_length` gives NaN instead of an error.

    Parameters as in PyPI's aft-pytorch: to_q, to_k, to_v (E, D) and project (D, E), with biases; wbias (max_length,
    max_length), of which "local" reads a band. That program has no "conv"; its parameters here are to_k (H, D), wbias
    (H, s), newest first, gamma and beta (H), with w = gamma (wbias - mean) / std + beta, as in the paper.
    With a rank, w_u and w_v (max_length, r) take the place of wbias.
    Initialisation: as in PyTorch; wbias, w_u and w_v Xavier uniform, in "conv" N(0, 1); gamma and beta 0.
    State: in "simple" (B, 3, E), see `weighted_average`; otherwise AFTState, S = max_length in "full" and s elsewhere.
    Large keys do not overflow: sums are stored divided by their largest weight. The bias of to_k multiplies all weights
    by the same factor, so it has no effect. A window costs S·E numbers per step.
    Time: "full" takes two products of w's lower triangle (T, T) with matrices (T, B E), and four in the backward pass;
    "local" and "conv" take those of blocks of 64 steps with 64 + s keys. Keys that lie more than 30 apart within a
    block, in any channel, cost more, since the block is divided.
    """

    id = "S-aft-simple"
    aliases = ("ATF", "attention_free_transformer")
    equation = "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t,i}} v_i / sum_{i<=t} e^{k_i + w_{t,i}})"
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, eq. (2) to (5)'
    op = "weighted_average"
    sample: ClassVar = {"width": 8}
    residual_out = "project"

    wbias: nn.Parameter

    def __init__(
        self,
        dim: options.Dim,
        variant: Annotated[
            str,
            one_of(VARIANTS),
            '"simple": w = 0. "full": w is learned for each pair of positions. "local": w is learned for pairs with '
            't - i < s, and is 0 for others. "conv": w is learned for each distance t - i < s, and is 0 beyond',
        ] = "simple",
        width: Annotated[options.Width | None, "E, channels of the average; by default dim"] = None,
        max_length: Annotated[options.MaxLength, 'positions for which "full" and "local" have w'] = 1024,
        window: Annotated[options.Window, 's, steps that "local" and "conv" weigh by position'] = 32,
        num_heads: Annotated[options.FreeHeads, 'H of "conv": the E/H channels of a head have a common key and w'] = 1,
        rank: Annotated[
            options.Rank | None,
            'r, of w = U Vᵀ in "full" and "local", with U, V (max_length, r); None for full rank',
        ] = None,
    ) -> None:
        super().__init__()
        size = width or dim
        if variant == "conv" and window < 2:
            self._refuse("window", window, "at least 2 because of variant 'conv'")
        if variant == "conv" and size % num_heads:
            self._refuse("num_heads", num_heads, f"a divisor of width={size}")
        if rank is not None and variant not in ("full", "local"):
            self._refuse("rank", rank, f"None because of variant={variant!r}")
        self.dim, self.variant, self.width, self.rank = dim, variant, size, rank
        self.longest = max_length if variant in ("full", "local") else None
        self.window = max_length if variant == "full" else window
        self.to_q = nn.Linear(dim, size)
        self.to_k = nn.Linear(dim, num_heads if variant == "conv" else size)
        self.to_v = nn.Linear(dim, size)
        self.project = nn.Linear(size, dim)
        if rank is not None:
            self.w_u, self.w_v = (
                nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_length, rank))) for _ in range(2)
            )
        elif variant in ("full", "local"):
            self.wbias = nn.Parameter(nn.init.xavier_uniform_(torch.empty(max_length, max_length)))
        elif variant == "conv":
            self.wbias = nn.Parameter(torch.randn(num_heads, window))
            self.gamma = nn.Parameter(torch.zeros(num_heads))
            self.beta = nn.Parameter(torch.zeros(num_heads))

    def init_state(self, batch_size: int, *, device: Device = None, dtype: DType = None) -> Tensor | AFTState:
        zeros = self._zeros(batch_size, 3, self.width, device=device, dtype=dtype, at_least=torch.float32)
        largest = torch.full_like(zeros[:, 2:], -math.inf)  # exponent; the sums are 0
        average = torch.cat([zeros[:, :2], largest], 1)
        if self.variant == "simple":
            return average
        window = zeros.new_zeros(batch_size, self.window, self.width)
        steps = zeros.new_zeros(batch_size, 1, dtype=torch.int64)
        return AFTState(() if self.variant == "full" else average, window, window.clone(), steps)

    def run(
        self, x: Tensor, state: Tensor | AFTState | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, Tensor | AFTState]:
        k, v = self.to_k(x), self.to_v(x)
        k = k.repeat_interleave(self.width // k.shape[2], -1)
        if self.variant == "simple":
            assert not isinstance(state, AFTState)
            o, after = weighted_average(k, v, None, None, state, cu_seqlens=cu_seqlens)
        else:
            assert not isinstance(state, Tensor)
            if cu_seqlens is not None:
                return each_alone(self.forward, x, state, cu_seqlens)
            with as_widened(x):
                o, after = self._with_positions(widen(k), widen(v), state)
        return self.project(self.to_q(x).sigmoid() * o.to(x.dtype)), after

    def _with_positions(self, k: Tensor, v: Tensor, state: AFTState | None) -> tuple[Tensor, AFTState]:
        batch, length, _ = k.shape
        earlier = None if state is None else move(state, dtype=k.dtype)
        steps = k.new_zeros(batch, 1, dtype=torch.int64) if earlier is None else earlier.steps
        after = steps + length
        self._check_length(after)
        if earlier is None and self.variant != "full":
            earlier = self.init_state(batch, device=k.device, dtype=k.dtype)
        assert earlier is None or isinstance(earlier, AFTState)
        keys, values = k, v
        if earlier is not None:
            keys, values = torch.cat([earlier.keys, k], 1), torch.cat([earlier.values, v], 1)
        average = None if earlier is None or self.variant == "full" else earlier.average
        bias = self._kernel() if self.variant == "conv" else self._pairs()
        o, *sums = _averaged(
            keys, values, bias, average, None if state is None else steps, length, self.window, self.variant != "conv"
        )
        keys, values = (F.pad(tensor, (0, 0, self.window, 0))[:, -self.window :] for tensor in (keys, values))
        return o, AFTState(sums[0] if sums else (), keys, values, after)

    def _check_length(self, steps: Tensor) -> None:
        unknown = torch.compiler.is_compiling() or steps.device.type != "cpu" or not steps.shape[0]
        if self.longest is not None and not unknown and not holds(steps.flatten() <= self.longest):
            raise ShapeError(
                f"{self._who()}: x ends at step {int(steps.max())}, expected at most max_length={self.longest}; "
                "build the layer with a larger one"
            )

    def _pairs(self) -> Tensor:
        """Return w of each pair of positions: (max_length, max_length)."""
        return widen(self.wbias) if self.rank is None else widen(self.w_u) @ widen(self.w_v).t()

    def _kernel(self) -> Tensor:
        """Return w of each distance: (H, s)."""
        centred = self.wbias - self.wbias.mean(1, keepdim=True)
        return widen(self.gamma[:, None] * centred / self.wbias.std(1, keepdim=True) + self.beta[:, None])


@registry.preset("aft_simple", variant="simple")
class AFTSimple(AFT):
    """AFT-simple: an average of the values with weights that depend only on the keys."""

    id = "S-aft-simple"
    equation = "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i} v_i / sum_{i<=t} e^{k_i})"
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, sec. 3.2'


@registry.preset("aft_full", variant="full")
class AFTFull(AFT):
    """AFT-full: an average of the values, with a learned weight for each pair of positions up to `max_length`."""

    id = "S-aft-full"
    cost = ("T^2", "T")
    equation = "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t,i}} v_i / sum_{i<=t} e^{k_i + w_{t,i}})"
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, eq. (2)'
    op = None
    sample: ClassVar = {"width": 8, "max_length": 80}
    excused: ClassVar = {
        "default_sizes_are_in_proportion": "w has a number for each pair of positions",
        "bits_are_the_same_in_any_company": WINDOW_EXCUSE,
    }
    own_path = True


@registry.preset("aft_local", variant="local")
class AFTLocal(AFT):
    """AFT-local: an average of the values, with learned weights for pairs of positions less than `window` apart."""

    id = "S-aft-local"
    cost = ("T W", "W")
    equation = (
        "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t,i}} v_i / sum_{i<=t} e^{k_i + w_{t,i}}),  "
        "w_{t,i} = 0 where t - i >= s"
    )
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, sec. 3.2'
    op = None
    sample: ClassVar = {"width": 8, "max_length": 80, "window": 3}
    excused: ClassVar = {
        "default_sizes_are_in_proportion": "w has a number for each pair of positions",
        "bits_are_the_same_in_any_company": WINDOW_EXCUSE,
    }
    own_path = True


@registry.preset("aft_conv", variant="conv")
class AFTConv(AFT):
    """AFT-conv: an average of the values, with learned weights for the last `window` distances, in heads."""

    id = "S-aft-conv"
    cost = ("T W", "W")
    equation = (
        "y_t = W_o (sigmoid(q_t) * sum_{i<=t} e^{k_i + w_{t-i}} v_i / sum_{i<=t} e^{k_i + w_{t-i}}),  "
        "w_j = 0 where j >= s"
    )
    source = 'Zhai et al., "An Attention Free Transformer", arXiv:2105.14103, sec. 3.2'
    op = None
    sample: ClassVar = {"width": 8, "window": 3, "num_heads": 2}
    excused: ClassVar = {"bits_are_the_same_in_any_company": WINDOW_EXCUSE}
    own_path = True
