"""Impulse responses beside kernels."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.inspect import impulse_response
from scanl.inspect.base import noise
from scanl.layers import LRU, Elman


def test_that_of_a_linear_system_is_its_kernel():
    """C diag(λ)^k B, and D more at step 0, for every input, whatever else the layer reads."""
    torch.manual_seed(0)
    layer = LRU(3).double()
    response = impulse_response(layer, noise(2, 12, 3), channels=[0, 2]).response
    value = torch.polar((-layer.nu_log.exp()).exp(), layer.theta_log.exp())
    B = torch.complex(layer.B_re, layer.B_im) * layer.gamma_log.exp()[:, None]
    C = torch.complex(layer.C_re, layer.C_im)
    powers = value ** torch.arange(12)[:, None]
    kernel = torch.einsum("dn,kn,ni->ikd", C, powers, B).real
    kernel[:, 0] += torch.diag(layer.D)
    for row in response:
        torch.testing.assert_close(row, kernel[[0, 2]].detach(), rtol=1e-8, atol=1e-9)


def test_that_of_a_nonlinear_layer_is_the_derivative():
    torch.manual_seed(0)
    layer, x = Elman(3).double(), noise(1, 6, 3)
    exact = torch.autograd.functional.jacobian(lambda first: layer(torch.cat([first, x[:, 1:]], 1))[0][0], x[:, :1])
    response = impulse_response(layer, x).response[0]  # (C, K, D)
    torch.testing.assert_close(response, exact[:, :, 0, 0].movedim(2, 0), rtol=1e-6, atol=1e-8)


def test_in_pieces_as_at_once(monkeypatch):
    torch.manual_seed(0)
    layer, x = LRU(5), noise(1, 8, 5)
    whole = impulse_response(layer, x)
    monkeypatch.setattr("scanl.inspect.impulse.BUDGET", 1)
    assert whole.channels.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(impulse_response(layer, x).response, whole.response)


def test_wrong_channels():
    for channels in ([4], [-1], []):
        with pytest.raises(ConfigError, match=r"impulse_response: channels is .*, expected some from 0 to 3"):
            impulse_response(LRU(4), channels=channels)
    with pytest.raises(ConfigError, match="impulse_response: x has 1 step, expected at least 2"):
        impulse_response(LRU(4), noise(1, 1, 4))
