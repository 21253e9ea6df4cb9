"""`scanl warmup`: what is run so that its kernels are compiled; here the references run in their place."""

from dataclasses import replace

import pytest
import torch

from scanl.cli import main, warmup
from scanl.ops import registry

pytest.importorskip("triton")
SIZES = "--dtype float32 --steps 3 --dim 4 --heads 4 --shared-heads 2 --key 3 --value 5 --states 2 --window 3".split()  # noqa: SIM905
ABLE = [op for op in registry.declared() if "triton" in op.backends]


@pytest.fixture
def calls(monkeypatch):
    """Of each op the operands by name, and whether they were packed, in the order of its runs."""
    found = {op.name: [] for op in ABLE}
    for op in ABLE:

        def run(*operands, op=op, cu_seqlens=None, **more):
            given = {name: v for name, v in zip(op.names, operands, strict=True) if v is not None}
            found[op.name].append((given, cu_seqlens is not None))
            y_shape = op.output_shape(op.sizes(dict(zip(op.names, operands, strict=True)), cu_seqlens))
            return op.evaluate("reference", operands, y_shape, cu_seqlens=cu_seqlens, **more)

        monkeypatch.setitem(op.backends, "triton", replace(op.backends["triton"], run=run))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA device")
def test_without_a_gpu_there_is_nothing_to_do(monkeypatch, capfd):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert main(["warmup"]) == 2
    assert capfd.readouterr() == ("", "scanl: warmup: no CUDA device: nothing to compile for\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ops linear_scam", "unknown op with a triton backend 'linear_scam'; did you mean 'linear_scan'?"),
        ("--dtype bfloat61", "unknown dtype 'bfloat61'; did you mean 'bfloat16'?"),
        ("--layer glaa", "unknown layer 'glaa'; did you mean 'gla'?"),
        ("--layer hawk --layer-options.widht 8", "unknown option of hawk 'widht'; did you mean 'width'?"),
        ("--steps 0", "warmup: steps is 0, expected at least 1"),
    ],
)
def test_mistakes(options, message, capfd):
    assert main(["warmup", *options.split()]) == 2
    assert message in capfd.readouterr().err


def test_every_op_in_every_variant(calls, capfd):
    assert main(["warmup", *SIZES, "--packed"]) == 0
    assert [line.split(":")[0] for line in capfd.readouterr().out.splitlines()] == [op.name for op in ABLE]
    for op in ABLE:
        runs = [(given[op.names[0]].shape[1], packed) for given, packed in calls[op.name]]
        assert set(runs) == {(3, False), (3, True), (1, False), (1, True)}
        assert all(
            given[op.names[0]].requires_grad == (steps > 1)
            for (given, _), (steps, _) in zip(calls[op.name], runs, strict=True)
        )
        seen = {(name, value.ndim) for given, _ in calls[op.name] for name, value in given.items()}
        for operand in op.operands:
            for axes in operand.choices:
                if operand.broadcast or (op.name, operand.name) == ("linear_attention", "gv"):
                    continue
                assert (operand.name, len(axes)) in seen, f"{op.name} was not run with {operand.name} {axes}"


def test_all_that_a_backend_takes_is_given_at_once():
    op = registry.get("linear_attention")
    if "triton" not in op.backends:
        pytest.skip("has no triton backend here")
    sizes = {"B": 1, "T": 3, "G": 1, "H": 1, "K": 4, "V": 4}
    found = warmup.variants(op, sizes)
    assert {"q", "k", "v", "state"} == set(found[0])
    assert found[-1]["g"] == ("B", "T", "H", "K")
    assert "u" in found[-1]
    assert not any("gv" in axes for axes in found)
    assert len(found) == len({tuple(axes.items()) for axes in found})


def test_a_chosen_op_alone(calls):
    assert main(["warmup", *SIZES, "--ops", "linear_scan", "--batch", "2"]) == 0
    assert {name for name, runs in calls.items() if runs} == {"linear_scan"}
    assert {given["x"].shape for given, _ in calls["linear_scan"]} == {(2, 3, 4), (2, 1, 4)}


def test_sizes_that_a_backend_does_not_take(monkeypatch, capfd):
    op = registry.get("linear_scan")
    refusing = replace(op.backends["triton"], needs=lambda **sizes: [f"T={sizes['T']} is over 2"])
    monkeypatch.setitem(op.backends, "triton", refusing)
    assert main(["warmup", *SIZES, "--dim", "7", "--ops", "linear_scan"]) == 2
    assert "backend 'triton' cannot run these arguments: T=3 is over 2" in capfd.readouterr().err


@pytest.mark.parametrize("more", [[], ["--autocast", "--dtype", "bfloat16"], ["--packed"]], ids=str)
def test_a_layer(more, calls, capfd):
    assert main(["warmup", *SIZES, "--layer", "mingru", *more]) == 0
    assert "of width 4: " in capfd.readouterr().out
    assert bool(calls["linear_scan"]) == torch.cuda.is_available()


def test_the_kernels_themselves(capfd):
    assert main(["warmup", *SIZES, "--ops", "linear_scan"]) == 0
    assert capfd.readouterr().out.startswith("linear_scan: ")
