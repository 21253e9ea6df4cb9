"""GatedAttention: its equation step by step, how it starts, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_uniform, linear
from scanl.errors import ConfigError, ShapeError
from scanl.layers.rnn.gatedattn import GatedAttention
from scanl.ops import linear_attention

pytestmark = pytest.mark.cells_by_loop


def gatedattn(layer, xs):
    h, ys = torch.zeros(layer.width), []
    for x in xs:
        h = torch.exp(-torch.exp(layer.nu_log)) * h + linear(layer.in_m, x) * linear(layer.in_x, x)
        ys.append(layer.readout.weight @ ((layer.out_m.weight @ h) * (layer.out_x.weight @ h)))
    return ys


EQUATIONS = {"gatedattn": (lambda: GatedAttention(DIM, 6, 5), gatedattn)}

REFUSED = [(lambda: GatedAttention(8, 0), "gatedattn: width is 0, expected at least 1")]


@pytest.mark.usefixtures("double")
def test_gated_attention_is_linear_attention():
    layer, x, weights = GatedAttention(3, 12, 9), torch.randn(2, 7, 3), torch.randn(3, 3, 3)
    layer.set_attention(*weights)
    q, k, v = (x @ w.T for w in weights)
    expected, _ = linear_attention(q[:, :, None], k[:, :, None], v[:, :, None], scale=1.0)
    torch.testing.assert_close(layer(x)[0], expected[:, :, 0])
    with pytest.raises(ConfigError, match="gatedattn: width is 3, expected 12 because of dim=3"):
        GatedAttention(3).set_attention(*weights)
    with pytest.raises(ShapeError, match=r"gatedattn: key has shape \(2, 3\), expected \(3, 3\)"):
        layer.set_attention(weights[0], weights[1][:2], weights[2])


def test_init_of_gated_attention():
    layer = GatedAttention(64, 512)
    assert_uniform((-layer.nu_log.exp()).exp(), 0, 1)
    assert_uniform(layer.in_m.weight, -1 / 8, 1 / 8)
