"""The selective scan against its closed form, at the sizes that its kernels divide, and in memory."""

import importlib
import itertools
from typing import Any

import pytest
import torch

import laws
from scanl.errors import ShapeError
from scanl.ops.registry import OpSample
from scanl.ops.selective_scan import selective_scan

BACKENDS = ("reference", "parallel", "cpu")


def _operands(steps, channels, width, *groups, batch=2, dtype=torch.float64, complex_of="") -> dict[str, Any]:
    def draw(name, *shape):
        return torch.randn(shape, dtype=dtype.to_complex() if name in complex_of else dtype)

    decay = -torch.rand(channels, width, dtype=dtype) * 2
    if "A" in complex_of:
        decay = torch.complex(decay, torch.randn_like(decay))
    return {
        "u": torch.randn(batch, steps, channels, dtype=dtype),
        "delta": torch.rand(batch, steps, channels, dtype=dtype),
        "A": decay,
        "B": draw("B", batch, steps, *groups, width),
        "C": draw("C", batch, steps, *groups, width),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kinds", ["", "A", "AB", "ABC", "BC"])
def test_closed_form(backend, kinds):
    """y_t = Σ_{s <= t} C_t · exp(A Σ_{s < r <= t} Δ_r) Δ_s u_s B_s, twice its real part when complex, then D and z."""
    given = _operands(6, 4, 3, 2, complex_of=kinds)
    D, z, bias = torch.randn(4).double(), torch.randn(2, 6, 4).double(), torch.randn(4).double()
    y, last = selective_scan(**given, D=D, z=z, delta_bias=bias, delta_softplus=True, backend=backend)
    delta = (1 + (given["delta"] + bias).exp()).log()
    B, C = (given[name].repeat_interleave(2, 2) for name in "BC")
    for t in range(6):
        h = torch.zeros(2, 4, 3, dtype=last.dtype)
        for s in range(t + 1):
            through = delta[:, s + 1 : t + 1].sum(1).unsqueeze(-1)
            h = h + (through * given["A"]).exp() * (delta[:, s] * given["u"][:, s]).unsqueeze(-1) * B[:, s]
        read = (h * C[:, t]).sum(-1)
        read = 2 * read.real if kinds else read
        expected = (read + D * given["u"][:, t]) * z[:, t] * z[:, t].sigmoid()
        torch.testing.assert_close(y[:, t], expected)
        if t == 5:
            torch.testing.assert_close(last, h)
    assert last.is_complex() == bool(kinds)


@pytest.mark.parametrize(("channels", "width", "groups"), [(300, 3, ()), (130, 2, (2,)), (36, 3, (12,)), (9, 2, (9,))])
@pytest.mark.parametrize("constant", ["", "B", "C"])
def test_blocks_of_channels_and_chunks_of_time(channels, width, groups, constant):
    """More channels than a block, groups wider and narrower than one, more steps than a chunk."""
    given = _operands(37, channels, width, *groups)
    for name in constant:
        given[name] = torch.randn(channels, width).double()
    more = {"D": torch.randn(channels).double(), "z": torch.randn(2, 37, channels).double()}
    state = torch.randn(2, channels, width).double()
    sample = OpSample({**given, **more, "delta_bias": torch.randn(channels).double(), "state": state})
    for dtype, reverse in itertools.product((torch.float32, torch.complex128), (False, True)):
        if laws.ALL or (dtype == torch.float32) != (reverse != (constant == "B")):  # each direction in one dtype
            laws.truth(selective_scan, sample, {"reverse": reverse, "delta_softplus": True}, "cpu", dtype)


@pytest.mark.parametrize("constant", ["", "BC"])
def test_several_sequences_to_a_unit(monkeypatch, constant):
    """One core takes five sequences in two parts: sums over sequences inside a part and over parts."""
    kernels = importlib.import_module("scanl.ops._cpu.selective_scan")
    given = _operands(19, 3, 2, batch=5)
    for name in constant:
        given[name] = torch.randn(3, 2).double()
    given |= {
        "D": torch.randn(3).double(),
        "delta_bias": torch.rand(3).double(),
        "state": torch.randn(5, 3, 2).double(),
    }
    monkeypatch.setattr(kernels, "CORES", 1)
    kernels._divide.cache_clear()
    try:
        assert kernels._divide(5, 19, 3, 2, 1, 1, None).parts == 2
        laws.truth(selective_scan, OpSample(given), {}, "cpu", torch.float64)
    finally:
        kernels._divide.cache_clear()


@pytest.mark.parametrize("backend", ["parallel", "cpu"])
@pytest.mark.parametrize("alone", ["B", "C"])
@pytest.mark.parametrize(("channels", "groups"), [(6, 3), (80, 2)], ids=["narrow", "wide"])
def test_groups_of_one_matrix_alone(backend, alone, channels, groups):
    given = _operands(5, channels, 2, groups)
    given[{"B": "C", "C": "B"}[alone]] = torch.randn(2, 5, 2).double()
    given["state"] = torch.randn(2, channels, 2).double()
    laws.truth(selective_scan, OpSample(given), {}, backend, torch.float64)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_and_infinite_step_sizes(backend):
    """softplus is its argument over 20, as torch has it; at -inf a step leaves the state alone, gradient 0."""
    given = _operands(3, 2, 2, batch=1)
    given["delta"] = torch.tensor([[[25.0, 19.0], [-torch.inf, -40.0], [20.5, 0.5]]]).double().requires_grad_()
    y, last = selective_scan(**given, delta_softplus=True, backend=backend)
    plain = {**given, "delta": torch.nn.functional.softplus(given["delta"].detach())}
    torch.testing.assert_close((y, last), selective_scan(**plain, backend="reference"), rtol=1e-14, atol=1e-14)
    (grad,) = torch.autograd.grad(y.sum(), given["delta"])
    assert grad.isfinite().all()
    assert grad[0, 1, 0] == 0


def test_real_operands_are_real():
    given = _operands(3, 2, 2)
    with pytest.raises(ShapeError, match="selective_scan: u is complex128, expected real numbers"):
        selective_scan(**{**given, "u": given["u"] + 0j})


def test_strided_rows_are_read_in_place():
    """u and z as halves of one projection, delta as a view: gradients reach what they are views of."""
    given = _operands(20, 8, 2)
    both = torch.randn(2, 20, 16).double()
    results = []
    for backend in ("reference", "cpu"):
        leaf = both.clone().requires_grad_()
        u, z = leaf.chunk(2, -1)
        y, last = selective_scan(**{**given, "u": u}, z=z, backend=backend)
        y.transpose(0, 1).square().sum().backward()
        results.append((y, last, leaf.grad))
    torch.testing.assert_close(*results)


def test_long_sums_do_not_drift():
    """2^15 steps in float32 against float64, values and every gradient."""
    given = _operands(2**15, 2, 2, batch=1)
    given["A"] = given["A"] * 0.01
    sample = {**given, "D": torch.randn(2).double(), "delta_bias": torch.rand(2).double()}
    exact = laws.evaluate(selective_scan, sample, {}, "parallel")
    actual = laws.evaluate(selective_scan, {k: v.float() for k, v in sample.items()}, {}, "cpu")
    for name, value in exact.items():
        error = (actual[name].double() - value).norm() / value.norm()
        assert error < 2e-6, f"{name}: {error}"
