"""The fastest of a few configurations of a kernel: measured at the first call of a kind, kept on disk.

A kind is what compile-time flags and dtypes make of a kernel; lengths are not asked. Configurations differ in tiles,
warps and stages, so in the order of sums: two machines, or two measurements, may round differently. The first is what
registers and spills make us expect, and all that there is for the interpreter and for blocks too narrow to matter.
A first call cannot be captured in a CUDA graph; `scanl warmup` makes it before.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from triton import Config

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SHRUNK = INTERPRETED  # small tiles, chunks and programs, so that small tests cross their borders
NARROWEST = 16  # what a product of matrices takes
WIDEST = 256
MOST = NARROWEST if SHRUNK else WIDEST  # channels of a block
SMALL = 16  # channels under which nothing is measured


class Tile(NamedTuple):
    """Of matrix memories: channels of keys and of values, warps, stages."""

    keys: int
    values: int
    warps: int
    stages: int


def _worth_measuring(configs: list[Config], _: Any, **flags: Any) -> list[Config]:
    widest = max(flags.get(name, 0) for name in ("CHANNELS", "K", "V"))
    return configs if widest >= SMALL else configs[:1]


def tuned(configs: Sequence[Config], key: Sequence[str], restored: Sequence[str] = ()) -> Callable[[Any], Any]:
    """For a kernel, over `triton.jit`.

    key: the flags that make a kind, of which a kernel may lack some; restored: what it changes in place, as measuring
    calls it many times.
    """
    options = {"prune_configs_by": {"early_config_prune": _worth_measuring}, "cache_results": True}

    def decorate(kernel: Any) -> Any:
        own = [name for name in key if name in kernel.arg_names]
        return triton.autotune(configs[:1] if INTERPRETED else configs, own, restore_value=restored, **options)(kernel)

    return decorate


def block(width: int, most: int) -> int:
    """Channels of a block, of a power of two, at most `most`."""
    return max(NARROWEST, min(most, MOST, triton.next_power_of_2(width)))


@functools.cache
def cut(tiles: tuple[Tile, ...], K: int, V: int) -> tuple[Tile, ...]:
    """Clip tiles to K and V; drop duplicates."""
    return tuple(dict.fromkeys(tile._replace(keys=block(K, tile.keys), values=block(V, tile.values)) for tile in tiles))


@functools.cache
def of_memory(kernel: Any, tiles: tuple[Tile, ...], restored: tuple[str, ...] = ()) -> Any:
    """A kernel of matrix memories."""
    configs = [Config({"BK": keys, "BV": values}, warps, stages) for keys, values, warps, stages in tiles]
    return tuned(configs, ("K", "V", "DECAY", "ADJOINT"), restored)(kernel)
