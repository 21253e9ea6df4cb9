"""Read a long sequence through each layer of attention that remembers, and measure the time of a token and the memory.

    python benchmarks/speed/long_attention.py [LAYER ...] [--tokens 100000] [--width 64]

training: segments of 512 tokens, forward and backward, with the state carried over without its gradient.   streaming:
pieces of 16 tokens, forward. Each has a process of its own, random weights and a batch of one. A row compares the last
tenth of the tokens with the second tenth, because the first one compiles: `slower` is the ratio of the median times of
a call, by the processor, `grown` that of the resident memory, and `peak_grown` that of its peak. The rows are in
benchmarks/results/long_attention.csv.

`rpe`, `rsa`, `rtransformer` and `gau` are not here: a step of theirs attends to all steps before it, so their state is
the sequence.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch

from scanl import layers
from scanl.layers import state as states

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, in_process, parse, parser, resident

LAYERS = {
    "transformer_xl": {"window": 64, "chunk_size": 64},
    "compressive_transformer": {"window": 64, "chunk_size": 64},
    "rmt": {"chunk_size": 64, "depth": 2},
    "infini_attention": {"chunk_size": 64},
    "tlb": {"chunk_size": 64},
    "block_recurrent": {"window": 64, "num_slots": 64},
    "bst": {"window": 64},
    "ran": {"window": 64},
    "flash": {"chunk_size": 64},
    "ntm": {},
    "ttm": {},
    "rwkv5": {},
}
SEGMENT = {"training": 512, "streaming": 16}
TENTHS = 10
MIB = 2**20


def measured(layer: str, mode: str, tokens: int, width: int, steps: int) -> dict[str, float]:
    """Return the columns of a row. steps: of a call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, training = layers.build(layer, width, **LAYERS[layer]), mode == "training"
    model.train(training)
    state, calls = model.init_state(1), tokens // steps
    tenth = calls // TENTHS
    times, memory, peaks = torch.empty(TENTHS, tenth), [], []
    for number, call in itertools.product(range(TENTHS), range(tenth)):
        x = torch.randn(1, steps, width)
        begin = time.process_time()
        with torch.set_grad_enabled(training):
            y, state = model(x, state)
        if training:
            y.square().mean().backward()
            model.zero_grad()
            state = states.detach(state)
        times[number, call] = time.process_time() - begin
        if call == tenth - 1:
            memory.append(resident("VmRSS") / MIB)
            peaks.append(resident("VmHWM") / MIB)
    medians = times.median(1).values / steps
    return {
        "floats": sum(leaf.numel() for _, leaf in states.leaves(state)),
        "microseconds": 1e6 * medians.median().item(),
        "slower": (medians[-1] / medians[1]).item(),
        "resident_mib": memory[-1],
        "grown": memory[-1] / memory[1],
        "peak_grown": peaks[-1] / peaks[1],
    }


def main() -> None:
    made = parser(__doc__, LAYERS)
    made.add_argument("--tokens", type=int, default=10**5)
    made.add_argument("--width", type=int, default=64)
    options: argparse.Namespace = parse(made)
    results = Results("long_attention", options)
    for layer, mode in itertools.product(options.names, SEGMENT):
        tokens, steps = (30, 3) if options.quick else (options.tokens, SEGMENT[mode])
        key = {"layer": layer, "mode": mode, "tokens": tokens, "width": options.width}
        if not results.timed(**key):
            begin, arguments = time.perf_counter(), (layer, mode, tokens, options.width, steps)
            columns = measured(*arguments) if options.quick else in_process(measured, *arguments)
            results.add(**key, **columns, minutes=(time.perf_counter() - begin) / 60)


if __name__ == "__main__":
    main()
