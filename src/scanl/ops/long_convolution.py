r"""Causal convolution with a long kernel, computed by FFT, that can be continued exactly from a state of fixed size.

.. math:: y_t = b \odot x_t + \sum_{j=0}^{L-1} \kappa_j \odot x_{t-j}

A whole sequence takes one FFT. Piece by piece, it is the tiling of relaxed multiplication.

Differs: the kernel's length does not depend on the sequence's, so the state has a fixed size.

The tiling. Let P be the least power of two >= the longest lag, L - 1. Time is cut into blocks of P steps; p < P is the
position in a block. A partial sum is the contribution of past inputs to a future output. When position p is reached,
let u be the largest power of two that divides p (u = P at the end of a block). One FFT product, a tile, then adds the
contributions of the last u inputs to the partial sums of the next u outputs. An input and an output at most P apart
meet in exactly one tile: the one at the middle of the smallest aligned interval that holds both. T steps cost
O(T log² P) in all.

The state at p therefore holds 2^i rows for each bit i of p. If the bit is set, they are the inputs of a tile that has
not been computed yet. If it is not set, they are partial sums of 2^i outputs. A step passes on the levels that it does
not change; it does not copy them.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.errors import ShapeError
from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.dispatch import in_forward_mode, transforming
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.nonfinite import faulty, replaced, since, suspected
from scanl.ops._frame.op import op


class LongConvolutionState(NamedTuple):
    """The contribution of past inputs to future outputs. Its size depends on the kernel's length alone."""

    position: Tensor  # (B,) int64: p, the position of the next step in its block of P = 2^len(levels)
    due: Tensor  # (B, 1, D): the partial sum of the next output
    levels: tuple[Tensor, ...]  # level i is (B, 2^i, D): inputs if bit i of p is set, else partial sums of outputs


def _form(
    sizes: Mapping[str, Any], options: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> LongConvolutionState:
    """Return the state before any input."""
    if sizes["L"] == 0:
        raise ShapeError("long_convolution: kernel has L=0, expected at least one lag")
    owed = torch.zeros(sizes["B"], 1 << _depth(sizes["L"]), sizes["D"], dtype=dtype, device=device)
    return _state(0, *_deal(owed))


@op(
    "x: B T D, kernel: D L, bias?: D, state: tree -> B T D",
    id="P-longconv",
    equation="y_t = b * x_t + sum_j kappa_j * x_{t-j}",
    source=(
        'Gu, Goel and Ré, "Efficiently Modeling Long Sequences with Structured State Spaces", arXiv:2111.00396, '
        'section 2.4; the tiling: van der Hoeven, "Relax, but don\'t be too lazy", J. Symbolic Computation 34, '
        '2002; for such models: Oncescu et al., "Flash Inference", arXiv:2410.12982, section 3'
    ),
    neutral={},
    values="x",
    dtypes=HALF_DTYPES + FLOATING + COMPLEX,
    form=_form,
    excused={
        "causality to the bit": "a transform rounds by all of its range; earlier outputs differ by rounding",
        "tracing from a state": "which tiles are met depends on the position, a number in the state",
    },
)
def long_convolution(
    x: Tensor,
    kernel: Tensor,
    state: LongConvolutionState | None = None,
    *,
    bias: Tensor | None = None,
    **call: Unpack[Call],
) -> tuple[Tensor, LongConvolutionState]:
    """Convolve each channel with its own kernel, causally and without wrap-around.

    x: input, (B, T, D), real or complex.   kernel: κ, (D, L), lag 0 first; L and T are independent.
    state: the state after the steps before x; None if there are none.   bias: b, (D,), added to κ_0.
    reverse: convolve with later inputs, y_t = b x_t + Σ_j κ_j x_{t+j}; the state then holds the steps after x.
    cu_seqlens: offsets (N+1,) of N sequences packed into one row (B == 1), each with its own row of the state.

    Returns y in x's dtype (complex if another operand is) and the state, in float32 or wider. The state holds the
    position, and P rows of D numbers for each row of the batch; P is the power of two in L - 1 <= P < 2 L.
    You may cut a sequence into calls anywhere: the results are equal to rounding. T steps without a state cost one
    transform of length T + P. Pieces shorter than P/4 are tiled, so a single step costs O(D log² L) on average. Rows of
    states may be selected and concatenated; if their positions differ, the next call aligns them. A call with a state
    reads the position, which synchronises a GPU. For a convolution in both directions, add two calls, one of them with
    `reverse`.

    Half precision is computed in float32. An input that is not finite makes its channel's outputs NaN from its step
    on; earlier outputs are unaffected. The error of a transform is relative to the largest numbers in it, so a large
    input adds rounding error to earlier outputs of its channel in the same call. The error of an output is at most
    10 eps log2(2 (T + L)) Σ_t |x_t| Σ_j |κ_j|, summed over the call's steps and the kernel's lags, in the output's row
    and channel. If that is too much, start a new call at the large input; earlier calls are not affected by it.
    Raises ShapeError for a wrong shape, dtype or device, before any work.

    >>> x, kernel = torch.tensor([[[1.0], [2.0], [3.0]]]), torch.tensor([[1.0, 0.5]])
    >>> y, state = long_convolution(x, kernel)  # 1; 2 + .5·1; 3 + .5·2
    >>> [round(v, 4) for v in y.flatten().tolist()]
    [1.0, 2.5, 4.0]
    >>> y, state = long_convolution(x[:, :1], kernel, state)  # 1 + .5·3
    >>> round(y.item(), 4)
    2.5
    """
    steps, block = x.shape[1], 1 << _depth(kernel.shape[1])
    if state is None:
        owed = x.new_zeros(x.shape[0], block, x.shape[2])
    else:
        owed = _settle(kernel, *_at_one_position(state, kernel))
    owed = F.pad(owed, (0, 0, 0, steps))
    for t in range(steps):
        brought = kernel.T * x[:, t : t + 1]  # the contribution of step t to the outputs from t on
        owed = owed + F.pad(brought, (0, 0, t, owed.shape[1] - t - brought.shape[1]))
    y = owed[:, :steps] if steps else x.clone()
    return y if bias is None else y + bias * x, _state(0, *_deal(owed[:, steps:]))


@long_convolution.backend("parallel")
def _parallel(
    x: Tensor, kernel: Tensor, state: LongConvolutionState | None, *, bias: Tensor | None
) -> tuple[Tensor, LongConvolutionState]:
    """Compute the piece with one transform, or in tiles if it is short."""
    position, partial, levels = (0, None, ()) if state is None else _at_one_position(state, kernel)
    y, last = _advance(x, kernel, position, partial, levels)
    return y if bias is None else y + bias * x, last


def _advance(
    x: Tensor, kernel: Tensor, position: int, partial: Tensor | None, levels: tuple[Tensor, ...]
) -> tuple[Tensor, LongConvolutionState]:
    """Return the outputs of the steps x, and the state after them. partial is None if there was no step before x."""
    batch, steps, _ = x.shape
    depth = _depth(kernel.shape[1])
    block = 1 << depth
    # From P/4 steps on, one transform over the whole piece costs no more than its tiles do.
    if 4 * steps >= block and steps > 1:
        y = _onto(x, kernel, 0, steps + block)
        if partial is not None:
            owed = _settle(kernel, position, partial, levels)
            y = y + F.pad(owed, (0, 0, 0, steps))
        # Copy the partial sums, so that the state does not keep all of y in memory.
        partial, levels = _deal(y[:, steps:].clone())
        return y[:, :steps].contiguous(), _state(0, partial, levels)

    if partial is None:
        partial, levels = _deal(x.new_zeros(batch, block, x.shape[2]))
    done, ys = 0, []
    while done < steps:
        # Take the longest aligned run of inputs, 2^low of them. The levels below `low` hold their partial sums.
        low = min((steps - done).bit_length() - 1, _zeros(position, depth))
        new = x[:, done : done + (1 << low)]
        ys.append(torch.cat([partial, *levels[:low]], 1) + _onto(new, kernel, 0, 1 << low))
        high = low + _zeros(~(position >> low), depth - low)
        tile = torch.cat([*levels[low:high][::-1], new], 1)
        owed = _onto(tile, kernel, 1 << high, 1 << high)
        if high < depth:
            partial, fresh = _deal(levels[high] + owed)
            levels = (*fresh, tile, *levels[high + 1 :])
        else:
            partial, levels = _deal(owed)
        position = (position + (1 << low)) % block
        done += 1 << low
    return torch.cat(ys, 1) if ys else x, _state(position, partial, levels)


def _onto(x: Tensor, kernel: Tensor, first: int, count: int) -> Tensor:
    """Return the contribution of the inputs x to `count` outputs, the first of them `first` steps after x[:, 0].

    The result is Σ_s κ_{first+r-s} x_s for r < count, of shape (B, count, D).
    """
    n = x.shape[1]
    if n == count == 1 and first < kernel.shape[1]:
        return x * kernel[:, first]
    if first < n - 1 and suspected(x):
        # A transform multiplies later inputs by zero and adds them, so a NaN would reach earlier outputs.
        spoil = since(faulty(x), 1)[:, torch.arange(first, first + count, device=x.device).clamp(max=n - 1)]
        return _product(replaced(x), kernel, first, count) * spoil.to(x.real.dtype)
    return _product(x, kernel, first, count)


def _product(x: Tensor, kernel: Tensor, first: int, count: int) -> Tensor:
    """Compute `_onto` for finite numbers."""
    n, length = x.shape[1], kernel.shape[1]
    low, high = max(first - n + 1, 0), min(first + count, length)  # the lags in use
    if n * count <= 64:
        lags = F.pad(kernel[:, low : max(low, high)], (low - (first - n + 1), first + count - max(low, high)))
        return torch.einsum("bsd,drs->brd", x.flip(1), lags.unfold(1, n, 1))
    if high <= low:
        return x.new_zeros(x.shape[0], count, x.shape[2])
    if x.numel() == 0:  # torch.fft refuses empty tensors; the zeros returned stay in the graph
        return (x.sum() * kernel.sum()).expand(x.shape[0], count, x.shape[2])
    # The full product has `full` terms; the terms from `skip` on are returned. Terms that wrap around may fall before
    # `skip`, so the transform can be shorter.
    skip, full = first - low, n + high - low - 1
    size = _fast(max(full - skip, min(skip + count, full)))
    # On a CPU, transforms over the last axis of transposed views were six times as fast as transforms over axis 1.
    rows, lags = x.transpose(1, 2), kernel[:, low:high]
    if x.is_complex() or kernel.is_complex() or torch.compiler.is_compiling() or in_forward_mode() or transforming():
        product = _by_fft(rows, lags, size)
    else:
        product = _Product.apply(rows, lags, size)
    piece = product[..., skip : min(skip + count, full)]
    return F.pad(piece, (0, count - piece.shape[-1])).transpose(1, 2)


def _by_fft(x: Tensor, kernel: Tensor, size: int) -> Tensor:
    """Return the cyclic convolution of x (B, D, n) and kernel (D, m) over `size` steps."""
    forward, back = (torch.fft.fft, torch.fft.ifft) if x.is_complex() else (torch.fft.rfft, torch.fft.irfft)
    return back(forward(x, size) * forward(kernel, size), size)


class _Product(torch.autograd.Function):
    """`_by_fft` of real numbers. Its gradients are correlations of real numbers.

    torch differentiates a real transform by a complex one of the same length, which takes twice the time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: Tensor, size: int) -> Tensor:
        spectrum, filters = torch.fft.rfft(x, size), torch.fft.rfft(kernel, size)
        needed = ctx.needs_input_grad
        ctx.save_for_backward(x, kernel, spectrum if needed[1] else None, filters if needed[0] else None)
        ctx.size = size
        return torch.fft.irfft(spectrum * filters, size)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        x, kernel, spectrum, filters = ctx.saved_tensors
        (by,) = cotangents
        if torch.is_grad_enabled():  # this pass is differentiated
            with torch.enable_grad():
                y = _by_fft(x, kernel, ctx.size)
            leaves = [leaf for leaf in (x, kernel) if leaf.requires_grad]
            gradients = iter(torch.autograd.grad(y, leaves, by, create_graph=True))
            return *(next(gradients) if leaf.requires_grad else None for leaf in (x, kernel)), None
        by = torch.fft.rfft(by, ctx.size)
        to_x = to_kernel = None
        if ctx.needs_input_grad[0]:
            to_x = torch.fft.irfft(by * filters.conj(), ctx.size)[..., : x.shape[-1]]
        if ctx.needs_input_grad[1]:
            to_kernel = torch.fft.irfft((by * spectrum.conj()).sum(0), ctx.size)[..., : kernel.shape[-1]]
        return to_x, to_kernel, None


def _settle(kernel: Tensor, position: int, partial: Tensor, levels: tuple[Tensor, ...]) -> Tensor:
    """Compute all remaining tiles. Return the partial sums of the next P outputs, (B, P, D): a state at position 0."""
    block = 1 << len(levels)
    sums = [level for i, level in enumerate(levels) if not position >> i & 1]
    owed = F.pad(torch.cat([partial, *sums], 1), (0, 0, 0, position))
    for i, tile in enumerate(levels):
        if position >> i & 1:
            # The tile of these inputs already served the outputs up to 2^(i+1) steps after its start.
            start, width = position >> (i + 1) << (i + 1), 1 << i
            late = _onto(tile, kernel, 2 * width, block - width)
            padding = start + 2 * width - position
            owed = owed + F.pad(late, (0, 0, padding, position - start - width))
    return owed


def _deal(owed: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Split the partial sums of 2^n outputs into `due`, for the first output, and n levels."""
    depth = owed.shape[1].bit_length() - 1
    return owed[:, :1], tuple(owed[:, 1 << i : 2 << i] for i in range(depth))


def _at_one_position(state: LongConvolutionState, kernel: Tensor) -> tuple[int, Tensor, tuple[Tensor, ...]]:
    """Return one position for all rows, `due` and the levels. Rows at different positions are moved to position 0."""
    positions = state.position.tolist()
    if len(set(positions)) <= 1:
        return (positions[0] if positions else 0), state.due, state.levels
    rows = [_rows(state, slice(n, n + 1)) for n in range(len(positions))]
    owed = [_settle(kernel, position, row.due, row.levels) for position, row in zip(positions, rows, strict=True)]
    return 0, *_deal(torch.cat(owed))


def _state(position: int, partial: Tensor, levels: tuple[Tensor, ...]) -> LongConvolutionState:
    return LongConvolutionState(torch.full((partial.shape[0],), position, device=partial.device), partial, levels)


def _rows(state: LongConvolutionState, rows: slice) -> LongConvolutionState:
    return LongConvolutionState(state.position[rows], state.due[rows], tuple(level[rows] for level in state.levels))


def _depth(lags: int) -> int:
    """Return log2 of P, the least power of two >= the longest lag."""
    return (max(lags - 1, 1) - 1).bit_length()


def _zeros(number: int, limit: int) -> int:
    """Count the trailing zero bits of a number, at most `limit`."""
    number |= 1 << limit
    return (number & -number).bit_length() - 1


def _fast(size: int) -> int:
    """Return the least length >= size with no prime factor above 5."""
    return min(odd << ((size - 1) // odd).bit_length() for odd in (1, 3, 5, 9, 15))


@long_convolution.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def past(batch: int, lags: int, steps: int, width: int) -> LongConvolutionState:
        """Return the state after some steps; for some sizes its position is in the middle of a block."""
        x, kernel = draw(batch, steps, width), draw(width, lags)
        state = None
        for t in range(steps):
            _, state = long_convolution(x[:, t : t + 1], kernel, state, backend="parallel")
        assert state is not None
        return state

    yield OpSample({"x": draw(2, 7, 3), "kernel": draw(3, 5), "bias": draw(3), "state": past(2, 5, 3, 3)})
    yield OpSample({"x": draw(2, 6, 2), "kernel": draw(2, 12), "state": past(2, 12, 13, 2)})
    yield OpSample({"x": draw(2, 24, 2), "kernel": draw(2, 20), "state": past(2, 20, 8, 2)})
    yield OpSample({"x": draw(3, 5, 2), "kernel": draw(2, 1), "state": past(3, 1, 2, 2)})
    packed = {"x": draw(1, 9, 2), "kernel": draw(2, 6), "bias": draw(2), "state": past(3, 6, 5, 2)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})


@long_convolution.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, kernel = torch.zeros(2, 6, 3), torch.zeros(3, 5)
    state = long_convolution(x, kernel)[1]
    yield OpSample({"x": x[0], "kernel": kernel}), "x has shape (6, 3), expected (B, T, D)"
    yield OpSample({"x": x.long(), "kernel": kernel}), "x is int64, expected bfloat16, float16, float32"
    yield OpSample({"x": x, "kernel": kernel[:, :0]}), "kernel has L=0, expected at least one lag"
    yield OpSample({"x": x, "kernel": kernel, "bias": torch.zeros(2)}), "bias has shape (2,), expected (D,) with D=3"
    operands = {"x": x, "kernel": kernel}
    yield OpSample({**operands, "state": state.due}), "state is a Tensor, expected a LongConvolutionState"
    yield (
        OpSample({**operands, "kernel": torch.zeros(3, 50), "state": state}),
        "state.levels holds 2 tensors, expected 6 because of x, kernel",
    )
    wrong = state._replace(levels=(state.levels[0], state.levels[1][:, :1]))
    yield OpSample({**operands, "state": wrong}), "state.levels[1] has shape (2, 1, 3), expected (2, 2, 3) because of x"
