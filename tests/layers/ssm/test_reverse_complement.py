"""ReverseComplement: its equation step by step, and what only it knows."""

import pytest
import torch

from by_hand import DIM, shaken
from scanl.errors import ConfigError
from scanl.layers import ReverseComplement
from tests.layers.ssm.equations import SIZES, bimamba


def reverse_complement(layer, xs):
    half = layer.dim // 2
    one = bimamba(layer.layer, [x[:half] for x in xs])
    other = bimamba(layer.layer, [x[half:].flip(0) for x in xs[::-1]])[::-1]
    return [torch.cat([a, b.flip(0)]) for a, b in zip(one, other, strict=True)]


EQUATIONS = {"reverse_complement": (lambda: ReverseComplement(DIM, layer_options=SIZES), reverse_complement)}


@pytest.mark.usefixtures("double")
def test_the_reverse_complement_of_the_input_gives_that_of_the_output():
    layer, x = shaken(ReverseComplement(DIM, layer_options=SIZES)), torch.randn(2, 11, DIM)
    torch.testing.assert_close(layer(x.flip(1, 2))[0], layer(x)[0].flip(1, 2))


def test_an_odd_width_has_no_strands():
    with pytest.raises(ConfigError, match="reverse_complement: dim is 5, expected an even number of at least 2"):
        ReverseComplement(5)
