"""Compiled loops over whole mini-batches: the values and the gradients of `learn`, step by step, and where they run."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

import laws
from scanl import layers
from scanl.layers import state as states
from scanl.ops.fused import learned_matrices
from scanl.ops.fused.learned_matrices import Norm, learn_whole, rates

# P, heads, C, K and the hidden features, 0 for none; W and Z or W alone; whether the last row is a bias
CASES = [
    (3, 2, 16, 16, 32, 2, True),
    (2, 1, 32, 32, 48, 1, True),
    (2, 2, 16, 32, 0, 2, False),
    (2, 1, 16, 16, 0, 1, True),
]


def drawn(parts, heads, steps, width, hidden, copies, bias):
    torch.manual_seed(0)

    def draw(*shape):
        return torch.randn(2 if len(shape) < 2 else parts, *shape, dtype=torch.float64)

    q, k = (F.normalize(draw(2, heads, steps, width), dim=-1) for _ in range(2))
    a, f, e = (draw(2, heads, steps).sigmoid() for _ in range(3))
    G, E = (0.05 * draw(2, heads, steps, steps).tril() for _ in range(2))
    norm = [1 + 0.1 * torch.randn(heads, width, dtype=torch.float64) for _ in range(2)]
    widths = [width, hidden, width] if hidden else [width, width]
    shapes = [(2, heads, copies, r + bias, c) for r, c in pairwise(widths)]
    memory = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    factors = [torch.ones_like(a), f, torch.ones_like(a)] if copies == 1 else [a, f, e]
    return [q, k, draw(2, heads, steps, width), *factors, G, E, *norm, *memory]


def results(operands, dtype, bias):
    operands = [tensor.to(dtype).requires_grad_() for tensor in operands]
    q, k, v, *factors, weight, shift = operands[:10]
    y, memory = learn_whole(operands[10:], q, k, v, rates(*factors), Norm(weight, shift), bias=bias)
    outputs = [y, *memory]
    by = [torch.sin(torch.arange(x.numel(), dtype=dtype)).view_as(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, operands, by, allow_unused=True, materialize_grads=True)
    return [x.detach() for x in (*outputs, *gradients)]


@pytest.fixture
def plain(monkeypatch):
    """A function that calls another without compiled loops."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(learned_matrices, "_has_loops", lambda *_: False)
            return function(*arguments)

    return call


@pytest.mark.parametrize("case", CASES)
def test_loops_are_the_plain_form(case, plain):
    operands, bias = drawn(*case), case[-1]
    own, true = (plain(results, operands, dtype, bias) for dtype in (torch.float32, torch.float64))
    errors = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(own, true, strict=True) if b.any()]
    for found, exact in zip(results(operands, torch.float32, bias), true, strict=True):
        laws.close(found, exact, max(errors) / torch.finfo(torch.float32).eps, "a result")


@pytest.mark.parametrize("name", ["titans", "ttt_mlp"])
def test_a_layer_cut_anywhere_is_the_whole(name):
    """Whole mini-batches by loops; what is left before and after them by torch."""
    layer, x = layers.build(name, 32, num_heads=2), torch.randn(2, 70, 32, requires_grad=True)
    y, last = layer(x)
    pieces, state = [], None
    for piece in x.split([5, 50, 15], 1):
        piece, state = layer(piece, state)
        pieces.append(piece)
    whole, cut = (torch.autograd.grad(z.sin().sum(), x)[0] for z in (y, torch.cat(pieces, 1)))
    torch.testing.assert_close(torch.cat(pieces, 1), y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)
    for one, two in zip(states.leaves(last), states.leaves(state), strict=True):
        torch.testing.assert_close(one[1], two[1], rtol=1e-4, atol=1e-5)


def test_second_derivatives(plain):
    operands = [tensor.float().requires_grad_() for tensor in drawn(*CASES[0])]
    q, k, v, *factors, weight, shift = operands[:10]

    def second():
        y, _ = learn_whole(operands[10:], q, k, v, rates(*factors), Norm(weight, shift), bias=True)
        (first,) = torch.autograd.grad(y.sin().sum(), k, create_graph=True)
        return torch.autograd.grad((first * first.detach()).sum(), v)[0]

    torch.testing.assert_close(second(), plain(second), rtol=1e-3, atol=1e-5)
