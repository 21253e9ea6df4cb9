"""BlockStateTransformer: its equation step by step in its three forms, what only it knows, and what it refuses."""

import pytest
import torch

from by_hand import DIM, assert_normal
from scanl import layers
from tests.layers.attention.test_block_recurrent import attention, bucket, projected
from tests.layers.attention.test_rmt import rms_norm
from tests.layers.ssm.test_s4d import s4d

NAME = "bst"


def bst(layer, xs):
    """Token by token, with the contexts of its block collected by a loop over positions."""
    W, H, ys = layer.window, layer.num_heads, []
    q, cross, k, v = projected(layer.tokens, xs)
    zeros = [torch.zeros_like(k[0])] * W
    k, v = zeros + k, zeros + v  # token t has the index W + t
    outputs = [s4d(system, xs) for system in layer.systems]

    def seen(t):
        """The contexts of token t, each as one vector for every head."""
        first = t - t % W
        if layer.variant == "multi_filter":
            last = layer.slots if first == 0 else [output[first - 1] for output in outputs]
            return [[rms_norm(layer.context_norm, c) + i] * H for c, i in zip(last, layer.ids, strict=True)]
        return [
            [rms_norm(layer.context_norm, outputs[head % len(outputs)][s]) for head in range(H)]
            for s in range(first, t + 1)
        ]

    def mapped(maps, context):
        if len(maps) == 1:
            return (maps[0].weight @ context[0]).view(H, -1)
        return torch.stack([linear.weight @ c for linear, c in zip(maps, context, strict=True)])

    for t in range(len(xs)):
        biases = [layer.bias[:, bucket(W - i)] for i in range(W)]
        among = attention(q[t], k[t : t + W], v[t : t + W], layer.tokens.scale, biases)
        keys = [mapped(layer.context_k, context) for context in seen(t)]
        keys = [key / torch.sqrt((key**2).sum(1, keepdim=True) + 1e-6) for key in keys]
        values = [mapped(layer.context_v, context) for context in seen(t)]
        across = attention(cross[t], keys, values, layer.tokens.cross_scale)
        ys.append(layer.o_proj.weight @ torch.cat([among, across]))
    return ys


def make(**more):
    return layers.build(
        NAME, DIM, **{"num_heads": 2, "window": 3, "num_slots": 2, "layer_options": {"state_dim": 4}} | more
    )


EQUATIONS = {
    NAME: (make, bst),
    f"{NAME}_multi_head": (lambda: make(variant="multi_head", head_dim=3), bst),
    f"{NAME}_multi_filter": (lambda: make(variant="multi_filter", window=2), bst),
}

WRONG = [
    (NAME, {"num_heads": 3}, "num_heads is 3, expected a divisor of dim=8 without head_dim"),
    (NAME, {"variant": "single"}, "unknown variant 'single'"),
    (NAME, {"layer": "bidirectional"}, "layer is 'bidirectional', expected a causal layer"),
    (
        NAME,
        {"layer": "linear_attention", "layer_options": {"causal": False}},
        "layer is 'linear_attention', expected a causal layer",
    ),
]


def test_initial_values():
    layer = layers.build(NAME, 64, variant="multi_filter", num_slots=3, layer="mega_ema")
    assert_normal(layer.slots, 0.1)
    assert_normal(layer.ids, 1.0)
    assert {type(system).name for system in layer.systems} == {"mega_ema"}
    first, second = (torch.cat([p.flatten() for p in system.parameters()]) for system in layer.systems[:2])
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("double")
def test_the_contexts_of_multi_filter_come_from_the_block_before():
    """With systems without memory, the last token reads the last step of the block before, or the steps of its own."""
    x = torch.randn(1, 9, DIM, requires_grad=True)
    for variant, read in (("multi_filter", [5]), ("single_head", [6, 7, 8])):
        layer = make(variant=variant)
        for system in layer.systems:
            system.kernel.C.data.zero_()
        layer.tokens.v_proj.weight.data.zero_()
        layer.tokens.cross_proj.weight.data.zero_()  # so each context has the same weight, whatever the token is
        (grad,) = torch.autograd.grad(layer(x)[0][:, -1].sum(), x)
        assert grad[0].any(1).nonzero().flatten().tolist() == read
