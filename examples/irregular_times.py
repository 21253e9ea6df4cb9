"""Sequences whose samples come at irregular times: tell the model how long each step lasts.

    python irregular_times.py --steps 1000

Each example is a wave that is sampled at random times. The answer is its value at a later time. A layer that takes
`timespans` moves its state over the time between two samples. The other model sees the same samples, and no times.
"""

import argparse

import numpy as np
import torch

from scanl.models import Features, SequenceRegressor, Stack

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--layer", default="cfc", help="one that takes timespans")
parser.add_argument("--steps", type=int, default=300)


def waves(count: int, length: int, seed: int):
    """Return samples (B, T, 2), the time since the sample before (B, T), and the answers (B, 1).

    The last sample is hidden: its value is 0, and a second feature says so.
    """
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1.0, (count, length)), axis=1)
    period = random.uniform(6, 12, (count, 1))
    values = np.sin(2 * np.pi * (times / period + random.random((count, 1))))
    features = np.stack([values, np.zeros_like(values)], 2)
    features[:, -1] = [0, 1]
    spans = np.diff(times, axis=1, prepend=0)
    return (torch.tensor(array, dtype=torch.float32) for array in (features, spans, values[:, -1:]))


def train(layer: str, told: bool, steps: int) -> float:
    """Return the mean squared error of a trained model on waves that it has not seen."""
    torch.manual_seed(0)
    model = SequenceRegressor(1, Stack(32, 2, layer), Features(2), pool="last", distribution="points")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        x, spans, y = waves(64, 32, seed=1 + step)
        loss, _ = model.loss(x, y, timespans=spans if told else None)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    x, spans, y = waves(1000, 32, seed=0)
    model.eval()
    with torch.inference_mode():
        answers, _ = model(x, timespans=spans if told else None)
        return float((model.head.mean(answers) - y).square().mean())


def main() -> None:
    options = parser.parse_args()
    print(f"{options.layer}, told the times: error {train(options.layer, True, options.steps):.3f}")
    print(f"{options.layer}, told nothing:   error {train(options.layer, False, options.steps):.3f}")
    print("the mean of all waves: error 0.500")


if __name__ == "__main__":
    main()
