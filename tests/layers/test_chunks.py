"""A long sequence in pieces: the numbers and gradients of the whole, in bounded memory."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.layers import build, in_chunks
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack

pytestmark = pytest.mark.cells_by_loop("name")


@pytest.mark.parametrize("name", ["lru", "gla", "gru"])
@pytest.mark.parametrize("size", [1, 3, 10, 11, 64])
def test_pieces_give_the_numbers_and_gradients_of_the_whole(name, size):
    layer, x = build(name, 8), torch.randn(2, 10, 8, requires_grad=True)
    results = []
    for run in (lambda: layer(x), lambda: in_chunks(layer, x, size=size)):
        y, state = run()
        loss = y.square().sum() + sum(leaf.abs().square().sum() for _, leaf in leaves(state))
        results.append((y, *torch.autograd.grad(loss, [x, *layer.parameters()])))
    torch.testing.assert_close(results[1], results[0])
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(layer, x, size=size)[0], results[0][0])


def test_a_model_runs_in_pieces_and_further_arguments_are_cut():
    model, tokens = LanguageModel(11, Stack(8, 2, "lru")), torch.randint(11, (2, 9))
    torch.testing.assert_close(in_chunks(model, tokens, size=4)[0], model(tokens)[0])
    layer, x, timespans = build("cfc", 8, width=6), torch.randn(2, 9, 8), torch.rand(2, 9)
    torch.testing.assert_close(in_chunks(layer, x, size=4, timespans=timespans)[0], layer(x, timespans=timespans)[0])
    y, _ = in_chunks(layer, x[:, :0])
    assert y.shape == (2, 0, 8)


def test_memory_is_bounded():
    """The values that wait for the backward pass do not grow with the sequence, but for x, y and the states."""
    layer, kept = build("gru", 8), {}
    for name, run in {"whole": layer, "pieces": lambda x: in_chunks(layer, x, size=4)}.items():
        sizes = []

        def pack(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(torch.randn(2, 64, 8))
        kept[name] = sum(sizes)
    assert kept["pieces"] < kept["whole"] / 4


@pytest.mark.parametrize(
    ("name", "how", "message"),
    [
        ("lru", {"size": 0}, "in_chunks: size is 0, expected a whole number of at least 1"),
        ("lru", {"size": 2.5}, "in_chunks: size is 2.5, expected a whole number of at least 1"),
        ("bidirectional", {}, "in_chunks: the layer is bidirectional, expected a causal one"),
        ("lru", {"cu_seqlens": torch.tensor([0, 3])}, "in_chunks: cu_seqlens is given, expected none"),
    ],
)
def test_what_cannot_be_cut_is_refused(name, how, message):
    with pytest.raises(ConfigError, match=message):
        in_chunks(build(name, 8), torch.randn(1, 3, 8), **how)
