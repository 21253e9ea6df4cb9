"""Claims of the literature about state-space models, each as an experiment that could come out otherwise."""

import math

import pytest
import torch

from scanl.errors import ConfigError, ShapeError
from scanl.inspect import decoded, reconstruction
from scanl.inspect.reconstruction import waves
from scanl.layers import LRU, S4D, HiPPO, LinRNNLTI
from scanl.layers import state as states
from scanl.ops import linear_attention, linear_scan, long_convolution, ssm_kernel_diagonal


def test_recurrence_convolution_and_scan_are_three_views_of_one_system():
    """Gu et al., arXiv:2110.13985: the same S4D by steps, by its kernel, and by a scan over discrete states."""
    layer, x = S4D(3, 6).double(), torch.randn(2, 50, 3, dtype=torch.float64)
    A, C, dt = layer.kernel.system()
    y, _ = long_convolution(x, ssm_kernel_diagonal(A, torch.ones_like(A), C, dt, 50))
    a = torch.exp(dt[:, None] * A)
    s, _ = linear_scan((a - 1) / A * x[..., None], a)
    torch.testing.assert_close(2 * (C * s).real.sum(-1), y)
    whole, last = layer(x)
    state, steps = layer.init_state(2), []
    for t in range(50):
        out, state = layer.step(x[:, t], state)
        steps.append(out)
    torch.testing.assert_close(torch.stack(steps, 1), whole)
    torch.testing.assert_close(dict(states.leaves(state)), dict(states.leaves(last)))


def test_linear_attention_without_a_normaliser_is_a_state_space_model():
    """Katharopoulos et al., arXiv:2006.16236: A = I, B = k, C = q; the state is a matrix."""
    q, k, v = (torch.randn(2, 20, 3, 4, dtype=torch.float64) for _ in range(3))
    y, _ = linear_attention(q, k, v, None, scale=1.0)
    s, _ = linear_scan(k[..., None] * v[..., None, :], torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(y, torch.einsum("bthk,bthkv->bthv", q, s))


@pytest.mark.parametrize("radius", [0.9, 1.0, 1.1])
def test_gradients_vanish_below_an_eigenvalue_of_one_and_explode_above(radius):
    """Pascanu et al., arXiv:1211.5063: of a linear recurrence the gradient over T steps goes as the radius to the T."""
    torch.manual_seed(0)
    layer = LinRNNLTI(4, 16).double()
    with torch.no_grad():
        phase = torch.atan2(layer.lambda_im, layer.lambda_re)
        layer.lambda_re.copy_(radius * phase.cos())
        layer.lambda_im.copy_(radius * phase.sin())
    x = torch.randn(1, 241, 4, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(layer(x)[0][0, -1].sum(), x)
    sizes = slope[0].norm(dim=1).flip(0)[1:]  # by the lag, from 1
    rate = (sizes[120:].log().mean() - sizes[:120].log().mean()) / 120
    assert abs(rate.item() - math.log(radius)) < 0.01


def test_complex_eigenvalues_near_the_circle_hold_more_of_the_past():
    """Orvieto et al., arXiv:2307.11888: what a linear map reads of past inputs from 32 real numbers of state."""
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(6000, generator=generator, dtype=torch.float64)
    radius = 0.97 + 0.02 * torch.rand(32, generator=generator, dtype=torch.float64)
    real, _ = linear_scan(u[None, :, None].expand(-1, -1, 32), radius)
    ring = torch.polar(radius[:16], math.pi * (torch.arange(16, dtype=torch.float64) + 0.5) / 16)
    complex_, _ = linear_scan(u[None, :, None].expand(-1, -1, 16).to(ring.dtype), ring)
    held = [
        decoded(u, each[0], 40).clamp(min=0).sum().item() for each in (real, torch.view_as_real(complex_).flatten(2))
    ]
    assert held[1] > 1.5 * held[0]
    assert held[1] <= 32


def test_a_random_selective_recurrence_projects_the_signature_and_a_fixed_one_does_not():
    """Cirone et al., arXiv:2402.19047: the signed area under a path, read by a linear map from 64 numbers of state."""
    generator = torch.Generator().manual_seed(0)
    dx = torch.randn(600, 40, 2, generator=generator, dtype=torch.float64) / math.sqrt(40)
    path = dx.cumsum(1) - dx
    area = (path[..., 0] * dx[..., 1] - path[..., 1] * dx[..., 0]).sum(1) / 2
    select, write = (torch.randn(2, 64, generator=generator, dtype=torch.float64) for _ in range(2))
    selective = linear_scan(dx @ write, torch.exp(dx @ select / 4))[1]
    fixed = linear_scan(dx @ write, torch.linspace(0.5, 1, 64, dtype=torch.float64))[1]
    left = []
    for state in (selective, fixed):
        read = torch.linalg.lstsq(state[:400], area[:400]).solution
        left.append(((area[400:] - state[400:] @ read).square().mean() / area[400:].var()).item())
    assert left[0] < 0.2
    assert left[1] > 0.9


def hold(signal, size, measure, theta=100.0):
    return reconstruction(HiPPO(1, size, measure, theta), signal[None, :, None])


def test_what_hippo_remembers():
    """The window of each measure comes back; a longer memory is not worse."""
    signal = waves(400)
    assert hold(signal, 32, "legt").error() < 0.05
    inspection = hold(signal, 64, "legs", 1.0)
    assert inspection.error() < 0.01 < hold(signal, 32, "legs").error()  # eighteen periods need more than 18 π numbers
    assert inspection.steps.tolist() == list(range(400))
    assert inspection.values.shape == (400,)
    assert hold(signal, 8, "legt").steps.tolist() == list(range(300, 400))
    assert hold(signal, 8, "lagt", 20.0).steps.tolist() == list(range(320, 400))  # four times θ
    assert hold(signal, 8, "lagt", 200.0).steps.tolist() == list(range(400))
    assert hold(signal, 8, "legt", 1000.0).steps.tolist() == list(range(400))
    assert hold(signal, 32, "fourier").what == "Fourier: the last 100 steps"


def test_what_is_no_signal_for_hippo():
    for shape in ((1, 1, 1), (2, 5, 1)):
        with pytest.raises(ShapeError, match=r"reconstruction: x has shape .*, expected \(1, T, 1\), T at least 2"):
            reconstruction(HiPPO(1, 8), torch.zeros(shape))
    with pytest.raises(ConfigError, match="reconstruction: layer is lru, expected hippo because its memory is a proj"):
        reconstruction(LRU(4))
