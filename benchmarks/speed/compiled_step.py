"""A compiled step of a language model, beside the ordinary step and the time in which its weights are copied.

    python benchmarks/speed/compiled_step.py [hawk] [mamba] ... [--threads 1]

A token at batch 1 and at batch 16, at widths 128 (4 blocks) and 768 (2 blocks, more than the caches hold). weights:
bytes of all parameters but the embedding, of which a step reads one row. state: bytes of a row's state, which a step
reads and writes. bytes: those that the step moves, as a multiple of those that it moves for one row. copy: `copy_` of
as many bytes as the weights. Times are the least of calls that take turns, in seconds of the processor: what else the
machine does only adds to them. compile: seconds of the processor for `compile_step`; a second run finds the machine
code on disk. error: the largest difference of a logit, over the largest logit. The rows are in
benchmarks/results/compiled_step.csv.
"""

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

LAYERS = ("hawk", "mamba", "mamba2", "gla", "gated_deltanet", "rwkv7", "gru", "xlstm")
DEPTHS, BATCHES = {128: 4, 768: 2}, (1, 16)


def least(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least time of the processor of each call, in turns."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - begin)
    return best


def run(results: Results, name: str, width: int, depth: int, batch: int, rounds: int) -> None:
    key = {"layer": name, "width": width, "batch": batch}
    if results.timed(**key):
        return
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(width, depth, name)).eval().requires_grad_(False)
    begin = time.process_time()
    compiled = model.compile_step(batch)
    took = time.process_time() - begin
    if compiled.reason is not None:
        raise SystemExit(f"{name}: {compiled.reason}")
    weights = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    state = sum(leaf.nbytes for _, leaf in leaves(model.init_state(1)))
    moved = [4 * weights + 2 * rows * state for rows in (1, batch)]
    source, target = torch.randn(weights), torch.empty(weights)
    tokens = torch.randint(256, (batch,))
    with torch.inference_mode():
        _, before = model(torch.randint(256, (batch, 8)))
        expected, y = model.step(tokens, before)[0], compiled(tokens, before)[0]
        calls = {
            "copy": lambda: target.copy_(source),
            "compiled": lambda: compiled(tokens, before),
            "ordinary": lambda: model.step(tokens, before),
        }
        best = least(calls, rounds)
    results.add(
        **key, depth=depth, weights=4 * weights, state=state, bytes=moved[1] / moved[0],
        **{f"{who}_us": 1e6 * seconds for who, seconds in best.items()},
        ratio=best["compiled"] / best["copy"], compile=took, error=float((y - expected).abs().max() / y.abs().max()),
    )  # fmt: skip


def main() -> None:
    options = parse(parser(__doc__, LAYERS, rounds=200))
    results = Results("compiled_step", options)
    for width, depth in {16: 1}.items() if options.quick else DEPTHS.items():
        for batch in BATCHES[:1] if options.quick else BATCHES:
            for name in options.names:
                run(results, name, width, depth, batch, options.rounds)


if __name__ == "__main__":
    main()
