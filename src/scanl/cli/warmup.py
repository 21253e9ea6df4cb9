"""`scanl warmup`: compile and tune the kernels of a layer, or of ops of given sizes, for this machine's GPU.

Triton keeps the compiled kernels and the fastest configurations in its cache on disk, so a later job starts at once.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import scanl.ops  # noqa: F401 (fills the registry)
from scanl.cli.parser import Parser
from scanl.errors import ConfigError, nearest
from scanl.layers import build
from scanl.ops import registry
from scanl.ops.registry import Op
from scanl.options import Positive

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.bfloat16, torch.float16, torch.float32)}
SIZES = {
    "batch": "B",
    "steps": "T",
    "heads": "H",
    "key": "K",
    "value": "V",
    "dim": "D E *F",
    "states": "N",
    "window": "W",
}


def run(argv: Sequence[str]) -> int:
    """Run the layer or each op forward, backward and for one step."""
    parser = Parser("warmup", "Compile, and tune, the GPU kernels of a layer or of ops, before they are needed.")
    parser.add("--layer", str | None, "a registered layer, of width --dim", metavar="NAME")
    parser.add("--layer-options", dict[str, Any], "the layer's options, as for train", {})
    parser.add_argument(
        "--autocast", action="store_true", help="the layer's parameters in float32, autocast to --dtype"
    )
    parser.add("--ops", str | None, "ops, by commas; all when no layer is given either", metavar="NAME,...")
    parser.add("--dtype", str, "of the operands", "bfloat16", metavar="|".join(DTYPES))
    parser.add_argument("--packed", action="store_true", help="packed sequences too")
    parser.add("--batch", Positive, "B", 1)
    parser.add("--steps", Positive, "T; linear_scan chooses its tiles by it", 256)
    parser.add("--heads", Positive, "H, heads of a matrix memory", 16)
    parser.add("--shared-heads", int | None, "G, heads of q and k; H when left out")
    parser.add("--key", Positive, "K, key width", 128)
    parser.add("--value", Positive, "V, value width", 128)
    parser.add("--dim", Positive, "the layer's width, or channels of an op of vectors", 1024)
    parser.add("--states", Positive, "N, states a channel of selective_scan", 16)
    parser.add("--window", Positive, "W of short_convolution", 4)
    args = parser.parse(argv)
    if args.dtype not in DTYPES:
        raise nearest("dtype", args.dtype, DTYPES)
    layer = None if args.layer is None else build(args.layer, args.dim, **args.layer_options)
    device, dtype = _device(), DTYPES[args.dtype]
    if layer is not None:
        layer = layer.to(device, torch.float32 if args.autocast else dtype)
        mixed = torch.autocast(device, dtype) if args.autocast else contextlib.nullcontext()
        with _timed(f"{args.layer} of width {args.dim}"), mixed:
            _warm_layer(layer, torch.zeros(args.batch, args.steps, args.dim).to(next(layer.parameters())), args.packed)
    if args.ops is not None or args.layer is None:
        sizes = {axis: args[name] for name, axes in SIZES.items() for axis in axes.split()}
        sizes |= {"G": args.shared_heads or args.heads, "*F": (args.dim,)}
        for op in _ops(args.ops):
            with _timed(op.name):
                for axes in variants(op, sizes):
                    _warm_op(op, axes, sizes, device, dtype, args.packed)
    return 0


def _device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    raise ConfigError("warmup: no CUDA device: nothing to compile for")


def _ops(names: str | None) -> list[Op]:
    able = {op.name: op for op in registry.declared() if "triton" in op.backends}
    for name in chosen if (chosen := names and names.split(",")) else ():
        if name not in able:
            raise nearest("op with a triton backend", name, able)
    return [op for name, op in able.items() if not chosen or name in chosen]


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    print(f"{what}: {time.perf_counter() - begin:.1f} s", flush=True)


def variants(op: Op, sizes: Mapping[str, Any]) -> list[dict[str, tuple[str, ...]]]:
    """List the sets of operands to run, as axes by operand name.

    They are: the required operands alone; these with one other choice of axes or one optional operand; and these with
    as many optional operands together as the kernel takes.
    """
    defaults = {name: option.default for name, option in op.options.items()}

    def supported(axes: Mapping[str, Any]) -> bool:
        return not op.backends["triton"].needs(**sizes, **defaults, given=frozenset(axes))

    base = {operand.name: operand.choices[0] for operand in op.operands if not operand.optional}
    full, sets = base, [base]
    for operand in op.operands:
        for axes in operand.choices[0 if operand.optional else 1 :]:
            sets.append(base | {operand.name: axes})
        if operand.optional and supported(more := full | {operand.name: operand.choices[-1]}):
            full = more
    sets = [axes for axes in [*sets, full] if axes is base or supported(axes)]
    return [axes for i, axes in enumerate(sets) if axes not in sets[:i]]


def _warm_op(
    op: Op, axes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, Any], device: str, dtype: torch.dtype, packed: bool
) -> None:
    for steps in (sizes["T"], 1):
        here = {**sizes, "T": steps, **({"B": 1} if packed else {})}
        operands = {
            name: _zeros(names, here, device, torch.float32 if name in op.wide else dtype)
            for name, names in axes.items()
            if name != "state"
        }
        for offsets in (None, torch.tensor([0, steps], device=device)) if packed else (None,):
            leaves = [value.requires_grad_(steps > 1) for value in operands.values()]
            results = op(*map(operands.get, op.names), cu_seqlens=offsets, backend="triton")
            if steps > 1:
                torch.autograd.grad(results, leaves, [torch.zeros_like(value) for value in results])


def _zeros(axes: Sequence[str], sizes: Mapping[str, Any], device: str, dtype: torch.dtype) -> Tensor:
    shape: list[int] = []
    for axis in axes:
        size = int(axis) if axis.isdigit() else sizes[axis]
        shape.extend(size if isinstance(size, tuple) else [size])
    return torch.zeros(shape, device=device, dtype=dtype)


def _warm_layer(layer: Any, x: Tensor, packed: bool) -> None:
    x.requires_grad_()
    for offsets in (None, torch.tensor([0, x.shape[1]], device=x.device)) if packed else (None,):
        y, _ = layer(x if offsets is None else x[:1], cu_seqlens=offsets)
        y.sum().backward()
    if not layer.bidirectional:
        with torch.no_grad():
            layer.step(x[:, 0], layer.init_state(len(x)))
