"""Distil a language model of Hyena: how far its logits move, and how much faster it decodes after a long context.

    python benchmarks/laughing_hyena.py [--context 8192] [--dim 64] [--depth 2] [--steps 100] [--tolerance 1e-4]

The teacher is trained for a few steps on the bytes of Python's own `argparse.py`, so that its filters are not those of
a new model. Float32. Decoding is timed a token at a time after the context, medians of interleaved runs. Writes
benchmarks/results/laughing_hyena.json.
"""

import argparse
import json

import torch
from torch import Tensor
from torch.nn import functional as F

from primitives import medians
from run import RESULTS, machine
from scanl.models import LanguageModel, Stack, distil_model

TRAINED = 256  # steps of a training sequence


def corpus() -> Tensor:
    with open(argparse.__file__, "rb") as file:
        return torch.tensor(list(file.read()))


def taught(context: int, dim: int, depth: int, steps: int) -> LanguageModel:
    torch.manual_seed(0)
    model, data = LanguageModel(256, Stack(dim, depth, "hyena", layer_options={"max_length": context})), corpus()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        starts = torch.randint(len(data) - TRAINED - 1, (4,))
        tokens = torch.stack([data[s : s + TRAINED + 1] for s in starts])
        loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step + 1 == steps:
            print(f"teacher: {loss.item():.3f} nats a byte after {steps} steps")
    return model.eval()


@torch.no_grad()
def compare(teacher: LanguageModel, context: int, tolerance: float, rounds: int) -> dict[str, float]:
    student, fits = distil_model(teacher, tolerance=tolerance)
    tokens = corpus()[None, :context]
    (expected, before), (found, after) = teacher(tokens), student(tokens)
    token = tokens[:, -1:]
    took = medians({"teacher": lambda: teacher(token, before), "student": lambda: student(token, after)}, rounds)
    return {
        "modes": max(fit.modes.shape[1] for fit in fits),
        "largest order": max(fit.order.max().item() for fit in fits),
        "largest error of a filter": max(fit.error.max().item() for fit in fits),
        "logits, relative": ((found - expected).norm() / expected.norm()).item(),
        "logits, largest over largest": ((found - expected).abs().max() / expected.abs().max()).item(),
        "teacher, ms a token": 1e3 * took["teacher"],
        "student, ms a token": 1e3 * took["student"],
        "times as fast": took["teacher"] / took["student"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("context", 8192), ("dim", 64), ("depth", 2), ("steps", 100), ("rounds", 21)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--tolerance", type=float, default=1e-4, help="of Hankel singular values")
    options = parser.parse_args()
    print(machine("cpu"))
    teacher = taught(options.context, options.dim, options.depth, options.steps)
    found = compare(teacher, options.context, options.tolerance, options.rounds)
    for name, value in found.items():
        print(f"{name:30} {value:.4g}")
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "laughing_hyena.json").write_text(json.dumps({"options": vars(options), **found}, indent=1))


if __name__ == "__main__":
    main()
