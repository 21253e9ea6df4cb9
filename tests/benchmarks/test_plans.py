"""Costs by hand, by simulation, and at limits where every form is equally good."""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from scanl.errors import ConfigError

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import plans
from cost import Link, forward_seconds, gathered_seconds
from plans import Machine, Model

MODEL = Model(
    parameters=1e6, depth=6, width=4, heads=8, state=16, carry=16, op_forward=1e-7, op_backward=3e-7
)  # fmt: skip
NOTHING = Link(0.0, math.inf)
FAST = Machine(flops=1e12, attention=1e12, copy=math.inf, memory=1e9, node=8, near=NOTHING, far=NOTHING)


@pytest.mark.parametrize(("size", "messages"), [(1, 0), (2, 1), (3, 4), (4, 6), (5, 6), (6, 8), (9, 8), (10, 10)])
def test_messages_of_an_exchange(size, messages):
    """A latency of one second counts them: b, and from three ranks on A, to the neighbour and over each distance."""
    assert forward_seconds(size, Link(1.0, math.inf), state=8, carry=8) == messages


def test_messages_that_share_lanes_take_longer():
    """Of three ranks two send to their neighbours, and one of them over the distance 1."""
    alone, shared = (forward_seconds(3, Link(0.0, 1.0, lanes), state=3, carry=5) for lanes in (2, 1))
    assert (alone, shared) == (8 + 8, 16 + 8)
    assert gathered_seconds(5, Link(10.0, 2.0), state=3, carry=5, join=1.0) == 3 * 10 + 4 * (8 / 2 + 1)


def test_a_full_node_uses_no_network():
    machine = replace(FAST, node=4, near=Link(1.0, 30.0), far=Link(2.0, 5.0))
    assert [machine.link(gpus) for gpus in (3, 4, 5)] == [machine.near, machine.near, machine.far]
    assert [machine.collective(gpus) for gpus in (4, 5)] == [Link(1.0, 30.0), Link(2.0, 4 * 5.0)]
    assert replace(machine, far=Link(2.0, 10.0)).collective(5) == Link(2.0, 30.0)


def test_one_gpu_by_hand():
    step = plans.alone(MODEL, FAST, 1000)
    assert step.products == pytest.approx(8 * 1e6 * 1000 / 1e12)
    assert step.ops == pytest.approx(6 * 1000 * (2 * 1e-7 + 3e-7))
    assert step.memory == 16 * 1e6 + 2 * 4 * 6 * 1000


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_forms_share_the_work_where_messages_cost_nothing(gpus):
    whole = plans.alone(MODEL, FAST, 2**20)
    dense = replace(MODEL, op_forward=0.0, op_backward=0.0)  # the ops of a divided sequence run more often
    for exchange in plans.EXCHANGES:
        assert plans.sequence(dense, FAST, gpus, 2**20, exchange=exchange).seconds == pytest.approx(
            whole.products / gpus
        )
    assert plans.tensor(MODEL, FAST, gpus, 2**20).seconds == pytest.approx(whole.seconds / gpus)
    ring, swapped = (form(MODEL, FAST, gpus, 2**20) for form in (plans.ring_attention, plans.ulysses))
    assert ring.seconds == swapped.seconds == pytest.approx((whole.products + 9 * 4 * 6 * 2**40 / 1e12) / gpus)


@pytest.mark.parametrize(("gpus", "chunks"), [(2, 1), (3, 5), (6, 4)])
def test_a_pipeline_takes_as_long_as_its_schedule(gpus, chunks):
    """A stage reads a chunk after the stage before, and after its own chunk before."""
    one = plans.alone(MODEL, FAST, 100).seconds / gpus
    done = {}
    for stage, chunk in itertools.product(range(gpus), range(chunks)):
        done[stage, chunk] = one + max(done.get((stage - 1, chunk), 0.0), done.get((stage, chunk - 1), 0.0))
    step = plans.pipeline(MODEL, FAST, gpus, 100 * chunks, chunk=100)
    assert step.seconds == pytest.approx(done[gpus - 1, chunks - 1])


def test_limits():
    assert plans.pipeline(MODEL, FAST, 7, 1000) is None
    assert plans.tensor(MODEL, FAST, 16, 1000) is None
    assert plans.ulysses(MODEL, FAST, 16, 1000) is None
    with pytest.raises(ConfigError, match="exchange: it is 'tree', expected one of rounds, all-gather"):
        plans.sequence(MODEL, FAST, 8, 1000, exchange="tree")


def test_slow_messages_are_waited_for():
    """Each GPU waits for the bytes that it receives, and for nothing else."""
    slow = replace(FAST, flops=math.inf, near=Link(0.0, 1.0), attention=math.inf)
    still = replace(MODEL, op_forward=0.0, op_backward=0.0)
    for form in (plans.tensor, plans.ring_attention, plans.ulysses):
        step = form(still, slow, 4, 1000)
        assert step.waiting == pytest.approx(step.received)
