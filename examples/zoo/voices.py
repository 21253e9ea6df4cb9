"""How alike two voices are: the voice encoder of the package Resemblyzer (Apache 2.0) as a stream.

    python voices.py one.wav other.wav    # after each second of the other recording
    python voices.py                      # of noise

Needs `pip install --no-deps Resemblyzer`, and for recordings what its features need: librosa and webrtcvad-wheels.
"""

import argparse
from pathlib import Path

import torch
from packages import packaged
from torch import Tensor, nn

from scanl import hub

WIDTH, HIDDEN, SECOND = 40, 256, 100  # channels of a mel spectrogram, width of the voice, frames of a second


class VoiceEncoder(nn.Module):
    """The voice (B, 256), of norm 1, in mel spectrograms (B, T, 40) of 16 kHz, 100 frames a second."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, HIDDEN, 3, batch_first=True)
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        voice = self.linear(self.lstm(x)[0][:, -1]).relu()
        return voice / voice.norm(dim=1, keepdim=True)


def read() -> VoiceEncoder:
    """Return the encoder with the weights of the package."""
    file = packaged("resemblyzer", "pretrained.pt", "Resemblyzer")
    weights = torch.load(file, map_location="cpu", weights_only=True)["model_state"]
    encoder = VoiceEncoder()
    encoder.load_state_dict({name: weights[name] for name in encoder.state_dict()})
    return encoder.eval()


def spectrogram(file: Path | None) -> Tensor:
    """Return the frames (1, T, 40) of a recording, or noise."""
    if file is None:
        return torch.rand(1, 3 * SECOND, WIDTH) / 100
    from resemblyzer.audio import preprocess_wav, wav_to_mel_spectrogram

    return torch.from_numpy(wav_to_mel_spectrogram(preprocess_wav(file)))[None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    one, other = parser.parse_args().files or (None, None)
    stream, state = hub.convert(read()), None
    with torch.inference_mode():
        known, _ = stream(spectrogram(one))
        for second, frames in enumerate(spectrogram(other).split(SECOND, 1), 1):
            voice, state = stream(frames, state)
            print(f"after {second} s: {float(known @ voice.T):.3f}")


if __name__ == "__main__":
    main()
