"""Compare layers by what they recall: several pairs of a key and a value, then the keys once more.

    python compare_recall.py hawk linear_attention gated_deltanet --pairs 8

Prints a table: how many values come back, the size of the state that carries them, and the time of training.
"""

import argparse
import time

import torch
from torch.nn.functional import cross_entropy

from scanl import tasks
from scanl.layers.state import leaves
from scanl.learning import score
from scanl.models import LanguageModel, Stack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("layers", nargs="*", default=["hawk", "linear_attention", "gated_deltanet"])
parser.add_argument("--pairs", type=int, default=4)
parser.add_argument("--length", type=int, default=64)
parser.add_argument("--dim", type=int, default=64)
parser.add_argument("--steps", type=int, default=600)


def main() -> None:
    options = parser.parse_args()
    size = {"length": options.length, "num_pairs": options.pairs, "vocab_size": 64}
    task = tasks.build("mqar", **size, random_non_queries=False)
    print(f"{task}\nby chance {task.chance:.3f}\n")
    print(f"{'layer':<20}{'recalled':>10}{'floats of state':>18}{'seconds':>10}")

    for layer in options.layers:
        torch.manual_seed(0)
        model = LanguageModel(task.vocab_size, Stack(options.dim, 2, layer))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=options.steps)
        began = time.perf_counter()
        for step in range(options.steps):
            batch = task.generate(32, seed=step).tensors()  # never the same examples twice
            logits, _ = model(batch.inputs)
            loss = cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        took = time.perf_counter() - began
        model.eval()
        recalled = score(model, task, 200, seed=[1])
        floats = sum(leaf.numel() for _, leaf in leaves(model.stack.init_state(1)))
        print(f"{layer:<20}{recalled:>10.3f}{floats:>18,}{took:>10.0f}", flush=True)


if __name__ == "__main__":
    main()
