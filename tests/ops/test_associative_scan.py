"""Any associative operator, over any structure, against a loop that combines one element at a time."""

import doctest
import importlib
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from scanl.errors import ShapeError
from scanl.ops.associative_scan import associative_scan


class Map(NamedTuple):
    a: Tensor
    x: Tensor


def _affine(first, second):
    return Map(first.a * second.a, second.a * first.x + second.x)


def _wide(first, second):
    """A product of decays kept in double beside a state in single precision."""
    (a, x), (b, y) = first, second
    return a * b, b.to(x.dtype) * x + y


def _matmul(first, second):
    return {"m": second["m"] @ first["m"]}


def _dense(first, second):
    (a, x), (b, y) = first, second
    return b @ a, (b @ x[..., None])[..., 0] + y


def _average(first, second):
    """Sums weighted by e^m, with the largest exponent apart: what a stable softmax needs."""
    m = torch.maximum(first["m"], second["m"])
    return {"m": m, "p": (first["m"] - m).exp() * first["p"] + (second["m"] - m).exp() * second["p"]}


def _elements(name: str, size: tuple[int, ...], axis: int, steps: int):
    """The operator and its elements, of `size` with `steps` inserted at `axis`."""
    full = (*size[:axis], steps, *size[axis:])
    one = tuple(steps if i == axis else 1 for i in range(len(full)))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    return {
        "sum": (torch.add, draw(*full)),
        "max": (torch.maximum, draw(*full)),
        "products": (_matmul, {"m": draw(*full, 3, 3) / 2}),
        "affine": (_affine, Map(draw(*full), draw(*full))),
        "affine, shared decay": (_affine, Map(draw(*one), draw(*full))),
        "affine, complex": (_affine, Map(torch.polar(draw(*full).sigmoid(), draw(*full)), draw(*full) + 1j)),
        "affine, two dtypes": (_wide, (draw(*one).sigmoid(), draw(*full).float())),
        "dense": (_dense, (draw(*full, 2, 2) / 2, draw(*full, 2))),
        "averages": (_average, {"m": 30 * draw(*full), "p": draw(*full)}),
    }[name]


AFFINE = ["affine", "affine, shared decay", "affine, complex", "affine, two dtypes"]
NAMES = ["sum", "max", "products", *AFFINE, "dense", "averages"]


def _loop(combine, elements, axis: int, reverse: bool):
    leaves, structure = pytree.tree_flatten(elements)
    steps = leaves[0].shape[axis]

    def at(t: int):
        return pytree.tree_unflatten([leaf.narrow(axis, t, 1) for leaf in leaves], structure)

    order = list(reversed(range(steps))) if reverse else list(range(steps))
    ys = [at(order[0])]
    for t in order[1:]:
        ys.append(combine(ys[-1], at(t)))
    ys = [pytree.tree_leaves(y) for y in (ys[::-1] if reverse else ys)]
    return pytree.tree_unflatten([torch.cat(parts, axis) for parts in zip(*ys, strict=True)], structure)


def _compare(actual, expected):
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    for a, e in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, e)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 70), st.integers(0, 2), st.booleans(), st.integers(0, 10**6))
def test_equals_the_loop(name, steps, axis, reverse, seed):
    torch.manual_seed(seed)
    combine, elements = _elements(name, (2, 3), axis, steps)
    actual = associative_scan(combine, elements, axis, reverse=reverse)
    _compare(actual, _loop(combine, elements, axis, reverse) if steps else elements)


@pytest.mark.parametrize("steps", [0, 1])
def test_short_results_are_new_tensors(steps):
    elements = torch.ones(2, steps, 3)
    y = associative_scan(torch.add, elements)
    y += 1
    assert torch.equal(elements, torch.ones(2, steps, 3))


def test_a_negative_axis_is_counted_from_the_right():
    x = torch.randn(2, 3, 9, dtype=torch.float64)
    torch.testing.assert_close(associative_scan(torch.add, x, -1), x.cumsum(-1))
    weights, values = torch.rand(9).double(), torch.randn(2, 3, 9).double()
    a, h = associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (weights, values), -1)
    torch.testing.assert_close(a, weights.cumprod(0))
    torch.testing.assert_close(h, _loop(_wide, (weights.expand(2, 3, 9), values), 2, False)[1])


def test_dtypes_of_the_leaves_are_kept():
    combine, elements = _elements("affine, two dtypes", (2, 3), 1, 6)
    a, h = associative_scan(combine, elements)
    assert (a.dtype, h.dtype) == (torch.float64, torch.float32)
    assert a.shape == (1, 6, 1)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("max", "affine, two dtypes")])
def test_every_order_of_derivative(name, reverse):
    combine, elements = _elements(name, (2,), 1, 5)
    leaves, structure = pytree.tree_flatten(elements)
    leaves = [leaf.requires_grad_() for leaf in leaves]

    def run(*values):
        y = associative_scan(combine, pytree.tree_unflatten(list(values), structure), reverse=reverse)
        return tuple(pytree.tree_leaves(y))

    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 64, 1000, 1025])
def test_depth_is_logarithmic_and_work_linear(steps):
    sizes = []

    def counted(first, second):
        sizes.append(first.shape[1])
        return first + second

    associative_scan(counted, torch.ones(1, steps))
    rounds = math.ceil(math.log2(steps))
    assert len(sizes) <= (rounds if steps <= 8 else 2 * rounds - 3)
    assert sum(sizes) <= 2 * steps
    assert min(sizes) >= 1


@pytest.mark.parametrize(("steps", "reverse"), [(0, False), (1, False), (13, False), (6, True)])
def test_compiled_gives_the_same_numbers(steps, reverse):
    torch.compiler.reset()
    elements = Map(torch.rand(2, steps, 3), torch.randn(2, steps, 3))

    def run(a, x):
        return associative_scan(_affine, Map(a, x), reverse=reverse)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = []
    for function in (run, compiled):
        leaves = [leaf.clone().requires_grad_() for leaf in elements]
        y = function(*leaves)
        results.append([*y, *torch.autograd.grad(y.x.square().sum(), leaves, materialize_grads=True)])
    _compare(results[1], results[0])


def test_compiled_with_a_dict():
    torch.compiler.reset()
    elements = {"m": torch.randn(2, 9), "p": torch.randn(2, 9)}
    compiled = torch.compile(lambda e: associative_scan(_average, e), fullgraph=True, backend="aot_eager")
    _compare(compiled(elements), associative_scan(_average, elements))


X = torch.ones(2, 4, 3)


@pytest.mark.parametrize(
    ("combine", "elements", "message"),
    [
        (torch.add, (), "associative_scan: elements holds no tensors, expected at least one"),
        (torch.add, {"a": X, "b": 1.0}, r"associative_scan: elements\['b'\] is a float, expected a tensor"),
        (torch.add, (X, X[:, :3]), r"elements\[1\] has shape \(2, 3, 3\), expected 4 on axis 1 because of"),
        (torch.add, Map(X, X[:, 0, 0]), r"associative_scan: elements.x has shape \(2,\), expected an axis 1"),
        (lambda p, q: p[:, :1], X, r"combine returns float32\(2, 1, 3\), expected what it was given, float32\(2"),
        (lambda p, q: (p + q).double(), X, r"combine returns float64\(2, 2, 3\), expected what it was given, float32"),
        (lambda p, q: (p, q), X, r"combine returns \(float32\(2, 2, 3\), float32\(2, 2, 3\)\), expected what it"),
        (lambda p, q: [p[0], q[0]], (X, X), r"combine returns \[float32.*\], expected what it was given, \(float32"),
        (lambda p, q: {"b": p["a"]}, {"a": X}, r"combine returns {b: float32.*}, expected what it was given, {a: fl"),
        (lambda p, q: 1.0, X, r"combine returns 1.0, expected what it was given"),
        (lambda p, q: None, X, r"combine returns None, expected"),
    ],
)  # fmt: skip
def test_errors(combine, elements, message):
    with pytest.raises(ShapeError, match=message):
        associative_scan(combine, elements)


def test_a_dict_in_another_order_is_the_same_dict():
    elements = {"m": torch.randn(2, 9), "p": torch.randn(2, 9)}

    def turned(first, second):
        y = _average(first, second)
        return {"p": y["p"], "m": y["m"]}

    _compare(associative_scan(turned, elements), associative_scan(_average, elements))


def test_worked_examples():
    results = doctest.testmod(importlib.import_module("scanl.ops.associative_scan"), extraglobs={"torch": torch})
    assert results.attempted > 0
    assert results.failed == 0
