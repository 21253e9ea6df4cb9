"""Losses of layers: who gets them, and what is added to the loss of the task."""

import threading

import pytest
import torch
from torch import nn

from scanl.layers import auxiliary, build, in_chunks


def term(layer, name, total, count=1.0):
    losses = auxiliary.collecting()
    if losses is not None:
        losses.add(layer, name, torch.tensor(total), torch.tensor(count))


def test_the_innermost_collect_of_a_thread_gets_the_losses():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    with auxiliary.collect() as outer:
        term(first, "a", 1.0)
        with auxiliary.collect() as inner:
            term(first, "a", 2.0)
            term(first, "a", 3.0, 4.0)  # the mean of five terms
            term(second, "a", 4.0)
            term(second, "b", 16.0, 0.0)
        term(second, "a", 8.0)
        other = threading.Thread(target=term, args=(first, "a", 32.0))
        other.start()
        other.join()
    assert (outer.total(), inner.total()) == (9, 21)
    assert inner.by_name() == {"a": 5, "b": 16}
    assert auxiliary.collecting() is None
    with auxiliary.collect() as none:
        pass
    assert none.total() == 0


@pytest.mark.usefixtures("double")
def test_pieces_that_run_again_collect_the_same():
    layer = build("compressive_transformer", 4, num_heads=1, window=2, chunk_size=2, num_slots=2)
    x, results = torch.randn(2, 12, 4), []
    for run in (layer, lambda x: in_chunks(layer, x, size=5)):
        with auxiliary.collect() as losses:
            y, _ = run(x)
        loss = y.square().sum() + losses.total()
        results.append([losses.total(), *torch.autograd.grad(loss, list(layer.parameters()))])
    torch.testing.assert_close(results[1], results[0])
