"""`benchmarks/quality/originals.py`: which tests of the originals it takes, and how it counts them."""

import csv
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from quality import originals


def case(function, **params):
    return SimpleNamespace(
        function=function,
        originalname=function.__name__,
        path=Path("test_some.py"),
        callspec=SimpleNamespace(params=params),
    )


def calls_ours():
    def run():
        return chunk_some(1)  # noqa: F821

    return run()


def calls_a_kernel():
    return kernel(1)  # noqa: F821


def test_a_case_is_taken_if_it_calls_ours_the_smallest_first():
    plugin = originals.Plugin({"chunk_some"}, "float32", 2)
    half = [case(calls_ours, T=T, dtype=torch.float16) for T in (64, 8, 16)]
    items = [case(calls_a_kernel, T=1), *half, case(calls_ours, T=8, dtype=torch.bfloat16)]
    plugin.pytest_collection_modifyitems(items)
    assert [item.callspec.params for item in items] == [{"T": T, "dtype": torch.float32} for T in (8, 16)]
    for node, end in {"a": "passed", "b": "failed", "c": "skipped"}.items():
        node = f"tests/test_some.py::calls_ours[{node}]"
        why = ("test_some.py", 1, "Skipped: needs a GPU")
        report = SimpleNamespace(when="call", outcome=end, nodeid=node, longrepr=why, skipped=end == "skipped")
        plugin.pytest_runtest_logreport(report)
    (row,) = plugin.rows("some", "float32")
    assert (row["passed"], row["failed"], row["skipped"], row["left"]) == (1, 1, 1, 1)
    assert row["why"] == "needs a GPU"


def test_a_test_that_is_left_out_says_why(monkeypatch):
    monkeypatch.setitem(originals.LEFT_OUT, "calls_ours", "is about a kernel")
    plugin = originals.Plugin({"chunk_some"}, None, 2)
    items = [case(calls_ours, T=T) for T in (8, 16)]
    plugin.pytest_collection_modifyitems(items)
    assert not items
    (row,) = plugin.rows("some", None)
    assert (row["passed"], row["left"], row["why"]) == (0, 2, "is about a kernel")


def test_a_test_whose_reference_refuses_float32_keeps_its_dtype():
    plugin = originals.Plugin({"chunk_some"}, "float32", 2)
    item = case(calls_ours, dtype=torch.float16)
    item.path = Path(originals.HALF[0])
    plugin.pytest_collection_modifyitems([item])
    assert item.callspec.params == {"dtype": torch.float16}
    (row,) = plugin.rows("some", "float32")
    assert row["dtype"] == "as written"


def test_ours_stand_in_every_module_of_the_package(monkeypatch):
    inner, other = types.ModuleType("somepackage.inner"), types.ModuleType("otherpackage")
    inner.chunk_some = other.chunk_some = len
    for module in (inner, other):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    originals.stand_in("somepackage", {"chunk_some": max})
    assert inner.chunk_some is max
    assert other.chunk_some is len


def test_tensors_are_made_on_the_cpu():
    with originals.OnCPU():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2).to("cuda:0").device.type == "cpu"


def test_rows_replace_those_of_the_same_test(tmp_path, monkeypatch):
    monkeypatch.setattr(originals, "RESULTS", tmp_path / "originals.csv")
    row = dict.fromkeys(originals.FIELDS, "0") | {"test": "a"}
    originals.save([row])
    originals.save([row | {"passed": "3"}, row | {"test": "b"}])
    with originals.RESULTS.open(newline="") as file:
        assert [(each["test"], each["passed"]) for each in csv.DictReader(file)] == [("a", "3"), ("b", "0")]


def test_a_checkout_of_another_project_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="is no checkout of mamba, causal-conv1d or flash-linear-attention"):
        originals.prepare(tmp_path)
