r"""sLSTM: an LSTM with exponential gates, a normaliser state, and recurrent weights within heads.

Before its nonlinearity every gate is g^_t = x^g_t + R_g h_{t-1}, with R_g block-diagonal over the heads. Then

.. math::
   m_t = \max(\hat\imath_t, \log f_t + m_{t-1}), \quad i_t = e^{\hat\imath_t - m_t}, \quad
   f'_t = e^{\log f_t + m_{t-1} - m_t}, \\
   c_t = f'_t \odot c_{t-1} + i_t \odot \tanh(\hat z_t), \quad n_t = f'_t \odot n_{t-1} + i_t, \quad
   h_t = \sigma(\hat o_t) \odot c_t / n_t

The forget gate is log f = log σ(f^), as in the authors' program, or f^ itself. As in it, the order of the gates is i,
f, z, o, and of the state h, c, n, m; the first step from a zero state sets m = i^; and f' is at most 1.

Differs: here each channel with n = 0 sets m = i^; in the authors' program the whole batch does or none.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from scanl.errors import ConfigError, unknown
from scanl.ops._frame.context import late
from scanl.ops._frame.declaration import OpSample
from scanl.ops._frame.draws import Draws
from scanl.ops.cell import cell

FORGET_GATES = {"sigmoid": late(torch.nn.functional, "logsigmoid"), "exp": lambda raw: raw}


def check_forget(forget: str) -> None:
    """Raise ConfigError for an unknown forget gate."""
    if forget not in FORGET_GATES:
        raise ConfigError(f"slstm: {unknown('forget', forget, FORGET_GATES)}")


@cell(
    "x: B T 4 H K, r: 4 H K K, state: B 4 H K -> B T H K",
    id="P-denserec",
    equation=(
        "c_t = f_t * c_{t-1} + i_t * tanh(z_t),  n_t = f_t * n_{t-1} + i_t,  h_t = sigmoid(o_t) * c_t / n_t,  "
        "(i', f', z, o)_t = x_t + R h_{t-1},  i_t = exp(i'_t),  f_t = sigmoid(f'_t) or exp(f'_t)"
    ),
    source='Beck et al., "xLSTM: Extended Long Short-Term Memory", arXiv:2405.04517, eq. (8) to (17)',
    check=lambda operands, options, cu_seqlens: check_forget(options["forget"]),
)
def slstm(
    x: Tensor,
    r: Tensor,
    state: Tensor,
    *,
    forget: str = "sigmoid",
) -> tuple[Tensor, Tensor]:
    """Scan the sLSTM over time.

    x: the projected input of the gates i, f, z, o, biases included, (B, T, 4, H, K).
    r: recurrent weights of the gates, per head, (4, H, K, K), (outputs, inputs) as in nn.Linear.
    state: h_0, c_0, n_0, m_0, (B, 4, H, K); zeros when None.
    forget: "sigmoid" (log f = log σ(f^)) or "exp" (log f = f^).

    Returns h of every step, (B, T, H, K), in x's dtype, and the last state, in float32 or wider. Raises ShapeError for
    a wrong shape, dtype or device, ConfigError for an unknown forget gate. Half precision is computed in float32.

    >>> x = torch.zeros(1, 2, 4, 1, 1)
    >>> x[0, :, 2], x[0, :, 3] = torch.tensor([[[2.0]], [[-2.0]]]), 50.0  # z = ±tanh 2 = ±0.964, o = 1
    >>> h, state = slstm(x, torch.zeros(4, 1, 1, 1), forget="exp")  # i = f = 1: c = .964, n = 1; c = 0, n = 2
    >>> [round(value, 3) for value in h.flatten().tolist()], state.flatten().tolist()
    ([0.964, 0.0], [0.0, 0.0, 2.0, 0.0])
    """
    h, c, n, m = state.unbind(1)
    i, f, z, o = (x + torch.einsum("ghok,bhk->bgho", r, h)).unbind(1)
    log_forget = m + FORGET_GATES[forget](f)
    m = torch.where(n == 0, i, torch.maximum(i, log_forget))
    i, f = torch.exp(i - m), torch.exp((log_forget - m).clamp(max=0))
    c, n = f * c + i * torch.tanh(z), f * n + i
    h = torch.sigmoid(o) * c / n
    return h, torch.stack([h, c, n, m], 1)


@slstm.samples
def _samples() -> Iterator[OpSample]:
    draw = Draws()

    def state(batch: int, heads: int, width: int) -> Tensor:
        h, c, n, m = draw(4, batch, heads, width)
        return torch.stack([h, c, 1 + n.abs(), m], 1)

    yield OpSample({"x": draw(2, 7, 4, 1, 3), "r": draw(4, 1, 3, 3), "state": state(2, 1, 3)})
    yield OpSample({"x": draw(3, 5, 4, 2, 4), "r": draw(4, 2, 4, 4) / 2, "state": state(3, 2, 4)}, {"forget": "exp"})
    yield OpSample(
        {"x": draw(1, 9, 4, 2, 2), "r": draw(4, 2, 2, 2), "state": state(3, 2, 2)},
        {"cu_seqlens": torch.tensor([0, 2, 2, 9])},
    )


@slstm.errors
def _errors() -> Iterator[tuple[OpSample, str]]:
    x, r = torch.zeros(2, 5, 4, 2, 3), torch.zeros(4, 2, 3, 3)
    yield OpSample({"x": x, "r": r[:3]}), "r has shape (3, 2, 3, 3), expected (4, H, K, K) with H=2 from x"
    yield OpSample({"x": x, "r": r, "state": torch.zeros(2, 4, 6)}), "state has shape (2, 4, 6), expected (B, 4, H, K)"
    yield OpSample({"x": x}), "r is missing, expected a tensor (4, H, K, K)"
