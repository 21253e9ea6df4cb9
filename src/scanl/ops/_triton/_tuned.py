"""Choose the fastest of a few configurations of a kernel: measure them at the first call of a kind, store the choice.

A kind is a combination of compile-time flags and dtypes; lengths do not matter. The choice is stored on disk.
Configurations differ in tiles, warps and stages, and so in the order of sums: two machines, or two measurements, may
round differently. The first configuration is the one expected to be fastest from register use and spills. It is the
only one for the interpreter and for blocks too narrow to matter. A first call cannot be captured in a CUDA graph;
`scanl warmup` makes the first calls.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton
from triton import Config

IS_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
HAS_SMALL_TILES = IS_INTERPRETER  # small tiles, chunks and programs, so that small tests have several of each
MIN_WIDTH = 16  # least size of an axis in a matrix product
MAX_WIDTH = 256
MAX_CHANNELS = MIN_WIDTH if HAS_SMALL_TILES else MAX_WIDTH  # most channels of a block
MIN_MEASURED_CHANNELS = 16  # with fewer channels, nothing is measured


class Tile(NamedTuple):
    """A configuration for matrix memories: the tile's key and value channels, and the program's warps and stages."""

    keys: int
    values: int
    warps: int
    stages: int


def _worth_measuring(configs: list[Config], _: Any, **flags: Any) -> list[Config]:
    widest = max(size for name, size in flags.items() if name in ("CHANNELS", "K", "V") or name.startswith("BLOCK_"))
    return configs if widest >= MIN_MEASURED_CHANNELS else configs[:1]


def tuned(configs: Sequence[Config], key: Sequence[str], restored: Sequence[str] = ()) -> Callable[[Any], Any]:
    """Return a decorator for a `triton.jit` kernel that chooses the fastest configuration.

    key: the flags that define a kind; a kernel may lack some of them.   restored: arguments that the kernel changes in
    place; they are restored between measurements.
    """
    options: dict[str, Any] = {"prune_configs_by": {"early_config_prune": _worth_measuring}, "cache_results": True}
    if restored:
        options |= _restoring(restored)

    def decorate(kernel: Any) -> Any:
        names = [name for name in key if name in kernel.arg_names]
        return triton.autotune(configs[:1] if IS_INTERPRETER else configs, names, **options)(kernel)

    return decorate


def _restoring(names: Sequence[str]) -> dict[str, Any]:
    """Return hooks that restore arguments between measurements. `restore_value` of triton before 3.8 fails for None."""
    copies: dict[str, Any] = {}

    def before(arguments: dict[str, Any], reset_only: bool = False) -> None:
        if not reset_only:
            copies.update({name: arguments[name].clone() for name in names if arguments[name] is not None})

    def after(arguments: dict[str, Any], exception: BaseException | None) -> None:
        for name, copy in copies.items():
            arguments[name].copy_(copy)
        copies.clear()

    return {"pre_hook": before, "post_hook": after}


def block(width: int, limit: int) -> int:
    """Return the channels of a block: a power of two, at most `limit`."""
    return max(MIN_WIDTH, min(limit, MAX_CHANNELS, triton.next_power_of_2(width)))


@functools.cache
def cut(tiles: tuple[Tile, ...], K: int, V: int) -> tuple[Tile, ...]:
    """Clip tiles to K and V; drop duplicates."""
    return tuple(dict.fromkeys(tile._replace(keys=block(K, tile.keys), values=block(V, tile.values)) for tile in tiles))


@functools.cache
def of_memory(kernel: Any, tiles: tuple[Tile, ...], restored: tuple[str, ...] = ()) -> Any:
    """Return a matrix-memory kernel that chooses the fastest of these tiles."""
    configs = [Config({"BK": keys, "BV": values}, warps, stages) for keys, values, warps, stages in tiles]
    return tuned(configs, ("K", "V", "DECAY", "ADJOINT"), restored)(kernel)
