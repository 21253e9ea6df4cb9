"""`scanl list` and `scanl show NAME`."""

import inspect
import re
import textwrap
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from scanl.cli.parser import Parser
from scanl.errors import ConfigError
from scanl.layers import Layer, build, get, names
from scanl.layers.state import leaves
from scanl.ops._op import REGISTRY


def options_of(name: str) -> dict[str, Any]:
    """A layer's options with their defaults."""
    parameters = inspect.signature(get(name)).parameters
    return {option: p.default for option, p in parameters.items() if option != "dim"}


def list_layers(argv: Sequence[str]) -> int:
    """Print a line for each registered layer."""
    Parser("list", "The layers.").parse(argv)
    width = max(map(len, names())) + 2
    for name in names():
        cls = get(name)
        print(f"{name:<{width}}{inspect.cleandoc(cls.__doc__ or '').splitlines()[0]}")
        print(f"{'':<{width}}{cls.equation}")
    print("\n`scanl show NAME` has the rest.")
    return 0


def table() -> str:
    """Every layer as rows of Markdown, as the README has them."""
    rows = ["| layer | what it is | recurrence | source |", "|---|---|---|---|"]
    for name in names():
        cls = get(name)
        papers = [
            f"[{paper}](https://arxiv.org/abs/{paper})" for paper in re.findall(r"arXiv:(\d{4}\.\d{5})", cls.source)
        ]
        cells = (f"`{name}`", inspect.cleandoc(cls.__doc__ or "").splitlines()[0].rstrip("."), f"`{cls.equation}`")
        source = ", ".join(papers) or cls.source.split('"')[0].rstrip(", ")
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (*cells, source)) + " |")
    return "\n".join(rows)


def show_layer(argv: Sequence[str]) -> int:
    """Print what is known of a layer."""
    parser = Parser("show", "One layer: equation, source, options, size, backends.")
    parser.add_argument("name", type=str, help="a registered layer; `scanl list` has them")
    parser.add_argument("--dim", type=int, default=256, help="model width for the sizes")
    args = parser.parse(argv)
    cls = get(args.name)
    if args.dim < 1:
        raise ConfigError(f"show: dim is {args.dim}, expected at least 1")
    layer = build(args.name, args.dim)
    parameters = sum(p.numel() for p in layer.parameters())
    rows = [
        ("equation", cls.equation),
        ("source", cls.source),
        ("options", ", ".join(f"{option}={default}" for option, default in options_of(args.name).items())),
        ("parameters", f"{parameters:,} at dim {args.dim}"),
        ("state", f"{state_size(layer)} at dim {args.dim}"),
        ("step", step_cost(layer)),
        (
            "op",
            cls.op or ("of the layer inside" if _inside(layer) else "plain functions of PyTorch and scanl.ops"),
        ),
    ]
    print(f"{args.name}: {inspect.cleandoc(cls.__doc__ or '').splitlines()[0]}\n")
    for title, text in rows:
        print(textwrap.fill(f"{title:<12}{text}", 100, subsequent_indent=" " * 12, break_long_words=False))
    if cls.op is not None:
        op = REGISTRY[cls.op]
        for name in op.preference():
            backend = op.backends[name]
            where = "any device" if backend.devices is None else ", ".join(backend.devices)
            missing = f"; package {backend.package} is not installed" if backend.package else ""
            print(f"{'':<12}{name}: {where}{missing}")
    return 0


def _inside(layer: Layer) -> bool:
    return any(isinstance(module, Layer) for module in layer.modules() if module is not layer)


@torch.no_grad()
def step_cost(layer: Layer) -> str:
    """What one token of one sequence costs: multiplications in matrices, and the time it takes here."""
    if layer.bidirectional:
        return "none: it reads the whole sequence"
    x, state = torch.zeros(1, layer.dim), layer.init_state(1)
    with FlopCounterMode(display=False) as counter:
        layer.step(x, state)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        layer.step(x, state)
        times.append(time.perf_counter() - begin)
    return (
        f"{counter.get_total_flops() // 2:,} multiplications by matrices, {1e3 * min(times):.2f} ms here "
        "for one sequence on the CPU"
    )


def state_size(layer: Any) -> str:
    """Floats that a sequence carries from step to step; a complex number counts as two."""
    if layer.bidirectional:
        return "none: it reads the whole sequence"
    parts = [(2 if leaf.is_complex() else 1) * leaf.numel() for _, leaf in leaves(layer.init_state(1, device="meta"))]
    return f"{sum(parts):,} floats a sequence"
