"""GatedMLP: its equation step by step."""

from by_hand import DIM
from scanl.layers.channel.gated_mlp import GatedMLP


def sglu(layer, xs):
    return [layer.down.weight @ ((layer.gate.weight @ x) * (layer.up.weight @ x)) for x in xs]


EQUATIONS = {"gated_mlp_identity": (lambda: GatedMLP(DIM, activation="identity"), sglu)}
