r"""Causal convolution with a long kernel, through the FFT; exact continuation from a bounded state.

.. math:: y_t = b \odot x_t + \sum_{j=0}^{L-1} \kappa_j \odot x_{t-j}

Source: the whole sequence as in Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces",
arXiv:2111.00396, section 2.4; piece by piece by the tiling of relaxed multiplication, van der Hoeven, "Relax, but don't
be too lazy" (2002), which Oncescu et al., "Flash Inference", arXiv:2410.12982, section 3, use for such models.
Differs: the kernel has a length of its own, and so the state is bounded however long the sequence is.

The tiling. Let P be the power of two that reaches the longest lag, and p < P the place in a block of P steps. Once p
is reached, with u the largest power of two that divides it, the last u inputs are added to the sums that the next u
outputs are owed; at the end of a block u = P. Every pair of input and output at most P apart is met in exactly one such
tile: at the middle of the smallest aligned interval that holds both. T steps cost O(T log² P) in all.

So what must be kept at p is, for each bit i, 2^i rows: where the bit is set, the inputs of a tile still to come; where
it is not, the sums owed to 2^i outputs. Levels that a step doesn't touch are handed on as they are, not copied.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.ops._frame.declaration import COMPLEX, FLOATING
from scanl.ops._frame.nonfinite import faulty, replaced, since, suspected
from scanl.ops.offsets import check_kind, offsets

DTYPES = (torch.bfloat16, torch.float16, *FLOATING, *COMPLEX)


class LongConvolutionState(NamedTuple):
    """All that the past still brings to the future; its size follows from the kernel's length alone."""

    position: Tensor  # (B,) int64: p, the place of the next step in its block of P = 2^len(levels)
    due: Tensor  # (B, 1, D): the sum owed to the next output
    levels: tuple[Tensor, ...]  # level i is (B, 2^i, D): inputs where bit i of p is set, else sums owed


def long_convolution(
    x: Tensor,
    kernel: Tensor,
    state: LongConvolutionState | None = None,
    *,
    bias: Tensor | None = None,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, LongConvolutionState]:
    """Convolve each channel with its own kernel, causally and without wrap-around.

    x: input, (B, T, D), real or complex.   kernel: κ, (D, L), lag 0 first; L and T are independent.
    state: what the steps before x left; None is an empty past.   bias: b, (D,), beside lag 0.
    reverse: from the last step to the first, y_t = b x_t + Σ_j κ_j x_{t+j}; the state is then that of what comes after.
    cu_seqlens: offsets (N+1,) of N sequences packed in B == 1, each with its own row of the state.

    Returns y in x's dtype (complex if another operand is) and the state, in float32 or wider: the place, and P rows of
    D numbers for each row of the batch, where P is the power of two in L - 1 <= P < 2 L. Any cut of the sequence gives
    the same numbers to rounding. T steps from an empty past cost one transform of length T + P; pieces shorter than P/4
    are tiled, so that a single step costs O(D log² L) on average. Rows of a state may be selected and joined; rows at
    different places are brought to one by the next call. To continue, the place is read: a GPU is waited for.
    A convolution in both directions is the sum of two calls, one of them with `reverse`.

    Half precision is computed in float32. An input that is not finite makes NaN of its channel's outputs from its step
    on, and leaves those before it as they are. The error of a transform is relative to all of its range: a large input
    is felt in earlier outputs of its channel in the same call. No output is wrong by more than 10 eps log2(2 (T + L))
    Σ_t |x_t| Σ_j |κ_j|, the sums over the call's steps and the lags of its row and channel. Where that is too much, cut
    the sequence before what is large: what comes in a later call is not felt at all.
    Raises ShapeError for a wrong shape, dtype or device, before any work.

    >>> x, kernel = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[1.0, 0.5]])
    >>> y, state = long_convolution(x, kernel)  # 1; 2 + .5·1; 3 + .5·2
    >>> [round(v, 4) for v in y.flatten().tolist()]
    [1.0, 2.5, 4.0]
    >>> y, state = long_convolution(x[:, :1], kernel, state)  # 1 + .5·3
    >>> round(y.item(), 4)
    2.5
    """
    _check(x, kernel, state, bias, cu_seqlens)
    if cu_seqlens is not None:
        return _packed(x, kernel, state, bias, reverse, cu_seqlens)
    common = _common(x, kernel, bias)
    compute = torch.promote_types(common, torch.float32)
    y_dtype = common if common.is_complex else x.dtype
    x, kernel = x.to(compute), kernel.to(compute)
    inputs = x.flip(1) if reverse else x
    if state is None:
        place, due, levels = 0, None, ()
    else:
        place, due, levels = _at_one_place(state if state.due.dtype == compute else _cast(state, compute), kernel)
    y, state = _advance(inputs, kernel, place, due, levels)
    y = y.flip(1) if reverse else y
    if bias is not None:
        y = y + bias.to(compute) * x
    return y.to(y_dtype), state


def _advance(
    x: Tensor, kernel: Tensor, place: int, due: Tensor | None, levels: tuple[Tensor, ...]
) -> tuple[Tensor, LongConvolutionState]:
    """The outputs of the steps x, and the state behind them. No sums due means an empty past."""
    batch, steps, _ = x.shape
    depth = _depth(kernel)
    block = 1 << depth
    # From here on a transform over the whole piece costs no more than its tiles do.
    if 4 * steps >= block and steps > 1:
        y = _onto(x, kernel, 0, steps + block)
        if due is not None:
            owed = _settle(kernel, place, due, levels)
            y = y + F.pad(owed, (0, 0, 0, steps))
        # A copy of the sums, so that the state does not keep the whole of y in memory.
        due, levels = _deal(y[:, steps:].clone())
        return y[:, :steps].contiguous(), _state(0, due, levels)

    if due is None:
        due, levels = _deal(x.new_zeros(batch, block, x.shape[2]))
    done, ys = 0, []
    while done < steps:
        # The widest aligned step: 2^low inputs, whose outputs are due at the levels below `low`.
        low = min((steps - done).bit_length() - 1, _zeros(place, depth))
        new = x[:, done : done + (1 << low)]
        ys.append(torch.cat([due, *levels[:low]], 1) + _onto(new, kernel, 0, 1 << low))
        high = low + _zeros(~(place >> low), depth - low)
        tile = torch.cat([*levels[low:high][::-1], new], 1)
        owed = _onto(tile, kernel, 1 << high, 1 << high)
        if high < depth:
            due, fresh = _deal(levels[high] + owed)
            levels = (*fresh, tile, *levels[high + 1 :])
        else:
            due, levels = _deal(owed)
        place = (place + (1 << low)) % block
        done += 1 << low
    return torch.cat(ys, 1) if ys else x, _state(place, due, levels)


def _onto(x: Tensor, kernel: Tensor, first: int, count: int) -> Tensor:
    """What the inputs x bring to `count` outputs, of which the first comes `first` steps after the first input.

    Of shape (B, count, D): Σ_s κ_{first+r-s} x_s for r < count.
    """
    n = x.shape[1]
    if n == count == 1 and first < kernel.shape[1]:
        return x * kernel[:, first]
    if first < n - 1 and suspected(x):
        # Of an output, what comes after it is multiplied by zero here, and in a transform meets it.
        spoil = since(faulty(x), 1)[:, torch.arange(first, first + count, device=x.device).clamp(max=n - 1)]
        return _product(replaced(x), kernel, first, count) * spoil.to(x.real.dtype)
    return _product(x, kernel, first, count)


def _product(x: Tensor, kernel: Tensor, first: int, count: int) -> Tensor:
    """As `_onto`, of finite numbers."""
    n, length = x.shape[1], kernel.shape[1]
    low, high = max(first - n + 1, 0), min(first + count, length)  # the lags in use
    if n * count <= 64:
        lags = F.pad(kernel[:, low : max(low, high)], (low - (first - n + 1), first + count - max(low, high)))
        return torch.einsum("bsd,drs->brd", x.flip(1), lags.unfold(1, n, 1))
    if high <= low:
        return x.new_zeros(x.shape[0], count, x.shape[2])
    if x.numel() == 0:  # torch.fft refuses it; nothing is convolved, and yet it has gradients
        return (x.sum() * kernel.sum()).expand(x.shape[0], count, x.shape[2])
    # The full product has `full` terms, wanted from `skip` on: those that wrap around may land before it.
    skip, full = first - low, n + high - low - 1
    size = _fast(max(full - skip, min(skip + count, full)))
    forward, back = (torch.fft.fft, torch.fft.ifft) if x.is_complex() else (torch.fft.rfft, torch.fft.irfft)
    # Transforms over the last axis of transposed views were six times as fast on a CPU as over axis 1.
    product = back(forward(x.transpose(1, 2), size) * forward(kernel[:, low:high], size), size)
    wanted = product[..., skip : min(skip + count, full)]
    return F.pad(wanted, (0, count - wanted.shape[-1])).transpose(1, 2)


def _settle(kernel: Tensor, place: int, due: Tensor, levels: tuple[Tensor, ...]) -> Tensor:
    """The sums owed to the next P outputs, (B, P, D), once the tiles still to come are met: a state at place 0."""
    block = 1 << len(levels)
    sums = [level for i, level in enumerate(levels) if not place >> i & 1]
    owed = F.pad(torch.cat([due, *sums], 1), (0, 0, 0, place))
    for i, tile in enumerate(levels):
        if place >> i & 1:
            # Its own tile has served the outputs up to 2^(i+1) after its start.
            start, width = place >> (i + 1) << (i + 1), 1 << i
            late = _onto(tile, kernel, 2 * width, block - width)
            before = start + 2 * width - place
            owed = owed + F.pad(late, (0, 0, before, place - start - width))
    return owed


def _deal(owed: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sums owed to 2^n outputs, as what is due first and the levels below n."""
    depth = owed.shape[1].bit_length() - 1
    return owed[:, :1], tuple(owed[:, 1 << i : 2 << i] for i in range(depth))


def _at_one_place(state: LongConvolutionState, kernel: Tensor) -> tuple[int, Tensor, tuple[Tensor, ...]]:
    """The place of all rows, with their sums; rows at different places are settled, each from its own."""
    places = state.position.tolist()
    if len(set(places)) <= 1:
        return (places[0] if places else 0), state.due, state.levels
    rows = [_rows(state, slice(n, n + 1)) for n in range(len(places))]
    owed = [_settle(kernel, place, row.due, row.levels) for place, row in zip(places, rows, strict=True)]
    return 0, *_deal(torch.cat(owed))


def _packed(
    x: Tensor,
    kernel: Tensor,
    state: LongConvolutionState | None,
    bias: Tensor | None,
    reverse: bool,
    cu_seqlens: Tensor,
) -> tuple[Tensor, LongConvolutionState]:
    """Each packed sequence by itself."""
    bounds = offsets(cu_seqlens, x.shape[1], "long_convolution")
    if len(bounds) == 1:
        y, last = long_convolution(x, kernel, bias=bias)
        return y, _rows(last, slice(0, 0))
    parts = []
    for n, (start, end) in enumerate(itertools.pairwise(bounds)):
        row = None if state is None else _rows(state, slice(n, n + 1))
        parts.append(long_convolution(x[:, start:end], kernel, row, bias=bias, reverse=reverse))
    states = [last for _, last in parts]
    position, due = (torch.cat([last[i] for last in states]) for i in (0, 1))
    levels = tuple(torch.cat(level) for level in zip(*(last.levels for last in states), strict=True))
    return torch.cat([y for y, _ in parts], 1), LongConvolutionState(position, due, levels)


def _state(place: int, due: Tensor, levels: tuple[Tensor, ...]) -> LongConvolutionState:
    return LongConvolutionState(torch.full((due.shape[0],), place, device=due.device), due, levels)


def _rows(state: LongConvolutionState, rows: slice) -> LongConvolutionState:
    return LongConvolutionState(state.position[rows], state.due[rows], tuple(level[rows] for level in state.levels))


def _cast(state: LongConvolutionState, dtype: torch.dtype) -> LongConvolutionState:
    levels = tuple(level.to(dtype) for level in state.levels)
    return LongConvolutionState(state.position, state.due.to(dtype), levels)


def _depth(kernel: Tensor) -> int:
    """log2 of P, the power of two that reaches the longest lag."""
    return (max(kernel.shape[1] - 1, 1) - 1).bit_length()


def _zeros(number: int, most: int) -> int:
    """How many bits of a number are zero from the lowest up, at most `most`."""
    number |= 1 << most
    return (number & -number).bit_length() - 1


def _fast(size: int) -> int:
    """The next length with no factor above 5."""
    return min(odd << ((size - 1) // odd).bit_length() for odd in (1, 3, 5, 9, 15))


def _common(x: Tensor, kernel: Tensor, bias: Tensor | None) -> torch.dtype:
    common = torch.promote_types(x.dtype, kernel.dtype)
    return common if bias is None else torch.promote_types(common, bias.dtype)


def _check(
    x: Tensor,
    kernel: Tensor,
    state: LongConvolutionState | None,
    bias: Tensor | None,
    cu_seqlens: Tensor | None,
) -> None:
    def refuse(name: str, found: object, expected: str) -> ShapeError:
        return ShapeError(f"long_convolution: {name} {found}, expected {expected}")

    for name, value, axes in (("x", x, "(B, T, D)"), ("kernel", kernel, "(D, L)"), ("bias", bias, "(D,)")):
        if value is None and name == "bias":
            continue
        if not isinstance(value, Tensor):
            raise refuse(name, f"is a {type(value).__name__}", f"a tensor {axes}")
        if value.dtype not in DTYPES:
            raise refuse(name, f"is {_short(value.dtype)}", ", ".join(map(_short, DTYPES)))
        if value.device != x.device:
            raise refuse(name, f"is on {value.device}", f"{x.device} because of x")
        if value.ndim != axes.count(",") + (axes[-2] != ","):
            raise refuse(name, f"has shape {tuple(value.shape)}", axes)
    width = x.shape[2]
    if kernel.shape[0] != width or kernel.shape[1] == 0:
        raise refuse("kernel", f"has shape {tuple(kernel.shape)}", f"(D, L) with D={width} from x and L > 0")
    if bias is not None and bias.shape != (width,):
        raise refuse("bias", f"has shape {tuple(bias.shape)}", f"(D,) with D={width} from x")
    batch, of = x.shape[0], "x"
    if cu_seqlens is not None:
        check_kind("long_convolution", cu_seqlens)
        if batch != 1:
            raise refuse("x", f"has a batch of {batch}", "1 because of cu_seqlens")
        batch, of = cu_seqlens.shape[0] - 1, "cu_seqlens"
    if state is None:
        return
    if not isinstance(state, LongConvolutionState):
        raise refuse("state", f"is a {type(state).__name__}", "a LongConvolutionState or None")
    depth = _depth(kernel)
    if len(state.levels) != depth:
        expected = f"{depth} because of kernel with L={kernel.shape[1]}"
        raise refuse("state", f"has {len(state.levels)} levels", expected)
    sizes = [1, *(1 << i for i in range(depth))]
    real = not _common(x, kernel, bias).is_complex
    for i, (value, size) in enumerate(zip((state.due, *state.levels), sizes, strict=True)):
        name = f"state.levels[{i - 1}]" if i else "state.due"
        if value.shape != (batch, size, width):
            found = f"has shape {tuple(value.shape)}"
            raise refuse(name, found, f"({batch}, {size}, {width}) because of {of} and kernel")
        if value.device != x.device:
            raise refuse(name, f"is on {value.device}", f"{x.device} because of x")
        if real and value.is_complex():
            raise refuse(name, f"is {_short(value.dtype)}", "a real dtype because of x and kernel")
    if state.position.shape != (batch,) or state.position.dtype != torch.int64:
        found = f"is {_short(state.position.dtype)} of shape {tuple(state.position.shape)}"
        raise refuse("state.position", found, f"int64 of shape ({batch},) because of {of}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
