"""Layers and models over a sequence that ranks divide."""

import copy
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from forked import begun_script
from scanl import layers
from scanl.errors import ConfigError
from scanl.layers.state import leaves, map_leaves
from scanl.models import Features, SequenceClassifier, Stack
from scanl.parallel import by_ops, stretch, stretch_offsets
from scanl.parallel.context import _at_once, divide, undivided
from tests.parallel import trial
from threads_as_ranks import on_ranks

COVERS = ["parallel/counters", "parallel/ranks"]

CAUSAL = [name for name in layers.names() if not layers.get(name).bidirectional]
LENGTHS = [3, 4, 2]
GAPS = [0, 4, 0, 5, 0]  # some ranks have no step


def made(name):
    """A layer none of whose parameters has its first value, which may hide that it is used."""
    torch.manual_seed(0)
    layer = layers.build(name, 12, **layers.get(name).sample).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.03)
    return layer.eval()


def trained(module, x, dy):
    """Run both passes, and return y and the gradients."""
    y, _ = module(x)
    (y * dy).sum().backward()
    return y.detach(), {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}


@pytest.mark.cells_by_loop("name")
@pytest.mark.parametrize("name", CAUSAL)
def test_a_layer_over_ranks_equals_the_layer(name):
    layer = made(name)
    x, dy = torch.randn(2, 9, 12, dtype=torch.float64), torch.randn(2, 9, 12, dtype=torch.float64)
    y, expected = trained(copy.deepcopy(layer), x, dy)

    def work(ranks):
        cut = [stretch(tensor, ranks.rank, len(GAPS), lengths=GAPS) for tensor in (x, dy)]
        return trained(divide(copy.deepcopy(layer), ranks), *cut)

    results = on_ranks(len(GAPS), work)
    torch.testing.assert_close(torch.cat([part for part, _ in results], 1), y, rtol=1e-9, atol=1e-9)
    for weight, gradient in expected.items():
        found = sum(gradients[weight] for _, gradients in results if weight in gradients)
        torch.testing.assert_close(found, gradient, rtol=1e-8, atol=1e-8)


@pytest.mark.cells_by_loop
def test_blocks_that_run_again_equal_the_stack():
    """Once each, however many divided ops a block has."""
    stack = Stack(12, 2, ("gated_deltanet", "gru")).double()
    x, dy = torch.randn(2, 9, 12, dtype=torch.float64), torch.randn(2, 9, 12, dtype=torch.float64)
    y, expected = trained(copy.deepcopy(stack), x, dy)
    runs = []

    def work(ranks):
        own = divide(copy.deepcopy(stack), ranks)
        own.recompute = True
        for block in own.blocks:
            block.register_forward_pre_hook(lambda *_: runs.append(ranks.rank))
        cut = [stretch(tensor, ranks.rank, 3, lengths=LENGTHS) for tensor in (x, dy)]
        return trained(own, *cut)

    results = on_ranks(3, work)
    assert sorted(runs) == [0] * 4 + [1] * 4 + [2] * 4
    torch.testing.assert_close(torch.cat([part for part, _ in results], 1), y, rtol=1e-9, atol=1e-9)
    for weight, gradient in expected.items():
        found = sum(gradients[weight] for _, gradients in results)
        torch.testing.assert_close(found, gradient, rtol=1e-8, atol=1e-8)


def test_undivided_models_read_whole_sequences():
    stack = Stack(12, 2, ("mingru", "gru")).double()
    x = torch.randn(1, 5, 12, dtype=torch.float64)
    y, _ = stack(x)

    def work(ranks):
        own = divide(copy.deepcopy(stack), ranks)
        if ranks.rank == 0:  # alone, as the other says nothing
            with undivided():
                return own(x)[0]
        return None

    torch.testing.assert_close(on_ranks(2, work)[0], y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "first"), [("mingru", 0), ("local_rnn", 2)])  # by ops, and in turn
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_an_interrupted_call_leaves_no_division_open(name, first, interrupt):
    """It is interrupted on the ranks from `first` on, for which no other waits."""
    layer, x = made(name), torch.randn(2, 9, 12, dtype=torch.float64)
    y, _ = layer(x)

    def work(ranks):
        own = divide(copy.deepcopy(layer), ranks)
        cut = stretch(x, ranks.rank, 3, lengths=LENGTHS)
        run, own.run = own.run, interrupted if ranks.rank >= first else own.run
        with pytest.raises(interrupt) if ranks.rank >= first else nullcontext():
            own(cut)
        own.run = run
        alone = copy.deepcopy(layer)(x)[0].detach()  # as if there were no ranks
        return alone, own(cut)[0].detach()

    def interrupted(*_):
        raise interrupt

    results = on_ranks(3, work)
    assert all(torch.equal(alone, y) for alone, _ in results)
    torch.testing.assert_close(torch.cat([part for _, part in results], 1), y, rtol=1e-9, atol=1e-9)


@pytest.mark.cells_by_loop("name")
@pytest.mark.parametrize("name", CAUSAL)
def test_what_a_layer_declares_carries_its_state(name):
    """Where ranks wait for each other after all, they must be ready for it."""
    layer = made(name)
    assert by_ops(layer) == trial.carried(layer), f"{name}: declare carried_by"
    assert _at_once(layer) <= trial.at_once(layer)


@pytest.mark.cells_by_loop
def test_a_solver_over_all_steps_runs_no_op():
    for name in ("gru", "lstm"):
        layer = layers.build(name, 12, solver="newton").double()
        assert not by_ops(layer)
        assert not trial.carried(layer)


@pytest.mark.parametrize("name", ["window_attention", "hawk", "retnet"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_state_that_counts_steps_goes_on(name, packed):
    """The ranks read the second half of a sequence, or of three packed ones, of which the last begins within it."""
    layer = made(name)
    x, dy = torch.randn(1 if packed else 2, 9, 12, dtype=torch.float64), torch.randn(1, 9, 12, dtype=torch.float64)
    offsets = torch.tensor([0, 4, 6, 9]) if packed else None
    _, state = layer(torch.randn(3 if packed else 2, 5, 12, dtype=torch.float64))
    state = map_leaves(torch.Tensor.detach, state)
    whole = map_leaves(lambda leaf: leaf.clone().requires_grad_(leaf.is_floating_point()), state)
    y, last = layer(x, whole, cu_seqlens=offsets)
    (y * dy).sum().backward()

    def work(ranks):
        start = sum(LENGTHS[: ranks.rank])
        own = stretch_offsets(offsets, start, start + LENGTHS[ranks.rank]) if packed else None
        rows = {0: [0], 1: [0, 1, 2], 2: [2]}[ranks.rank] if packed else [0, 1]  # of the sequences with steps here
        mine = map_leaves(lambda leaf: leaf[rows].clone().requires_grad_(leaf.is_floating_point()), state)
        cut = [stretch(tensor, ranks.rank, 3, lengths=LENGTHS) for tensor in (x, dy)]
        part, after = divide(copy.deepcopy(layer), ranks)(
            cut[0], mine if packed or ranks.rank == 0 else None, cu_seqlens=own
        )
        (part * cut[1]).sum().backward()
        return part.detach(), after, mine

    results = on_ranks(3, work)
    torch.testing.assert_close(torch.cat([part for part, *_ in results], 1), y, rtol=1e-9, atol=1e-9)
    for (_, leaf), (_, expected) in zip(leaves(results[-1][1]), leaves(last), strict=True):
        torch.testing.assert_close(leaf[-1:], expected[-1:], rtol=1e-9, atol=1e-9)
    for (_, leaf), (_, expected) in zip(leaves(results[0][2]), leaves(whole), strict=True):
        if leaf.is_floating_point() and leaf.grad is not None:
            torch.testing.assert_close(leaf.grad[:1], expected.grad[:1], rtol=1e-8, atol=1e-8)


def test_a_model_that_no_rank_can_answer_is_refused():
    with pytest.raises(ConfigError, match="it is a SequenceClassifier, expected a Layer, a Stack or a LanguageModel"):
        on_ranks(1, lambda ranks: divide(SequenceClassifier(2, Stack(8, 1, "mingru"), Features(3)), ranks))
    with pytest.raises(ConfigError, match="bidirectional reads both directions, expected causal layers"):
        on_ranks(1, lambda ranks: divide(layers.build("bidirectional", 8, layer="mingru"), ranks))


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.long) for n in (2, 4))])
def test_processes_equal_one(size, tmp_path):
    """By torch.distributed: ops, a hybrid on packed sequences, received bytes, what is refused, shards, lost ranks."""
    program, store = Path(__file__).with_name("process.py"), tmp_path / "store"
    what = ("every_op", "reverse", "hybrid", "counted", "refused", "sharded", "another_version", "another_mesh", "lost")
    ranks = [begun_script(program, rank, size, store, *what) for rank in range(size)]
    for rank in ranks:
        rank.join(200)
        rank.kill()  # one that hangs would keep the tests from ending
    assert [rank.exitcode for rank in ranks] == [0] * size
