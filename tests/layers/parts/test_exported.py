"""A layer as one operator: what it returns, and what it refuses."""

import pytest
import torch
from torch.nn.utils import parametrizations

from scanl.errors import ConfigError
from scanl.layers import build
from scanl.layers.parts.exported import exported


@pytest.mark.usefixtures("double")
def test_the_operator_returns_what_the_layer_returns():
    layer, x = build("rmt", 8, num_heads=2, num_slots=2, chunk_size=3), torch.randn(2, 7, 8)
    with torch.no_grad():
        y, state = layer(x)
        torch.testing.assert_close(exported(layer, x, None), (y, state))
        torch.testing.assert_close(exported(layer, x, state), layer(x, state))


def test_a_layer_whose_parameters_have_other_names_is_refused():
    layer = build("transformer_xl", 8, num_heads=2)
    parametrizations.weight_norm(layer.o_proj)
    message = r"transformer_xl: its parameters differ from those of a new one in \[.*o_proj.*\], expected the same"
    with pytest.raises(ConfigError, match=message):
        exported(layer, torch.randn(1, 3, 8), None)
