"""The summary of a piece says what it does to any state that enters it: a law over every op that has one."""

import itertools

import pytest
import torch

import laws
from scanl import ops
from scanl.errors import ConfigError, ShapeError
from scanl.ops import registry

OPS = [*registry.declared(), *registry.cells()]
WITH = [op for op in OPS if op.effect is not None]
WITHOUT = [op for op in OPS if op.effect is None]
each = pytest.mark.parametrize("op", WITH, ids=lambda op: op.name)
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def of(op, packed=False):
    """The samples whose state enters linearly."""
    samples = [s for s in op.samples if ("cu_seqlens" in s.options) == packed]
    return [s for s in samples if not any(name in s.operands for name in op.effect.unless)]


def test_every_op_whose_state_enters_linearly_has_one():
    assert {op.name for op in WITH} == {
        "delta_rule",
        "dplr_scan",
        "linear_attention",
        "linear_scan",
        "selective_scan",
        "short_convolution",
        "sru",
        "weighted_average",
    }


@each
@directions
def test_pieces_apart_equal_the_whole(op, reverse):
    """Each piece is summed up alone; joined in either order of brackets, they lead a state to where the op leads it."""
    for sample in of(op):
        operands = laws.at(op, sample, torch.float64, "reference")
        more = {**sample.options, "reverse": reverse}
        state, steps = operands["state"], operands[op.names[0]].shape[1]
        rounding = laws.own_rounding(op, operands, more)
        _, exact = op(**operands, **more, backend="reference")
        _, empty = op(**{**operands, "state": None}, **more, backend="reference")
        bounds = [0, steps // 3, steps // 3, steps - 1, steps]  # one piece has no steps
        pieces = [
            op.summary(**laws.timed(op, operands, start, end), **more) for start, end in itertools.pairwise(bounds)
        ]
        first, second, third, last = reversed(pieces) if reverse else pieces
        for joined in (first.then(second).then(third).then(last), first.then(second.then(third.then(last)))):
            laws.close(joined.after(state), exact, rounding, f"{op.name} after a state")
            laws.close(joined.after(None), empty, rounding, f"{op.name} after nothing")
        laws.close(last.after(third.after(second.after(first.after(state)))), exact, rounding, f"{op.name} one by one")


@each
def test_packed_sequences_have_a_row_each(op):
    for sample in of(op, packed=True):
        operands = laws.at(op, sample, torch.float64, "reference")
        rounding = laws.own_rounding(op, operands, sample.options)
        _, exact = op(**operands, **sample.options, backend="reference")
        state = operands.pop("state")
        laws.close(op.summary(**operands, **sample.options).after(state), exact, rounding, op.name)


@each
def test_gradients_go_through(op):
    sample = of(op)[0]
    operands = {name: value.requires_grad_() for name, value in laws.at(op, sample, torch.float64, "reference").items()}
    _, whole = op(**operands, **sample.options)
    wanted = torch.autograd.grad(whole.square().sum(), list(operands.values()), allow_unused=True)
    state = operands.pop("state")
    found = op.summary(**operands, **sample.options).after(state)
    grads = torch.autograd.grad(found.square().sum(), [*operands.values(), state], allow_unused=True)
    for name, expected, grad in zip([*operands, "state"], wanted, grads, strict=True):
        zero = torch.zeros_like(operands.get(name, state))
        torch.testing.assert_close(zero if grad is None else grad, zero if expected is None else expected, msg=name)


@pytest.mark.parametrize("op", WITHOUT, ids=lambda op: op.name)
def test_others_say_why_not(op):
    with pytest.raises(ConfigError, match=f"{op.name}: no summary of a piece is known, as one is for delta_rule, "):
        op.summary()


def test_wrong_use_is_refused():
    x, a = torch.randn(1, 3, 2), torch.rand(1, 3, 2)
    with pytest.raises(
        ConfigError, match="linear_scan: state is given, expected none because a summary holds for every"
    ):
        ops.linear_scan.summary(x, a, torch.zeros(1, 2))
    with pytest.raises(
        ConfigError, match="sru: v_f is given, expected none because with it the state enters a nonline"
    ):
        ops.sru.summary(x, a, a, v_f=torch.zeros(2))


@each
def test_a_state_is_read_as_the_op_reads_it(op):
    """Of another dtype, and under autocast: joined in the dtype of the summary, to its rounding."""
    for sample in of(op)[:2]:
        operands = laws.at(op, sample, torch.float32, "reference")
        rounding = laws.own_rounding(op, operands, sample.options)
        _, exact = op(**laws.wide(operands), **sample.options, backend="reference")
        state = operands.pop("state")
        summary = op.summary(**operands, **sample.options)
        found = summary.after(state.double())
        assert found.dtype == summary.last.dtype
        laws.close(found, exact, rounding, f"{op.name} after a wider state")
        nothing = op.summary(**laws.timed(op, operands, 0, 0), **sample.options)
        with torch.autocast("cpu", torch.bfloat16):
            laws.close(summary.after(state), exact, rounding, f"{op.name} under autocast")
            laws.close(nothing.then(summary).after(state), exact, rounding, f"{op.name} joined under autocast")


@each
def test_a_state_of_another_shape_is_refused(op):
    operands = laws.at(op, of(op)[0], torch.float32, "reference")
    state = operands.pop("state")
    summary = op.summary(**operands, **of(op)[0].options)
    for wrong in (state[:1], state[..., :1]):
        with pytest.raises(ShapeError, match=r"summary: state has shape \(.*\), expected \(.*\) because of the piece"):
            summary.after(wrong)
    with pytest.raises(ShapeError, match="summary: state is on meta, expected cpu because of the piece"):
        summary.after(state.to("meta"))
    with pytest.raises(
        ShapeError, match=r"summary: state is torch\.complex64, expected real numbers because of the piece"
    ):
        summary.after(state.to(torch.complex64))
