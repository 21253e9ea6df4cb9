"""Generate samples of sound with SaShiMi: rate and memory while it runs, and whether they are what it reads at once.

    python benchmarks/sashimi.py [--samples 16000] [--dim 64] [--blocks 2]

Random weights, one row, one core. Prints the rate of each tenth, by the time of the processor, and the peak of the
process's memory after it. Then compares the logits of the first 2,048 samples with those of one call over them. Writes
benchmarks/results/sashimi.json.
"""

import argparse
import json
import time

import torch

from primitives import resident
from run import RESULTS, machine
from scanl.models import LanguageModel, sashimi

COMPARED = 2048


def generate(model: LanguageModel, samples: int, parts: int = 10) -> tuple[torch.Tensor, list[dict[str, float]]]:
    """Return the samples, and of each part the rate in samples a second of the processor, and the peak memory in MiB.

    Other work on the machine disturbs the clock on the wall, and the processor's time much less.
    """
    made, rows = torch.empty(samples, dtype=torch.int64), []  # a list of tensors would grow
    stream = model.generate(torch.zeros(1, 1, dtype=torch.int64), max_new_tokens=samples, seed=0)
    for part in range(parts):
        start = time.thread_time()
        for n in range(samples // parts):
            made[part * (samples // parts) + n] = next(stream)[0]
        rows.append({"rate": samples // parts / (time.thread_time() - start), "MiB": resident("VmHWM") / 1024})
    return made, rows


@torch.no_grad()
def difference(model: LanguageModel, samples: torch.Tensor) -> float:
    """Return the largest difference of logits, one sample at a time beside one call, relative to the largest logit."""
    state, one_by_one = model.init_state(1), []
    for sample in samples:
        logits, state = model(sample.view(1, 1), state)
        one_by_one.append(logits)
    whole, _ = model(samples[None])
    return ((torch.cat(one_by_one, 1) - whole).abs().max() / whole.abs().max()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = sashimi(256, options.dim, depth=options.blocks).eval()
    print(machine("cpu"))
    made, rows = generate(model, options.samples)
    for number, row in enumerate(rows, 1):
        print(f"tenth {number:2}: {row['rate']:8.0f} samples a second, peak {row['MiB']:.1f} MiB", flush=True)
    found = difference(model, made[:COMPARED])
    print(f"logits of {min(COMPARED, len(made))} samples, one by one and at once: within {found:.1e}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sashimi.json").write_text(json.dumps({"options": vars(options), "rows": rows, "difference": found}))


if __name__ == "__main__":
    main()
