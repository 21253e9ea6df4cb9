"""Time each linear memory on a CPU beside plain torch forms of others: one row a memory.

    python benchmarks/memories.py [--only NAME ...] [--rounds 5]

The others are the naive forms of flash-linear-attention (`pip install flash-linear-attention`), torch's own attention
over as many steps, and for recurrences with nonlinear feedback their Python loop. float32, medians of interleaved runs
in one process. A ratio is the other's time over that of scanl, so 4.0 means that scanl is four times as fast. Results
are compared before they are timed. Writes benchmarks/results/memories.json.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from primitives import attention, both, decay, draw, medians, theirs
from run import RESULTS, machine
from scanl import layers, ops

SHAPE = (1, 2048, 8, 64)
LONG = (1, 4096, 8, 64)
LOOP = (1, 256, 512)  # a loop takes milliseconds a step


class Row(NamedTuple):
    """Functions of the same leaves: ours, and the other's, None if its package is missing."""

    what: str
    leaves: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    other: Callable[..., Tensor] | None
    same: bool = True  # whether the two compute the same


def qkv(shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor, Tensor]:
    return draw(*shape), F.normalize(draw(*shape), dim=-1), draw(*shape)


def naive(where: str, name: str, *, heads_first: bool = False) -> Callable[..., Tensor] | None:
    """Return a form of flash-linear-attention as a function of tensors (B, T, H, ·), or None if it is not installed."""
    function = theirs(f"fla.ops.{where}", name)
    if function is None:
        return None

    def run(*leaves: Tensor) -> Tensor:
        if heads_first:
            leaves = tuple(leaf.transpose(1, 2) for leaf in leaves)
        y = function(*leaves)
        y = y[0] if isinstance(y, tuple) else y
        return y.transpose(1, 2) if heads_first else y

    return run


def swapped(function: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
    """Take beta before g, as we do, for a function that takes it after g."""
    return None if function is None else lambda q, k, v, beta, g: function(q, k, v, g, beta)


def additive(*leaves: Tensor) -> Tensor:
    return ops.linear_attention(*leaves)[0]


def delta(*leaves: Tensor) -> Tensor:
    return ops.delta_rule(*leaves)[0]


def low_rank(q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, g: Tensor) -> Tensor:
    return ops.dplr_scan(q, k, v, a, b, g)[0]


def based() -> Row:
    """The Taylor map of 16 keys, with its denominator."""
    q, k, v = draw(1, 2048, 8, 16), draw(1, 2048, 8, 16), draw(1, 2048, 8, 64)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        reads, writes = ops.feature_maps.taylor(q * 16**-0.5), ops.feature_maps.taylor(k)
        return ops.normalized_linear_attention(reads, writes, v)[0]

    return Row("fla, chunks", (q, k, v), ours, naive("based.naive", "naive_chunk_based", heads_first=True))


def versus_attention(*decays: int) -> Row:
    q, k, v = qkv(LONG)
    g = (decay(*decays),) if decays else ()

    def other(q: Tensor, k: Tensor, v: Tensor, *g: Tensor) -> Tensor:
        return attention(q, k, v, g[0] if g else v.new_zeros(()))

    return Row("softmax attention", (q, k, v, *g), additive, other, same=False)


def loop(name: str) -> Row:
    layer: Any = layers.build(name, dim=LOOP[-1])

    def ours(x: Tensor) -> Tensor:
        return layer(x)[0]

    def other(x: Tensor) -> Tensor:
        with ops.backend("reference"):
            return layer(x)[0]

    return Row("Python loop", (draw(*LOOP),), ours, other)


def beta() -> Tensor:
    return draw(*SHAPE[:3]).sigmoid()


ROWS: dict[str, Callable[[], Row]] = {
    "linear attention": lambda: Row(
        "fla, chunks", qkv(), additive, naive("linear_attn.naive", "naive_chunk_linear_attn")
    ),
    "one decay a head": lambda: Row(
        "fla, chunks", (*qkv(), decay(*SHAPE[:3])), additive, naive("simple_gla.naive", "naive_chunk_simple_gla")
    ),
    "gated linear attention": lambda: Row(
        "fla, steps", (*qkv(), decay(*SHAPE)), additive, naive("gla.naive", "naive_recurrent_gla")
    ),
    "based": based,
    "delta rule": lambda: Row(
        "fla, chunks", (*qkv(), beta()), delta, naive("delta_rule.naive", "delta_rule_chunkwise", heads_first=True)
    ),
    "gated delta rule": lambda: Row(
        "fla, chunks",
        (*qkv(), beta(), decay(*SHAPE[:3])),
        delta,
        swapped(naive("gated_delta_rule.naive", "naive_chunk_gated_delta_rule")),
    ),
    "Kimi delta attention": lambda: Row(
        "fla, chunks", (*qkv(), beta(), decay(*SHAPE)), delta, swapped(naive("kda.naive", "naive_chunk_kda"))
    ),
    "diagonal plus low rank": lambda: Row(
        "fla, chunks",
        (*qkv(), F.normalize(draw(*SHAPE), dim=-1), F.normalize(draw(*SHAPE), dim=-1) / 2, decay(*SHAPE)),
        low_rank,
        naive("generalized_delta_rule.dplr.naive", "dplr_chunkwise", heads_first=True),
    ),
    "linear attention, 4096 steps": versus_attention,
    "one decay a head, 4096 steps": partial(versus_attention, *LONG[:3]),
    "gated linear attention, 4096 steps": partial(versus_attention, *LONG),
    "rdn": partial(loop, "rdn"),
    "srwm": partial(loop, "srwm"),
}


def compare(name: str, rounds: int) -> dict[str, Any] | None:
    torch.manual_seed(0)
    row = ROWS[name]()
    if row.other is None:
        return None
    with torch.no_grad():
        if row.same:
            torch.testing.assert_close(row.ours(*row.leaves), row.other(*row.leaves), rtol=1e-3, atol=1e-3)
        calls = {"scanl": row.ours, "other": row.other}
        forward = medians({key: partial(call, *row.leaves) for key, call in calls.items()}, rounds)
    whole = medians({key: both(call, row.leaves) for key, call in calls.items()}, rounds)
    ratios = {"forward": forward["other"] / forward["scanl"], "both": whole["other"] / whole["scanl"]}
    print(f"| {name} | {row.what} | {ratios['forward']:.1f} | {ratios['both']:.1f} |", flush=True)
    return {"other": row.what, "forward": forward, "both": whole, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print("| memory | other | forward | forward + backward |\n|---|---|---|---|")
    rows = {name: compare(name, args.rounds) for name in args.only}
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": machine("cpu"), "rows": {name: row for name, row in rows.items() if row is not None}}
    (RESULTS / "memories.json").write_text(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
