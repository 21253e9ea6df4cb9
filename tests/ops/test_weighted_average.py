"""Weighted averages against their double sum, at the ends of the number range, and over a million steps."""

import pytest
import torch

import laws
from scanl.errors import ShapeError
from scanl.ops.weighted_average import noncausal_weighted_average, weighted_average

BACKENDS = pytest.mark.parametrize("backend", ["reference", "parallel", "cpu"])
FORMS = pytest.mark.parametrize(
    ("decayed", "with_bonus"), [(False, False), (True, False), (False, True), (True, True)], ids=str
)


def _double_sum(k, v, decay, bonus, causal):
    """The definition in float64: a matrix of exponents for each channel, and a softmax."""
    k, v = k.double(), v.double()
    t = torch.arange(k.shape[1])
    distance = (t[:, None] - t[None, :]).abs() - (0 if bonus is None else 1)
    exponents = k[:, None] + distance[:, :, None].clamp(min=0) * (0 if decay is None else decay.double())
    here = torch.eye(k.shape[1], dtype=torch.bool)[:, :, None]
    if bonus is not None:
        exponents = torch.where(here, exponents + bonus.double(), exponents)
    if causal:
        exponents = exponents.masked_fill((t[:, None] < t[None, :])[:, :, None], -torch.inf)
    return (exponents.softmax(2) * v[:, None]).sum(2)


def _operands(decayed, with_bonus, spread, steps=60, width=5):
    k, v = (torch.rand(2, steps, width) - 0.5) * 2 * spread, torch.randn(2, steps, width)
    decay = torch.tensor([0.0, -1e-3, -0.5, -3.0, -50.0]) if decayed else None
    return k, v, decay, torch.randn(width) if with_bonus else None


@BACKENDS
@FORMS
@pytest.mark.parametrize("spread", [1, 100])
def test_it_is_the_double_sum(backend, decayed, with_bonus, spread):
    operands = _operands(decayed, with_bonus, spread)
    o, _ = weighted_average(*operands, backend=backend)
    torch.testing.assert_close(o.double(), _double_sum(*operands, causal=True), rtol=0, atol=3e-5)


@FORMS
@pytest.mark.parametrize("spread", [1, 100])
def test_noncausal_is_the_double_sum(decayed, with_bonus, spread):
    operands = _operands(decayed, with_bonus, spread)
    o, last = noncausal_weighted_average(*operands)
    torch.testing.assert_close(o.double(), _double_sum(*operands, causal=False), rtol=0, atol=3e-5)
    torch.testing.assert_close(last, weighted_average(*operands, backend="reference")[1], rtol=1e-5, atol=1e-5)


@FORMS
def test_noncausal_starts_from_a_state(decayed, with_bonus):
    """What came before weighs as in the causal form: at the last step the two agree, and both are differentiable."""
    k, v, decay, bonus = (x if x is None else x[..., 1:4] for x in _operands(decayed, with_bonus, 2, steps=3))
    k, v, state = k.double(), v.double(), torch.rand(2, 3, 3, dtype=torch.float64)
    o, last = noncausal_weighted_average(k, v, decay, bonus, state)
    causal, end = weighted_average(k, v, decay, bonus, state)
    torch.testing.assert_close((o[:, -1], last), (causal[:, -1], end))
    leaves = [x.requires_grad_() for x in (k, v, state)]
    assert torch.autograd.gradcheck(lambda k, v, s: noncausal_weighted_average(k, v, decay, bonus, s), leaves)


def test_noncausal_edges():
    k = torch.full((2, 3, 4), -torch.inf)
    for decay in (None, torch.full((4,), -1.0)):
        assert noncausal_weighted_average(k, torch.ones(2, 3, 4), decay)[0].eq(0).all()
        assert noncausal_weighted_average(k[:, :0], k[:, :0], decay)[0].shape == (2, 0, 4)
    assert noncausal_weighted_average(k.half(), k.half().zero_())[0].dtype == torch.float16
    with pytest.raises(ShapeError, match=r"weighted_average: v has shape \(2, 2, 4\), expected \(B, T, D\)"):
        noncausal_weighted_average(k, k[:, 1:])


@BACKENDS
@FORMS
def test_an_empty_denominator_gives_zero(backend, decayed, with_bonus):
    """Nothing counts before the third step, nor after all is forgotten in the fifth; gradients are finite."""
    _, v, _, bonus = _operands(decayed, with_bonus, 1, steps=7)
    k = torch.zeros_like(v)
    k[:, [0, 1, 4, 5]] = -torch.inf
    decay = torch.zeros_like(v)
    decay[:, 4] = -torch.inf
    for leaf in (k, v, decay):
        leaf.requires_grad_()
    o, last = weighted_average(k, v, decay, bonus, backend=backend)
    after = [0, 1, 5] if with_bonus else [0, 1, 4, 5]  # a bonus reads before what is there decays
    assert o[:, after].eq(0).all()
    assert o[:, [2, 3, 6]].ne(0).all()
    for grad in torch.autograd.grad(o.square().sum() + last[:, :2].sum(), (k, v, decay)):
        assert torch.isfinite(grad).all()
    nothing = torch.full_like(k, -torch.inf)
    assert weighted_average(nothing, v, backend=backend)[1][:, 2].eq(-torch.inf).all()


@BACKENDS
def test_a_mask_may_be_the_least_number(backend):
    k, v = torch.zeros(1, 4, 2), torch.randn(1, 4, 2)
    k[:, 1] = torch.finfo(torch.float32).min
    o, _ = weighted_average(k, v, backend=backend)
    torch.testing.assert_close(o[:, 3], v[:, [0, 2, 3]].mean(1))


@BACKENDS
def test_a_state_of_zeros_is_empty_too(backend):
    k, v = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    o, _ = weighted_average(k, v, state=torch.zeros(2, 3, 3), backend=backend)
    torch.testing.assert_close(o, weighted_average(k, v, backend=backend)[0])


@pytest.mark.parametrize(
    ("decayed", "with_bonus", "backend"),
    [
        pytest.param(*form, backend, marks=[pytest.mark.long] * (form[0] != form[1] or not form[0]))
        for form in ((False, False), (True, False), (False, True), (True, True))
        for backend in ("parallel", "cpu")
    ],
)
def test_a_million_steps_without_drift(backend, decayed, with_bonus):
    """Float32 against float64; constant keys under a first that is larger are what plain sums in float32 get wrong."""
    steps = 2**20
    decay = torch.tensor([0.0, -torch.inf, -50.0, -1e-4, -1e-6, 0.0]) if decayed else None
    bonus = torch.randn(6) if with_bonus else None
    k, v = torch.randn(1, steps, 6), torch.randn(1, steps, 6) + 0.5
    k[:, :, 3:] = 0
    k[:, 0, 3:] = 1
    leaves = [k.requires_grad_(), v.requires_grad_()]
    o, last = weighted_average(k, v, decay, bonus, backend=backend)
    wide = [None if x is None else x.double() for x in (k, v, decay, bonus)]
    exact, exact_last = weighted_average(*wide, backend="cpu")
    assert (((o - exact).norm(dim=1) / exact.norm(dim=1)) < 2e-6).all()
    torch.testing.assert_close(last.double(), exact_last, rtol=1e-4, atol=1e-4)
    if backend == "cpu":
        grads, exact_grads = (torch.autograd.grad(y.square().sum(), leaves) for y in (o, exact))
        for got, grad in zip(grads, exact_grads, strict=True):
            assert (got - grad).norm() < 1e-5 * grad.norm()


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
def test_blocks_and_chunks(reverse):
    """More channels than a block and more steps than a chunk, with decays of each kind; values and every gradient."""
    width, steps = 150, 71
    state = torch.rand(2, 3, width, dtype=torch.float64) + 0.5
    state[:, 2, ::2] += 8  # there no key exceeds what came before
    k, v = (torch.randn(2, steps, width, dtype=torch.float64) for _ in range(2))
    constant, timed = (-torch.rand(shape, dtype=torch.float64) / 20 for shape in ((width,), (2, steps, width)))
    bonus = torch.randn(width, dtype=torch.float64)
    whole, packed = {"k": k, "v": v, "state": state}, {"k": k[:1], "v": v[:1], "state": state}
    for operands, options in (
        ({**whole, "decay": constant}, {}),
        ({**whole, "decay": timed, "bonus": bonus}, {}),
        ({**packed, "decay": constant, "bonus": bonus}, {"cu_seqlens": torch.tensor([0, 33, 71])}),
    ):
        options["reverse"] = reverse
        expected = laws.evaluate(weighted_average, operands, options, "reference")
        for name, value in laws.evaluate(weighted_average, operands, options, "cpu").items():
            torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("backend", ["parallel", "cpu"])
@pytest.mark.parametrize("bonus", [False, True])
def test_ties_between_keys(backend, bonus):
    """With equal keys the largest exponent is a tie at every step; only the state's m, p and z could tell."""
    operands = {"k": torch.zeros(1, 4, 2, dtype=torch.float64), "v": torch.randn(1, 4, 2, dtype=torch.float64)}
    operands |= {"bonus": torch.randn(2, dtype=torch.float64)} if bonus else {}
    expected = laws.evaluate(weighted_average, operands, {}, "reference")
    got = laws.evaluate(weighted_average, operands, {}, backend)
    torch.testing.assert_close((got["y"], got["last"], got["dv"]), (expected["y"], expected["last"], expected["dv"]))
    if backend == "cpu":
        torch.testing.assert_close(got["dk"], expected["dk"])
