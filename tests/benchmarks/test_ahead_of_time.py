"""benchmarks/speed/ahead_of_time.py: its cases are calls that the ops accept, and it sees every kernel of a launch."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import scanl.ops
from scanl.ops import registry

triton = pytest.importorskip("triton")
FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))
from speed import ahead_of_time  # noqa: E402


def test_every_op_that_has_the_backend_has_cases():
    found = ahead_of_time.cases()
    able = {op.name for op in registry.every() if "triton" in op.backends}
    assert {case.op for case in found.values()} == able & set(scanl.ops.__all__)
    written = [
        *ahead_of_time.scans(), *ahead_of_time.memories(), *ahead_of_time.vectors(), *ahead_of_time.cells()
    ]  # fmt: skip
    assert len(written) == len(dict(written)), "two cases of one name"


def test_an_op_without_cases_gets_what_it_requires(monkeypatch):
    op = registry.get("sru")
    everything = replace(op.backends["triton"], dtypes=op.dtypes)
    monkeypatch.setitem(op.backends, "triton", everything)
    found = ahead_of_time.cases()
    assert {name for name in found if name.startswith("sru")} == {"sru: bfloat16", "sru: float32"}
    given, packed = ahead_of_time.operands(found["sru: bfloat16"], op)
    assert packed is None
    assert {name: value.shape for name, value in given.items() if value is not None} == {
        **dict.fromkeys("xfr", (8, 4096, 2048)),
        "state": (8, 2048),
    }


@pytest.mark.parametrize("name", ahead_of_time.cases())
def test_cases_are_what_the_backend_takes(name):
    case = ahead_of_time.cases()[name]
    op = registry.get(case.op)
    operands, packed = ahead_of_time.operands(case, op)
    sizes = op.sizes(operands, packed)
    options = {key: case.options.get(key, option.default) for key, option in op.options.items()}
    given = frozenset(key for key, value in operands.items() if value is not None)
    assert not op.backends["triton"].needs(**sizes, **options, given=given)
    assert operands["state"].dtype == {torch.bfloat16: torch.float32}.get(case.dtype, case.dtype)
    assert set(case.options) <= set(op.options)


KERNELS = """
    import json
    import torch, triton, triton.language as tl
    from triton.runtime import driver
    from speed import ahead_of_time

    @triton.jit
    def _double(x):
        return 2 * x

    @triton.autotune([triton.Config({}, num_warps=w) for w in (2, 4)], key=["SIZE"])
    @triton.jit
    def _tuned(p, n, SIZE: tl.constexpr):
        i = tl.arange(0, SIZE)
        tl.store(p + i, _double(tl.load(p + i, mask=i < n)), mask=i < n)

    @triton.jit(do_not_specialize=["n"])
    def _plain(p, n, FLAG: tl.constexpr):
        tl.store(p, n + FLAG)

    def launch(case, way):
        x = torch.empty(2**40, device="meta")
        for n in (5, 6):  # the second compiles nothing new
            _tuned[(n,)](x, n, SIZE=64, enable_fp_fusion=True)
            _plain[lambda meta: (n,)](x, n, FLAG=True, enable_fp_fusion=True)

    driver.set_active(ahead_of_time.Chip())
    ahead_of_time.launch = launch
    print(json.dumps(list(ahead_of_time.kernels(None, "forward"))))
"""


def test_every_configuration_is_compiled_once(tmp_path):
    if not (Path(triton.__file__).parent / "backends/nvidia/bin/ptxas").exists():
        pytest.skip("this triton comes without ptxas")
    program = tmp_path / "kernels.py"
    program.write_text(textwrap.dedent(KERNELS))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(FOLDER)}
    run = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert [(row["kernel"], row["warps"], json.loads(row["flags"])) for row in found] == [
        ("main.tuned", 2, {"SIZE": 64}),
        ("main.tuned", 4, {"SIZE": 64}),
        ("main.plain", 4, {"FLAG": True}),
    ]
    assert all(row["spilled"] == 0 and row["registers"] > 0 and row["programs"] >= 16 for row in found)


def test_the_table_has_the_worst_of_each_kernel():
    row = {"case": "c", "kernel": "k", "registers": 8, "spilled": 0, "shared": 64, "programs": 4}
    rows = [row, {**row, "registers": 9, "shared": 32, "programs": 3}, {"case": "d", "error": "x"}]
    assert ahead_of_time.table(rows).splitlines()[2:] == ["| c | `k` | 2 | 9 | 0 | 64 | 3 |"]


@pytest.mark.parametrize(("interpreted", "message"), [("1", "interpreted, not compiled"), (None, "unknown name 'x'")])
def test_refusals(interpreted, message, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if interpreted:
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
    monkeypatch.setattr(ahead_of_time.driver, "set_active", lambda chip: None)
    monkeypatch.setattr(sys, "argv", ["ahead_of_time.py", "x"])
    with pytest.raises(SystemExit) as raised:
        ahead_of_time.main()
    assert message in f"{raised.value} {capsys.readouterr().err}"
