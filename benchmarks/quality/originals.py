"""The test files of mamba-ssm, causal-conv1d and flash-linear-attention, run over `scanl.compat` on a CPU.

    python benchmarks/quality/originals.py CHECKOUT [--dtype float32] [--most N] [--tests EXPRESSION] [--save]

CHECKOUT: a clone of https://github.com/state-spaces/mamba, https://github.com/Dao-AILab/causal-conv1d or
https://github.com/fla-org/flash-linear-attention. The first two are imported from there; the third is the installed
package, of which the extra `outside` has version 0.6. No GPU is needed, and no compiled extension. Before the test
files are imported, the functions that scanl.compat has take the place of the originals. Each test that calls one of
them runs as it is written, with its references, shapes and tolerances. What differs: its tensors are on the CPU, and of
the dtype that is asked for, if one is. A test whose reference refuses float32 keeps its dtype.

--most N: at most N cases of each test, those of the fewest numbers first; all cases take hours on two cores.
--save: the counts go to benchmarks/results/originals.csv, from which docs/compat.md is filled.
"""

import argparse
import contextlib
import csv
import importlib
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from scanl.compat import causal_conv1d, fla, mamba_ssm
from scanl.compat.calls import FUNCTIONS

RESULTS = Path(__file__).parents[1] / "results" / "originals.csv"
FIELDS = ("project", "file", "test", "dtype", "passed", "failed", "skipped", "left", "why")
# Per project: the package in its checkout, the module of ours, the test files, and what stands for its extensions.
CONV = ("causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states")
SCANS = ("selective_scan_fn", "mamba_inner_fn", "selective_state_update", "mamba_chunk_scan_combined")
FLA = (
    "gla", "simple_gla", "retention", "linear_attn", "lightning_attn", "rwkv6", "rwkv7", "gsa", "hgrn", "comba",
    "delta", "gdn", "kda", "delta_product", "gdp", "dplr_delta", "iplr_delta",
)  # fmt: skip
HALF = ("test_delta_product.py", "test_gdp.py")  # their reference refuses float32
# Tests that ask about kernels alone: they are left out.
LEFT_OUT = {
    "test_causal_conv1d_race_condition": "runs a kernel 10,000 times",
    "test_chunk_safe_gate_multihead_gradients": "calls a Triton kernel of its own",
    "test_chunk_invalid_chunk_size": "expects an error about a size of chunks, which we ignore",
}


class OnCPU(TorchFunctionMode):
    """Keep tensors on the CPU where a call asks for cuda."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(_on_cpu(value) for value in args)
        return func(*args, **{name: _on_cpu(value) for name, value in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    """Return the CPU for another device, and other values as they are."""
    return "cpu" if isinstance(value, str | torch.device) and str(value).startswith("cuda") else value


class Plugin:
    """Chooses the tests that call a function of ours, sets their dtype, and counts how they end.

    why: for each test that did not run, the reason.
    """

    def __init__(self, names: set[str], dtype: str | None, most: int) -> None:
        self.names, self.most, self.left = names, most, Counter[tuple[str, str]]()
        self.dtype = None if dtype is None else getattr(torch, dtype)
        self.ends: dict[str, str] = {}
        self.why: dict[tuple[str, str], str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        groups: dict[Any, dict[Any, Any]] = {}
        for item in items:
            key = (item.path.name, item.originalname)
            if item.originalname in LEFT_OUT:
                self.left[key] += 1
                self.why[key] = LEFT_OUT[item.originalname]
            if item.originalname in LEFT_OUT or not self.names & set(_called(item.function.__code__)):
                continue
            params = item.callspec.params if hasattr(item, "callspec") else {}
            if self.dtype is not None and item.path.name not in HALF:
                for name in ("dtype", "itype"):
                    if name in params:
                        params[name] = self.dtype
            groups.setdefault(key, {}).setdefault(str(params), item)
        items[:] = []
        for key, cases in groups.items():
            chosen = sorted(cases.values(), key=_size)[: self.most]
            self.left[key] = len(cases) - len(chosen)
            items.extend(chosen)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        with OnCPU():
            return (yield)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.ends[report.nodeid] = report.outcome
        if report.skipped:
            self.why[_key(report.nodeid)] = report.longrepr[2].removeprefix("Skipped: ")

    def rows(self, project: str, dtype: str | None) -> list[dict[str, Any]]:
        counts = {key: Counter[str]() for key in self.left}
        for node, end in self.ends.items():
            counts[_key(node)][end] += 1
        return [
            {
                "project": project,
                "file": key[0],
                "test": key[1],
                "dtype": "as written" if dtype is None or key[0] in HALF else dtype,
                **{end: count[end] for end in ("passed", "failed", "skipped")},
                "left": self.left[key],
                "why": self.why.get(key, ""),
            }
            for key, count in counts.items()
        ]


def _key(node: str) -> tuple[str, str]:
    """Return the file and the test of a case."""
    file, _, test = node.partition("::")
    return Path(file).name, test.partition("[")[0]


def _called(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function uses, and the functions in it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _called(each)


def _size(item: Any) -> int:
    """Return the product of a case's numbers, which is about its size."""
    size = 1
    for value in item.callspec.params.values() if hasattr(item, "callspec") else ():
        number = value[-1] if isinstance(value, list) else value
        size *= max(1, int(number)) if isinstance(number, int | float) else 1
    return size


def stand_in(package: str, functions: dict[str, Callable[..., Any]]) -> None:
    """Put functions of ours in the place of those of the same names, in all modules of the package."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            for key in functions.keys() & vars(module).keys():
                setattr(module, key, functions[key])


def prepare(checkout: Path) -> tuple[str, list[str], set[str]]:
    """Import the package of a checkout, with our functions. Return its name, its test files, and our names."""
    tests = checkout / "tests"
    if not any((checkout / package).is_dir() for package in ("fla", "causal_conv1d", "mamba_ssm")):
        sys.exit(f"{checkout} is no checkout of mamba, causal-conv1d or flash-linear-attention")
    if (checkout / "fla").is_dir():
        os.environ["FLA_DISABLE_BACKEND_DISPATCH"] = "1"  # else its tests skip what its other backends lack
        functions = {name: getattr(fla, name) for name in (*FUNCTIONS, "chunk_gdn", "fused_recurrent_gdn")}
        for name in ("", ".hgrn", ".rwkv7", ".gated_delta_product"):
            importlib.import_module("fla.ops" + name)
        stand_in("fla", functions)
        return "flash-linear-attention", [str(tests / "ops" / f"test_{name}.py") for name in FLA], set(functions)
    sys.path.insert(0, str(checkout))
    sys.modules["causal_conv1d_cuda"] = types.ModuleType("causal_conv1d_cuda")
    if (checkout / "causal_conv1d").is_dir():
        functions = {name: getattr(causal_conv1d, name) for name in CONV}
        importlib.import_module("causal_conv1d.causal_conv1d_varlen")
        stand_in("causal_conv1d", functions)
        return "causal-conv1d", [str(tests / "test_causal_conv1d.py")], set(functions)
    package = types.ModuleType("mamba_ssm")  # without its own __init__, which imports models and kernels
    package.__path__ = [str(checkout / "mamba_ssm")]
    sys.modules["mamba_ssm"], sys.modules["causal_conv1d"] = package, causal_conv1d
    extension = sys.modules["causal_conv1d.cpp_functions"] = types.ModuleType("causal_conv1d.cpp_functions")
    for name in ("fwd", "bwd", "update"):
        setattr(extension, f"causal_conv1d_{name}_function", None)
    functions = {name: getattr(mamba_ssm, name) for name in SCANS}
    for name in ("selective_scan_interface", "triton.selective_state_update", "triton.ssd_combined"):
        importlib.import_module(f"mamba_ssm.ops.{name}")
    stand_in("mamba_ssm", functions)
    files = ("test_selective_scan.py", "triton/test_selective_state_update.py")
    return "mamba-ssm", [str(tests / "ops" / file) for file in files], set(functions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--most", type=int, default=sys.maxsize)
    parser.add_argument("--tests", default="")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.cuda.synchronize = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    project, files, names = prepare(options.checkout.resolve())
    plugin = Plugin(names, options.dtype, options.most)
    chosen = ["-k", options.tests] if options.tests else []
    quiet = ["-q", "-p", "no:cacheprovider", "--tb=line", "-c", "/dev/null", "--rootdir", str(options.checkout)]
    code = pytest.main([*quiet, *chosen, *files], [plugin])
    rows = plugin.rows(project, options.dtype)
    for row in rows:
        print(*row.values())
    if options.save:
        save(rows)
    return int(code)


def save(rows: list[dict[str, Any]]) -> None:
    """Write rows of tests that ran over those of the same test and dtype."""
    key = ("project", "file", "test", "dtype")
    kept: dict[tuple[str, ...], dict[str, Any]] = {}
    with contextlib.suppress(FileNotFoundError), RESULTS.open(newline="", encoding="utf-8") as file:
        kept = {tuple(row[name] for name in key): row for row in csv.DictReader(file)}
    ran = [row for row in rows if row["passed"] or row["failed"] or row["skipped"] or row["why"]]
    kept |= {tuple(row[name] for name in key): row for row in ran}
    with RESULTS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept.values())


if __name__ == "__main__":
    sys.exit(main())
