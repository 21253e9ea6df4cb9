"""LRU: its equation step by step, and how it starts."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, assert_uniform
from scanl.layers import LRU
from tests.layers.ssm.equations import held


def lru(layer, xs, spans=None):
    log = torch.complex(-layer.nu_log.exp(), layer.theta_log.exp())
    B, C = torch.complex(layer.B_re, layer.B_im), torch.complex(layer.C_re, layer.C_im)
    h, ys = torch.zeros_like(log), []
    for x, span in zip(xs, held(spans, xs), strict=True):
        entered = (torch.exp(log * span) - 1) / (torch.exp(log) - 1)
        h = torch.exp(log * span) * h + entered * layer.gamma_log.exp() * (B @ x.to(B.dtype))
        ys.append((C @ h).real + layer.D * x)
    return ys


EQUATIONS = {"lru": (lambda: LRU(DIM, 5), lru)}


@pytest.mark.parametrize(("r_min", "r_max", "max_phase"), [(0.0, 1.0, 2 * math.pi), (0.9, 0.999, math.pi / 10)])
def test_init_of_lru(r_min, r_max, max_phase):
    layer = LRU(16, 20_000, r_min, r_max, max_phase)
    radius, phase = torch.exp(-layer.nu_log.exp()), layer.theta_log.exp()
    assert_uniform(radius.double() ** 2, r_min**2 - 1e-6, r_max**2 + 1e-6)  # uniform over the ring's area
    assert_uniform(phase, 0, max_phase * (1 + 1e-6))
    normalised = layer.gamma_log.exp() ** 2 / (1 - radius.double() ** 2)
    torch.testing.assert_close(normalised.median(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=0)
    assert layer.gamma_log.isfinite().all()
    assert layer.nu_log.isfinite().all()
    for B in (layer.B_re, layer.B_im):
        assert_normal(B, math.sqrt(1 / 32))
    for C in (layer.C_re, layer.C_im):
        assert_normal(C, math.sqrt(1 / 20_000))
    assert_normal(LRU(10_000, 1).D, 1.0)
