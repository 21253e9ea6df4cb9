"""GLU: its equation step by step, its relatives, and what it refuses."""

import pytest
import torch

from by_hand import DIM, gelu_tanh, linear, sigmoid, silu
from scanl.layers.channel.gated_mlp import GatedMLP
from scanl.layers.channel.glu import GLU

HAND = {"sigmoid": sigmoid, "silu": silu, "gelu_tanh": gelu_tanh, "relu": lambda v: torch.where(v > 0, v, 0)}


def glu(layer, xs):
    f, ys = HAND[layer.activation], []
    for x in xs:
        up, gate = linear(layer.up, x), linear(layer.gate, x)
        y = (f(up) if layer.variant == "both" else up) * f(gate)
        ys.append(linear(layer.out, y) if hasattr(layer, "out") else y)
    return ys


EQUATIONS = {
    "glu": (lambda: GLU(DIM), glu),
    "glu_both": (lambda: GLU(DIM, 5, bias=False, activation="silu", variant="both"), glu),
    "glu_relu": (lambda: GLU(DIM, 6, activation="relu"), glu),
}

REFUSED = [
    (lambda: GLU(8, activation="sigmid"), r"glu: unknown activation 'sigmid'; did you mean 'sigmoid'\?"),
    (lambda: GLU(8, variant="none"), "glu: unknown variant 'none'"),
    (lambda: GLU(8, 0), "glu: hidden_dim is 0, expected at least 1"),
]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_with_an_output_map_it_is_gated_mlp(activation):
    x, layer = torch.randn(2, 5, DIM), GLU(DIM, 12, activation=activation)
    other = GatedMLP(DIM, hidden_dim=12, bias=True, activation=activation)
    names = {"up": layer.up, "gate": layer.gate, "down": layer.out}
    other.load_state_dict(
        {f"{name}.{kind}": getattr(part, kind) for name, part in names.items() for kind in ("weight", "bias")}
    )
    torch.testing.assert_close(layer(x)[0], other(x)[0])


def test_it_is_the_gated_linear_unit_of_torch():
    x, layer = torch.randn(2, 5, DIM), GLU(DIM)
    halves = torch.cat([layer.up(x), layer.gate(x)], -1)
    torch.testing.assert_close(layer(x)[0], torch.nn.functional.glu(halves))
