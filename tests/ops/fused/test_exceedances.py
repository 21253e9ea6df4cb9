"""Tallies above thresholds: the compiled loop against the plain one, and against convolutions."""

import pytest
import torch

from scanl.ops._frame.fused import supported
from scanl.ops.fused.exceedances import Exceedances, exceedances, plain

BOUNDS = torch.tensor([0, 9, 9, 20])  # the second sequence is empty


def operands(dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    decay = torch.polar(0.9 * torch.rand(3, 5, generator=draw), 3 * torch.rand(3, 5, generator=draw))
    shapes = [(2, 3, 5), (2, 3, 5), (2, 5), (4, 5), (3, 4, 3, 5), (3, 5)]
    mix, c, e, thresholds, filters, past = (torch.randn(*shape, generator=draw, dtype=dtype) for shape in shapes)
    x = torch.randn(20, 2, generator=draw, dtype=dtype)
    delta = torch.tensor([0, 1, 0, 1, 1], dtype=dtype)
    tallies = torch.randint(3, (3, 4, 4, 5), generator=draw).to(dtype)
    state = Exceedances(filters, past, tallies, torch.tensor([0, 2, 5]))
    return [x, torch.stack([decay.real, decay.imag]).to(dtype), mix, c, e, delta, thresholds, state]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_is_the_plain_loop(dtype):
    *given, state = operands(dtype)
    before = [part.clone() for part in state]
    assert supported(*given, *state[:3])
    after = exceedances(*given, state, BOUNDS)
    assert after.steps.tolist() == [9, 2, 16]
    for found, expected in zip(after, plain(*given, state, BOUNDS), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)
    for part, was in zip(state, before, strict=True):
        assert torch.equal(part, was)


def test_it_tallies_a_convolution():
    """With double poles, the response to an impulse after t steps is (t + 1) λ^t."""
    x, decay, mix, c, e, delta, thresholds, state = operands()
    start = Exceedances(*(torch.zeros_like(part) for part in state))
    tallies = exceedances(x, decay, mix, c, e, delta, thresholds, start, BOUNDS).tallies[2]
    powers = torch.complex(*decay) ** torch.arange(11)[:, None, None]
    kernel = (torch.complex(*c).conj() * torch.arange(1, 12)[:, None, None] * powers).real
    y = torch.stack(
        [
            sum(torch.einsum("c,cfk,fk->k", x[s], mix, kernel[t - s]) for s in range(9, t + 1)) + x[t] @ e
            for t in range(9, 20)
        ]
    )
    z = y - delta * torch.cat([torch.zeros_like(y[:1]), y[:-1]])
    above = (z[:, None] > thresholds).int()
    count, when, run, longest = tallies
    torch.testing.assert_close(above.sum(0).to(count), count)
    torch.testing.assert_close((above * torch.arange(1, 12)[:, None, None]).sum(0).to(when), when)
    texts = [["".join(map(str, above[:, q, k].tolist())).split("0") for k in range(5)] for q in range(4)]
    assert longest.tolist() == [[max(map(len, parts)) for parts in row] for row in texts]
    assert run.tolist() == [[len(parts[-1]) for parts in row] for row in texts]
    assert 0 < count.mean() < 11


def test_pieces_are_the_whole():
    x, *system, state = operands()
    one = Exceedances(*(part[:1] for part in state))
    whole = exceedances(x, *system, one, torch.tensor([0, 20]))
    middle = exceedances(x[:7], *system, one, torch.tensor([0, 7]))
    end = exceedances(x[7:], *system, middle, torch.tensor([0, 13]))
    for found, expected in zip(end, whole, strict=True):
        assert torch.equal(found, expected)
