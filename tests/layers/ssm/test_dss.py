"""DSS: its equation step by step, and how it starts."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform
from scanl.layers import DSS, DSSSoftmax
from scanl.layers.parts import hippo
from tests.layers.ssm.equations import after_systems, held, without_decay


def dss(layer, xs, spans=None):
    """The kernel lag by lag as the paper has it; the time between two steps takes the place of the lag."""
    kernel = layer.kernel
    step = torch.exp(kernel.log_dt)
    step = step if step.ndim == 2 else torch.stack([step, step], 1)
    if kernel.max_length is None:
        Lambda = torch.complex(-torch.exp(kernel.Lambda_log_neg_re), kernel.Lambda_im)
    else:
        Lambda = torch.complex(*kernel.Lambda.unbind(-1))
    A, W = torch.complex(step[:, :1] * Lambda.real, step[:, 1:] * Lambda.imag), torch.complex(*kernel.W[0].unbind(-1))
    times = torch.cat([torch.zeros(1), held(spans, xs).cumsum(0)])
    ys = []
    for t in range(len(xs)):
        read = 0
        for s in range(t + 1):
            power = torch.exp(A * (times[t + 1] - times[s + 1]))
            if kernel.max_length is None:
                entering = (torch.exp(A * (times[s + 1] - times[s])) - 1) / Lambda
            else:
                powers = torch.stack([torch.exp(A * r) for r in range(kernel.max_length)])
                q = Lambda * (torch.exp(torch.where(Lambda.real > 0, -A, A) * kernel.max_length) - 1)
                bound = q.abs() ** 2 / (q.abs() ** 2 + 1e-7)
                entering = bound / Lambda / powers.sum(0)
            read = read + (W * entering * power).sum(1) * xs[s]
        ys.append(after_systems(layer, read.real, xs[t]))
    return ys


def growing_modes(layer):
    """The real parts of λ of every other mode above 0."""
    with torch.no_grad():
        layer.kernel.Lambda[::2, 0] = 0.7
    return layer


EQUATIONS = {
    "dss": (lambda: DSS(DIM, 5), dss),
    "dss_of_one_step_size": (lambda: DSS(DIM, 3, init="lin", sep_dt_re_im=False), dss),
    "dss_softmax": (lambda: DSSSoftmax(DIM, 4, max_length=9), dss),
    "dss_softmax_growing": (lambda: growing_modes(DSS(DIM, 4, 60, sep_dt_re_im=False)), dss),
}


@pytest.mark.usefixtures("double")
def test_init_of_dss():
    layer = DSS(3000)
    kernel, both = layer.kernel, hippo.diagonal_legs(128).Lambda
    torch.testing.assert_close(kernel.Lambda_log_neg_re.exp(), torch.full((64,), 0.5))
    torch.testing.assert_close(kernel.Lambda_im.detach(), both.imag[both.imag > 0])
    torch.testing.assert_close(kernel.log_dt[:, 0], kernel.log_dt[:, 1])
    assert_uniform(kernel.log_dt[:, 0], math.log(1e-3), math.log(1e-1))
    assert_normal(kernel.W, 1.0)
    assert_normal(layer.D, 1.0)
    free = DSSSoftmax(2, init="lin", sep_dt_re_im=False).kernel
    expected = torch.stack([torch.full((64,), -0.5), math.pi * torch.arange(64.0)], 1)
    torch.testing.assert_close(free.Lambda.detach(), expected)
    assert free.log_dt.shape == (2,)
    slow = dict.fromkeys((f"kernel.{name}" for name, _ in kernel.named_parameters()), (0.0, 1e-3))
    assert without_decay(layer) == slow | dict.fromkeys(("D", "output_linear.bias"), (0.0, None))
