"""Decoding with weights of whole numbers, beside float32, beside llama.cpp, and what they cost in bits a byte.

    python benchmarks/speed/quantized.py [layers] [mamba-130m] [bits --run RUN] [--threads 2]

layers: a token of a language model's compiled step at batch 1, at widths whose weights the caches do not hold.
mamba-130m: the shape of that model with random weights: the compiled step of `hub.load`, an accelerated model of
transformers, and llama.cpp where llama-cpp-python and gguf are installed, in turns. bits: the score of a run on text,
such as `make demo` trains, on its held-out text.

weights: bytes of all parameters and buffers that a token reads; of an embedding that is no map to the logits it reads a
row. copy: `copy_` of as many bytes. A time is the least of many calls, which take turns with the others', in seconds of
the processor with one thread, by the clock with more. The rows are in benchmarks/results/quantized.csv.
"""

import argparse
import copy
import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scanl import hub
from scanl.learning import RunFolder
from scanl.learning.evaluation import measures
from scanl.models import LanguageModel, Stack, quantize

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

LAYERS = {"hawk": 4, "mamba": 4, "gla": 4, "rwkv7": 4, "xlstm": 4}  # and their depths
WIDTHS, WEIGHTS = (768, 1024), ("float32", "int8", "int4")
MAMBA = {"vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16}
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 4}


def least(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least time of each call, in turns."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()  # its own weights are as the call before it leaves them
            begin = clock()
            call()
            best[name] = min(best[name], clock() - begin)
    return best


def weight_bytes(model: nn.Module, embedding: nn.Module, tied: bool) -> int:
    """Return the bytes of the weights that a token reads."""
    tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    if not tied:
        for tensor in (*embedding.parameters(), *embedding.buffers()):
            del tensors[id(tensor)]
    return sum(tensors.values())


def copying(size: int) -> Callable[[], object]:
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def stepping(model: LanguageModel) -> Callable[[], object]:
    """Return a call that decodes a token by the compiled step."""
    step, token = model.compile_step(), torch.zeros(1, dtype=torch.long)
    if step.reason is not None:
        raise SystemExit(step.reason)
    state = step(token, None)[1]
    return lambda: step(token, state)


def add(
    results: Results, key: Mapping[str, Any], times: Mapping[str, float], sizes: Mapping[str, int], base: str
) -> None:
    """Add a row for each program. speed: the time of the program `base` over its own."""
    for who in sizes:
        seconds = times[who]
        results.add(
            **key, program=who, weights=sizes[who], us=1e6 * seconds, tokens=1 / seconds, speed=times[base] / seconds,
            copy_us=1e6 * times[f"copy {who}"], ratio=seconds / times[f"copy {who}"],
        )  # fmt: skip


def layers(results: Results, options: argparse.Namespace) -> None:
    for width in (64,) if options.quick else WIDTHS:
        for name, depth in LAYERS.items():
            key = {"what": "layers", "name": name, "width": width, "depth": depth}
            if results.timed(**key):
                continue
            torch.manual_seed(0)
            model = LanguageModel(256, Stack(width, depth, name)).eval().requires_grad_(False)
            models = {kind: copy.deepcopy(model) for kind in WEIGHTS}
            for kind, each in models.items():
                if kind != "float32":
                    quantize(each, kind)
            with torch.inference_mode():
                calls = {who: stepping(each) for who, each in models.items()}
                sizes = {who: weight_bytes(each, each.embedding, False) for who, each in models.items()}
                calls |= {f"copy {who}": copying(size) for who, size in sizes.items()}
                add(results, key, least(calls, options.rounds), sizes, WEIGHTS[0])


def mamba(results: Results, options: argparse.Namespace) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    shape = SMALL if options.quick else MAMBA
    key = {"what": "mamba-130m", "name": "mamba", "width": shape["hidden_size"], "depth": shape["num_hidden_layers"]}
    if results.timed(**key):
        return
    torch.manual_seed(0)
    theirs = MambaForCausalLM(MambaConfig(**shape)).eval().requires_grad_(False)
    calls, sizes = dict[str, Callable[[], object]](), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        theirs.save_pretrained(folder)
        for kind in WEIGHTS:
            model = hub.load(folder)
            if kind != "float32":
                quantize(model, kind)
            calls[f"scanl {kind}"] = stepping(model)
            sizes[f"scanl {kind}"] = weight_bytes(model, model.embedding, True)
        hub.accelerate(theirs)
        for kind in WEIGHTS[:2]:
            model = copy.deepcopy(theirs)
            if kind != "float32":
                quantize(model, kind)
            calls[f"transformers {kind}"] = generating(model)
            sizes[f"transformers {kind}"] = weight_bytes(model, model.backbone.embeddings, True)
        if importlib.util.find_spec("llama_cpp") is not None:
            for kind in ("F32", "Q8_0"):
                path = Path(folder, f"{kind}.gguf")
                sizes[f"llama.cpp {kind}"] = write_gguf(path, theirs.state_dict(), shape, kind)
                calls[f"llama.cpp {kind}"] = llama(path)
        calls |= {f"copy {who}": copying(size) for who, size in sizes.items()}
        add(results, key, least(calls, options.rounds), sizes, "scanl float32")


def generating(model: Any) -> Callable[[], object]:
    """Return a call that decodes a token by a model of transformers with its cache, which goes on."""
    token = torch.zeros(1, 1, dtype=torch.long)
    cache = model(token, use_cache=True).cache_params
    return lambda: model(token, cache_params=cache, use_cache=True)


def llama(path: Path) -> Callable[[], object]:
    """Return a call that decodes a token by llama.cpp."""
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

    threads = torch.get_num_threads()
    model = Llama(str(path), n_ctx=1 << 14, n_threads=threads, n_threads_batch=threads, logits_all=False, verbose=False)
    return lambda: model.eval([0])


def write_gguf(path: Path, tensors: Mapping[str, Tensor], shape: Mapping[str, int], kind: str) -> int:
    """Write Mamba's tensors as llama.cpp reads them. Return the bytes of the weights."""
    import gguf  # pyright: ignore[reportMissingImports]

    width = 2 * shape["hidden_size"]
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(width)
    writer.add_ssm_state_size(shape["state_size"])
    writer.add_ssm_time_step_rank(-(-shape["hidden_size"] // 16))
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("no_vocab")
    size = 0
    for name, value in tensors.items():
        target, array = named(name, value)
        if target is None:
            continue
        quantized = kind == "Q8_0" and array.ndim == 2 and array.shape[1] % 32 == 0 and "ssm_a" not in target
        if quantized:
            array = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(target, array, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(target, array)
        size += array.nbytes
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return size


NAMES = {
    "norm": "attn_norm", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.x_proj": "ssm_x",
    "mixer.dt_proj": "ssm_dt", "mixer.out_proj": "ssm_out",
}  # fmt: skip


def named(name: str, value: Tensor) -> tuple[str | None, Any]:
    """Return the name in llama.cpp of a tensor of transformers' Mamba, and its numbers there."""
    whole = {"backbone.embeddings.weight": "token_embd.weight", "backbone.norm_f.weight": "output_norm.weight"}
    if name in whole or not name.startswith("backbone.layers."):
        return whole.get(name), value.float().numpy()
    _, _, block, rest = name.split(".", 3)
    if rest == "mixer.A_log":
        return f"blk.{block}.ssm_a", -value.exp().numpy()
    if rest == "mixer.D":
        return f"blk.{block}.ssm_d", value.numpy()
    module, _, kind = rest.rpartition(".")
    return f"blk.{block}.{NAMES[module]}.{kind}", value.squeeze().numpy()


def bits(results: Results, options: argparse.Namespace) -> None:
    """Score a run with each kind of weights."""
    folder = RunFolder.open(options.run)
    source = folder.source
    examples = source.exam().examples
    for kind in WEIGHTS:
        key = {"what": "bits", "name": "demo", "program": kind}
        if results.has(**key):
            continue
        model = folder.load_model()
        assert isinstance(model, LanguageModel)
        if kind != "float32":
            quantize(model, kind)
        score = measures(model, source, examples)[source.metric]
        size = weight_bytes(model, model.embedding, True)
        results.add(**key, width=model.stack.dim, weights=size, bits=score)


def main() -> None:
    made = parser(__doc__, ("layers", "mamba-130m", "bits"), rounds=100)
    made.add_argument("--run", metavar="RUN", help="of bits: a run on text")
    options = parse(made)
    results = Results("quantized", options)
    for name in options.names:
        if name == "bits" and options.run is None:
            print("bits: left out, for want of --run")
            continue
        {"layers": layers, "mamba-130m": mamba, "bits": bits}[name](results, options)


if __name__ == "__main__":
    main()
