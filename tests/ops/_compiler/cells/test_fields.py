"""Cells whose state is a NamedTuple: with fields of the same axes, and with fields of different axes."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import laws
from scanl.errors import ConfigError, ShapeError
from scanl.ops.registry import Cell, OpSample


class Wave(NamedTuple):
    y: Tensor
    z: Tensor


class Memory(NamedTuple):
    s: Tensor
    n: Tensor
    m: Tensor


def _wave(x, w, state: Wave, *, dt: float = 0.1):
    z = state.z + dt * (torch.tanh(x + state.y @ w[0].T + state.z @ w[1].T) - state.y)
    y = state.y + dt * z
    return y, Wave(y, z)


def _memory(q, v, g, u, state: Memory):
    """Fields whose sizes only together are a number with a name."""
    m = torch.tanh(g + state.m)
    s = state.s * torch.sigmoid(m)[..., None] + v[..., None] * q[:, None]
    n = torch.tanh(state.n + q + v @ u.T)
    return (s * n[:, None]).sum(-1), Memory(s, n, m)


def _cell(step, declaration: str) -> Cell:
    return Cell(step, declaration, equation="", source="")


wave = _cell(_wave, "x: B T D, w: 2 D D, state.y: B D, state.z: B D -> B T D")
memory = _cell(_memory, "q: B T K, v: B T V, g: B T 1, u: K V, state.s: B V K, state.n: B K, state.m: B 1 -> B T V")


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _operands(op: Cell, batch: int, steps: int, rows: int, *, widths: tuple[int, int] = (3, 4)):
    k, v = widths
    if op is wave:
        return {"x": _draw(batch, steps, k), "w": _draw(2, k, k), "state": Wave(_draw(rows, k), _draw(rows, k))}
    timed = {"q": _draw(batch, steps, k), "v": _draw(batch, steps, v), "g": _draw(batch, steps, 1), "u": _draw(k, v)}
    return {**timed, "state": Memory(_draw(rows, v, k), _draw(rows, k), _draw(rows, 1))}


def _loop(op: Cell, *, state, **operands):
    """Run the step as it is written."""
    ys = []
    for t in range(next(iter(operands.values())).shape[1]):
        y, state = op.step(*[v[:, t] if name in "xqvg" else v for name, v in operands.items()], state)
        ys.append(y)
    return torch.stack(ys, 1), state


each = pytest.mark.parametrize("op", [wave, memory], ids=["stacked", "joined"])
PACKED = {"cu_seqlens": torch.tensor([0, 2, 2, 5]), "reverse": True}


@each
@pytest.mark.parametrize(("batch", "rows", "more"), [(2, 2, {}), (1, 3, PACKED)], ids=["batch", "packed"])
def test_kernels_equal_the_loop(op, batch, rows, more):
    laws.truth(op, OpSample(_operands(op, batch, 5, rows)), more, "cpu", torch.float64)


@each
def test_the_last_state_and_its_gradient(op):
    """Of each field by itself, from a given state and from none; the same kernels serve other widths."""
    for widths, start in (((3, 4), True), ((7, 2), True), ((7, 2), False)):
        operands = laws.differentiable(_operands(op, 2, 3, 2, widths=widths))
        state = operands.pop("state") if start else operands.pop("state") and None
        wanted = [*operands.values(), *(state or ())]
        found = []
        for backend in ("reference", "cpu"):
            y, last = op(**operands, state=state, backend=backend)
            assert type(last) is op.fields.kind
            loss = sum((i + 1) * field.sin().sum() for i, field in enumerate((y, *last)))
            found.append((y, *last, *torch.autograd.grad(loss, wanted)))
        torch.testing.assert_close(found[1], found[0])
    assert [len(known) for known in op._compiled.values()] == [1]


@each
@pytest.mark.parametrize("method", ["sequential", "newton", "quasi_newton"])
def test_all_steps_at_once(op, method):
    operands = _operands(op, 2, 6, 2)
    expected = _loop(op, **operands)
    torch.testing.assert_close(op(**operands, backend="reference"), expected)
    found = op.solve(method, **operands)
    torch.testing.assert_close(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)
    assert type(found[1]) is op.fields.kind


@each
def test_second_derivatives_and_half_precision(op):
    operands = laws.differentiable(_operands(op, 1, 2, 1))
    state = operands.pop("state")

    def run(*values):
        given = dict(zip(operands, values, strict=False))
        y, last = op(**given, state=op.fields.kind(*values[len(given) :]), backend="cpu")
        return y, *last

    assert torch.autograd.gradgradcheck(run, (*operands.values(), *state), fast_mode=True)
    half = {name: value.detach().bfloat16() for name, value in operands.items()}
    y, last = op(**half, backend="reference")
    assert (y.dtype, {field.dtype for field in last}) == (torch.bfloat16, {torch.float32})


def test_nothing_to_read():
    operands = _operands(memory, 2, 0, 2)
    for backend in ("reference", "cpu"):
        y, last = memory(**operands, backend=backend)
        assert y.shape == (2, 0, 4)
        torch.testing.assert_close(last, operands["state"])


def test_compiled_and_exported():
    operands = _operands(wave, 2, 3, 2)
    expected = wave(**operands)

    class Model(torch.nn.Module):
        def forward(self, x, w, state):
            return wave(x, w, Wave(*state))

    given = (operands["x"], operands["w"], tuple(operands["state"]))
    torch.testing.assert_close(torch.compile(Model(), fullgraph=True, backend="aot_eager")(*given), expected)
    torch.testing.assert_close(torch.export.export(Model(), given).module()(*given), expected)


def test_on_a_gpu():
    pytest.importorskip("triton")
    laws.truth(wave, OpSample(_operands(wave, 1, 5, 3)), {"cu_seqlens": PACKED["cu_seqlens"]}, "triton", torch.float32)


def test_wrong_states():
    operands = _operands(memory, 2, 3, 2)
    s, n, m = operands.pop("state")
    for state, message in (
        (s, "_memory: state is a Tensor, expected a Memory with the fields s, n, m"),
        ((s, n, m), "_memory: state is a tuple, expected a Memory with the fields s, n, m"),
        (Memory(s, n[:, :1], m), "_memory: state.n has shape (2, 1), expected (B, K) = (2, 3)"),
        (Memory(s, n, m[:1]), "_memory: state.m has shape (1, 1), expected (B, 1) = (2, 1)"),
        (Memory(s, n, 1.0), "_memory: state.m is a float, expected a tensor of shape (2, 1)"),
    ):
        for call in (memory, memory.explain, lambda **given: memory.solve("newton", **given)):
            with pytest.raises(ShapeError) as raised:
                call(**operands, state=state)
            assert str(raised.value) == message


def test_wrong_declarations():
    for declaration, message in (
        (
            "x: B T D, w: 2 D D, state.y: B D -> B T D",
            "the annotation of state is Wave, expected a NamedTuple with the",
        ),
        (
            "x: B T D, w: 2 D D, state.y: B D, state.z: B E -> B T D",
            "state.z has the axis E, expected one that another",
        ),
    ):
        with pytest.raises(ConfigError, match=f"_wave: {message}"):
            _cell(_wave, declaration)
