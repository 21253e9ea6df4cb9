"""The order of the loops of a kernel: programs that are drawn, against torch."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scanl.ops._compiler import print_numba, schedule
from scanl.ops._compiler.recorded import RecordedFunction


@pytest.fixture(autouse=True)
def scratch_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read before it is written shows."""
    memory = RecordedFunction.memory
    monkeypatch.setattr(RecordedFunction, "memory", lambda *args: [each.fill_(torch.nan) for each in memory(*args)])


def draw(chance: random.Random) -> tuple[Callable[..., list[Tensor]], Tensor]:
    """Return a function of tensors (2, 3), (2, 4), (2, 3, 4) and (2, 1, 1), by steps that are drawn once, and a buffer.

    The function writes the buffer.
    """
    often = 2, 2, 2, 3, 2, 1, 2, 1, 1, 2, 3, 1, 1, 2  # kinds 5, 7 and 12 are calls between the loops
    kinds = chance.choices(range(14), often, k=24)
    steps = [(kind, chance.randrange(1 << 16), chance.randrange(1 << 16)) for kind in kinds]
    kept = [chance.randrange(1 << 16) for _ in range(4)]
    buffer = torch.zeros(2, 3, 4)

    def function(row: Tensor, column: Tensor, matrix: Tensor, gate: Tensor) -> list[Tensor]:
        shapes: dict[str, list[Tensor]] = {
            "row": [row], "column": [column], "matrix": [matrix, matrix + buffer], "gate": [gate],
        }  # fmt: skip
        written: list[Tensor] = []
        for kind, first, second in steps:
            rows, columns, matrices, gates = shapes.values()
            a, b = (rows[at % len(rows)] for at in (first, second))
            c, d = (columns[at % len(columns)] for at in (first, second))
            m, n = (matrices[at % len(matrices)] for at in (first, second))
            if kind == 0:
                rows.append(a.tanh() * b)
            elif kind == 1:
                columns.append(c - d * gates[first % len(gates)][:, 0])
            elif kind == 2:
                matrices.append(a[:, :, None] * c[:, None, :])
            elif kind == 3:
                matrices.append(m * gates[second % len(gates)] + n)
            elif kind == 4:
                columns.append((a[:, None, :] @ m)[:, 0])
            elif kind == 5:
                rows.append((m @ c[:, :, None])[:, :, 0])
            elif kind == 6:
                matrices.append(m - b[:, :, None] * d[:, None, :])
            elif kind == 7:
                gates.append((-m.abs()).exp().sum((1, 2), keepdim=True) * gates[first % len(gates)])
            elif kind == 8:
                buffer.copy_(m)
                matrices.append(n * 0.5 + buffer)
            elif kind == 9:
                matrices.append(m.clone())
                written.append(matrices[-1])
            elif kind == 11:
                columns.append(m.sum(1) - n.mean(1))
            elif kind == 12:
                rows.append((c[:, None, :] @ m.mT)[:, 0])
            elif kind == 13 and written:
                matrices.append(written[second % len(written)].flip(1) + m)
            elif written:
                written[second % len(written)].sub_(a[:, :, None] * 0.1)
        return [tensors[at % len(tensors)] for at, tensors in zip(kept, shapes.values(), strict=True)]

    return function, buffer


def texts(recorded: RecordedFunction) -> list[str]:
    """Return the source of each loop."""
    return [print_numba.function(name, function) for function, name in recorded.schedule.functions.items()]


@pytest.mark.parametrize("seed", range(32))
def test_loops_that_become_one_compute_what_torch_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "MAX_WAITING_CALLS", 32 if seed % 2 else 2)
    torch.manual_seed(seed)
    dtype = torch.float64 if seed % 4 == 3 else torch.float32  # the buffer is float32
    operands = [torch.randn(shape, dtype=dtype) for shape in ((2, 3), (2, 4), (2, 3, 4), (2, 1, 1))]
    function, buffer = draw(random.Random(seed))
    recorded = RecordedFunction(function, *operands)
    buffer.zero_()
    expected, after = [each.clone() for each in function(*operands)], buffer.clone()
    buffer.zero_()
    for y, true in zip(recorded(*operands), expected, strict=True):
        torch.testing.assert_close(y, true)
    torch.testing.assert_close(buffer, after)


def test_the_product_of_a_state_is_summed_while_the_state_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decay is computed after the product of key and value, in two loops of other sizes; both run before."""

    def step(state: Tensor, key: Tensor, value: Tensor, gate: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        product = key[:, :, None] * value[:, None, :]
        state = (key * gate.exp())[:, :, None] * state + product
        return (query[:, None, :] @ state)[:, 0], state

    operands = [torch.randn(2, 16, 32), *(torch.randn(2, size) for size in (16, 32, 1, 16))]
    recorded = RecordedFunction(step, *operands)
    assert sum(recorded.scratch.values()) < operands[0].numel()
    assert sum("p0[i0 * 512 + i1 * 32 + i2] = " in text for text in texts(recorded)) == 1
    for y, true in zip(recorded(*operands), step(*operands), strict=True):
        torch.testing.assert_close(y, true)


def test_the_product_of_a_state_of_heads_is_summed_while_the_state_is_written() -> None:
    """The product has one axis for rows and heads."""

    def step(state: Tensor, key: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        state = 0.5 * state + key[..., None]
        return query.flatten(0, 1)[:, None, :] @ state.flatten(0, 1), state

    operands = torch.randn(2, 3, 16, 32), torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    recorded = RecordedFunction(step, *operands)
    assert sum("p0[i0 * 512 + i1 * 32 + i2] = " in text and "p2[" in text for text in texts(recorded)) == 1
    for y, true in zip(recorded(*operands), step(*operands), strict=True):
        torch.testing.assert_close(y, true)


@pytest.mark.parametrize("size", [5, 16, schedule.MAX_SHORT_ROW, 65])
def test_short_rows_are_summed(size: int) -> None:
    x = torch.randn(3, 4, size)
    for y, true in zip(RecordedFunction(lambda x: (x.sum(-1), x.mean(-1)), x)(x), (x.sum(-1), x.mean(-1)), strict=True):
        torch.testing.assert_close(y, true)


def test_a_sum_along_rows_is_a_loop_that_writes_nothing_else() -> None:
    """Else the addresses of what it writes decide the order of the sum, and bits differ from run to run."""
    recorded = RecordedFunction(lambda x: (x * x, (x * x).sum(-1), (x * x).sum(0)), torch.randn(5, 128))
    sums = [text for text in texts(recorded) if "+" in text.partition("separate")[2].replace("i0 * 128 +", "")]
    along = [text for text in sums if "total +=" in text]
    assert len(sums) == 2
    assert len(along) == 1
    assert along[0].count("] = ") == 1


def test_a_sum_is_known_after_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(state: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        state = 2 * state
        read = (key[:, None, :] @ state)[:, 0]
        return read, state * read[:, None, :]

    operands = torch.randn(2, 3, 4), torch.randn(2, 3)
    for y, true in zip(RecordedFunction(step, *operands)(*operands), step(*operands), strict=True):
        torch.testing.assert_close(y, true)


def test_a_sum_that_joins_no_loop_leaves_the_calls_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product needs a sum over what its loop would write; the loop may not run twice."""
    buffer, matrix = torch.ones(2, 3, 4), torch.randn(2, 3, 4)

    def step(matrix: Tensor) -> Tensor:
        buffer.copy_(buffer + matrix)
        return (buffer.sum(-1)[:, None, :] @ buffer)[:, 0]

    monkeypatch.setattr(schedule, "MAX_WAITING_CALLS", 2)
    recorded = RecordedFunction(step, matrix)
    buffer.fill_(1)
    expected = step(matrix).clone()
    buffer.fill_(1)
    torch.testing.assert_close(recorded(matrix), expected)
