r"""Elementwise (diagonal) linear recurrence.

.. math:: h_t = a_t \odot h_{t-1} + x_t

The adjoint is the same recurrence in reverse time. With g_t the gradient of the loss by the output h_t,
δ_t = g_t + conj(a_{t+1}) δ_{t+1}, dx_t = δ_t, da_t = δ_t conj(h_{t-1}), dh_0 = conj(a_1) δ_1.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from scanl.ops._frame.compiled import compiled
from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.op import op
from scanl.ops._frame.summary import Diagonal
from scanl.ops.associative_scan import associative_scan


@op(
    "x: B T *F, a: ~ B T *F, state: B *F -> B T *F",
    id="P-linrec",
    equation="h_t = a_t * h_{t-1} + x_t",
    source=(
        'Martin and Cundy, "Parallelizing Linear Recurrent Neural Nets Over Sequence Length", arXiv:1709.04057, eq. (5)'
    ),
    neutral={"x": 0.0, "a": 1.0},
    effect=Diagonal({"x": 0.0}),
    values="x",
    dtypes=HALF_DTYPES + FLOATING + COMPLEX,
)
def linear_scan(
    x: Tensor,
    a: Tensor,
    state: Tensor | None = None,
    **call: Unpack[Call],
) -> tuple[Tensor, Tensor]:
    """Scan h_t = a_t h_{t-1} + x_t over time, elementwise.

    x: input, (B, T, *F), real or complex.   a: decay, of any shape that broadcasts to x's: (B, T, *F) per step,
    (*F,) constant over time, (B, T, H, 1) one per head, ... Broadcast axes are not expanded in memory.
    state: h_0, (B, *F); zeros when None.   reverse: scan from the last step to the first, h_t = a_t h_{t+1} + x_t.
    cu_seqlens: offsets (N+1,) of N sequences packed into one row (B == 1), each with its own row of `state`.
    backend: "auto", "reference", "parallel", "cpu" or "triton". A named backend runs or raises BackendError.

    Returns h of every step in x's dtype (complex if a is), and the last state, in float32 or wider.
    Raises ShapeError for a wrong shape, dtype or device, before any work.
    Half precision is computed in float32. Derivatives of every order are exact.

    >>> x, a = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, 0.5, 2.0]])
    >>> h, last = linear_scan(x, a)  # 1; .5·1+2 = 2.5; 2·2.5+3 = 8
    >>> h.tolist(), last.tolist()
    ([[1.0, 2.5, 8.0]], [8.0])
    >>> linear_scan(x, a, torch.tensor([4.0]), reverse=True)[0].tolist()  # 2·4+3 = 11; .5·11+2 = 7.5; .5·7.5+1
    [[4.75, 7.5, 11.0]]
    >>> linear_scan(x, torch.tensor(0.5), cu_seqlens=torch.tensor([0, 1, 3]))[0].tolist()  # 1 | 2; .5·2+3 = 4
    [[1.0, 2.0, 4.0]]
    """
    assert state is not None  # zeros where the caller gave None
    a = a.expand(x.shape)
    h, hs = state, []
    for t in range(x.shape[1]):
        h = a[:, t] * h + x[:, t]
        hs.append(h)
    return torch.stack(hs, 1) if hs else x.clone(), h


@linear_scan.backend("parallel", whole=True)
def _parallel(
    x: Tensor, a: Tensor, state: Tensor, *, reverse: bool = False, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run an associative scan over the pairs (a, x), joined by (a, x)∘(b, y) = (ab, bx + y)."""
    if x.shape[1] == 0:
        return x.clone(), state
    a = a.reshape((1,) * (x.ndim - a.ndim) + a.shape)
    a = a.expand(a.shape[0], x.shape[1], *a.shape[2:])
    if cu_seqlens is None:
        if reverse:
            x, a = x.flip(1), a.flip(1)
        x = torch.cat([x[:, :1] + a[:, :1] * state[:, None], x[:, 1:]], 1)
        h = _join(x, a)
        return (h.flip(1) if reverse else h), h[:, -1]
    at = _starts(x.shape[1], reverse, cu_seqlens)
    blank = x.new_zeros(1, 1, *x.shape[2:])
    entering = torch.cat([a.expand(1, *x.shape[1:]), blank], 1)[0, at] * state
    x = torch.cat([x, blank], 1).index_put((torch.zeros_like(at), at), entering, accumulate=True)[:, :-1]
    inside = torch.ones(x.shape[1] + 1, dtype=torch.bool, device=x.device).index_fill(0, at, False)[:-1]
    inside = inside.view(1, -1, *(1,) * (x.ndim - 2))
    a = torch.where(inside, a, 0)
    h = _join(x.flip(1), a.flip(1), inside.flip(1)).flip(1) if reverse else _join(x, a, inside)
    ends = _starts(x.shape[1], not reverse, cu_seqlens)
    some = (ends < x.shape[1]).view(-1, *(1,) * (x.ndim - 2))
    return h, torch.where(some, torch.cat([h, blank], 1)[0, ends], state)


def _join(x: Tensor, a: Tensor, inside: Tensor | None = None) -> Tensor:
    """Join the pairs by doubling. Products of decays are double, since log2(T) squarings multiply their error by T.

    inside: False at the first step of a sequence, where a is 0. There the earlier state is dropped rather than
    multiplied by 0, since 0 times NaN is NaN.
    """
    a = a.to(torch.promote_types(a.dtype, torch.float64))

    def combine(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        (b, y), (c, z) = first[:2], second[:2]
        if inside is not None:
            b, y = torch.where(second[2], b, 0), torch.where(second[2], y, 0)
            return b * c, c.to(x.dtype) * y + z, first[2] & second[2]
        return b * c, c.to(x.dtype) * y + z

    return associative_scan(combine, (a, x) if inside is None else (a, x, inside))[1]


def _before(y: Tensor, state: Tensor, reverse: bool, cu_seqlens: Tensor | None) -> Tensor:
    """Return h_{t-1} of every step; at the first step of a sequence this is its initial state."""
    if cu_seqlens is None:
        steps = y.shape[1]
        if reverse:
            return torch.cat([y, state[:, None]], 1)[:, 1:]
        return torch.cat([state[:, None], y], 1)[:, :steps]
    at = _starts(y.shape[1], reverse, cu_seqlens)
    shifted = torch.cat([y.roll(-1 if reverse else 1, 1), y.new_zeros(1, 1, *y.shape[2:])], 1)
    return shifted.index_put((torch.zeros_like(at), at), state)[:, :-1]


def _at_start(y: Tensor, reverse: bool, cu_seqlens: Tensor | None) -> Tensor:
    """Return y at the first step of every sequence; zero for an empty sequence."""
    if cu_seqlens is None:
        return (y[:, -1:] if reverse else y[:, :1]).sum(1)
    at = _starts(y.shape[1], reverse, cu_seqlens)
    return torch.cat([y, y.new_zeros(1, 1, *y.shape[2:])], 1)[0, at]


def _starts(steps: int, reverse: bool, cu_seqlens: Tensor) -> Tensor:
    """Return the step at which the scan of each packed sequence begins; one past the last step if it is empty."""
    first = cu_seqlens[1:] - 1 if reverse else cu_seqlens[:-1]
    return torch.where(cu_seqlens.diff() > 0, first, steps).long()


def _second(forward, inputs, results, cotangents, reverse, cu_seqlens):
    """Differentiate the backward pass, at the cost of another scan.

    δ is a scan in reverse time. So its cotangent λ is a scan in forward time, over the cotangents of dx and da.
    """
    _, _, a, y, state = inputs
    delta, (u, w, z) = results[0], cotangents
    previous = _before(y, state, reverse, cu_seqlens)
    lam, last = forward(u + w * previous, a, z, reverse, cu_seqlens)
    to_a = _before(lam, z, reverse, cu_seqlens).conj() * delta
    to_before = w.conj() * delta
    to_y = _before(to_before, torch.zeros_like(state), not reverse, cu_seqlens)
    to_a = to_a.sum_to_size((1,) * (to_a.ndim - a.ndim) + a.shape).view(a.shape)
    return lam, last, to_a, to_y, _at_start(to_before, reverse, cu_seqlens)


_saved = {"saves": ("a", "y", "state"), "second": _second, "dtypes": HALF_DTYPES + FLOATING + COMPLEX}
compiled(linear_scan, "cpu", devices=("cpu",), package="numba", **_saved)
compiled(linear_scan, "triton", devices=("cuda",), package="triton", **_saved)


@linear_scan.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def decay(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw.generator, dtype=torch.float64)

    yield OpSample({"x": draw(2, 7, 3), "a": decay(2, 7, 3), "state": draw(2, 3)})
    yield OpSample({"x": draw(2, 5, 3), "a": decay(3), "state": draw(2, 3)})
    yield OpSample({"x": draw(2, 9, 2, 4), "a": decay(2, 9, 2, 1), "state": draw(2, 2, 4)})
    yield OpSample({"x": draw(2, 4, 2, 2, 3), "a": decay(4, 1, 2, 1), "state": draw(2, 2, 2, 3)})
    yield OpSample({"x": draw(3, 6), "a": decay(), "state": draw(3)})
    yield OpSample(
        {"x": draw(1, 9, 4), "a": decay(1, 9, 4), "state": draw(3, 4)},
        {"cu_seqlens": torch.tensor([0, 2, 2, 9])},
    )
    yield OpSample({"x": draw(1, 8, 4), "a": decay(4), "state": draw(2, 4)}, {"cu_seqlens": torch.tensor([0, 5, 8])})


@linear_scan.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, a = torch.zeros(2, 4, 3), torch.zeros(2, 4, 3)
    zeros = torch.zeros(1, 4, 3)
    yield OpSample({"x": x.long(), "a": a}), "x is int64, expected bfloat16, float16, float32"
    yield OpSample({"x": x, "a": a.to("meta")}), "a is on meta, expected cpu because of x"
    yield OpSample({"x": x, "a": 0.5}), "a is a float, expected a tensor"  # type: ignore[dict-item]
    yield OpSample({"x": x}), "a is missing, expected a tensor"
    yield OpSample({"x": x, "a": a}, {"backend": "numba"}), "unknown backend 'numba'; known: auto, reference"
    yield OpSample({"x": x, "a": a}, {"backend": "tritn"}), "did you mean 'triton'?"
    yield OpSample({"x": x, "a": a}, {"cu_seqlens": torch.tensor([0, 4])}), "x has a batch of 2, expected 1"
    yield (
        OpSample({"x": zeros, "a": zeros}, {"cu_seqlens": torch.tensor([0.0, 4.0])}),
        "cu_seqlens is float32 of shape (2,)",
    )
    yield (
        OpSample({"x": zeros, "a": zeros}, {"cu_seqlens": torch.tensor([0, 3])}),
        "expected offsets that rise from 0 to T=4",
    )
    yield (
        OpSample({"x": zeros, "a": zeros}, {"cu_seqlens": torch.tensor([0, 3, 2, 4])}),
        "cu_seqlens is [0, 3, 2, 4]",
    )
