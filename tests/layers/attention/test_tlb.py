"""TemporalLatentBottleneck: its equation step by step, what only it knows, and what it refuses."""

import math

import pytest
import torch

from by_hand import DIM, assert_normal, gelu_tanh, layer_norm, linear
from scanl import layers
from tests.layers.attention.test_transformer_xl import code

NAME = "tlb"


def mixed(block, h, others):
    """One vector h through a block that attends to `others`; they have the block's norm if it has no other."""
    H, normed = block.num_heads, layer_norm(h, block.norm)
    others = [layer_norm(s, block.norm if block.other_norm is None else block.other_norm) for s in others]
    q = (block.q_proj.weight @ normed).view(H, -1)
    ks, vs = ([(p.weight @ s).view(H, -1) for s in others] for p in (block.k_proj, block.v_proj))
    out = []
    for head in range(H):
        weights = (torch.stack([k[head] for k in ks]) @ q[head] / math.sqrt(q.shape[1])).exp()
        out.append(sum(w * v[head] for w, v in zip(weights / weights.sum(), vs, strict=True)))
    h = h + block.o_proj.weight @ torch.cat(out)
    return h + linear(block.mlp.fc2, gelu_tanh(linear(block.mlp.fc1, layer_norm(h, block.mlp_norm))))


def tlb(layer, xs):
    slots, ys = [torch.zeros(DIM)] * layer.num_slots, []
    for first in range(0, len(xs), layer.chunk_size):
        hs = [x + code(place, DIM) for place, x in enumerate(xs[first : first + layer.chunk_size])]
        slots = [s + code(n, DIM) for n, s in enumerate(slots)]
        for block in layer.fast:
            hs = [mixed(block, h, hs[: i + 1]) for i, h in enumerate(hs)]
        hs = [mixed(layer.reader, h, slots) for h in hs]
        slots = [mixed(layer.slow, s, hs) for s in slots]
        ys += [layer_norm(h, layer.norm) for h in hs]
    return ys


def make(**more):
    return layers.build(NAME, DIM, **{"num_heads": 2, "num_slots": 3, "chunk_size": 2, "depth": 1} | more)


EQUATIONS = {
    NAME: (make, tlb),
    f"{NAME}_deep": (lambda: make(depth=2, num_slots=2, chunk_size=3, expand=1.0, num_heads=4), tlb),
}

WRONG = [(NAME, {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8"), (NAME, {"depth": 0}, "depth is 0")]


def test_initial_values():
    assert_normal(layers.build(NAME, 64).slow.q_proj.weight, 1 / 8)


@pytest.mark.usefixtures("double")
def test_earlier_chunks_act_through_the_slow_stream_alone():
    layer, x = make(), torch.randn(2, 6, DIM)
    _, state = layer(x[:, :4])
    alone = layer.init_state(2)._replace(slots=state.slots)
    torch.testing.assert_close(layer(x[:, 4:], alone)[0], layer(x)[0][:, 4:])
    assert not torch.allclose(layer(x[:, 4:])[0], layer(x)[0][:, 4:])
