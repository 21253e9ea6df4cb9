"""Columnar-constructive network: its equation step by step, how it grows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, linear, sigmoid
from scanl.layers.rnn.columnar_constructive import BLOCK, ColumnarConstructive, Constructive

pytestmark = pytest.mark.cells_by_loop


def normed(layer, value, figures):
    """No gradient flows through the figures."""
    mean = layer.decay * figures[0] + (1 - layer.decay) * value.detach()
    variance = layer.decay * figures[1] + (1 - layer.decay) * (value.detach() - mean) ** 2
    return (value - mean) / torch.sqrt(torch.clamp(variance, min=layer.floor)), (mean, variance)


def constructive(layer, xs):
    count, size = len(layer.stages), layer.columns
    h, c = torch.zeros(count, size), torch.zeros(count, size)
    seen = (torch.zeros(DIM), torch.ones(DIM))
    made = [(torch.zeros(size), torch.ones(size)) for _ in range(count)]
    ys = []
    for x in xs:
        read, seen = normed(layer, x, seen)
        known = [read]
        for k, stage in enumerate(layer.stages):
            i, f, g, o = linear(stage.gates, torch.cat(known)).view(4, size) + stage.recurrent * h[k]
            c[k] = sigmoid(f) * c[k] + sigmoid(i) * torch.tanh(g)
            h[k] = sigmoid(o) * torch.tanh(c[k])
            feature, made[k] = normed(layer, h[k], made[k])
            known.append(feature)
        ys.append(torch.cat(known[1:]) * layer.grown)
    return ys


def grown(stage=None, **options):
    layer = ColumnarConstructive(DIM, init_scale=0.7, **options)
    if stage is not None:
        layer.grow(stage)
    return layer


EQUATIONS = {
    "columnar_constructive": (lambda: grown(columns=4), constructive),
    "constructive": (lambda: grown(columns=1), constructive),
}

REFUSED = [
    (lambda: ColumnarConstructive(8, columns=3), "columnar_constructive: columns is 3, expected a divisor of dim=8"),
    (lambda: ColumnarConstructive(8, floor=0.0), "columnar_constructive: floor is 0.0, expected more than 0"),
    (lambda: Constructive(8, decay=1.5), "constructive: decay is 1.5, expected 0 to 1"),
]


@pytest.mark.usefixtures("double")
def test_the_equation_holds_where_figures_change_fast():
    """With this decay numerical derivatives see the figures, through which no gradient flows."""
    layer, x = grown(1, columns=2, decay=0.8), torch.randn(2, 9, DIM)
    for row, y in zip(x, layer(x)[0], strict=True):
        torch.testing.assert_close(y, torch.stack(constructive(layer, row)), rtol=1e-10, atol=1e-12)


def test_outputs_of_earlier_stages_are_the_same_to_the_bit_with_and_without_later_stages():
    layer, x = ColumnarConstructive(8, columns=2, init_scale=0.5), torch.randn(2, 9, 8)
    layer.grow(0)
    before, _ = layer(x)
    assert not before[..., 2:].any()
    layer.grow(2)
    after, _ = layer(x)
    assert torch.equal(after[..., :2], before[..., :2])
    assert after[..., 2:6].any()
    assert not after[..., 6:].any()
    assert "grown" in layer.state_dict()


@pytest.mark.usefixtures("double")
def test_stages_in_several_blocks_are_as_if_each_map_were_called():
    layer, x = ColumnarConstructive(3 * BLOCK, columns=BLOCK // 2, init_scale=0.5), torch.randn(2, 5, 3 * BLOCK)
    results = []
    for _ in range(2):
        y, _ = layer(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), list(layer.parameters()))])
        for stage in layer.stages:
            stage.gates.register_forward_hook(lambda *_: None)
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)
