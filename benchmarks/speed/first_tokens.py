"""`generate` of 64 tokens in a fresh process, with the compiled step, beside the time in which its weights are read.

    python benchmarks/speed/first_tokens.py [gla] [hawk] ... [--cold] [--threads 1]

Width 128, four blocks, the prompt of 16 tokens. Times are of the processor, in microseconds.
token: mean of the last 60 tokens.   median: theirs, which other work on the machine disturbs less.
reads: the weights are summed, but for the embedding, of which a step reads one row.   state: the state is copied, which
a step reads and writes beside.   Both are medians of 30.   ratio: median over reads.
total: seconds for all 64 tokens, with what is imported and read from disk. The kernels are on disk.
With --cold the process begins with an empty folder of kernels: total is then that of the compiled step, ordinary that
of the ordinary one in another empty folder, and more their difference. A layer without a compiled step has a reason.
The rows are in benchmarks/results/first_tokens.csv.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from scanl.layers import registry
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack
from scanl.models.decoding import compiled_step
from scanl.ops._frame import cache

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, in_process, parse, parser

WIDTH, DEPTH, PROMPT, TOKENS, LAST = 128, 4, 16, 64, 60
LAYERS = [name for name in registry.names() if not registry.get(name).bidirectional]


def child(name: str, width: int, depth: int, kernels: str | None, *, compiled: bool = True) -> dict[str, Any]:
    """Return the row of a process. kernels: its folder of kernels; None for the user's."""
    if kernels is not None:
        os.environ["NUMBA_CACHE_DIR"] = kernels
    torch.set_num_threads(1)
    if not compiled:
        compiled_step.MIN_TOKENS = 2 * TOKENS
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(width, depth, name)).eval().requires_grad_(False)
    weights = torch.cat([weight.flatten() for at, weight in model.named_parameters() if at != "embedding.weight"])
    prompt, begin, ends = torch.randint(256, (1, PROMPT)), time.process_time(), []
    for _ in model.generate(prompt, max_new_tokens=TOKENS):
        ends.append(time.process_time())
    state = torch.zeros(sum(leaf.nbytes for _, leaf in leaves(model.init_state(1))), dtype=torch.uint8)
    read, copy = _median(weights.sum), _median(state.clone)
    tokens = [end - begin for begin, end in itertools.pairwise(ends[-1 - LAST :])]
    token, median = statistics.mean(tokens), statistics.median(tokens)
    reason = model.explain().splitlines()[0].removeprefix("compiled: ") if compiled else ""
    times = {"token_us": 1e6 * token, "median_us": 1e6 * median, "reads_us": 1e6 * read, "state_us": 1e6 * copy}
    times |= {"ratio": median / read, "total": ends[-1] - begin}
    return {**times, "reason": None if reason == "can run" else reason}


def _median(call: Callable[[], object]) -> float:
    """Return the median time of 30 calls."""
    times = []
    for _ in range(30):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def run(results: Results, name: str, cold: bool, quick: bool) -> None:
    key = {"layer": name, "start": "cold" if cold else "warm"}
    if results.timed(**key):
        return
    sizes = (16, 1) if quick else (WIDTH, DEPTH)
    if not cold:
        before, row = _kernels(), in_process(child, name, *sizes, None)
        if not quick and _kernels() != before:  # they are on disk now
            row = in_process(child, name, *sizes, None)
        results.add(**key, **row)
        return
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        row = in_process(child, name, *sizes, one)
        ordinary = in_process(_ordinary, name, *sizes, other)["total"]
    results.add(**key, **row, ordinary=ordinary, more=row["total"] - ordinary)


def _kernels() -> set[str]:
    """Return the names of the kernels on disk."""
    return {path.name for path in cache.folder().glob("*")}


def _ordinary(*arguments: Any) -> dict[str, Any]:
    return child(*arguments, compiled=False)


def main() -> None:
    made = parser(__doc__, LAYERS)
    made.add_argument("--cold", action="store_true", help="with empty folders of kernels")
    options = parse(made)
    results = Results("first_tokens", options)
    for name in options.names:
        run(results, name, options.cold, options.quick)


if __name__ == "__main__":
    main()
