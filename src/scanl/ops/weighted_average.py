r"""Weighted average: for each channel, the mean of all values so far, with weights e^k that decay.

.. math:: o_t = \frac{\sum_{i \le t} e^{k_i + (t-i) w} v_i}{\sum_{i \le t} e^{k_i + (t-i) w}}

With a bonus u, the op reads before it writes:

.. math::
   o_t = \frac{\sum_{i < t} e^{k_i + (t-1-i) w} v_i + e^{u + k_t} v_t}{\sum_{i < t} e^{k_i + (t-1-i) w} + e^{u + k_t}}.

The numerator p and the denominator z are stored divided by e^m, where m is the largest exponent so far, so that no
exponential exceeds one. Without decay it is AFT-simple, causal; with decay and bonus, the WKV operator of RWKV.

Differs: the decay w is the logarithm itself, at most 0 (RWKV's w is its negative), and may differ from step to step.
"""

from collections.abc import Iterator
from typing import Unpack

import torch
from torch import Tensor

from scanl.ops._frame.compiled import compiled
from scanl.ops._frame.declaration import FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.op import op
from scanl.ops._frame.summary import Linear
from scanl.ops.associative_scan import associative_scan


def _empty(zeros: Tensor) -> Tensor:
    """Return the state before any input: p = z = 0, m = -inf."""
    return torch.cat([zeros[:, :2], torch.full_like(zeros[:, 2:], -torch.inf)], 1)


def _weights(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return e^old and e^new, both divided by the larger of the two, and the larger exponent."""
    highest = torch.maximum(old, new)
    finite = torch.where(highest == -torch.inf, 0, highest)  # avoids -inf - -inf, which is NaN
    return (old - finite).exp(), (new - finite).exp(), highest


class _Averages(Linear):
    """Effect of a piece. p and z decay alike, so A is the sum of the log decays: the m that a unit state gets."""

    scaled = True

    def unit(self, last: Tensor) -> Tensor:
        return torch.stack([*torch.ones_like(last[:, :2]).unbind(1), torch.zeros_like(last[:, 2])], 1)

    def after(self, carry: Tensor, last: Tensor, state: Tensor) -> Tensor:
        (p, z, m), (p_last, z_last, m_last) = state.unbind(1), last.unbind(1)
        old, new, highest = _weights(m + carry[:, 2], m_last)
        return torch.stack([old * p + new * p_last, old * z + new * z_last, highest], 1)

    def follow(self, first: Tensor, second: Tensor) -> Tensor:
        return torch.cat([second[:, :2], first[:, 2:] + second[:, 2:]], 1)

    def forget(self, carry: Tensor, last: Tensor) -> Tensor:
        return torch.full_like(carry, -torch.inf)


@op(
    "k: B T D, v: B T D, decay?: D | B T D, bonus?: D, state: B 3 D -> B T D",
    id="P-wkv",
    equation="p_t = e^w p_{t-1} + e^{k_t} v_t,  z_t = e^w z_{t-1} + e^{k_t},  o_t = p_t / z_t",
    source=(
        'without decay: Zhai et al., "An Attention Free Transformer", arXiv:2105.14103; with decay and bonus: Peng '
        'et al., "RWKV: Reinventing RNNs for the Transformer Era", arXiv:2305.13048'
    ),
    neutral={"k": -torch.inf, "decay": 0.0},
    effect=_Averages({"k": -torch.inf}),
    values="v",
    dtypes=HALF_DTYPES + FLOATING,
    wide=("decay", "bonus"),
    initial=_empty,
)
def weighted_average(
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    bonus: Tensor | None = None,
    state: Tensor | None = None,
    **call: Unpack[Call],
) -> tuple[Tensor, Tensor]:
    """Average the values so far with weights e^k.

    k: logarithms of the weights, (B, T, D), of any size; -inf gives a step weight 0.   v: values, (B, T, D).
    decay: log decay w, natural, per step, <= 0, may be -inf: (D,) or (B, T, D); None is 0 (AFT).
    bonus: u, (D,). With a bonus, the current step has weight e^{u+k}, and the op reads before it writes (RWKV-4). When
    None, it writes first.   state: (B, 3, D): p and z, both divided by e^m, and m; None is p = z = 0, m = -inf.
    reverse, cu_seqlens, backend: as for every op (see `linear_scan`).

    Returns o in k's dtype, and the last state, float32 or wider. While all weights are 0, o is 0. Raises ShapeError
    and BackendError before any work.

    >>> k = torch.tensor([[[0.0], [0.0], [1000.0]]])
    >>> v = torch.tensor([[[2.0], [5.0], [7.0]]])
    >>> half = torch.tensor([0.5]).log()
    >>> o, state = weighted_average(k, v, half)  # 2; (.5·2 + 5)/(.5 + 1) = 4; e^1000 outweighs all
    >>> [round(x, 5) for x in o.flatten().tolist()], state.flatten().tolist()
    ([2.0, 4.0, 7.0], [7.0, 1.0, 1000.0])
    >>> three = torch.tensor([3.0]).log()
    >>> o, _ = weighted_average(k[:, :2], v[:, :2], half, three)  # 3·2/3 = 2; (2 + 3·5)/(1 + 3) = 4.25
    >>> [round(x, 5) for x in o.flatten().tolist()]
    [2.0, 4.25]
    """
    assert state is not None  # zeros where the caller gave None
    (p, z, m), os = state.unbind(1), []
    decays = torch.zeros_like(k) if decay is None else decay.expand(k.shape)
    for t in range(k.shape[1]):
        previous = p, z, m
        old, new, m = _weights(m + decays[:, t], k[:, t])
        p, z = old * p + new * v[:, t], old * z + new
        if bonus is None:
            os.append(_ratio(p, z))
        else:
            os.append(_read(*previous, bonus + k[:, t], v[:, t]))
    return torch.stack(os, 1) if os else v.clone(), torch.stack([p, z, m], 1)


def _ratio(p: Tensor, z: Tensor) -> Tensor:
    return p / torch.where(z == 0, 1, z)


def _read(p: Tensor, z: Tensor, m: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the average after adding v with weight e^k."""
    old, new, _ = _weights(m, k)
    return _ratio(old * p + new * v, old * z + new)


def _join(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Join two consecutive pieces of time. A piece is its log decay c and its p, z and m."""
    (c1, p1, z1, m1), (c2, p2, z2, m2) = first, second
    old, new, m = _weights(m1 + c2, m2)
    return c1 + c2, old * p1 + new * p2, old * z1 + new * z2, m


def _scan(
    k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor, *, reverse: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return p, z and m: the initial state, then the state after every step; in reverse the initial state is last."""
    p, z, m = (tensor.unsqueeze(1) for tensor in state.unbind(1))
    decays = torch.zeros_like(k) if decay is None else decay.expand(k.shape)
    start, steps = (torch.zeros_like(m), p, z, m), (decays, v, torch.ones_like(v), k)
    pairs = zip(steps, start, strict=True) if reverse else zip(start, steps, strict=True)
    return associative_scan(_join, tuple(torch.cat(pair, 1) for pair in pairs), reverse=reverse)[1:]


@weighted_average.backend("parallel")
def _parallel(k: Tensor, v: Tensor, decay: Tensor | None, bonus: Tensor | None, state: Tensor) -> tuple[Tensor, Tensor]:
    """Scan with the join c = c1 + c2, m = max(m1 + c2, m2), p = e^{m1+c2-m} p1 + e^{m2-m} p2, z likewise."""
    p, z, m = _scan(k, v, decay, state)
    last = torch.stack([p[:, -1], z[:, -1], m[:, -1]], 1)
    if bonus is None:
        return _ratio(p[:, 1:], z[:, 1:]), last
    return _read(p[:, :-1], z[:, :-1], m[:, :-1], bonus + k, v), last


compiled(weighted_average, "cpu", devices=("cpu",), package="numba", dtypes=FLOATING)
compiled(weighted_average, "triton", devices=("cuda",), package="triton", dtypes=HALF_DTYPES + FLOATING)


def noncausal_weighted_average(
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    bonus: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Average all steps at every step, o_t = Σ_i e^{k_i} v_i / Σ_i e^{k_i}: a softmax over time.

    This is AFT-simple (arXiv:2105.14103). With decay w, step i has weight e^{k_i + |t-i| w}. With decay and bonus it
    has weight e^{k_i + (|t-i|-1) w}, and the current step has e^{u + k_t}: Bi-WKV of Duan et al., "Vision-RWKV",
    arXiv:2403.02308, which writes -w/T for our w. Decays that differ between steps act on later steps as they do in
    `weighted_average` with `reverse`. Shapes, state and errors are as for `weighted_average`. The state holds what came
    before the first step; the last state is the causal op's. Autograd computes derivatives of every order.

    >>> k, v = torch.zeros(1, 3, 1), torch.tensor([[[2.0], [4.0], [9.0]]])
    >>> noncausal_weighted_average(k, v)[0].flatten().tolist()  # (2 + 4 + 9)/3
    [5.0, 5.0, 5.0]
    >>> half = torch.tensor([0.5]).log()
    >>> o, _ = noncausal_weighted_average(k, v, half)  # (2 + 2 + 9/4)/1.75; (1 + 4 + 4.5)/2; (.5 + 2 + 9)/1.75
    >>> [round(x, 4) for x in o.flatten().tolist()]
    [3.5714, 4.75, 6.5714]
    """
    weighted_average.sizes({"k": k, "v": v, "decay": decay, "bonus": bonus, "state": state}, None)
    wide = torch.promote_types(torch.promote_types(k.dtype, v.dtype), torch.float32)
    dtype = k.dtype
    k, v = k.to(wide), v.to(wide)
    zeros = k.new_zeros(k.shape[0], 3, k.shape[2])
    start = _empty(zeros) if state is None else state.to(wide)
    if decay is None and bonus is None:
        m = torch.maximum(k.amax(1), start[:, 2]) if k.shape[1] else start[:, 2]
        finite = torch.where(m == -torch.inf, 0, m)
        weights, start_weight = (k - finite.unsqueeze(1)).exp(), (start[:, 2] - finite).exp()
        p, z = (weights * v).sum(1) + start_weight * start[:, 0], weights.sum(1) + start_weight * start[:, 1]
        return _ratio(p, z).to(dtype).unsqueeze(1).expand(k.shape).contiguous(), torch.stack([p, z, m], 1)
    w = torch.zeros_like(k) if decay is None else decay.to(wide).expand(k.shape)
    past, future = _scan(k, v, w, start), _scan(k, v, w, _empty(zeros), reverse=True)
    last = torch.stack([values[:, -1] for values in past], 1)
    (p1, z1, m1), (p2, z2, m2) = (values[:, :-1] for values in past), (values[:, 1:] for values in future)
    if bonus is None:
        m1, m2, bonus = m1 + w, m2 + w, k.new_zeros(())
    old, new, m = _weights(m1, m2)
    return _read(old * p1 + new * p2, old * z1 + new * z2, m, bonus.to(wide) + k, v).to(dtype), last


@weighted_average.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def some(steps: int, width: int, batch: int = 2, sequences: int = 2) -> dict[str, Tensor]:
        state = draw(sequences, 3, width)
        state[:, 1] = state[:, 1].abs() + 0.5
        return {"k": draw(batch, steps, width), "v": draw(batch, steps, width), "state": state}

    yield OpSample(some(7, 3))
    yield OpSample({**some(6, 4), "decay": draw.decay(4)})
    yield OpSample({**some(8, 3), "decay": draw.decay(3), "bonus": draw(3)})
    yield OpSample({**some(35, 2), "decay": draw.decay(2, 35, 2), "bonus": draw(2)})
    yield OpSample({**some(5, 3), "decay": draw.decay(2, 5, 3)})
    yield OpSample({**some(5, 3), "bonus": draw(3)})
    packed = {**some(9, 3, 1, 3), "decay": draw.decay(3), "bonus": draw(3)}
    yield OpSample(packed, {"cu_seqlens": torch.tensor([0, 2, 2, 9])})
    yield OpSample({**some(9, 3, 1, 2), "decay": draw.decay(1, 9, 3)}, {"cu_seqlens": torch.tensor([0, 4, 9])})


@weighted_average.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    k = torch.zeros(2, 4, 3)
    yield OpSample({"k": k}), "v is missing, expected a tensor (B, T, D)"
    yield OpSample({"k": k, "v": k[:, 1:]}), "v has shape (2, 3, 3), expected (B, T, D) with B=2 from k, T=4 from k"
    yield OpSample({"k": k, "v": k, "decay": torch.zeros(2)}), "decay has shape (2,), expected (D,) or (B, T, D)"
    yield OpSample({"k": k, "v": k, "bonus": torch.zeros(4)}), "bonus has shape (4,), expected (D,) with D=3 from k"
    yield OpSample({"k": k, "v": k, "state": torch.zeros(2, 2, 3)}), "state has shape (2, 2, 3), expected (B, 3, D)"
    yield OpSample({"k": k.to(torch.complex128), "v": k}), "k is complex128, expected bfloat16"
