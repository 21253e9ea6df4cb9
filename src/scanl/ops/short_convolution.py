r"""Short convolution: causal and depthwise, over the last W steps, with an optional SiLU.

.. math:: y_t = \phi\Big(b + \sum_{j=0}^{W-1} w_{W-1-j} \odot x_{t-j}\Big)

Token shift is the case W = 2. Weights are ordered as in `torch.nn.Conv1d(D, D, W, groups=D)`: the last one
multiplies the newest input. The adjoint is the same convolution in reverse time. With d_t the gradient by the argument
of φ, dx_t = Σ_j w_{W-1-j} d_{t+j}.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor

from scanl.errors import ShapeError
from scanl.ops._frame.compiled import compiled
from scanl.ops._frame.declaration import FLOATING, HALF_DTYPES, Call, OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops._frame.op import op
from scanl.ops._frame.summary import Window


def _kept(sizes: Mapping[str, Any]) -> int:
    if sizes["W"] < 1:
        raise ShapeError(f"short_convolution: w has shape ({sizes['D']}, 0), expected (D, W) with W at least 1")
    return sizes["W"] - 1


@op(
    "x: B T D, w: D W, bias?: D, state: B R D -> B T D",
    id="P-shortconv",
    equation="y_t = phi(b + sum_j w_{W-1-j} * x_{t-j})",
    source=(
        'the shift of H3: Fu et al., "Hungry Hungry Hippos", arXiv:2212.14052, section 3.1; with SiLU: Gu and Dao, '
        '"Mamba", arXiv:2312.00752, figure 3'
    ),
    neutral={},
    effect=Window(),
    dtypes=HALF_DTYPES + FLOATING,
    derived={"R": _kept},
    wide=("w", "bias"),
)
def short_convolution(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    state: Tensor | None = None,
    *,
    silu: bool = False,
    **call: Unpack[Call],
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own W weights over the last W steps.

    x: input, (B, T, D).   w: weights, (D, W), W >= 1; the last one multiplies the newest input. This is
    `conv.weight[:, 0]` of a depthwise `torch.nn.Conv1d`.   bias: b, (D,), or None.   silu: φ(s) = s σ(s) if True, else
    φ(s) = s.   state: the last R = W-1 inputs, oldest first, (B, W-1, D); zeros when None.
    reverse, cu_seqlens, backend: as for every op (see `linear_scan`); in reverse, y_t depends on later inputs.

    Returns y in x's dtype, and the last state, float32 or wider. Raises ShapeError and BackendError before any work.

    >>> x, w = torch.tensor([[[1.0], [2.0], [5.0]]]), torch.tensor([[3.0, 10.0]])
    >>> y, state = short_convolution(x, w)  # 10·1; 10·2 + 3·1 = 23; 10·5 + 3·2 = 56
    >>> y.flatten().tolist(), state.tolist()
    ([10.0, 23.0, 56.0], [[[5.0]]])
    >>> y, _ = short_convolution(x[:, :1], w, torch.tensor([-27.0]), state, silu=True)
    >>> round(y.item(), 4)  # 10·1 + 3·5 - 27 = -2; -2/(1 + e²)
    -0.2384
    """
    assert state is not None  # zeros where the caller gave None
    window, ys = state, []
    for t in range(x.shape[1]):
        window = torch.cat([window, x[:, t : t + 1]], 1)
        y = (window * w.mT).sum(1)
        if bias is not None:
            y = y + bias
        ys.append(torch.nn.functional.silu(y) if silu else y)
        window = window[:, 1:]
    return torch.stack(ys, 1) if ys else x.clone(), window.clone()


@short_convolution.backend("parallel")
def _parallel(x: Tensor, w: Tensor, bias: Tensor | None, state: Tensor, *, silu: bool) -> tuple[Tensor, Tensor]:
    """Run torch's depthwise convolution over the state followed by x."""
    steps, window = x.shape[1], torch.cat([state, x], 1)
    if x.numel() == 0 or w.numel() == 0:
        return x * 0, window[:, steps:].clone()
    y = torch.nn.functional.conv1d(window.mT, w.unsqueeze(1), bias, groups=len(w)).mT
    return torch.nn.functional.silu(y) if silu else y, window[:, steps:].clone()


def _needs(W: int, **_: Any) -> list[str]:
    return [f"W={W} is over 16"] if W > 16 else []


compiled(short_convolution, "cpu", devices=("cpu",), package="numba", dtypes=FLOATING)
compiled(short_convolution, "triton", devices=("cuda",), package="triton", dtypes=HALF_DTYPES + FLOATING, needs=_needs)


@short_convolution.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def some(steps: int, width: int, window: int, batch: int = 2, sequences: int = 2) -> dict[str, Tensor]:
        x, w = draw(batch, steps, width), draw(width, window)
        return {"x": x, "w": w, "bias": draw(width), "state": draw(sequences, window - 1, width)}

    yield OpSample(some(7, 3, 4), {"silu": True})
    yield OpSample(some(5, 3, 2))
    yield OpSample(some(6, 3, 3), {"silu": True})
    yield OpSample({name: value for name, value in some(5, 2, 9).items() if name != "bias"}, {"silu": True})
    packed = torch.tensor([0, 2, 2, 9])
    yield OpSample(some(9, 3, 4, 1, 3), {"cu_seqlens": packed, "silu": True})
    yield OpSample(some(9, 3, 6, 1, 3), {"cu_seqlens": packed})


@short_convolution.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, w = torch.zeros(2, 4, 3), torch.zeros(3, 4)
    yield OpSample({"x": x}), "w is missing, expected a tensor (D, W)"
    yield OpSample({"x": x, "w": w.mT}), "w has shape (4, 3), expected (D, W) with D=3 from x"
    yield OpSample({"x": x, "w": w.unsqueeze(1)}), "w has shape (3, 1, 4), expected (D, W)"
    yield OpSample({"x": x, "w": w[:, :0]}), "w has shape (3, 0), expected (D, W) with W at least 1"
    yield OpSample({"x": x, "w": w, "bias": torch.zeros(4)}), "bias has shape (4,), expected (D,) with D=3 from x"
    yield OpSample({"x": x, "w": w, "state": torch.zeros(2, 4, 3)}), "state has shape (2, 4, 3), expected (B, R, D)"
    yield OpSample({"x": x.to(torch.complex128), "w": w}), "x is complex128, expected bfloat16"
