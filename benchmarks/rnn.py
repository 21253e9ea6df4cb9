"""Time torch's recurrent modules on a CPU, accelerated beside plain: `torch.nn.GRU`, `RNN` and `LSTM`.

    python benchmarks/rnn.py [--only GRU ...] [--rounds 7]

float32, one layer, forward and backward pass with all gradients, medians of interleaved runs in one process. The ratio
is the time of torch's own forward over that of the accelerated module, so 4.0 means four times as fast.

Then whole models of other people, where their package is installed: the acoustic model of
`piano_transcription_inference`, convolutions and two bidirectional layers of GRU, with random weights, and the weights
of `silero-vad`, convolutions and an LSTM, over recordings of different lengths. Forward alone, and with backward.
"""

import argparse
import copy
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from primitives import medians
from run import machine
from scanl import hub

KINDS = {"GRU": nn.GRU, "RNN": nn.RNN, "LSTM": nn.LSTM}
SHAPES = (4, 1024, 256), (8, 1024, 128), (32, 256, 256), (1, 1024, 128)  # batch, steps, width


def step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    leaves = [x, *module.parameters()]
    return lambda: torch.autograd.grad(module(x)[0].sum(), leaves)


def compare(kind: str, shape: tuple[int, int, int], rounds: int) -> dict[str, float]:
    """Return the median seconds of both, after a check that their outputs agree."""
    torch.manual_seed(0)
    plain = KINDS[kind](shape[-1], shape[-1], batch_first=True)
    accelerated, x = copy.deepcopy(plain), torch.randn(shape, requires_grad=True)
    hub.accelerate(accelerated)
    torch.testing.assert_close(accelerated(x)[0], plain(x)[0], rtol=1e-3, atol=1e-4)
    return medians({"plain": step(plain, x), "accelerated": step(accelerated, x)}, rounds)


class Silero(nn.Module):
    """The network of silero-vad at 16 kHz: whether someone speaks, for each 512 samples and the 64 before them."""

    def __init__(self, weights: Path):
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, 128, bias=False)
        sizes = ((129, 128, 1), (128, 64, 2), (64, 64, 2), (64, 128, 1))
        for number, (taken, given, stride) in enumerate(sizes, 1):
            self.add_module(f"conv{number}", nn.Conv1d(taken, given, 3, stride, 1))
        self.lstm = nn.LSTM(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)
        found = {
            f"lstm.{name.removeprefix('lstm_cell.')}_l0" if name.startswith("lstm_cell.") else name: value
            for name, value in load_file(weights).items()
        }
        self.load_state_dict(found)

    def forward(self, recordings: list[Tensor]) -> Tensor:
        """Map recordings, each (chunks, 576), to the probabilities of all their chunks, in the order of a packing."""
        x = self.stft_conv(F.pad(torch.cat(recordings), (0, 64), mode="reflect")[:, None])
        x = (x[:, :129].square() + x[:, 129:].square()).sqrt()
        for number in range(1, 5):
            x = torch.relu(self.get_submodule(f"conv{number}")(x))
        features = x[..., 0].split([len(each) for each in recordings])
        y: PackedSequence = self.lstm(pack_sequence(list(features), enforce_sorted=False))[0]
        return torch.sigmoid(self.final_conv(torch.relu(y.data)[..., None]))


def silero() -> tuple[nn.Module, Any]:
    found = importlib.util.find_spec("silero_vad")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("silero_vad")
    model = Silero(Path(found.origin).parent / "data" / "silero_vad_16k.safetensors")
    return model, [torch.randn(chunks, 576) / 10 for chunks in range(100, 900, 100)]


def piano() -> tuple[nn.Module, Any]:
    models = importlib.import_module("piano_transcription_inference.models")
    return models.AcousticModelCRnn8Dropout(88, 1792, 0.01).eval(), torch.randn(2, 1, 100, 229)


MODELS = {"piano_transcription_inference": piano, "silero_vad": silero}


def compare_model(make: Callable[[], tuple[nn.Module, Any]], rounds: int) -> dict[str, float]:
    """Return the median seconds of a whole model, plain and accelerated, after a check that both agree."""
    torch.manual_seed(0)
    plain, x = make()
    accelerated = copy.deepcopy(plain)
    hub.accelerate(accelerated)
    calls: dict[str, Callable[[], object]] = {}
    for name, model in (("plain", plain), ("accelerated", accelerated)):
        calls[f"{name}, forward"] = torch.no_grad()(lambda model=model: model(x))
        calls[name] = lambda model=model: torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for call in ("{}, forward", "{}"):
        torch.testing.assert_close(*(calls[call.format(w)]() for w in ("accelerated", "plain")), rtol=1e-2, atol=1e-4)
    return medians(calls, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS), help="some of them")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(machine("cpu"))
    for kind in options.only:
        for shape in SHAPES:
            found = compare(kind, shape, options.rounds)
            before, after = found["plain"], found["accelerated"]
            size = str(shape)
            print(
                f"{kind:5} {size:16} {1e3 * before:9.1f} ms  {1e3 * after:9.1f} ms  {before / after:6.2f} ×", flush=True
            )
    for name, make in MODELS.items():
        try:
            took = compare_model(make, options.rounds)
        except ModuleNotFoundError as error:
            print(f"{name}: left out: {error}")
            continue
        for what in (", forward", ""):
            before, after = took[f"plain{what}"], took[f"accelerated{what}"]
            title = f"{name}{what or ', forward and backward'}"
            print(f"{title:52} {1e3 * before:9.1f} ms  {1e3 * after:9.1f} ms  {before / after:6.2f} ×", flush=True)


if __name__ == "__main__":
    main()
