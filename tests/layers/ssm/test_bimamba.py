"""Mamba in both directions: Vision Mamba's mixer, that of Caduceus, and equivariance to the reverse complement."""

import pytest
import torch

from by_hand import DIM, shaken, silu, softplus
from by_hand import convolve as by_hand_convolve
from scanl.errors import ConfigError
from scanl.layers import BiMamba, CaduceusMixer, ReverseComplement


def direction(layer, us, zs, suffix):
    conv, x_proj, dt_proj = (layer.get_submodule(name + suffix) for name in ("conv1d", "x_proj", "dt_proj"))
    A_log, D = (layer.A_b_log, layer.D_b) if suffix else (layer.A_log, layer.D)
    h, ys = torch.zeros_like(A_log), []
    for u, z in zip([silu(u) for u in by_hand_convolve(us, conv)], zs, strict=True):
        low, B, C = (x_proj.weight @ u).split([layer.rank, layer.state_dim, layer.state_dim])
        delta = softplus(dt_proj.weight @ low + dt_proj.bias)
        h = torch.exp(-delta[:, None] * torch.exp(A_log)) * h + (delta * u)[:, None] * B
        ys.append((h @ C + D * u) * silu(z))
    return ys


def bimamba(layer, xs):
    us, zs = zip(*((layer.in_proj.weight @ x).chunk(2) for x in xs), strict=True)
    ahead = direction(layer, list(us), zs, "")
    back = direction(layer, list(us)[::-1], zs[::-1], "_b")[::-1]
    scale = 0.5 if layer.divide_out else 1
    return [scale * (layer.out_proj.weight @ (a + b)) for a, b in zip(ahead, back, strict=True)]


def reverse_complement(layer, xs):
    half = layer.dim // 2
    one = bimamba(layer.layer, [x[:half] for x in xs])
    other = bimamba(layer.layer, [x[half:].flip(0) for x in xs[::-1]])[::-1]
    return [torch.cat([a, b.flip(0)]) for a, b in zip(one, other, strict=True)]


SIZES = {"state_dim": 3, "conv_size": 3, "rank": 2}
EQUATIONS = {
    "vim": (lambda: BiMamba(DIM, **SIZES), bimamba),
    "caduceus": (lambda: CaduceusMixer(DIM, **SIZES), bimamba),
    "reverse_complement": (lambda: ReverseComplement(DIM, layer_options=SIZES), reverse_complement),
}


@pytest.mark.usefixtures("double")
def test_the_reverse_complement_of_the_input_gives_that_of_the_output():
    layer, x = shaken(ReverseComplement(DIM, layer_options=SIZES)), torch.randn(2, 11, DIM)
    torch.testing.assert_close(layer(x.flip(1, 2))[0], layer(x)[0].flip(1, 2))


@pytest.mark.usefixtures("double")
def test_equal_directions_make_reversal_symmetric():
    layer, x = shaken(BiMamba(DIM, **SIZES)), torch.randn(2, 11, DIM)
    with torch.no_grad():
        layer.A_b_log.copy_(layer.A_log)
        layer.D_b.copy_(layer.D)
        for name in ("conv1d", "x_proj", "dt_proj"):
            layer.get_submodule(f"{name}_b").load_state_dict(layer.get_submodule(name).state_dict())
    torch.testing.assert_close(layer(x.flip(1))[0], layer(x)[0].flip(1))


def test_both_directions_start_as_mamba():
    layer = BiMamba(64, state_dim=5)
    expected = torch.arange(1.0, 6).log().repeat(128, 1)
    for A_log, D, dt_proj in ((layer.A_log, layer.D, layer.dt_proj), (layer.A_b_log, layer.D_b, layer.dt_proj_b)):
        assert torch.equal(A_log, expected)
        assert (D == 1).all()
        step = softplus(dt_proj.bias)
        assert 1e-3 * 0.999 <= step.min() <= step.max() <= 0.1 * 1.001
    assert not torch.equal(layer.x_proj.weight, layer.x_proj_b.weight)


def test_an_odd_width_has_no_strands():
    with pytest.raises(ConfigError, match="reverse_complement: dim is 5, expected an even number of at least 2"):
        ReverseComplement(5)
