"""The fused cells beyond what every op is tested for: widths that fill tiles and leave rests, gates, edges."""

import importlib
import re
from functools import partial

import numpy as np
import pytest
import torch
from numba import njit
from torch import Tensor

import laws
from scanl.errors import ConfigError, ShapeError
from scanl.ops._cpu import _sigmoid
from scanl.ops.linear_scan import linear_scan
from scanl.ops.registry import Cell, Op, OpSample

indrnn, ligru, slstm, sru = (
    getattr(importlib.import_module(f"scanl.ops.{n}"), n) for n in ("indrnn", "ligru", "slstm", "sru")
)

directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
kinds = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _sample(
    op: Op, batch: int, steps: int, width: int, heads: int = 1, sequences: int | None = None, **options
) -> OpSample:
    n = batch if sequences is None else sequences
    if op is indrnn:
        return OpSample({"x": _draw(batch, steps, width), "w": _draw(width).tanh(), "state": _draw(n, width)}, options)
    if op is sru:
        timed = {name: _draw(batch, steps, width) for name in ("x", "f", "r", "u")}
        return OpSample({**timed, "v_f": _draw(width) / 2, "v_r": _draw(width), "state": _draw(n, width)}, options)
    if op is ligru:
        u = _draw(2, width, width) / width**0.5
        return OpSample({"x": _draw(batch, steps, 2, width), "u": u, "state": _draw(n, width)}, options)
    state = _draw(n, 4, heads, width)
    state[:, 2] = 1 + state[:, 2].abs()
    r = _draw(4, heads, width, width) / width**0.5
    return OpSample({"x": _draw(batch, steps, 4, heads, width), "r": r, "state": state}, options)


@pytest.mark.parametrize(
    ("dtype", "reverse"),
    [
        pytest.param(torch.float32, False, id="float32-forward"),
        pytest.param(torch.float64, True, id="float64-reverse"),
        pytest.param(torch.float32, True, id="float32-reverse", marks=pytest.mark.long),
        pytest.param(torch.float64, False, id="float64-forward", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("op", [indrnn, sru, ligru, slstm], ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("batch", "steps", "width"), [(1, 12, 16), (2, 5, 37), (9, 4, 33), (3, 20, 8), (0, 3, 4), (2, 0, 4)]
)
def test_any_width_equals_the_loop(op, batch, steps, width, reverse, dtype):
    if steps == 0:
        operands = laws.at(op, _sample(op, batch, steps, width), dtype, "cpu")
        y, last = op(**operands, reverse=reverse, backend="cpu")
        assert y.shape[:2] == (batch, 0)
        torch.testing.assert_close(last, operands["state"], rtol=0, atol=0)
        return
    laws.truth(op, _sample(op, batch, steps, width), {"reverse": reverse}, "cpu", dtype)


@kinds
@pytest.mark.parametrize("op", [indrnn, sru, ligru, slstm], ids=lambda op: op.name)
def test_many_packed_sequences_of_any_length(op, dtype):
    """More sequences than one group holds, short beside long: some members of a group rest while others go on."""
    lengths = [3, 0, 11, 1, 2, 7, 0, 5, 1, 4, 9]
    bounds = torch.tensor([0, *np.cumsum(lengths).tolist()])
    for reverse in (False, True) if laws.ALL else (dtype == torch.float32,):
        sample = _sample(op, 1, sum(lengths), 20, 2, sequences=len(lengths), cu_seqlens=bounds)
        laws.truth(op, sample, {"reverse": reverse}, "cpu", dtype)


@pytest.mark.parametrize("op", [indrnn, sru], ids=lambda op: op.name)
def test_weights_summed_over_many_steps(op):
    """The gradients of their weights are sums over time, added up a few hundred steps at a time."""
    laws.truth(op, _sample(op, 1, 600, 3), {}, "cpu", torch.float64)


def test_slstm_heads_do_not_touch():
    sample = _sample(slstm, 2, 6, 4, 3).operands
    y, last = slstm(**sample)
    for head in range(3):
        one = {"x": sample["x"][:, :, :, head : head + 1], "r": sample["r"][:, head : head + 1]}
        z, end = slstm(**one, state=sample["state"][:, :, head : head + 1])
        torch.testing.assert_close(y[:, :, head : head + 1], z)
        torch.testing.assert_close(last[:, :, head : head + 1], end)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_slstm_from_zero_takes_its_first_gate_as_scale(backend):
    """m_1 = i^_1 where n_0 = 0, however small: e^-200 would vanish beside the m of a state that is not there."""
    x = torch.zeros(1, 3, 4, 2, 3)
    x[:, :, 0], x[:, :, 2], x[:, :, 3] = -200.0, 1.0, 100.0
    y, state = slstm(x, torch.zeros(4, 2, 3, 3), backend=backend)
    torch.testing.assert_close(y[:, 0], torch.full((1, 2, 3), 1.0).tanh())
    torch.testing.assert_close(y[:, 2], torch.full((1, 2, 3), 1.0).tanh())
    assert torch.isfinite(state).all()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_slstm_stays_finite_at_extreme_gates(backend):
    generator = torch.Generator().manual_seed(1)
    x = 80 * torch.randn(2, 50, 4, 2, 4, generator=generator)
    x.requires_grad_()
    y, last = slstm(x, torch.zeros(4, 2, 4, 4), backend=backend)
    (grad,) = torch.autograd.grad((y.sum() + last[:, :3].sum()), x)
    assert torch.isfinite(y).all()
    assert torch.isfinite(grad).all()
    assert (y.abs() <= 1 + 1e-6).all()  # an average of tanh under a gate


def test_slstm_does_not_depend_on_the_scale_of_its_state():
    """(c, n, m) and (c e^-a, n e^-a, m + a) are the same state."""
    sample = _sample(slstm, 2, 5, 4).operands
    h, c, n, m = sample["state"].unbind(1)
    moved = torch.stack([h, c * torch.exp(torch.tensor(-3.0)), n * torch.exp(torch.tensor(-3.0)), m + 3], 1)
    torch.testing.assert_close(slstm(**{**sample, "state": moved})[0], slstm(**sample)[0])


def test_linear_cells_are_linear_scans():
    x, w, state = _draw(2, 9, 5), _draw(5), _draw(2, 5)
    torch.testing.assert_close(indrnn(x, w, state, activation="identity"), linear_scan(x, w, state))
    f, r = _draw(2, 9, 5), _draw(2, 9, 5)
    c, last = linear_scan((1 - f.sigmoid()) * x, f.sigmoid(), state)
    torch.testing.assert_close(sru(x, f, r, state=state), (r.sigmoid() * c, last))


def test_ligru_with_an_open_gate_keeps_its_state():
    x = torch.stack([_draw(2, 6, 4), torch.full((2, 6, 4), 1e3, dtype=torch.float64)], 2)
    state = _draw(2, 4)
    y, last = ligru(x, _draw(2, 4, 4), state)
    torch.testing.assert_close(y, state[:, None].expand_as(y))
    torch.testing.assert_close(last, state)


def test_ligru_order_of_gates_and_weights():
    """Rows of u as nn.Linear has them, the candidate's first."""
    layer = torch.nn.Linear(3, 6, bias=False, dtype=torch.float64)
    x, h = _draw(2, 1, 2, 3), _draw(2, 3)
    a, z = (x[:, 0].flatten(1) + layer(h)).chunk(2, -1)
    expected = z.sigmoid() * h + (1 - z.sigmoid()) * a.relu()
    torch.testing.assert_close(ligru(x, layer.weight.detach().view(2, 3, 3), h)[1], expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_what_is_not_a_number_is_not_hidden(backend):
    x = torch.tensor([[[float("nan"), float("-inf"), float("inf")]]])
    y, _ = indrnn(x, torch.ones(3), backend=backend)
    torch.testing.assert_close(y.flatten(), torch.tensor([float("nan"), 0.0, float("inf")]), equal_nan=True)
    y, _ = indrnn(x, torch.ones(3), activation="tanh", backend=backend)
    torch.testing.assert_close(y.flatten(), torch.tensor([float("nan"), -1.0, 1.0]), equal_nan=True)


def test_unknown_options_are_refused_by_the_nearest_name():
    x = torch.zeros(1, 2, 3)
    for backend in ("reference", "cpu"):
        with pytest.raises(ConfigError, match="indrnn: unknown activation 'rleu'; did you mean 'relu'"):
            indrnn(x, x[0, 0], activation="rleu", backend=backend)
        with pytest.raises(ConfigError, match="slstm: unknown forget 'sigmod'; did you mean 'sigmoid'"):
            slstm(torch.zeros(1, 2, 4, 1, 3), torch.zeros(4, 1, 3, 3), forget="sigmod", backend=backend)


def test_views_of_one_projection_are_read_where_they_lie():
    whole = torch.randn(2, 7, 4, 5, dtype=torch.float64)
    v = _draw(2, 5)
    y, last = sru(*whole.unbind(2), *v, backend="cpu")
    z, end = sru(*[part.contiguous() for part in whole.unbind(2)], *v, backend="reference")
    torch.testing.assert_close((y, last), (z, end))


GATES = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "log_sigmoid": torch.nn.functional.logsigmoid}


@kinds
@pytest.mark.parametrize("name", GATES)
def test_gates_are_right_to_a_few_roundings(name, dtype):
    gate = getattr(_sigmoid, name)

    @njit
    def run(x, y):
        for i in range(x.size):
            y[i] = gate(x[i])

    inputs = torch.cat([torch.linspace(-80, 80, 40001), torch.linspace(-1, 1, 20001), torch.logspace(-30, 0, 999)])
    x = inputs.to(dtype)
    y = torch.empty_like(x)
    run(x.numpy(), y.numpy())
    exact = GATES[name](x.double())
    relative = ((y - exact) / exact)[exact.abs() > 1e-37].abs().max()
    assert relative <= 4 * torch.finfo(dtype).eps
    edges = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, 1e4, -1e4], dtype=dtype)
    y = torch.empty_like(edges)
    run(edges.numpy(), y.numpy())
    torch.testing.assert_close(y, GATES[name](edges), equal_nan=True)


def _wider(x, state):
    state = 0.5 * state + x.mean(-1, keepdim=True)
    return x + state.sum(-1, keepdim=True), state


WIDER = Cell(_wider, "x: B T D, state: B N -> B T D", equation="", source="")


@pytest.mark.parametrize("call", [WIDER, partial(WIDER.solve, "newton")], ids=["call", "solve"])
def test_a_state_whose_size_no_other_operand_tells_must_be_given(call):
    x, state = torch.randn(2, 5, 3), torch.randn(2, 7)
    assert call(x, state)[1].shape == (2, 7)
    message = "_wider: state is missing, expected a tensor (B, N) because no other operand has the axis N"
    with pytest.raises(ShapeError, match=re.escape(message)):
        call(x)
