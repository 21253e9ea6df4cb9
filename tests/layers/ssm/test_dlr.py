"""DLR: its equation step by step, and how it starts."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform
from scanl.layers import DLR
from tests.layers.ssm.equations import after_systems, without_decay


def dlr(layer, xs):
    kernel = layer.kernel
    Lambda = torch.exp(torch.complex(-(kernel.Lambda_log_neg_re**2), kernel.Lambda_im))
    W, s, ys = torch.complex(*kernel.W[0].unbind(-1)), torch.zeros(layer.dim, layer.state_dim, dtype=Lambda.dtype), []
    for x in xs:
        s = Lambda * s + x[:, None]
        read = (W * s).sum(1)
        read = {"real": read.real, "imag": read.imag, "sum": read.real + read.imag}[layer.config["variant"]]
        ys.append(after_systems(layer, read, x))
    return ys


EQUATIONS = {
    "dlr": (lambda: DLR(DIM, 6), dlr),
    "dlr_imag": (lambda: DLR(DIM, 5, "imag"), dlr),
    "dlr_sum": (lambda: DLR(DIM, 5, "sum"), dlr),
}


@pytest.mark.usefixtures("double")
def test_init_of_dlr():
    layer = DLR(50, 20_000)
    assert_uniform(torch.log(2 * layer.kernel.Lambda_log_neg_re**2), math.log(1e-4), math.log(1e-1))
    torch.testing.assert_close(layer.kernel.Lambda_im.detach(), 2 * math.pi * torch.arange(20_000.0) / 20_000)
    assert_normal(layer.kernel.W, 1 / 20_000)
    slow = ("kernel.Lambda_im", "kernel.Lambda_log_neg_re", "kernel.W")
    found = dict.fromkeys(slow, (0.0, 1e-4)) | dict.fromkeys(("D", "output_linear.bias"), (0.0, None))
    assert without_decay(layer) == found
