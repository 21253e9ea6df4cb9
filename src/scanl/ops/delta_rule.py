r"""Delta rule: a matrix memory that corrects the value it holds at a key.

.. math:: S_t = (I - \beta_t k_t k_t^\top)\, \mathrm{Diag}(e^{g_t})\, S_{t-1} + \beta_t k_t v_t^\top,
          \quad o_t = S_t^\top (c\, q_t)

It equals `dplr_scan` with a = -β k, b = e^g ⊙ k, and β v for v.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from scanl.ops._frame.declaration import FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.op import op
from scanl.ops._frame.summary import Matrix
from scanl.ops._matrix_memory import add_kernels, row_decays, scale_of
from scanl.ops.dplr_scan import chunked


@op(
    "q: B T G K, k: B T G K, v: B T H V, beta: B T H, g?: H | B T H | B T H K, state: B H K V -> B T H V",
    id="P-delta",
    equation="S_t = (I - beta_t k_t k_t^T) Diag(e^{g_t}) S_{t-1} + beta_t k_t v_t^T,  o_t = S_t^T (scale q_t)",
    source=(
        'Schlag et al., "Linear Transformers Are Secretly Fast Weight Programmers", arXiv:2102.11174, eq. (24); '
        'one decay per head: Yang et al., "Gated Delta Networks", arXiv:2412.06464, eq. (10); one per key channel: '
        'Kimi Team, "Kimi Linear", arXiv:2510.26692, eq. (1)'
    ),
    neutral={"beta": 0.0, "g": 0.0},
    effect=Matrix({"v": 0.0}),
    values="v",
    dtypes=HALF_DTYPES + FLOATING,
    divides={"G": "H"},
    wide=("beta", "g"),
)
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_keys: bool = False,
    eps: float = 1e-6,
    **call: Unpack[Call],
) -> tuple[Tensor, Tensor]:
    """Decay a matrix memory, move the value it holds at key k towards v, and read it with query q.

    q, k: queries and keys, (B, T, G, K), where G divides H. Each of the G heads serves H/G heads of v. k should have
    unit length; `normalize_keys` replaces it by k / sqrt(‖k‖² + eps).   v: values, (B, T, H, V).   beta: write
    strength, (B, T, H), in [0, 1], or up to 2 to allow reflections.   g: log decay, natural, <= 0, may be -inf: None,
    (H,), (B, T, H) or (B, T, H, K).   state: S_0, (B, H, K, V); zeros when None.   scale: c; None is 1/sqrt(K).
    reverse, cu_seqlens, backend: as for every op (see `linear_scan`).

    Returns o in q's dtype, and the last S, float32 or wider. Raises ShapeError and BackendError before any work.

    >>> one, half = torch.ones(1, 2, 1, 1), torch.full((1, 2, 1), 0.5)
    >>> v = torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)
    >>> delta_rule(one, one, v, half)[0].flatten().tolist()  # 0 + .5·(2 - 0) = 1; 1 + .5·(4 - 1) = 2.5
    [1.0, 2.5]
    >>> one, v = one[:, :1], v[:, :1]
    >>> o, _ = delta_rule(one, one / 1000, v, one[..., 0], normalize_keys=True)  # ‖k‖² = eps: k = 1/√2, and o = 2/√2
    >>> round(o.item(), 4)
    1.4142
    """
    assert state is not None  # zeros where the caller gave None
    q, k = q * scale_of(q, scale), unit(k, eps) if normalize_keys else k
    shared = v.shape[2] // q.shape[2] if q.shape[2] else 1
    q, k = q.repeat_interleave(shared, 2), k.repeat_interleave(shared, 2)
    rows = row_decays(g, q)
    S, os = state, []
    for t in range(q.shape[1]):
        if rows is not None:
            S = rows[:, t].exp().unsqueeze(-1) * S
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + k[:, t].unsqueeze(-1) * (beta[:, t].unsqueeze(-1) * missing).unsqueeze(-2)
        os.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(os, 1) if os else v.clone(), S


def unit(k: Tensor, eps: float) -> Tensor:
    return k * (k.square().sum(-1, keepdim=True) + eps).rsqrt()


@delta_rule.backend("parallel", dtypes=FLOATING)
def _parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    state: Tensor,
    *,
    scale: float | None,
    normalize_keys: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Write the delta rule as a `dplr_scan` and use its chunked form."""
    if normalize_keys:
        k = unit(k, eps)
    keys = k.repeat_interleave(v.shape[2] // k.shape[2], 2) if k.shape[2] else k
    reads = keys
    if g is not None:
        reads = keys * (g.exp() if g.ndim == 4 else g.exp().unsqueeze(-1))
    beta = beta.unsqueeze(-1)
    return chunked(q, k, beta * v, -beta * keys, reads, g, state, scale=scale)


add_kernels(delta_rule)


@delta_rule.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def some(steps: int, shared: int, heads: int, key: int, value: int, batch: int = 2) -> dict[str, Tensor]:
        q, k = draw(batch, steps, shared, key), draw(batch, steps, shared, key)
        k = torch.nn.functional.normalize(k, dim=-1)
        v, state = draw(batch, steps, heads, value), draw(batch, heads, key, value)
        return {"q": q, "k": k, "v": v, "beta": draw.rate(batch, steps, heads), "state": state}

    yield OpSample(some(6, 1, 2, 3, 4))
    yield OpSample({**some(5, 2, 2, 4, 2), "g": draw.decay(2)}, {"scale": 1.0})
    yield OpSample({**some(18, 2, 4, 3, 2), "g": draw.decay(2, 18, 4)})
    yield OpSample({**some(18, 2, 2, 3, 5), "g": draw.decay(2, 18, 2, 3)})
    short = some(5, 1, 2, 4, 2)
    yield OpSample({**short, "k": 2 * short["k"], "g": draw.decay(2, 5, 2)}, {"normalize_keys": True})
    packed = {**some(9, 1, 2, 3, 2, batch=1), "g": draw.decay(1, 9, 2), "state": draw(3, 2, 3, 2)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})


@delta_rule.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    q, v = torch.zeros(2, 4, 2, 3), torch.zeros(2, 4, 4, 5)
    beta = torch.zeros(2, 4, 4)
    yield (
        OpSample({"q": q, "k": q, "v": v, "beta": beta[..., :2]}),
        "beta has shape (2, 4, 2), expected (B, T, H) with B=2 from q, T=4 from q, H=4 from v",
    )
    few = {"v": v[:, :, :3], "beta": beta[..., :3]}
    yield OpSample({"q": q, "k": q, **few}), "q has G=2, expected a divisor of H=3 from v"
    yield OpSample({"q": q, "k": q, "v": v}), "beta is missing, expected a tensor (B, T, H)"
