"""What a stack gives its layers to start with: published scales, generic ones, and what follows from the place."""

import copy
import math

import pytest
import torch

from scanl import layers, ops
from scanl.layers import RWKV6, Bidirectional
from scanl.layers.channel.rwkv_channel_mix import RWKV6ChannelMix
from scanl.models import Stack
from scanl.models.block import normed

pytestmark = pytest.mark.cells_by_loop("name")

DIM, DEPTH = 64, 8

# Standard deviation of the projection into the residual stream, in a stack of so many layers. The sources:
PUBLISHED = {
    "hawk": lambda layer, depth: math.sqrt(2 / (depth * layer.width)),  # recurrentgemma, final_w_init_variance_scale
    "window_attention": lambda layer, depth: math.sqrt(2 / (depth * layer.o_proj.in_features)),
    "mlstm": lambda layer, depth: 2 / depth / math.sqrt(layer.dim),  # xlstm, wang_init_
    "mlstm_large": lambda layer, depth: 2 / depth / math.sqrt(layer.dim),  # xLSTM-7B in transformers
}
WRITERS = [name for name in layers.names(presets=False) if layers.get(name).residual_out is not None]


def written(layer):
    """The weight of the projection into the residual stream."""
    return layer.get_submodule(layer.residual_out).weight.detach()


def assert_std(tensors, std):
    """Within five standard errors: of n normal numbers, std / sqrt(2n)."""
    values = torch.cat([tensor.detach().flatten().double() for tensor in tensors])
    assert abs(values.std() - std) < 5 * std / math.sqrt(2 * values.numel())
    assert abs(values.mean()) < 5 * std / math.sqrt(values.numel())


def mixers(stack):
    return [block.mixer for block in stack.blocks]


def test_published_scales_are_all_here():
    assert {name for name in WRITERS if layers.get(name).residual_by_depth} == set(PUBLISHED)


@pytest.mark.parametrize("channel_mixer", ["none", "gated_mlp"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_scale_is_applied_once(name, channel_mixer):
    torch.manual_seed(0)
    found = mixers(Stack(DIM, DEPTH, name, channel_mixer=channel_mixer))
    assert_std(map(written, found), PUBLISHED[name](found[0], DEPTH))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_scale_counts_every_layer_of_a_hybrid_and_reaches_what_is_wrapped(name):
    torch.manual_seed(0)
    found = mixers(Stack(DIM, DEPTH, ("lru", name), channel_mixer="none"))[1::2]
    assert_std(map(written, found), PUBLISHED[name](found[0], DEPTH))
    found = mixers(Stack(DIM, DEPTH, ("lru", "bidirectional"), layer_options={"bidirectional": {"layer": name}}))[1::2]
    inner = [part for layer in found for part in (layer.forward_layer, layer.backward_layer)]
    assert_std(map(written, inner), PUBLISHED[name](inner[0], DEPTH))


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in PUBLISHED])
def test_without_a_published_scale_the_stream_does_not_grow(name):
    """Divided by the root of the number of writes: here of 4, and of 16, so that nothing is rounded."""
    torch.manual_seed(0)
    alone = written(layers.build(name, DIM))
    for depth, channel_mixer, root in ((4, "none", 2), (8, "gated_mlp", 4)):
        torch.manual_seed(0)
        lowest = mixers(Stack(DIM, depth, name, channel_mixer=channel_mixer))[0]
        torch.testing.assert_close(written(lowest) * root, alone, rtol=0, atol=0)


@pytest.mark.parametrize("name", layers.names(presets=False))
def test_the_stream_and_its_gradient_start_small(name):
    """After three layers, of unit inputs and with a unit gradient behind them."""
    torch.manual_seed(0)
    options = {"head_dim": 16} if name in ("rwkv5", "rwkv6", "rwkv7") else {}
    stack, x = Stack(32, 3, name, layer_options=options, channel_mixer="none"), torch.randn(2, 12, 32).requires_grad_()
    with ops.backend("parallel", "reference"):
        h, _ = stack.run_blocks(x, None)
    (slope,) = torch.autograd.grad(normed(stack.norm, h), x, torch.randn_like(x) / x.numel() ** 0.5)
    assert h.std() < 8
    assert slope.norm() < 4


def test_a_stack_tells_each_layer_its_place(monkeypatch):
    told = []
    for cls in (layers.LRU, layers.MinGRU, RWKV6ChannelMix):
        monkeypatch.setattr(cls, "enter_stack", lambda self, index, all_: told.append((self, index, list(all_))))
    stack = Stack(8, 3, ("lru", "mingru"), channel_mixer="rwkv6")
    told = [call for call in told if len(call[2]) > 1]  # not what a layer tells itself when it is made
    for each in (mixers(stack), [block.channel for block in stack.blocks]):
        assert [(index, all_) for layer, index, all_ in told if layer in each] == [(i, each) for i in range(3)]


@pytest.mark.parametrize("pattern", ["xlstm", ("lru", "slstm"), "slstm"])
def test_slstm_counts_every_layer_of_the_stack(pattern):
    """The released xlstm: block index over the number of blocks less one, whatever the other blocks are."""
    stack = Stack(DIM, DEPTH, pattern)
    places = [index for index, layer in enumerate(mixers(stack)) if isinstance(layer, layers.SLSTM)]
    assert places
    channels = torch.arange(16) / 15  # of one head of four
    for index in places:
        bias = stack.blocks[index].mixer.slstm_cell._bias_.view(4, 4, 16)
        expected = (5 - 12 * channels ** (0.3 + 1.3 * index / (DEPTH - 1))).expand(4, 16)
        torch.testing.assert_close(bias[1], expected)


def test_rwkv_counts_every_layer_of_the_stack():
    stack = Stack(DIM, 4, ("lru", "rwkv6"), channel_mixer="rwkv6")
    channels = torch.arange(DIM) / DIM
    for index, block in enumerate(stack.blocks):
        c = 1 - index / 4
        if isinstance(block.mixer, RWKV6):
            torch.testing.assert_close(block.mixer.time_maa_k.flatten(), 1 - channels**c)
        for share in (block.channel.time_maa_k, block.channel.time_maa_r):
            torch.testing.assert_close(share.flatten(), 1 - channels ** (c**3))


def test_lowest_rwkv7_of_a_hybrid_gives_the_values():
    stack = Stack(12, 5, ("lru", "rwkv7"), layer_options={"rwkv7": {"head_dim": 4}})
    assert [name for name, _ in stack.named_parameters() if name.endswith(".v0")] == ["blocks.3.mixer.v0"]
    y, _ = stack(torch.randn(1, 3, 12))
    assert y.isfinite().all()


def test_bounds_of_hgrn_are_shared_within_a_copy():
    """Γ is the lowest layer's; a copy's layers read the copy's, and plain layers do not read wrapped ones'."""
    stack = copy.deepcopy(Stack(12, 5, ("lru", "hgrn", "hgrn")))
    low, high, third = (stack.blocks[i].mixer for i in (1, 2, 4))
    assert [name for name, _ in stack.named_parameters() if name.endswith("gamma")] == ["blocks.1.mixer.gamma"]
    torch.nn.init.normal_(low.gamma)
    share = low.gamma.softmax(0)
    assert low.lower_bound() == 0
    torch.testing.assert_close(high.lower_bound(), share[1])
    torch.testing.assert_close(third.lower_bound(), share[1] + share[2])


def test_wrapped_layers_are_tied_among_their_like():
    options = {"bidirectional": {"layer": "hgrn"}}
    stack = Stack(12, 3, ("hgrn", "bidirectional", "bidirectional"), layer_options=options)
    plain, both, above = mixers(stack)
    assert isinstance(both, Bidirectional)
    assert plain.lower_bound() == 0
    assert plain.gamma is None
    for low, high in (
        (both.forward_layer, above.forward_layer), (both.backward_layer, above.backward_layer),
    ):  # fmt: skip
        torch.nn.init.normal_(low.gamma)
        torch.testing.assert_close(high.lower_bound(), low.gamma.softmax(0)[1])
