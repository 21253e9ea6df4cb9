"""Laws over every layer of what surrounds it: sizes by default, autocast, export, the meta device, dtypes, repr."""

import inspect
from functools import cache

import pytest
import torch
from test_layers import CASES, DIM, REGISTERED, STREAMING, inputs, make, make_like
from torch import nn

from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import state as states
from scanl.models.block import CHANNEL_MIXERS

WIDTHS = (128, 256, 1024)
INSIDE = {"bidirectional": 2, "multi_scale": 4}  # whole layers in one
STEPS_KEPT = ("max_length", "l_max", "window")  # options: how many steps the state keeps as they are


def state_size(layer):
    """Floats of state a sequence; a complex number counts as two."""
    parts = [leaf for _, leaf in states.leaves(layer.init_state(1, device="meta"))]
    return sum((2 if leaf.is_complex() else 1) * leaf.numel() for leaf in parts)


@pytest.mark.parametrize("dim", WIDTHS)
@pytest.mark.parametrize("name", REGISTERED)
def test_default_sizes_are_in_proportion(name, dim):
    """At most 8 D² parameters and 400 D (maps of a few numbers a channel) for each layer inside.

    Of state at most 2 D² (a matrix memory of one head of twice the width has 4 / H of them) and 300 D, and a
    key and a value of D for each step that is kept. Sizes that do not follow D leave this at one width or another.
    """
    with torch.device("meta"):
        layer = layers.build(name, dim)
    inside = INSIDE.get(name, 1)
    assert sum(p.numel() for p in layer.parameters()) <= inside * (8 * dim**2 + 400 * dim)
    defaults = {option: p.default for option, p in inspect.signature(layers.get(name)).parameters.items()}
    kept = sum(defaults.get(option) or 0 for option in STEPS_KEPT)
    assert state_size(layer) <= inside * (2 * dim**2 + 300 * dim) + 2 * kept * dim


def test_the_default_widths_of_gated_deltanet_are_the_published_ones():
    """Queries and keys of 3/4 D, values of 3/2 D: Yang et al., arXiv:2412.06464; 6 heads of 256 at their 2,048."""
    with torch.device("meta"):
        for dim in (64, 256, 1024, 2048):
            layer = layers.build("gated_deltanet", dim)
            assert (layer.q_proj.out_features, layer.k_proj.out_features) == (3 * dim // 4, 3 * dim // 4)
            assert (layer.v_proj.out_features, layer.g_proj.out_features) == (3 * dim // 2, 3 * dim // 2)
        assert layer.memory == (6, 256, 512)
        # Where 6 heads do not divide 3/4 D: the nearest whole head.
        assert [layers.build("gated_deltanet", dim).head_dim for dim in (1, 12, 100)] == [1, 2, 12]
        assert layers.build("gated_deltanet", 64, num_heads=4).head_dim == 12
