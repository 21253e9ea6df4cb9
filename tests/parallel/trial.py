"""What carries the state of a layer, found out by running it."""

from functools import partial

import torch

from scanl.layers.module import in_mode
from scanl.layers.state import leaves
from scanl.ops._frame.context import divided_by
from scanl.ops._frame.op import Op
from scanl.parallel import counters, division


def carried(layer):
    """Whether all of the state but counts of steps passes through ops, tried on four random steps."""
    states = []  # after each op that the first half calls
    try:
        with in_mode(layer, training=False):
            x = torch.randn(1, 4, layer.dim, dtype=next(layer.parameters()).dtype)
            with torch.no_grad(), divided_by(partial(noting, states)):
                _, state = layer(x[:, :2])
            places = {leaf.untyped_storage().data_ptr() for _, leaf in leaves(states)}
            start = layer.init_state(1)
            counted = dict(leaves(counters.later(layer, start, 2)))
            others = [leaf for path, leaf in leaves(state) if leaf.numel() and path not in counted]
            if any(leaf.untyped_storage().data_ptr() not in places for leaf in others):
                return False
            y, expected = gradients(layer, x[:, 2:], state)
            with divided_by(partial(from_states, iter(states))):
                z, found = gradients(layer, x[:, 2:], counters.replaced(start, counted) if counted else None)
    except OtherOps:
        return False
    pairs = zip([z, *found], [y, *expected], strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-3 * float(b.abs().max())) for a, b in pairs)


def at_once(layer):
    """Whether all ops of a layer run on all ranks at once, tried on two steps."""
    ways = []

    def note(op, operands, options, **call):
        ways.append(division.at_once(op, operands, call))
        with divided_by(None):
            return Op._call(op, **operands, **options, **call)

    with torch.no_grad(), divided_by(note):
        layer(torch.zeros(1, 2, layer.dim, dtype=next(layer.parameters()).dtype))
    return all(ways)


def gradients(layer, x, state):
    """The outputs, and the gradients of x and of all weights."""
    x = x.detach().requires_grad_()
    y, _ = layer(x, state)
    inputs = [x, *(weight for weight in layer.parameters() if weight.requires_grad)]
    draw = torch.linspace(0.5, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return y.detach(), list(torch.autograd.grad((y * draw).sum(), inputs, allow_unused=True, materialize_grads=True))


class OtherOps(Exception):
    """The second half of a trial calls other ops than the first."""


def noting(states, op, operands, options, **call):
    with divided_by(None):
        y, state = Op._call(op, **operands, **options, **call)
    states.append(state)
    return y, state


def from_states(states, op, operands, options, **call):
    state = next(states, None)
    with divided_by(None):
        expected = [leaf.shape for _, leaf in leaves(op.empty(operands, options, call["cu_seqlens"]))]
        if [leaf.shape for _, leaf in leaves(state)] != expected:
            raise OtherOps
        return Op._call(op, **{**operands, op.state: state}, **options, **call)
