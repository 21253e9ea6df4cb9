"""Layers and models over a sequence that ranks divide."""

import copy

import pytest
import torch

from scanl import layers
from scanl.errors import ConfigError
from scanl.layers.state import leaves
from scanl.models import LanguageModel, SequenceClassifier, Stack
from scanl.parallel import by_ops, stretch, stretch_offsets
from scanl.parallel.context import divide
from threads_as_ranks import on_ranks

CAUSAL = [name for name in layers.names() if not layers.get(name).bidirectional]


def trained(module, x, dy, **more):
    """Run both passes in float64, and return y, the last state and the gradients."""
    module.zero_grad()
    y, state = module(x, **more)
    (y * dy).sum().backward()
    return y.detach(), state, {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("name", CAUSAL)
def test_a_layer_over_ranks_equals_the_layer(name):
    torch.manual_seed(0)
    cls = layers.get(name)
    layer = layers.build(name, 12, **cls.sample).double()
    x, dy = torch.randn(2, 9, 12, dtype=torch.float64), torch.randn(2, 9, 12, dtype=torch.float64)
    y, last, expected = trained(copy.deepcopy(layer), x, dy)
    lengths = [3, 4, 2]

    def work(ranks):
        own = divide(copy.deepcopy(layer), ranks)
        cut = [stretch(t, ranks.rank, 3, lengths=lengths) for t in (x, dy)]
        return trained(own, *cut)

    results = on_ranks(3, work)
    torch.testing.assert_close(torch.cat([part for part, *_ in results], 1), y, rtol=1e-9, atol=1e-9)
    for weight, gradient in expected.items():
        found = sum(g[weight] for *_, g in results if weight in g)
        torch.testing.assert_close(found, gradient, rtol=1e-8, atol=1e-8)
