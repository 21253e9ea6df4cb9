"""Triton kernels of vectors beyond the laws: off the blocks, cut in time, at the ends of the number range, on a GPU."""

import functools
import itertools
from typing import Any

import pytest
import torch

import laws
from scanl.errors import BackendError
from scanl.ops import selective_scan, short_convolution, weighted_average
from scanl.ops.registry import Op, OpSample

triton = pytest.importorskip("triton")
from interpreter import each_way  # noqa: E402
from scanl.ops._triton import _rows  # noqa: E402
from scanl.ops._triton import selective_scan as scan_kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOUNDS = [0, 3, 3, 20, 21, 37]  # sequences that begin and end inside tiles and chunks, one of no steps, one of one
directions = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def scanned(steps, channels, states, groups=(), batch=1, constant="", more="", rows=None, one="") -> dict[str, Any]:
    """Operands of the selective scan; `more` names the optional ones to be given, `one` has a single group."""
    found = {
        "u": draw(batch, steps, channels),
        "delta": torch.rand(batch, steps, channels).double(),
        "A": -torch.rand(channels, states).double() * 2,
        "B": draw(channels, states) if "B" in constant else draw(batch, steps, *(() if one == "B" else groups), states),
        "C": draw(channels, states) if "C" in constant else draw(batch, steps, *(() if one == "C" else groups), states),
        "D": draw(channels),
        "z": draw(batch, steps, channels),
        "delta_bias": draw(channels),
        "state": draw(rows or batch, channels, states),
    }
    return {k: v for k, v in found.items() if k in ("u", "delta", "A", "B", "C", "state") or k in more.split()}


def averaged(steps, width, timed=False, bonus=True, batch=2, rows=None) -> dict[str, Any]:
    state = draw(rows or batch, 3, width).abs() + 0.5
    found = {"k": draw(batch, steps, width), "v": draw(batch, steps, width), "state": state}
    found["decay"] = -torch.rand((batch, steps, width) if timed else (width,)).double()
    return found | ({"bonus": draw(width)} if bonus else {})


def convolved(steps, width, window, batch=2, rows=None) -> dict[str, Any]:
    state = draw(rows or batch, window - 1, width)
    return {"x": draw(batch, steps, width), "w": draw(width, window), "bias": draw(width), "state": state}


def truth(op: Op, operands, dtype=torch.float32, **options: Any) -> None:
    if "bounds" in options:
        options["cu_seqlens"] = torch.tensor(options.pop("bounds"), device=DEVICE)
    laws.truth(op, OpSample({k: v.to(DEVICE) for k, v in operands.items()}), options, "triton", dtype)


SCANS = {
    "two blocks": functools.partial(scanned, 9, 11, 3, more="D z delta_bias"),
    "groups of two blocks": functools.partial(scanned, 9, 20, 2, (2,), more="z"),
    "narrow groups": functools.partial(scanned, 9, 6, 2, (6,)),
    "groups of B alone": functools.partial(scanned, 5, 20, 2, (2,), one="C"),
    "groups of C alone": functools.partial(scanned, 5, 20, 2, (2,), one="B"),
    "constant": functools.partial(scanned, 9, 11, 2, constant="BC", more="D"),
    "one state": functools.partial(scanned, 9, 2, 1, constant="B"),
    "chunks": functools.partial(scanned, 37, 3, 2, more="z delta_bias"),
}


@each_way("case", SCANS)
def test_selective_scan_off_the_blocks(case, reverse):
    """11 channels in blocks of 8, 37 steps in chunks of 16 and tiles of 8 and 4."""
    truth(
        selective_scan,
        SCANS[case](),
        reverse=reverse,
        delta_softplus="delta_bias" in SCANS[case].keywords.get("more", ""),
    )


@directions
def test_selective_scan_of_sequences_across_chunks(reverse):
    operands = scanned(37, 3, 2, rows=5, more="D z delta_bias", constant="C")
    truth(selective_scan, operands, reverse=reverse, bounds=BOUNDS, delta_softplus=True)


@each_way("bounds", [None, BOUNDS])
def test_selective_scan_cut_in_time(bounds, reverse, monkeypatch):
    """Pieces of 16 steps: what enters each, forwards and backwards, is found first."""
    monkeypatch.setattr(scan_kernels, "CHUNK", 8)
    length = 64 if bounds is None else 37
    entered = []
    enter = scan_kernels._Plan.enter
    monkeypatch.setattr(scan_kernels._Plan, "enter", lambda *args, **more: entered.append(more) or enter(*args, **more))
    monkeypatch.setattr(scan_kernels, "MIN_PIECE_STEPS", 16 if bounds is None else 8)
    operands = scanned(length, 3, 2, more="D z delta_bias", rows=1 if bounds is None else 5)
    more = {} if bounds is None else {"bounds": bounds}
    truth(selective_scan, operands, reverse=reverse, delta_softplus=True, **more)
    assert [found["ADJOINT"] for found in entered] == [False, False, True]


def test_selective_scan_at_large_and_infinite_step_sizes():
    """softplus is its argument over 20; at -inf a step leaves the state alone, and its gradient is 0."""
    operands = scanned(3, 2, 2)
    operands["delta"] = torch.tensor([[[25.0, 19.0], [-torch.inf, -40.0], [20.5, 0.5]]]).double()
    leaves = {name: value.to(DEVICE).requires_grad_() for name, value in operands.items()}
    results = {}
    for backend in ("triton", "reference"):
        y, last = selective_scan(**leaves, delta_softplus=True, backend=backend)
        results[backend] = (y, last, *torch.autograd.grad(y.sum() + last.sum(), list(leaves.values())))
    torch.testing.assert_close(results["triton"], results["reference"], rtol=1e-12, atol=1e-14)


def test_selective_scan_refuses_many_states():
    with pytest.raises(BackendError, match="N=257 is over 256"):
        selective_scan(**{k: v.to(DEVICE) for k, v in scanned(1, 1, 257).items()}, backend="triton")


@each_way("timed bonus", [(False, False), (True, False), (True, True), (False, True)])
def test_weighted_average_off_the_blocks(timed, bonus, reverse):
    """13 channels of two sequences in blocks of 16 lanes, 11 steps in tiles of 8 and 4."""
    truth(weighted_average, averaged(11, 13, timed, bonus), reverse=reverse)


@directions
def test_weighted_average_of_packed_sequences(reverse):
    """Lanes of a program belong to sequences of different lengths."""
    truth(weighted_average, averaged(37, 3, batch=1, rows=5), reverse=reverse, bounds=BOUNDS)


@pytest.mark.parametrize("bonus", [False, True])
def test_weighted_average_of_nothing(bonus):
    """Where nothing counts yet or any more, o is 0 and every gradient is finite."""
    operands = {k: v.to(DEVICE) for k, v in averaged(7, 3, timed=True, bonus=bonus).items() if k != "state"}
    operands["k"][:, [0, 1, 4, 5]] = -torch.inf
    operands["decay"][:, 4] = -torch.inf
    leaves = {name: value.requires_grad_() for name, value in operands.items()}
    y, last = weighted_average(**leaves, backend="triton")
    torch.testing.assert_close((y, last), weighted_average(**leaves, backend="reference"))
    assert y[:, [0, 1, 5]].eq(0).all()
    for grad in torch.autograd.grad(y.square().sum() + last[:, :2].sum(), list(leaves.values())):
        assert grad.isfinite().all()


def test_weighted_average_keeps_small_decays():
    """Decays of 1e-6 a step under keys of one size, in float32 against float64."""
    k, v = torch.zeros(1, 200, 2, device=DEVICE), torch.randn(1, 200, 2, device=DEVICE)
    decay = torch.tensor([-1e-6, -1e-3], device=DEVICE)
    for first in (1, 0):  # larger than all that follow; or each as large, and above a past that has decayed
        k[:, 0] = first
        y, _ = weighted_average(k, v, decay, backend="triton")
        exact, _ = weighted_average(k.double(), v.double(), decay.double(), backend="reference")
        torch.testing.assert_close(y.double(), exact, rtol=3e-7, atol=3e-7)


@directions
@pytest.mark.parametrize("window", [1, 2, 5, pytest.param(16, marks=pytest.mark.long)])
def test_short_convolution_windows(window, reverse):
    """5 channels in blocks of 4, sequences shorter and longer than a window and than a tile of 16."""
    for steps in (1, 19):
        truth(short_convolution, convolved(steps, 5, window), reverse=reverse, silu=True)


@each_way("window", [1, 4])
def test_short_convolution_of_packed_sequences(window, reverse):
    truth(short_convolution, convolved(37, 3, window, batch=1, rows=5), reverse=reverse, bounds=BOUNDS, silu=True)


def test_short_convolution_refuses_long_windows():
    with pytest.raises(BackendError, match="W=17 is over 16"):
        short_convolution(**{k: v.to(DEVICE) for k, v in convolved(1, 1, 17).items()}, backend="triton")


EACH = {
    "selective_scan": (selective_scan, functools.partial(scanned, channels=4, states=2, more="D z delta_bias")),
    "weighted_average": (weighted_average, functools.partial(averaged, width=4)),
    "short_convolution": (short_convolution, functools.partial(convolved, width=4, window=3)),
}
each = pytest.mark.parametrize("name", EACH)


@each
def test_rows_of_wider_tensors_are_read_in_place(name):
    """What comes as half of a projection is not copied; what lies otherwise is."""
    op, make = EACH[name]
    operands = {k: v.to(DEVICE) for k, v in make(steps=6, batch=2).items()}
    first = operands[op.names[0]]
    half = torch.cat([first, first], -1)[..., : first.shape[-1]]
    assert _rows.rows(half)[0] is half
    turned = first.mT.contiguous().mT
    assert _rows.rows(turned)[0].is_contiguous()
    expected = laws.evaluate(op, operands, {}, "triton")
    for other in (half, turned, first[:, :1].expand(first.shape)):
        plain = expected if other is not None and other.equal(first) else None
        got = op(**{**operands, op.names[0]: other}, backend="triton")
        wanted = (plain["y"], plain["last"]) if plain else op(**{**operands, op.names[0]: other}, backend="reference")
        torch.testing.assert_close(got, wanted)


@each
@pytest.mark.parametrize("steps", [0, 1])
def test_no_steps_and_one(name, steps):
    op, make = EACH[name]
    operands = {k: v.to(DEVICE).requires_grad_() for k, v in make(steps=steps).items()}
    results = op(**operands, backend="triton")
    found = torch.autograd.grad(results, list(operands.values()), [torch.ones_like(value) for value in results])
    got = dict(zip(operands, found, strict=True))
    if steps == 0:
        assert torch.equal(results[1], operands["state"])
        assert got.pop("state").eq(1).all()
        assert not any(grad.any() for grad in got.values())
    else:
        torch.testing.assert_close(results, op(**operands, backend="reference"))


@pytest.mark.gpu
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 1024, 512), (1, 8192, 200)], ids=str)
def test_real_sizes(name, shape, dtype):
    batch, steps, width = shape
    make = {
        "selective_scan": lambda: scanned(steps, width, 16, batch=batch, more="D z delta_bias"),
        "weighted_average": lambda: averaged(steps, width, batch=batch),
        "short_convolution": lambda: convolved(steps, width, 4, batch=batch),
    }[name]
    op = EACH[name][0]
    operands = laws.at(op, OpSample(make()), dtype, "triton")
    options = {"delta_softplus": True} if name == "selective_scan" else {}
    exact = laws.evaluate(op, laws.wide(operands), options, "parallel")
    same = laws.evaluate(op, operands, options, "parallel")
    ours = laws.evaluate(op, operands, options, "triton")
    rounding = laws.worst(same, exact)
    for result in exact:
        laws.close(ours[result], exact[result], rounding, result)


@pytest.mark.gpu
@each
def test_another_length_compiles_nothing(name):
    op, make = EACH[name]
    op(**{k: v.to(DEVICE).float() for k, v in make(steps=48).items()}, backend="triton")
    with laws.compiling_nothing():
        for steps, batch in itertools.product((2, 16, 47, 101), (2, 3)):
            op(**{k: v.to(DEVICE).float() for k, v in make(steps=steps, batch=batch).items()}, backend="triton")
