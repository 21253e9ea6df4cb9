"""Where someone speaks: the detector of the package silero-vad (MIT) as a stream.

    python speech.py sound.wav    # 16 kHz, one channel, 16 bits
    python speech.py              # of noise

Needs `pip install --no-deps silero-vad` and onnx, which reads the weights.
"""

import argparse
import wave
from pathlib import Path

import numpy as np
import torch
from packages import packaged
from torch import Tensor
from torch.nn import functional as F

from scanl import hub
from scanl.hub import StreamingModule

RATE, CHUNK, BEFORE = 16_000, 512, 64  # samples a second, of a chunk, and of the chunk before that are read again


def read() -> StreamingModule:
    """Return the stream of the detector: chunks (T, 576) to probabilities of speech (T,)."""
    return hub.convert(packaged("silero_vad", "data/silero_vad_16k_sequence.onnx", "silero-vad"))


def chunks(sound: Tensor) -> Tensor:
    """Return a sound as the detector reads it."""
    padded = F.pad(sound, (BEFORE, -len(sound) % CHUNK))
    return padded.unfold(0, BEFORE + CHUNK, CHUNK)


def recording(file: Path | None) -> Tensor:
    """Return the samples of a recording, from -1 to 1, or noise."""
    if file is None:
        return torch.randn(RATE) / 10
    with wave.open(str(file)) as sound:
        if (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{file} is no recording of 16 kHz with one channel of 16 bits")
        return torch.from_numpy(np.frombuffer(sound.readframes(sound.getnframes()), np.int16) / np.float32(32768))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path)
    stream, state = read(), None
    with torch.inference_mode():
        for number, chunk in enumerate(chunks(recording(parser.parse_args().file))):
            probability, state = stream(chunk[None], state)
            print(f"{number * CHUNK / RATE:.2f} s: {float(probability[0]):.3f}")


if __name__ == "__main__":
    main()
