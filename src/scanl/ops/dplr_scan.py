r"""Matrix memory whose transition is diagonal plus low rank.

.. math:: S_t = (\mathrm{Diag}(e^{g_t}) + a_t b_t^\top)\, S_{t-1} + k_t v_t^\top, \quad o_t = S_t^\top (c\, q_t)

In the paper S is transposed. The chunked form solves a unit triangular system.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from scanl.ops._chunks import chunks, joined, leading, scores, trailing
from scanl.ops._frame.declaration import FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.nonfinite import replaced, suspected
from scanl.ops._frame.op import op
from scanl.ops._frame.summary import Matrix
from scanl.ops._matrix_memory import add_kernels, row_decays, scale_of, spoilt


@op(
    "q: B T G K, k: B T G K, v: B T H V, a: B T H K, b: B T H K, g?: H | B T H | B T H K, state: B H K V -> B T H V",
    id="P-delta",
    equation="S_t = (Diag(e^{g_t}) + a_t b_t^T) S_{t-1} + k_t v_t^T,  o_t = S_t^T (scale q_t)",
    source=(
        'Peng et al., "RWKV-7 Goose", arXiv:2503.14456, eq. (17); the chunked form: Yang et al., "Parallelizing '
        'Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484, section 3'
    ),
    neutral={"k": 0.0, "a": 0.0, "g": 0.0},
    effect=Matrix({"v": 0.0}),
    values="v",
    dtypes=HALF_DTYPES + FLOATING,
    divides={"G": "H"},
    wide=("g",),
)
def dplr_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float | None = None,
    **call: Unpack[Call],
) -> tuple[Tensor, Tensor]:
    """Read a matrix memory with b, decay it, write what was read at a and v at k, and read the result with q.

    q, k: queries and keys, (B, T, G, K), where G divides H. Each of the G heads serves H/G heads of v.
    v: values, (B, T, H, V).   a, b: the low-rank part, (B, T, H, K). b reads the state before the decay; a is the key
    at which the result is written.   g: log decay of the rows, natural, <= 0, may be -inf: None, (H,), (B, T, H) or
    (B, T, H, K).   state: S_0, (B, H, K, V); zeros when None.   scale: c; None is 1/sqrt(K).
    reverse, cu_seqlens, backend: as for every op (see `linear_scan`).

    Returns o in q's dtype, and the last S, float32 or wider. Raises ShapeError and BackendError before any work.

    >>> one = torch.ones(1, 2, 1, 1)
    >>> v = torch.tensor([2.0, 3.0]).view(1, 2, 1, 1)
    >>> dplr_scan(one, one, v, -one, 0.5 * one)[0].flatten().tolist()  # 2; (1 - .5)·2 + 3 = 4
    [2.0, 4.0]
    """
    assert state is not None  # zeros where the caller gave None
    q = q * scale_of(q, scale)
    shared = v.shape[2] // q.shape[2] if q.shape[2] else 1
    q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
    rows = row_decays(g, q)
    S, os = state, []
    for t in range(q.shape[1]):
        readout = torch.einsum("bhk,bhkv->bhv", b[:, t], S)
        if rows is not None:
            S = rows[:, t].exp().unsqueeze(-1) * S
        S = S + a[:, t].unsqueeze(-1) * readout.unsqueeze(-2) + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        os.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(os, 1) if os else v.clone(), S


@dplr_scan.backend("parallel", dtypes=FLOATING)
def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Cut time into chunks. In a chunk, the reads y_t = S_{t-1}ᵀ b_t solve (I - L) y = b S_0 + M v, L strictly lower.

    The system is solved by substitution; no inverse is formed. Each decay is the exponential of a sum of log decays,
    which is never positive (`_chunks`). Masked products are multiplied by zero, so numbers that are not finite are
    replaced by zeros first, and NaN is put back at the end (`_frame.nonfinite`).
    """
    batch, steps, shared, _ = q.shape
    heads = v.shape[2]
    if q.numel() == 0 or v.numel() == 0:
        nothing = q if q.numel() == 0 else v  # its sum is zero, and keeps the outputs in the graph
        return torch.zeros_like(v) + nothing.sum(), state.clone()
    if g is None or g.ndim == 1:
        g = (v.new_zeros(heads) if g is None else g).expand(batch, steps, heads)
    if g.ndim == 3:
        g = g.unsqueeze(-1)
    spoil = None
    if suspected(k, v, a, b, g):
        spoil = spoilt([k, a, b], g, [v], None)
        k, v, a, b, g = replaced(k), replaced(v), replaced(a), replaced(b), replaced(g, decay=True)
    size = 64 if g.shape[-1] == 1 else 16  # per-channel decays take size² numbers per channel
    # axes from here on: batch, heads of q and k, heads of v per head of q, chunks, steps of a chunk, channels
    q, k, v, a, b, g = (chunks(x, size, shared) for x in (q * scale_of(q, scale), k, v, a, b, g))

    ba, bk, qa, qk = scores(b, a, g, True), scores(b, k, g, True), scores(q, a, g, False), scores(q, k, g, False)
    eye = torch.eye(ba.shape[-1], dtype=ba.dtype, device=ba.device)
    from_start = b * leading(g, True).exp()
    solved = torch.linalg.solve_triangular(
        eye - ba, torch.cat([bk @ v, from_start.expand(*ba.shape[:-1], -1)], -1), upper=False, unitriangular=True
    )
    inside, through = solved.split([v.shape[-1], b.shape[-1]], -1)
    reads = q * leading(g, False).exp()
    to_end, decay = trailing(g).exp(), g.sum(-2).exp().unsqueeze(-1)
    a, k = a * to_end, k * to_end
    S, os = state.unflatten(1, (shared, -1)), []
    for c in range(v.shape[3]):
        y = inside[:, :, :, c] + through[:, :, :, c] @ S
        os.append(reads[:, :, :, c] @ S + qa[:, :, :, c] @ y + qk[:, :, :, c] @ v[:, :, :, c])
        S = decay[:, :, :, c] * S + a[:, :, :, c].mT @ y + k[:, :, :, c].mT @ v[:, :, :, c]
    o, last = joined(torch.stack(os, 3), steps), S.flatten(1, 2)
    return (o, last) if spoil is None else (o * spoil, last * spoil[:, -1].unsqueeze(-2))


add_kernels(dplr_scan)


@dplr_scan.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def some(steps: int, shared: int, heads: int, key: int, value: int, batch: int = 2) -> dict[str, Tensor]:
        q, k = draw(batch, steps, shared, key), draw(batch, steps, shared, key)
        a, b = draw(batch, steps, heads, key) / key, draw(batch, steps, heads, key)
        v = draw(batch, steps, heads, value)
        return {"q": q, "k": k, "v": v, "a": a, "b": b, "state": draw(batch, heads, key, value)}

    yield OpSample(some(6, 1, 2, 3, 4))
    yield OpSample({**some(5, 2, 2, 4, 2), "g": draw.decay(2)}, {"scale": 1.0})
    yield OpSample({**some(18, 2, 4, 3, 2), "g": draw.decay(2, 18, 4)})
    yield OpSample({**some(18, 2, 2, 3, 5), "g": draw.decay(2, 18, 2, 3)})
    packed = {**some(9, 1, 2, 3, 2, batch=1), "g": draw.decay(1, 9, 2, 3), "state": draw(3, 2, 3, 2)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})


@dplr_scan.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    q, v = torch.zeros(2, 4, 2, 3), torch.zeros(2, 4, 4, 5)
    a = torch.zeros(2, 4, 4, 3)
    yield OpSample({"q": q, "k": q, "v": v, "a": q, "b": a}), "a has shape (2, 4, 2, 3), expected (B, T, H, K) with B=2"
    few = {"v": v[:, :, :3], "a": a[:, :, :3], "b": a[:, :, :3]}
    yield OpSample({"q": q, "k": q, **few}), "q has G=2, expected a divisor of H=3 from v"
    yield OpSample({"q": q, "k": q, "v": v, "a": a}), "b is missing, expected a tensor (B, T, H, K)"
