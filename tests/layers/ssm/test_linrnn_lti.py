"""LinRNNLTI: its equation step by step, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, T
from scanl.layers.ssm.linrnn_lti import LinRNNLTI

pytestmark = pytest.mark.cells_by_loop


def linrnn_lti(layer, xs):
    a = torch.complex(layer.lambda_re, layer.lambda_im)
    b, c = torch.complex(layer.B_re, layer.B_im), torch.complex(layer.C_re, layer.C_im)
    s, ys = torch.zeros(layer.state_dim, dtype=torch.complex128), []
    for x in xs:
        s = a * s + b @ x.to(s.dtype)
        ys.append((c @ s).real + layer.D * x)
    return ys


EQUATIONS = {"linrnn_lti": (lambda: LinRNNLTI(DIM, 6), linrnn_lti)}

REFUSED = [
    (lambda: LinRNNLTI(8, 0), "linrnn_lti: state_dim is 0, expected at least 1"),
    (lambda: LinRNNLTI(8, r_max=1.0), "linrnn_lti: r_max is 1.0, expected less than 1"),
]


@pytest.mark.usefixtures("double")
def test_a_linear_system_is_a_convolution_and_a_dense_recurrence():
    layer, x = LinRNNLTI(DIM, 6), torch.randn(1, T, DIM)
    a, b, c = (torch.complex(getattr(layer, f"{n}_re"), getattr(layer, f"{n}_im")) for n in ("lambda", "B", "C"))
    y = layer(x)[0][0]
    kernel = [(c @ torch.diag(a**j) @ b).real + (torch.diag(layer.D) if j == 0 else 0) for j in range(T)]
    convolved = torch.stack([sum(kernel[j] @ x[0, t - j] for j in range(t + 1)) for t in range(T)])
    torch.testing.assert_close(y, convolved)
    P = torch.randn(6, 6, dtype=torch.complex128)
    A, B, C = P @ torch.diag(a) @ P.inverse(), P @ b, c @ P.inverse()
    s, dense = torch.zeros(6, dtype=torch.complex128), []
    for step in x[0]:
        s = A @ s + B @ step.to(s.dtype)
        dense.append((C @ s).real + layer.D * step)
    torch.testing.assert_close(y, torch.stack(dense))
