"""Train memories on multi-query recall, and print their accuracy against the floats of their state.

    python benchmarks/recall.py                     # overnight on two cores
    python benchmarks/recall.py --only gla mamba2   # some of them
    python benchmarks/recall.py --steps 20 --widths 32  # whether it runs

In the manner of the figure of zoology (Arora et al., arXiv:2312.04927): two blocks, 16 pairs in 256 tokens of a
vocabulary of 2,048, each memory at several widths, at several learning rates of which the best counts. Runs lie under
runs/recall, and one that is there is not trained again. The table is printed after every run, and written to
runs/recall/table.json.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import torch

import seen_to_learn
from scanl import layers
from scanl.layers import state as states

FOLDER = Path("runs", "recall")
MEMORIES = {  # options by which a layer of width D has heads of D / 2 channels, where its defaults would not
    "linear_attention": {"num_heads": 2},
    "based": {"num_heads": 2},
    "dpfp": {"num_heads": 2},
    "retnet": {"num_heads": 2},
    "gla": {"num_heads": 2},
    "hgrn2": {"head_dim": 16},
    "gsa": {"num_heads": 2},
    "mamba": {},
    "mamba2": {"headdim": 32, "d_state": 32},
    "mamba3": {"headdim": 32, "d_state": 32},
    "deltanet": {"num_heads": 2},
    "gated_deltanet": {"num_heads": 2},
    "mesanet": {"num_heads": 2, "head_dim": 32},
    "rwkv7": {"head_size": 16},
    "attention": {"num_heads": 2, "max_length": 256},
}


def floats_of_state(name: str, dim: int) -> int:
    """Return how many floats of state one layer has for a sequence."""
    layer = layers.build(name, dim, **MEMORIES[name])
    return sum(leaf.numel() * (2 if leaf.is_complex() else 1) for _, leaf in states.leaves(layer.init_state(1)))


def accuracy(name: str, dim: int, lr: float, steps: int) -> float:
    """Train, unless that has been done, and return the accuracy on 1,000 new examples."""
    run = f"{name}-{dim}-{lr:g}-{steps}"
    kept = FOLDER / f"{run}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    options = json.dumps(MEMORIES[name])
    stage = (
        "--task-options '{length: 256, num_pairs: 16, vocab_size: 2048}' "
        f"--layer-options {shlex.quote(options)} --dim {dim} --depth 2 --batch-size 64 --steps {steps} --lr {lr} "
        "--eval-every 500 --until 0.995"
    )
    score = seen_to_learn.trained(run, "mqar", name, (stage,))
    kept.write_text(json.dumps(score))
    return score


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 64, 128])
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--steps", type=int, default=3000)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    seen_to_learn.FOLDER = FOLDER
    rows = []
    for dim in chosen.widths:
        for name in chosen.only:
            best = max(accuracy(name, dim, lr, chosen.steps) for lr in chosen.rates)
            rows.append({"layer": name, "dim": dim, "state": floats_of_state(name, dim), "accuracy": best})
            (FOLDER / "table.json").write_text(json.dumps(rows, indent=1))
            print(f"{'layer':20}{'dim':>6}{'floats of state':>18}{'accuracy':>10}")
            for row in sorted(rows, key=lambda row: row["state"]):
                print(f"{row['layer']:20}{row['dim']:6}{row['state']:18,}{row['accuracy']:10.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
