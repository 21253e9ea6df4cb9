"""SGConv: its equation step by step, how it starts, and what only it knows."""

import pytest
import torch

from by_hand import DIM, assert_normal
from scanl.layers import SGConv
from tests.layers.ssm.equations import after_systems


def sgconv(layer, xs):
    """The kernel lag by lag: between the middles of two stretched numbers runs a line."""
    k, scales, lags = layer.conv_size, len(layer.kernel_list), []
    for i, w in enumerate(layer.kernel_list):
        stretch = 2 ** max(0, i - 1)
        for j in range(k * stretch):
            at = min(max((j + 0.5) / stretch - 0.5, 0.0), k - 1.0)
            low = int(at)
            value = (1 - (at - low)) * w[0, :, low] + (at - low) * w[0, :, min(low + 1, k - 1)]
            lags.append(value * layer.multiplier[0, :, 0] ** (scales - 1 - i))
    assert len(lags) >= layer.max_length
    ys = []
    for t in range(len(xs)):
        read = sum(lags[j] * xs[t - j] for j in range(min(layer.max_length, t + 1)))
        ys.append(after_systems(layer, read / layer.kernel_norm[0, :, 0], xs[t]))
    return ys


EQUATIONS = {
    "sgconv": (lambda: SGConv(DIM, 4, 1, 1.5, 3.0), sgconv),
    "sgconv_of_one_scale": (lambda: SGConv(DIM, 3, 8), sgconv),
}


@pytest.mark.usefixtures("double")
def test_sgconv_stretches_its_kernels():
    """Four scales, the longest stretched fourfold and cut, over more steps than there are lags; and piece by piece."""
    layer, x = SGConv(DIM, 31, 4, 1.5, 4.0), torch.randn(1, 40, DIM)
    whole, last = layer(x)
    torch.testing.assert_close(whole[0], torch.stack(sgconv(layer, list(x[0]))))
    for size in (1, 7, 33):
        state, ys = None, []
        for piece in x.split(size, 1):
            y, state = layer(piece, state)
            ys.append(y)
        torch.testing.assert_close(torch.cat(ys, 1), whole)
        torch.testing.assert_close(state, last)


@pytest.mark.usefixtures("double")
def test_init_of_sgconv():
    layer = SGConv(3000, 64, 16, 1.0, 3.0)
    assert len(layer.kernel_list) == 3
    for kernel in layer.kernel_list:
        assert_normal(kernel, 1.0)
    assert_normal(layer.D, 1.0)
    torch.testing.assert_close(layer.multiplier.flatten(), 1 + 2 * torch.arange(3000.0) / 2999)
    response = layer._kernels() / layer.kernel_norm
    assert response.shape == (1, 3000, 64)
    torch.testing.assert_close(response.square().sum(-1), torch.ones(1, 3000))
