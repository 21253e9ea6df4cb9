"""Stages of sleep from the rate of a heart: the classifiers of the package SleepECG (BSD-3-Clause).

    python sleep.py features.npy     # (epochs, 36), as sleepecg.extract_features computes them, one each 30 s
    python sleep.py                  # of noise

Needs `pip install --no-deps sleepecg` and h5py, which reads the weights; no Keras. The network reads the night in both
directions, so it has no stream: `hub.accelerate` makes it fast.
"""

import argparse
import io
import zipfile
from pathlib import Path

import h5py
import numpy as np
import torch
from packages import packaged
from torch import Tensor, nn

from scanl import hub

WIDTH, MASK = 36, -1.0  # features of an epoch; all of them have this value where none is known
STAGES = ("undefined", "asleep, no REM", "REM", "awake")


class SleepNetwork(nn.Module):
    """Probabilities (B, T, 4) of stages from features (B, T, 36), all of them known."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, eps=1e-3)
        self.dense = nn.Linear(WIDTH, 64)
        self.first = nn.GRU(64, 8, batch_first=True, bidirectional=True)
        self.second = nn.GRU(16, 8, batch_first=True, bidirectional=True)
        self.output = nn.Linear(16, len(STAGES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(self.norm(x.mT).mT).relu()
        return self.output(self.second(self.first(x)[0])[0]).softmax(-1)


def read(name: str = "wrn-gru-mesa") -> SleepNetwork:
    """Return a network with the weights of a file of Keras, which lies in an archive in an archive."""
    packed = zipfile.ZipFile(packaged("sleepecg", f"classifiers/{name}.zip", "sleepecg")).read("classifier.keras")
    weights = zipfile.ZipFile(io.BytesIO(packed)).read("model.weights.h5")
    with h5py.File(io.BytesIO(weights)) as file:

        def layer(path: str) -> list[np.ndarray]:
            group = file[f"layers/{path}/vars"]
            return [group[str(number)][()] for number in range(len(group))]

        names = ("weight", "bias", "running_mean", "running_var")
        norm = map(torch.from_numpy, layer("batch_normalization"))
        state = {f"norm.{name}": row for name, row in zip(names, norm, strict=True)}
        for name, path in (("dense", "dense"), ("output", "dense_1")):
            kernel, bias = map(torch.from_numpy, layer(path))
            state |= {f"{name}.weight": kernel.T, f"{name}.bias": bias}
        for name, path in (("first", "bidirectional"), ("second", "bidirectional_1")):
            for ending, part in (("l0", "forward_layer"), ("l0_reverse", "backward_layer")):
                found = hub.keras_weights("GRU", *layer(f"{path}/{part}/cell"))
                state |= {f"{name}.{weight}_{ending}": tensor for weight, tensor in found.items()}
    network = SleepNetwork()
    network.load_state_dict(state, strict=False)  # Keras counts no batches
    hub.accelerate(network)
    return network.eval()


def stages(network: SleepNetwork, features: np.ndarray) -> np.ndarray:
    """Return the probabilities of each epoch. Where no feature is known, they are those of a state of zeros."""
    x = torch.from_numpy(features).float()
    known = (x != MASK).any(-1)
    with torch.inference_mode():
        probabilities = network.output.bias.softmax(0).repeat(len(x), 1)
        probabilities[known] = network(x[known][None])[0]
    return probabilities.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", nargs="?", type=Path)
    file = parser.parse_args().features
    features = np.random.default_rng(0).normal(size=(20, WIDTH)) if file is None else np.load(file)
    features[~np.isfinite(features)] = MASK
    for epoch, row in enumerate(stages(read(), features)):
        print(f"{epoch / 2:.1f} min: {STAGES[row.argmax()]} ({row.max():.0%})")


if __name__ == "__main__":
    main()
