r"""Linear attention: a matrix memory that decays and adds one outer product per step.

.. math:: S_t = \mathrm{Diag}(e^{g_t})\, S_{t-1}\, \mathrm{Diag}(e^{g^v_t}) + k_t v_t^\top,
          \quad o_t = S_t^\top (c\, q_t)

With a bonus u, the op reads before it writes: :math:`o_t = (S_{t-1} + (u \odot k_t) v_t^\top)^\top (c\, q_t)`.

Differs from Katharopoulos et al.: it has no denominator, which `normalized_linear_attention` adds.
"""

from collections.abc import Iterator
from typing import Any, Unpack

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.ops._chunks import between, chunks, joined, leading, scores, trailing
from scanl.ops._frame.declaration import COMPLEX, FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.nonfinite import replaced, suspected
from scanl.ops._frame.op import op
from scanl.ops._frame.summary import Diagonal
from scanl.ops._matrix_memory import add_kernels, row_decays, scale_of, spoilt
from scanl.ops.linear_scan import linear_scan


@op(
    "q: B T G K, k: B T G K, v: B T H V, g?: H | B T H | B T H K, gv?: B T H V, u?: H K, state: B H K V -> B T H V",
    id="P-kvmem",
    equation="S_t = Diag(e^{g_t}) S_{t-1} Diag(e^{gv_t}) + k_t v_t^T,  o_t = S_t^T (scale q_t)",
    source=(
        'Katharopoulos et al., "Transformers are RNNs", arXiv:2006.16236, eq. (18) to (20); decay per key channel: '
        'Yang et al., "Gated Linear Attention", arXiv:2312.06635, eq. (3); outer-product decay: Mao, "Fine-Tuning '
        'Pre-trained Transformers into Decaying Fast Weights", arXiv:2210.04243; bonus: Peng et al., "Eagle and '
        'Finch", arXiv:2404.05892, eq. (19)'
    ),
    neutral={"k": 0.0, "v": 0.0, "g": 0.0, "gv": 0.0},
    effect=Diagonal({"v": 0.0}),
    values="v",
    dtypes=HALF_DTYPES + FLOATING + COMPLEX,
    divides={"G": "H"},
    wide=("g", "gv", "u"),
)
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    u: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float | None = None,
    **call: Unpack[Call],
) -> tuple[Tensor, Tensor]:
    """Decay a matrix memory, write v to it at key k, and read it with query q.

    q, k: queries and keys, (B, T, G, K), where G divides H. Each of the G heads serves H/G heads of v, without copies.
    v: values, (B, T, H, V).   g: log decay of the rows, natural, <= 0, may be -inf: None, (H,), (B, T, H) or
    (B, T, H, K).   gv: log decay of the columns, None or (B, T, H, V).   u: bonus, (H, K). With it, the op reads before
    it writes; the current step has weight u.   state: S_0, (B, H, K, V); zeros when None.   scale: c; None is
    1/sqrt(K).   reverse, cu_seqlens, backend: as for every op (see `linear_scan`).

    Returns o in q's dtype, and the last S, float32 or wider. Raises ShapeError and BackendError before any work.

    >>> q = k = torch.ones(1, 2, 1, 1)
    >>> v = torch.tensor([2.0, 3.0]).view(1, 2, 1, 1)
    >>> half = torch.full((1, 2, 1), 0.5).log()
    >>> o, S = linear_attention(q, k, v, half)  # 2; .5·2 + 3 = 4
    >>> [round(x, 5) for x in o.flatten().tolist()], round(S.item(), 5)
    ([2.0, 4.0], 4.0)
    >>> o, S = linear_attention(q, k, v, half, u=torch.tensor([[3.0]]))  # 0 + 3·2 = 6; 2 + 3·3 = 11, not yet decayed
    >>> [round(x, 5) for x in o.flatten().tolist()], round(S.item(), 5)
    ([6.0, 11.0], 4.0)
    """
    assert state is not None  # zeros where the caller gave None
    q = q * scale_of(q, scale)
    shared = v.shape[2] // q.shape[2] if q.shape[2] else 1
    q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
    rows = row_decays(g, q)
    S, os = state, []
    for t in range(q.shape[1]):
        previous_S, write = S, k[:, t, :, :, None] * v[:, t, :, None, :]
        if rows is not None:
            S = rows[:, t].exp().unsqueeze(-1) * S
        if gv is not None:
            S = S * gv[:, t].exp().unsqueeze(-2)
        S = S + write
        visible = S if u is None else previous_S + u.unsqueeze(-1) * write
        os.append(torch.einsum("bhk,bhkv->bhv", q[:, t], visible))
    return torch.stack(os, 1) if os else v.clone(), S


@linear_attention.backend("parallel")
def _parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    gv: Tensor | None,
    u: Tensor | None,
    state: Tensor,
    *,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """Cut time into chunks: decayed, masked scores inside a chunk, a linear scan over matrices between chunks.

    Source: arXiv:2312.06635, section 4.

    Each decay is the exponential of one sum of log decays, never a quotient or a difference of sums. No sum is
    positive, so nothing overflows, and -inf is exact.

    Masked scores are multiplied by zero, and zero times NaN is NaN. So numbers that are not finite are replaced by
    zeros first, and NaN is put back at the end (`_frame.nonfinite`).
    """
    batch, steps, shared, width = q.shape
    heads = v.shape[2]
    if q.numel() == 0 or v.numel() == 0:
        nothing = q if q.numel() == 0 else v  # its sum is zero, and keeps the outputs in the graph
        return torch.zeros_like(v) + nothing.sum(), state.clone()
    size = 64 if gv is None and (g is None or g.ndim < 4) else 16  # per-channel decays take size² numbers per channel
    if g is not None and g.ndim == 1:
        g = g.expand(batch, steps, heads)
    if g is not None and g.ndim == 3:
        g = g.unsqueeze(-1)
    spoil = None
    if suspected(k, v, g, gv):
        spoil = spoilt([k], g, [v], gv)
        k, v = replaced(k), replaced(v)
        g, gv = (None if value is None else replaced(value, decay=True) for value in (g, gv))
    # axes from here on: batch, heads of q and k, heads of v per head of q, chunks, steps of a chunk, channels
    q, k = (chunks(value, size, shared) for value in (q * scale_of(q, scale), k))
    v = chunks(v, size, shared)
    g, gv = (None if value is None else chunks(value, size, shared) for value in (g, gv))
    reads, writes, inside = q, k, scores(q, k, g, u is not None)
    if g is not None:
        reads, writes = q * leading(g, u is not None).exp(), k * trailing(g).exp()
    if gv is None:
        o, written = inside @ v, v
    else:
        o = (inside.unsqueeze(-1) * v.unsqueeze(-3) * between(gv, u is not None).exp()).sum(-2)
        written = v * trailing(gv).exp()
    if u is not None:
        bonus = u.view(shared, -1, 1, 1, width)
        o = o + (q * bonus * k).sum(-1, keepdim=True) * v
    rows = 0 if g is None else g.sum(-2).unsqueeze(-1)
    columns = 0 if gv is None else gv.sum(-2).unsqueeze(-2)
    decay = (state.new_zeros(()) + rows + columns).exp()
    decay = decay.movedim(3, 1).flatten(2, 3) if decay.ndim else decay
    delta = (writes.mT @ written).movedim(3, 1).flatten(2, 3)
    S, last = linear_scan(delta, decay, state, backend="parallel")
    S = torch.cat([state.unsqueeze(1), S[:, :-1]], 1).unflatten(2, (shared, -1)).movedim(1, 3)
    carried = reads @ S
    o = o + (carried if gv is None else carried * leading(gv, u is not None).exp())
    o = joined(o, steps)
    return (o, last) if spoil is None else (o * spoil, last * spoil[:, -1].unsqueeze(-2))


add_kernels(linear_attention, without=("gv",))


def normalized_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    state: Tensor | None = None,
    *,
    eps: float = 1e-6,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    r"""Return weighted means, :math:`o_t = S_t^\top q_t / \max(z_t^\top q_t, ε)` with z_t = e^{g_t} z_{t-1} + k_t.

    q and k must not be negative: use a nonnegative feature map (arXiv:2006.16236, eq. (18)). A column of ones is
    appended to v, so z is the last column of S and needs no second pass. The state is (B, H, K, V+1).
    eps: ε, the least denominator; the paper has none.   more: arguments of `linear_attention` except gv.

    >>> one = torch.ones(1, 2, 1, 1)
    >>> normalized_linear_attention(one, one, torch.tensor([2.0, 3.0]).view(1, 2, 1, 1))[0].flatten().tolist()
    [2.0, 2.5]
    """
    if more.get("gv") is not None:
        raise ShapeError("normalized_linear_attention: gv is given, expected None: the denominator has no column of it")
    more.setdefault("scale", 1.0)
    ones = torch.ones_like(v[..., :1])
    o, last = linear_attention(q, k, torch.cat([v, ones], -1), g, state=state, **more)
    return o[..., :-1] / o[..., -1:].clamp(min=eps), last


def noncausal_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor | None = None, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Let every step read all steps, o_t = S_Tᵀ (scale q_t): two matrix products, no scan (arXiv:1812.01243).

    There is no decay. Shapes, state and ShapeError are as for `linear_attention`.

    >>> one = torch.ones(1, 2, 1, 1)
    >>> noncausal_linear_attention(one, one, torch.tensor([2.0, 3.0]).view(1, 2, 1, 1))[0].flatten().tolist()  # 2 + 3
    [5.0, 5.0]
    """
    sizes = linear_attention.sizes({"q": q, "k": k, "v": v, "g": None, "gv": None, "u": None, "state": state}, None)
    wide = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    shared = (q * scale_of(q, scale)).to(wide).movedim(1, 2).unsqueeze(2)
    values = v.to(wide).unflatten(2, (sizes["G"], -1)).permute(0, 2, 3, 1, 4)
    S = k.to(wide).movedim(1, 2).unsqueeze(2).mT @ values
    if state is not None:
        S = S + state.to(wide).unflatten(1, (sizes["G"], -1))
    # The backward pass needs S, and a caller may change what is returned in place.
    return (shared @ S).permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype), S.flatten(1, 2).clone()


@linear_attention.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def some(steps: int, shared: int, heads: int, key: int, value: int, batch: int = 2) -> dict[str, Tensor]:
        q, k = draw(batch, steps, shared, key), draw(batch, steps, shared, key)
        return {"q": q, "k": k, "v": draw(batch, steps, heads, value), "state": draw(batch, heads, key, value)}

    yield OpSample(some(6, 1, 2, 3, 4))
    yield OpSample({**some(5, 2, 2, 3, 2), "g": draw.decay(2)}, {"scale": 1.0})
    yield OpSample({**some(7, 2, 4, 3, 2), "g": draw.decay(2, 7, 4)})
    yield OpSample({**some(18, 2, 2, 3, 5), "g": draw.decay(2, 18, 2, 3)})
    yield OpSample({**some(6, 1, 2, 3, 2), "g": draw.decay(2, 6, 2, 3), "u": draw(2, 3)})
    yield OpSample({**some(5, 1, 2, 3, 2), "g": draw.decay(2, 5, 2, 3), "gv": draw.decay(2, 5, 2, 2)})
    yield OpSample({**some(5, 2, 2, 2, 3), "gv": draw.decay(2, 5, 2, 3), "u": draw(2, 2)})
    packed = {**some(9, 1, 2, 3, 2, batch=1), "g": draw.decay(1, 9, 2, 3), "state": draw(3, 2, 3, 2)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})


@linear_attention.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    q, v = torch.zeros(2, 4, 2, 3), torch.zeros(2, 4, 4, 5)
    yield OpSample({"q": q, "k": q, "v": v[:, :3]}), "v has shape (2, 3, 4, 5), expected (B, T, H, V) with B=2 from q"
    yield OpSample({"q": q, "k": q, "v": v[:, :, :3]}), "q has G=2, expected a divisor of H=3 from v"
    yield OpSample({"q": q, "k": q, "v": v, "g": torch.zeros(2)}), "g has shape (2,), expected (H,) or (B, T, H)"
    yield OpSample({"q": q, "k": q, "v": v, "u": torch.zeros(4, 5)}), "u has shape (4, 5), expected (H, K)"
    yield OpSample({"q": q, "k": q}), "v is missing, expected a tensor (B, T, H, V)"
