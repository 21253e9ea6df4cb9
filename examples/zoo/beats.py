"""Beats and downbeats of music, frame by frame: the network of the package BeatNet (CC BY 4.0) as a stream.

    python beats.py features.npy     # (frames, 272), as BeatNet.log_spect.LOG_SPECT computes them, 50 a second
    python beats.py                  # of noise

Needs `pip install --no-deps BeatNet`, which has three trained networks. It prints the probabilities of each frame.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from packages import packaged
from torch import Tensor, nn
from torch.nn import functional as F

from scanl import hub

WIDTH = 272


class BeatNetwork(nn.Module):
    """Scores (B, T, 3) of beat, downbeat and neither, from features (B, T, 272)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 2, 10)  # over the features of a frame
        self.linear0 = nn.Linear(2 * ((WIDTH - 9) // 2), 150)
        self.lstm = nn.LSTM(150, 150, 2, batch_first=True)
        self.linear = nn.Linear(150, 3)

    def forward(self, x: Tensor) -> Tensor:
        frames = F.max_pool1d(self.conv1(x.reshape(-1, 1, WIDTH)).relu(), 2)
        frames = self.linear0(frames.flatten(1)).unflatten(0, x.shape[:2])
        return self.linear(self.lstm(frames)[0])


def read(weights: Path) -> BeatNetwork:
    """Return the network with the weights of a file."""
    network = BeatNetwork()
    network.load_state_dict(torch.load(weights, weights_only=True))
    return network.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="?", type=Path)
    parser.add_argument("--model", type=int, choices=(1, 2, 3), default=1)
    options = parser.parse_args()
    noise = np.random.default_rng(0).random((200, WIDTH))
    features = noise if options.features is None else np.load(options.features)
    weights = packaged("BeatNet", f"models/model_{options.model}_weights.pt", "BeatNet")
    stream, state = hub.convert(read(weights), torch.zeros(1, 12, WIDTH)), None
    with torch.inference_mode():
        for number, frame in enumerate(torch.from_numpy(features).float()):
            scores, state = stream(frame[None, None], state)
            beat, downbeat, _ = scores[0, 0].softmax(0).tolist()
            print(f"{number / 50:.2f} s: beat {beat:.3f}, downbeat {downbeat:.3f}")


if __name__ == "__main__":
    main()
