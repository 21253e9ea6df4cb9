"""Measure the first call of each layer, forward and backward, where no machine code of kernels is on disk.

    python benchmarks/speed/first_calls.py [NAME ...]

NAME is a registered layer or preset; without names: every layer, and every preset that runs code of its own. x is (2,
64, 64) in float32, options are the defaults, and the gradients are those of x and of all parameters. Each call is the
first of a process, which has imported `scanl.layers` and has one thread. empty: the folder of kernels is empty. disk: a
second process, which finds there what the first has compiled. Seconds are of the processor. kernels: files that the
first process writes. The rows are in benchmarks/results/first_calls.csv.
"""

import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch

from scanl import layers

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

SHAPE = (2, 64, 64)


def first_call(name: str) -> dict[str, float]:
    """Return the seconds of both passes."""
    torch.manual_seed(0)
    x, layer = torch.randn(SHAPE, requires_grad=True), layers.build(name, SHAPE[-1])
    times = [time.process_time()]
    y = layer(x)
    times.append(time.process_time())
    (y[0] if isinstance(y, tuple) else y).sum().backward()
    times.append(time.process_time())
    return {"forward": times[1] - times[0], "backward": times[2] - times[1]}


def in_child(name: str, folder: str) -> dict[str, float]:
    """Return what a child process measures that has nothing compiled. folder: that of kernels."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.environ["NUMBA_CACHE_DIR"] = folder
            os.write(writer, json.dumps(first_call(name)).encode())
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        content = file.read()
    os.waitpid(child, 0)
    if not content:
        raise SystemExit(f"first_calls: the call of {name} ended with an error")
    return json.loads(content)


def run(results: Results, name: str) -> None:
    """Measure a layer, unless this machine has."""
    if results.timed(name=name):
        return
    with tempfile.TemporaryDirectory() as folder:
        empty = in_child(name, folder)
        kernels = sum(path.suffix in (".nbc", ".o") for path in Path(folder).rglob("*"))
        disk = in_child(name, folder)
    both, again = sum(empty.values()), sum(disk.values())
    line = f"{name}: {both:.2f} s ({empty['forward']:.2f} forward), {again:.2f} s from disk, {kernels} kernels"
    results.add(line, name=name, **empty, both=both, disk=again, kernels=kernels)


def timed(name: str) -> bool:
    layer = layers.get(name)
    return layer.preset_of is None or layer.own_path


def main() -> None:
    made = parser(__doc__, layers.names())
    made.set_defaults(names=[name for name in layers.names() if timed(name)])
    options = parse(made)
    results = Results("first_calls", options)
    for name in options.names:
        run(results, name)


if __name__ == "__main__":
    main()
