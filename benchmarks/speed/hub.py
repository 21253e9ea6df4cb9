"""Time models of transformers, and recurrent modules of torch, plain and after `scanl.hub.accelerate`.

    python benchmarks/speed/hub.py [NAME ...] [--tokens 1024] [--decode] [--train]

NAME is a family of transformers, a module of torch, or a published model whose package is installed. Families have
published widths and random weights, cut to two layers; the vocabulary is cut in proportion, so that the read-out takes
the same part of the time. Ways of a family: `prompt` reads the tokens; `inside` is the part of it in the patched
modules without their projections; --decode adds `token`, one token of generation. Of the whole models of small shapes,
whose names end in `_small`, only `token` is measured. --train adds `training`, one step of
a one-layer model, and its peak memory in a process of its own. A ratio is the plain time over the accelerated one. The
rows are in benchmarks/results/hub.csv.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.util
import itertools
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from scanl import hub
from scanl.hub import patches

sys.path.append(str(Path(__file__).parents[1]))
from harness import Contender, Results, Took, in_process, measure, of_module, parse, parser, race, resident

DECODED = 32  # tokens
READ = {name for patch in patches.names() for name in patches.get(patch).reads}  # inner modules that are not called


class Family(NamedTuple):
    """A model of transformers. depth: of the published model, of which the vocabulary is a part here too.

    kinds: the option that names the kind of each layer, the recurrent kind, and a kind of attention without which the
    original cannot run.
    """

    name: str
    vocabulary: int
    depth: int
    options: dict[str, Any]
    kinds: tuple[str, ...] = ()
    config: str = "Config"


LINEAR = ("layer_types", "linear_attention", "full_attention")
FAMILIES = {
    # state-spaces/mamba-130m
    "mamba": Family("Mamba", 50280, 24, {"hidden_size": 768, "state_size": 16}),
    # state-spaces/mamba2-130m
    "mamba2": Family("Mamba2", 50288, 24, {"hidden_size": 768, "num_heads": 24, "head_dim": 64, "state_size": 128,
        "n_groups": 1}),
    # the gated DeltaNet layers of Qwen/Qwen3.5-0.8B
    "gated_deltanet": Family("Qwen3_5", 248320, 24, {"hidden_size": 1024, "intermediate_size": 3584,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim":
        128}, LINEAR, "TextConfig"),
    # the delta attention layers of moonshotai/Kimi-Linear-48B-A3B, one expert wide
    "kimi_delta_attention": Family("KimiLinear", 163840, 27, {"hidden_size": 2304, "intermediate_size": 1024,
        "num_attention_heads": 32, "pad_token_id": 0, "mlp_layer_types": ["dense"] * 3}, LINEAR),
    # RWKV/rwkv-4-169m-pile
    "rwkv": Family("Rwkv", 50277, 12, {"hidden_size": 768}),
    # google/recurrentgemma-2b
    "recurrent_gemma": Family("RecurrentGemma", 256000, 26, {"hidden_size": 2560, "lru_width": 2560,
        "intermediate_size": 15360}, ("block_types", "recurrent", "attention")),
    # the mLSTM layers of NX-AI/xLSTM, at the width of a small model
    "xlstm": Family("xLSTM", 50304, 24, {"hidden_size": 1024, "num_heads": 4}),
    # MiniMax' lightning attention, heads of its width
    "lightning_attention": Family("MiniMax", 200064, 80, {"hidden_size": 2048, "intermediate_size": 2048,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "num_local_experts": 1,
        "num_experts_per_tok": 1}, ("layer_types", "linear_attention")),
    # the convolutions of LiquidAI/LFM2-350M
    "short_convolution": Family("Lfm2", 65536, 16, {"hidden_size": 1024, "intermediate_size": 6656,
        "num_attention_heads": 16, "num_key_value_heads": 8}, ("layer_types", "conv", "full_attention")),
}  # fmt: skip
SMALL = {  # whole models: a token of them is mostly calls
    "mamba_small": Family("Mamba", 1024, 4, {"hidden_size": 256, "state_size": 16}),
    "mamba2_small": Family("Mamba2", 1024, 4, {"hidden_size": 256, "num_heads": 8, "head_dim": 64, "state_size": 64,
        "n_groups": 1}),
    "recurrent_gemma_small": Family("RecurrentGemma", 1024, 6, {"hidden_size": 256, "lru_width": 256,
        "intermediate_size": 768, "num_attention_heads": 4}),
    "xlstm_small": Family("xLSTM", 1024, 4, {"hidden_size": 256, "num_heads": 4}),
    "qwen3_next_small": Family("Qwen3Next", 1024, 4, {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "mlp_only_layers": [0, 1, 2, 3]}),
}  # fmt: skip
KINDS = {"GRU": nn.GRU, "RNN": nn.RNN, "LSTM": nn.LSTM}
SHAPES = (4, 1024, 256), (8, 1024, 128), (32, 256, 256), (1, 1024, 128)  # batch, steps, width


def build(name: str, layers: int) -> Any:
    """Return a model of so many recurrent layers; a whole one of a small shape."""
    transformers, family = importlib.import_module("transformers"), (FAMILIES | SMALL)[name]
    if name in SMALL:
        layers = family.depth
    layers = max(2, layers) if name == "rwkv" else layers
    options = {**family.options, "vocab_size": family.vocabulary * layers // family.depth}
    if family.kinds:
        option, recurrent, *others = family.kinds
        options[option] = [recurrent] * layers + others
        layers += len(others)
    if "mlp_layer_types" in options:
        options["mlp_layer_types"] = options["mlp_layer_types"][:layers]
    config = getattr(transformers, family.name + family.config)(**options, num_hidden_layers=layers)
    return getattr(transformers, f"{family.name}ForCausalLM")(config)


def accelerated(plain: nn.Module) -> nn.Module:
    """Return an accelerated copy that has the same parameters."""
    other = copy.deepcopy(plain, {id(leaf): leaf for leaf in plain.parameters()})
    hub.accelerate(other)
    return other


class Inside:
    """Seconds spent in the patched modules of a model, and in the linear projections that both forms call."""

    def __init__(self) -> None:
        self.modules = self.projections = 0.0

    @contextlib.contextmanager
    def watch(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        began: list[float] = []

        def before(*_: object) -> None:
            began.append(time.perf_counter())

        def after(module: nn.Module, *_: object) -> None:
            seconds = time.perf_counter() - began.pop()
            if isinstance(module, nn.Linear):
                self.projections += seconds
            else:
                self.modules += seconds

        inner = ((name, child) for m in modules for name, child in m.named_modules() if isinstance(child, nn.Linear))
        watched = [*modules, *(child for name, child in inner if name.partition(".")[0] not in READ)]
        hooks = [
            handle for m in watched for handle in (m.register_forward_pre_hook(before), m.register_forward_hook(after))
        ]
        yield
        for hook in hooks:
            hook.remove()


def inside(models: dict[str, Any], ids: Tensor, rounds: int) -> dict[tuple[str, str], Took]:
    """Return the seconds in the patched modules without their projections, by the clock."""
    changed = {row.module for row in hub.accelerate(models["accelerated"]).accelerated}
    times: dict[str, list[float]] = {who: [] for who in models}
    for _, (who, model) in itertools.product(range(rounds), models.items()):
        watch = Inside()
        with watch.watch([module for name, module in model.named_modules() if name in changed]):
            model(ids)
        times[who].append(watch.modules - watch.projections)
    medians = {who: statistics.median(each) for who, each in times.items()}
    return {(who, "inside"): Took(seconds, seconds) for who, seconds in medians.items()}


@torch.no_grad()
def prompt(name: str, tokens: int, rounds: int, decode: bool) -> dict[tuple[str, str], Took]:
    torch.manual_seed(0)
    plain = build(name, 2).eval()
    models, ids = {"plain": plain, "accelerated": accelerated(plain)}, torch.randint(2, 500, (1, tokens))
    took = measure({(who, "prompt"): lambda model=model: model(ids) for who, model in models.items()}, rounds)
    took |= inside(models, ids, rounds)
    return took | decoded(models, ids[:, :16], rounds) if decode else took


def decoded(models: dict[str, Any], ids: Tensor, rounds: int) -> dict[tuple[str, str], Took]:
    """Return the seconds of one token of generation after ids."""

    def generate(model: Any, count: int) -> Callable[[], object]:
        lengths = {"max_new_tokens": count, "min_new_tokens": count}
        return lambda: model.generate(ids, **lengths, do_sample=False, pad_token_id=0)

    counts = itertools.product(models.items(), (1, DECODED))
    each = measure({(who, count): generate(model, count) for (who, model), count in counts}, rounds)
    took: dict[tuple[str, str], Took] = {}
    for who in models:
        ends = zip(each[who, DECODED], each[who, 1], strict=True)
        took[who, "token"] = Took(*((last - first) / (DECODED - 1) for last, first in ends))
    return took


def small(results: Results, name: str, options: argparse.Namespace) -> None:
    if not results.timed(name=name, way="token"):
        torch.manual_seed(0)
        plain = build(name, 0).eval()
        models, ids = {"plain": plain, "accelerated": accelerated(plain)}, torch.randint(2, 500, (1, 16))
        results.record(decoded(models, ids, options.rounds), "accelerated", name=name, shape="16")


def train(name: str, tokens: int, fast: bool) -> tuple[Took, int]:
    """Return the time of one training step in this process, and the bytes that its peak memory grew by."""
    torch.manual_seed(0)
    model = build(name, 1).train()
    if fast:
        hub.accelerate(model)
        warm = torch.randint(2, 500, (1, 16))
        model(warm, labels=warm, use_cache=False).loss.backward()
    ids = torch.randint(2, 500, (1, tokens))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, begin, processor = resident("VmRSS"), time.perf_counter(), time.process_time()
    model(ids, labels=ids, use_cache=False).loss.backward()
    took = Took(time.perf_counter() - begin, time.process_time() - processor)
    return took, resident("VmHWM") - before


def family(results: Results, name: str, options: argparse.Namespace) -> None:
    tokens = 8 if options.quick else options.tokens
    ways = ["prompt", *["token"] * options.decode, *["training"] * options.train]
    if all(results.timed(name=name, shape=str(tokens), way=way) for way in ways):
        return
    took, memory = prompt(name, tokens, options.rounds, options.decode), {}
    if options.train:
        for who in ("plain", "accelerated"):
            took[who, "training"], memory[who] = in_process(train, name, tokens, who == "accelerated")
    results.record(took, "accelerated", name=name, shape=str(tokens))
    for who, size in memory.items():
        results.add(name=name, shape=str(tokens), program=who, way="memory", bytes=size)


def module(results: Results, name: str, options: argparse.Namespace) -> None:
    """Time one layer of torch, after a check that both outputs agree."""
    for shape in ((2, 5, 3),) if options.quick else SHAPES:
        if not results.timed(name=name, shape=str(shape)):
            torch.manual_seed(0)
            plain, x = KINDS[name](shape[-1], shape[-1], batch_first=True), torch.randn(shape)
            pair = {"plain": plain, "accelerated": accelerated(plain)}
            torch.testing.assert_close(pair["accelerated"](x)[0], plain(x)[0], rtol=1e-3, atol=1e-4)
            took = race({who: of_module(each, x)._replace(forward=None) for who, each in pair.items()}, options.rounds)
            results.record(took, "accelerated", name=name, shape=str(shape))


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


def published(results: Results, name: str, options: argparse.Namespace) -> None:
    """Time a published model with an input of its own, after a check that both outputs agree."""
    if results.timed(name=name):
        return
    torch.manual_seed(0)
    try:
        plain, x = PUBLISHED[name]()
    except ModuleNotFoundError as error:
        print(f"{name}: left out: {error}")
        return
    programs = {}
    for who, model in (("plain", plain), ("accelerated", accelerated(plain))):
        leaves = list(model.parameters())
        forward = torch.no_grad()(lambda model=model: model(x))
        programs[who] = Contender(forward, lambda m=model, leaves=leaves: torch.autograd.grad(m(x).sum(), leaves))
    torch.testing.assert_close(programs["accelerated"].forward(), programs["plain"].forward(), rtol=1e-2, atol=1e-4)
    results.record(race(programs, options.rounds), "accelerated", name=name)


PUBLISHED = {"piano_transcription_inference": piano, "silero_vad": silero}


def main() -> None:
    made = parser(__doc__, [*FAMILIES, *SMALL, *KINDS, *PUBLISHED], rounds=3, threads=2)
    made.add_argument("--tokens", type=int, default=1024)
    made.add_argument("--decode", action="store_true")
    made.add_argument("--train", action="store_true", help="minutes for Mamba as it comes")
    options = parse(made)
    # transformers would take flash-linear-attention's kernels, where installed, and fail for want of a GPU.
    sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    results = Results("hub", options)
    for name in options.names:
        run = family if name in FAMILIES else small if name in SMALL else module if name in KINDS else published
        run(results, name, options)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # for the whole process
    main()
