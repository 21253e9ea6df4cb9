"""Contexts restore what they change, whatever ends them: an error, Ctrl-C, a closed generator, nested or in threads."""

import logging
import threading

import pytest
import torch

from scanl import ops
from scanl.export import onnx
from scanl.inspect.base import readings
from scanl.layers import auxiliary
from scanl.layers.module import in_mode
from scanl.learning import descent, evaluation
from scanl.learning.algorithms import ccn, reservoir
from scanl.learning.questions import base as questions
from scanl.models import LanguageModel, Stack
from scanl.models.whole.aligned import AlignedStack
from scanl.ops._compiler.cells import constant
from scanl.ops._frame import context
from scanl.ops.products import functions
from scanl.parallel import context as parallel_context

MODEL = LanguageModel(5, Stack(4, 1, "mingru"))
MODEL.train().stack.blocks[0].eval()
ALIGNED = AlignedStack(3, 1)


def modes():
    return [part.training for part in MODEL.modules()]


def trained():
    return [weight.requires_grad for weight in MODEL.parameters()]


def hooks():
    return [len(part._forward_pre_hooks) for part in MODEL.modules()]


CONTEXTS = {  # how to make it, and what it changes
    "backend": (lambda: ops.backend("reference"), context.preferred),
    "exact": (ops.exact, lambda: (context.preferred(), context.context.exact, torch.nn.functional.linear)),
    "large_products": (
        lambda: functions.large_products(64),
        lambda: (context.context.large_products, torch.nn.functional.linear),
    ),
    "op_calls": (context.op_calls, lambda: context.context.calls),
    "conditions_recorded": (lambda: context.conditions_recorded([torch.ones(1)]), lambda: context.context.conditions),
    "products_hold_inputs": (constant.products_hold_inputs, lambda: constant._entered.depth),
    "divided_by": (lambda: context.divided_by(print), lambda: context.context.divider),
    "undivided": (parallel_context.undivided, lambda: parallel_context._thread.undivided),
    "collect": (auxiliary.collect, auxiliary.collecting),
    "counted": (questions.counted, questions._COUNTS.get),
    "in_mode": (lambda: in_mode(MODEL, training=False), modes),
    "readings": (lambda: readings(MODEL), hooks),
    "align": (lambda: ALIGNED.align(0.1, 0.2), lambda: ALIGNED._alignment),
    "reservoir": (lambda: reservoir._alone(MODEL, MODEL.stack.blocks[0]), trained),
    "ccn": (lambda: ccn._constant([*MODEL.stack.parameters()]), trained),
    "seeded": (lambda: descent.seeded(3), lambda: torch.get_rng_state().tolist()),
    "quiet": (onnx._quiet, lambda: logging.root.manager.disable),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_a_context_restores_what_it_changed(name):
    make, state = CONTEXTS[name]
    before = state()

    def items():
        with make():
            yield state()

    for interrupt in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(interrupt), make():  # noqa: PT012  # what it changes is read inside
            assert state() != before
            raise interrupt
        assert state() == before
    generator = items()
    assert next(generator) != before
    generator.close()
    assert state() == before
    with make():
        inside = state()
        with pytest.raises(ValueError, match="inner"), make():
            raise ValueError("inner")
        assert state() == inside
    assert state() == before


@pytest.mark.parametrize("make", [lambda: ops.backend("reference"), ops.exact], ids=["backend", "exact"])
def test_threads_that_share_a_context_have_their_own_backends(make):
    """They enter and leave it in turns; and a generator leaves its context behind the one that came after it."""
    shared, inside, left, ends = make(), threading.Event(), threading.Event(), []

    def other():
        with ops.backend("parallel"):
            with shared:
                inside.set()
                assert left.wait(10)
            ends.append(context.preferred())

    thread = threading.Thread(target=other)
    with shared:
        thread.start()
        assert inside.wait(10)
    ends.append(context.preferred())
    left.set()
    thread.join()
    assert ends == [("auto",), ("parallel",)]
    assert not context.exactly()

    def items():
        with make():
            yield

    generator = items()
    next(generator)
    with make():
        generator.close()
    assert context.preferred() == ("auto",)


def test_an_interrupted_measurement_leaves_each_part_in_its_mode(monkeypatch):
    before = modes()

    def interrupted(*_):
        assert not any(modes())
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation, "_scores", interrupted)
    monkeypatch.setattr(evaluation, "answerer", lambda question: None)
    source = type("Source", (), {"question": None})
    with pytest.raises(KeyboardInterrupt):
        evaluation.measures(MODEL, source, [None])
    assert modes() == before


def test_an_interrupted_training_leaves_a_model_to_predict_with(monkeypatch):
    """Without its dropout."""

    def interrupted(*_):
        assert MODEL.training
        raise KeyboardInterrupt

    before = modes()
    monkeypatch.setattr(descent, "descend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        descent.optimize(MODEL, 3, 0.1, 0, None)
    assert not any(modes())
    for part, mode in zip(MODEL.modules(), before, strict=True):
        part.training = mode
