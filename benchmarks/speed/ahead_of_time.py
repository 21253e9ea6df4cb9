"""Compile for sm_90, without a GPU, every kernel that the triton backends would launch; print what each of them uses.

    python benchmarks/speed/ahead_of_time.py [--first] [CASE or OP ...]

A row for each kernel, each configuration of an autotuned one (with --first of the one tried first alone): registers a
thread, bytes a thread spilled, bytes of shared memory, asynchronous copies, products on tensor cores, programs that a
multiprocessor holds at once. The rows are in benchmarks/results/ahead_of_time.csv; a table of the worst of each kernel
is printed. The operands have no memory ("meta"), so what would wait for a device fails here.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

import scanl.ops
from scanl.ops import registry
from scanl.ops.registry import HALF_DTYPES, Cell, Op

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

SIZES = {"B": 8, "T": 4096, "G": 16, "H": 16, "K": 128, "V": 128, "D": 2048, "E": 2048, "N": 16, "W": 4, "*F": (1024,)}
REGISTERS, SHARED, WARPS, PROGRAMS = 2**16, 227 * 1024, 64, 32  # of a multiprocessor
WIDTHS, DTYPES = (64, 128), {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Operands of an op: those that it requires with the first axes it declares, and `given` ones, by axes or shape."""

    op: str
    dtype: torch.dtype = torch.bfloat16
    given: Mapping[str, str | tuple[int, ...]] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    sequences: int | None = None  # packed into one row
    backward: bool = True


def memories() -> Iterator[tuple[str, Case]]:
    """Decays that papers have, at the sizes of the benchmarks; then what else selects a kernel, once each."""
    decays = {"linear_attention": ("B T H", "B T H K"), "delta_rule": ("B T H", "B T H K"), "dplr_scan": ("B T H K",)}
    for op, axes in decays.items():
        for g in axes:
            what = "channel" if g.endswith("K") else "step"
            for width in WIDTHS:
                for name, dtype in DTYPES.items():
                    sizes = {"K": width, "V": width}
                    yield f"{op}: a decay a {what}, {width}, {name}", Case(op, dtype, {"g": g}, sizes)
        yield f"{op}: no decay", Case(op)
        yield f"{op}: packed", Case(op, given={"g": axes[-1]}, sizes={"B": 1, "T": 32768}, sequences=8)
        for width in WIDTHS:
            step = {"T": 1, "K": width, "V": width}
            yield f"{op}: one step, {width}", Case(op, given={"g": axes[-1]}, sizes=step, backward=False)
    retained = {"given": {"g": "H"}, "sizes": {"V": 256}}
    yield "linear_attention: a decay a head, values of 256", Case("linear_attention", **retained)
    bonus = {"given": {"g": "B T H K", "u": "H K"}, "sizes": {"K": 64, "V": 64}}
    yield "linear_attention: bonus, 64", Case("linear_attention", **bonus)
    state_space = {"given": {"g": "B T H"}, "sizes": {"G": 1, "H": 32, "V": 64}}
    yield "linear_attention: Mamba-2, 128 and 64", Case("linear_attention", **state_space)
    yield "delta_rule: keys normalized", Case("delta_rule", given={"g": "B T H"}, options={"normalize_keys": True})


def scans() -> Iterator[tuple[str, Case]]:
    def scan(name: str, x: tuple[int, ...], a: tuple[int, ...], dtype: torch.dtype) -> tuple[str, Case]:
        sizes = {"B": x[0], "T": x[1], "*F": x[2:]}
        return f"linear_scan: {name}", Case("linear_scan", dtype, {"a": a}, sizes)

    wide = (8, 1024, 1024)
    yield scan("float32", wide, wide, torch.float32)
    yield scan("bfloat16", wide, wide, torch.bfloat16)
    yield scan("complex64", wide, wide, torch.complex64)
    yield scan("complex64, constant", wide, (1024,), torch.complex64)
    yield scan("float32, shared", (8, 1024, 16, 64), (8, 1024, 16, 1), torch.float32)
    yield scan("float32, narrow", (2, 64, 3), (64, 3), torch.float32)
    yield scan("float32, cut", (1, 16384, 64), (1, 16384, 64), torch.float32)
    yield scan("bfloat16, cut, constant", (1, 16384, 64), (64,), torch.bfloat16)


def vectors() -> Iterator[tuple[str, Case]]:
    mamba = {
        "given": {"B": "B T N", "C": "B T N", "D": "E", "z": "B T E", "delta_bias": "E"},
        "options": {"delta_softplus": True},
    }
    for name, dtype in DTYPES.items():
        yield f"selective_scan: Mamba, {name}", Case("selective_scan", dtype, **mamba)
        yield f"selective_scan: constant, {name}", Case("selective_scan", dtype)
        yield f"weighted_average: RWKV-4, {name}", Case("weighted_average", dtype, {"decay": "D", "bonus": "D"})
        activated = {"given": {"bias": "D"}, "options": {"silu": True}}
        yield f"short_convolution: SiLU, {name}", Case("short_convolution", dtype, **activated)
    yield "selective_scan: one step", Case("selective_scan", sizes={"T": 1}, backward=False, **mamba)
    one = {"given": {"decay": "D", "bonus": "D"}, "sizes": {"T": 1}}
    yield "weighted_average: one step", Case("weighted_average", backward=False, **one)
    yield "short_convolution: one step", Case("short_convolution", sizes={"T": 1}, backward=False)


def cells() -> Iterator[tuple[str, Case]]:
    """Matrices of two widths, held in registers or loaded at each step."""
    for op in ("elman", "gru", "ligru", "lstm", "slstm"):
        for width in WIDTHS:
            sizes = {"H": 4, "K": width} if op == "slstm" else {"D": width}
            yield f"{op}: {width}", Case(op, torch.float32, sizes=sizes)
    yield "gru: packed", Case("gru", torch.float32, sizes={"B": 1, "T": 32768, "D": 64}, sequences=8)


def cases() -> dict[str, Case]:
    """Those written down, of ops that have the backend, and of others that have it what their declarations require."""
    able = [op for op in registry.every() if "triton" in op.backends and op.name in scanl.ops.__all__]
    written = {**dict(scans()), **dict(memories()), **dict(vectors()), **dict(cells())}
    found = {name: case for name, case in written.items() if registry.get(case.op) in able}
    for op in able:
        if not any(case.op == op.name for case in found.values()):
            own = op.backends["triton"].dtypes
            found |= {f"{op.name}: {name}": Case(op.name, dtype) for name, dtype in DTYPES.items() if dtype in own}
    return found


def operands(case: Case, op: Op) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """By name, and the offsets of packed sequences."""
    sizes = {**SIZES, **case.sizes}
    sizes |= {axis: derive(sizes) for axis, derive in op.derived.items()}
    found: dict[str, Tensor | None] = {}
    for operand in op.operands:
        chosen = case.given.get(operand.name, None if operand.optional else operand.choices[0])
        if chosen is None:
            found[operand.name] = None
            continue
        axes = chosen.split() if isinstance(chosen, str) else chosen
        state = operand.name == "state"
        if state and case.sequences is not None:
            axes = (case.sequences, *axes[1:])
        shape: list[int] = []
        for axis in axes:
            size = int(axis) if isinstance(axis, int) or axis.isdigit() else sizes[axis]
            shape.extend(size if isinstance(size, tuple) else [size])
        kept = state or operand.name in op.wide
        dtype = torch.float32 if kept and case.dtype in HALF_DTYPES else case.dtype
        dtype = dtype.to_real() if operand.name in op.real else dtype
        found[operand.name] = torch.empty(shape, dtype=dtype, device="meta")
    packed = None if case.sequences is None else torch.empty(case.sequences + 1, dtype=torch.int32, device="meta")
    return found, packed


def launch(case: Case, way: str) -> None:
    """What the operators of torch would run, of the same arguments."""
    op = registry.get(case.op)
    given, cu_seqlens = operands(case, op)
    options = [case.options.get(name, option.default) for name, option in op.options.items()]
    rest = (False, cu_seqlens, *options)
    if isinstance(op, Cell):
        launch_cell(op, list(given.values()), rest, case.dtype, way)
        return
    module = importlib.import_module(f"scanl.ops._triton.{op.name}")
    if way == "forward":
        module.forward(*given.values(), *rest)
        return
    y = torch.empty(op.output_shape(op.sizes(given, cu_seqlens)), dtype=case.dtype, device="meta")
    values = {**given, "y": y, "dy": y, "dlast": given["state"]}
    backward = getattr(torch.ops.scanl, f"{op.name}_triton_backward").default
    module.backward(*[values[argument.name] for argument in backward._schema.arguments[: -len(rest)]], *rest)


def launch_cell(op: Cell, given: list[Tensor | None], rest: tuple[Any, ...], dtype: torch.dtype, way: str) -> None:
    """What a cell's operators would run: kernels that are made from its step."""
    if way == "forward":
        op._forward("triton", *given, *rest, True)
        return
    _, cu_seqlens, *options = rest
    y = torch.empty(
        op.output_shape(op.sizes(dict(zip(op.names, given, strict=True)), cu_seqlens)), dtype=dtype, device="meta"
    )
    kept = y.new_empty((*y.shape[:2], op._numbers("triton", given, cu_seqlens, options)))
    op._backward("triton", y, given[-1], *given, y, kept, *rest)


class Chip:
    """In the driver's place: a GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def report(function: JITFunction, kernel: Any, flags: Mapping[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL"))
    warps, shared, ptx = kernel.metadata.num_warps, kernel.metadata.shared, kernel.asm["ptx"]
    fit = (REGISTERS // (-(-registers // 8) * 8 * 32 * warps), SHARED // max(1, shared), WARPS // warps, PROGRAMS)
    module = re.sub("_[0-9a-f]{16}$", "", function.module.rpartition(".")[2])  # a cell's has the digest of its source
    return {
        "kernel": f"{module.strip('_')}.{function.__name__.strip('_')}",
        "flags": json.dumps({name: value for name, value in flags.items() if value is not None}, default=str),
        "warps": warps,
        "stages": kernel.metadata.num_stages,
        "registers": registers,
        "spilled": stack + local,
        "shared": shared,
        "asynchronous": len(re.findall(r"cp\.async\.c|cp\.async\.bulk\.tensor", ptx)),
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "programs": min(fit),
    }


def kernels(case: Case, way: str, tried: int | None = None) -> Iterator[dict[str, Any]]:
    """Each kernel once, as it is launched: `JITFunction.run` compiles only, an autotuner runs all or `tried` it has."""
    found: dict[str, dict[str, Any]] = {}
    run, tune = JITFunction.run, Autotuner.run

    def compile_only(self, *arguments, grid, warmup, **flags):
        kernel = run(self, *arguments, grid=grid, warmup=True, **flags)
        constants = dict(zip((parameter.name for parameter in self.params), arguments, strict=False)) | flags
        constants = {p.name: constants[p.name] for p in self.params if p.is_constexpr and p.name in constants}
        if kernel.hash not in found:
            found[kernel.hash] = report(self, kernel, constants)
        return kernel

    def every(self, *arguments, **flags):
        self.nargs = dict(zip(self.arg_names, arguments, strict=False))
        for config in self.prune_configs(flags)[:tried]:
            self.fn.run(*arguments, **flags, **config.all_kwargs())

    JITFunction.run, Autotuner.run = compile_only, every
    try:
        launch(case, way)
    finally:
        JITFunction.run, Autotuner.run = run, tune
    yield from found.values()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of each kernel of each case, the worst over its variants and configurations."""
    lines = ["| case | kernel | variants | registers | spilled | shared | programs |", "|---|---|---|---|---|---|---|"]
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not row.get("error"):
            groups.setdefault((row["case"], row["kernel"]), []).append(row)
    for (case, kernel), found in groups.items():
        worst = [max(int(row[key]) for row in found) for key in ("registers", "spilled", "shared")]
        programs = min(int(row["programs"]) for row in found)
        lines.append(f"| {case} | `{kernel}` | {len(found)} | {' | '.join(map(str, worst))} | {programs} |")
    return "\n".join(lines)


def main() -> int:
    if triton.knobs.runtime.interpret:
        sys.exit("ahead_of_time: TRITON_INTERPRET is set: its kernels are interpreted, not compiled")
    known = cases()
    made = parser(__doc__, dict.fromkeys([*known, *(case.op for case in known.values())]))
    made.add_argument("--first", action="store_true", help="of each kernel the configuration that is tried first")
    options = parse(made)
    warnings.simplefilter("error")
    driver.set_active(Chip())
    results, rows = Results("ahead_of_time", options), []
    for name, case in known.items():
        if name not in options.names and case.op not in options.names:
            continue
        for way in ("forward", "backward") if case.backward else ("forward",):
            key = {"case": name, "op": case.op, "way": way, "target": "sm_90", "first": options.first}
            if not results.has(**key):
                try:
                    compiled = list(kernels(case, way, 1 if options.first else None))
                except Exception as error:  # the other cases are reported all the same
                    compiled = [{"error": f"{type(error).__name__}: {error}"}]
                for row in compiled:
                    results.add(**key, **row)
            rows += results.of(**key)
    print(f"\n{table(rows)}")
    return any(row.get("error") for row in rows)


if __name__ == "__main__":
    sys.exit(main())
