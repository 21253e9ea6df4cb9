"""S4ND: a separable convolution over the axes of a grid."""

import pytest
import torch

from by_hand import gelu, shaken
from scanl.errors import ConfigError, ShapeError
from scanl.layers import S4D, param_groups
from scanl.models.whole.s4nd import S4ND
from scanl.ops import ssm_kernel_diagonal


def two_sided(kernel, length, rate, kept=slice(None)):
    """The lags -(length - 1), ..., length - 1 of each channel, (D, 2 length - 1), by the powers of the system."""
    A, C, dt = kernel.system()
    lags = torch.arange(length)
    Bd = (torch.exp(rate * dt[:, None] * A) - 1) / A
    powers = torch.exp(rate * dt[:, None, None] * A[..., None] * lags)[:, kept]
    ahead = 2 * (C[:, kept, None] * Bd[:, kept, None] * powers).real.sum(1)
    if kernel.C_back is None:
        return torch.cat([torch.zeros(len(C), length - 1), ahead], 1)
    back = torch.view_as_complex(kernel.C_back)
    behind = 2 * (back[:, kept, None] * Bd[:, kept, None] * powers).real.sum(1)
    return torch.cat([behind[:, : length - 1].flip(1), ahead], 1)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("rank", "causal", "rate"), [(1, None, 1.0), (2, (True, False), (1.0, 0.5))])
def test_it_is_the_sum_over_the_grid(rank, causal, rate):
    layer = shaken(S4ND(3, 2, 4, rank, causal, dt_min=0.1, dt_max=0.5))
    x, rates = torch.randn(2, 4, 18, 3), [rate] * 2 if rate == 1.0 else rate
    expected = torch.zeros_like(x)
    for r in range(rank):
        one, two = (two_sided(layer.kernels[a * rank + r], x.shape[a + 1], rates[a]) for a in range(2))
        for i in range(4):
            for j in range(18):
                weights = one[:, 3 + i - torch.arange(4)][:, :, None] * two[:, 17 + j - torch.arange(18)][:, None]
                expected[:, i, j] += torch.einsum("dmn,bmnd->bd", weights, x) / rank
    gate, scale = layer.output_linear[0](gelu(expected + layer.D * x)).chunk(2, -1)
    torch.testing.assert_close(layer(x, rate=rate), gate * scale.sigmoid())


@pytest.mark.usefixtures("double")
def test_it_is_the_convolution_of_scipy():
    """Three axes, against a dense kernel."""
    signal = pytest.importorskip("scipy.signal")
    layer, x = S4ND(2, 3, 4, dt_min=0.1, dt_max=0.5), torch.randn(1, 4, 5, 6, 2)
    with torch.no_grad():
        one, two, three = (two_sided(kernel, n, 1.0) for kernel, n in zip(layer.kernels, (4, 5, 6), strict=True))
        dense = one[:, :, None, None] * two[:, None, :, None] * three[:, None, None]
        found = [signal.fftconvolve(x[0, ..., d], dense[d])[3:7, 4:9, 5:11] for d in range(2)]
        y = torch.stack([torch.from_numpy(each) for each in found], -1)
        torch.testing.assert_close(layer(x)[0], layer.output_linear(gelu(y + layer.D * x[0])))


@pytest.mark.usefixtures("double")
def test_one_causal_axis_is_s4d():
    layer, plain, x = S4ND(4, 1, 6, causal=[True]), S4D(4, 6), torch.randn(2, 9, 4)
    with torch.no_grad():
        for name, value in layer.kernels[0].named_parameters():
            plain.kernel.get_parameter(name).copy_(value)
        plain.D.copy_(layer.D)
        plain.output_linear[0].weight.copy_(layer.output_linear[0].weight[..., None])
        plain.output_linear[0].bias.copy_(layer.output_linear[0].bias)
    torch.testing.assert_close(layer(x), plain(x)[0])
    assert layer.kernels[0].C_back is None


@pytest.mark.usefixtures("double")
def test_twice_the_resolution_samples_the_same_signal():
    """Each number twice, at half the rate, gives at every second place what the coarse grid gives, as if held."""
    layer, x = S4ND(2, 1, 8, causal=[True], bandlimit=0.5, dt_min=0.05, dt_max=0.2), torch.randn(1, 12, 2)
    torch.testing.assert_close(layer(x.repeat_interleave(2, 1), rate=0.5)[:, 1::2], layer(x))
    A, _, dt = layer.kernels[0].system()
    kept = A.imag.abs() * dt[:, None] / (2 * torch.pi) < 0.25
    assert kept.any()
    assert not kept.all()
    clean = S4ND(2, 1, 8, causal=[True])
    clean.load_state_dict(layer.state_dict())
    with torch.no_grad():
        clean.kernels[0].C.mul_(kept[..., None])
    torch.testing.assert_close(layer(x), clean(x))
    system = layer.kernels[0].system()
    kernel = ssm_kernel_diagonal(system[0], torch.ones_like(system[0]), system[1] * kept, system[2], 12)
    torch.testing.assert_close(two_sided(clean.kernels[0], 12, 1.0)[:, 11:], kernel)


def test_it_trains_and_refuses_wrong_input():
    layer = S4ND(4, 2, 4)
    layer(torch.randn(2, 3, 5, 4)).square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.any() for p in layer.parameters())
    slow = [group for group in param_groups(layer) if group.get("lr") == 1e-3]
    assert [(len(group["params"]), group["weight_decay"]) for group in slow] == [(6, 0.0)]
    assert layer(torch.randn(0, 3, 5, 4)).shape == (0, 3, 5, 4)
    with pytest.raises(ShapeError, match=r"s4nd: x has shape \(2, 3, 4\), expected \(B, L_1, L_2, 4\)"):
        layer(torch.randn(2, 3, 4))
    with pytest.raises(ConfigError, match=r"s4nd: rate is \[1.0\], expected 2 numbers above 0 because of axes"):
        layer(torch.randn(2, 3, 5, 4), rate=[1.0])
    for options, message in (
        ({"axes": 0}, "axes is 0, expected at least 1"),
        ({"rank": 0}, "rank is 0, expected at least 1"),
        ({"causal": [True]}, r"causal is \(True,\), expected 2 truth values"),
    ):
        with pytest.raises(ConfigError, match=message):
            S4ND(4, **options)
