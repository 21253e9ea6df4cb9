"""Time transformers' recurrent models before and after `scanl.hub.accelerate`.

    python benchmarks/hub.py [--families NAME ...] [--tokens 1024] [--rounds 3] [--train] [--decode]

Models of published widths with random weights, cut to two layers. The vocabulary is cut in proportion, so that
the read-out takes the same part of the time. Medians of interleaved runs in one process: the prefill of a prompt, as a
whole and inside the patched modules without their projections. --decode adds the tokens after it, one at a time.
--train adds one training step of a one-layer model and its peak memory, each in its own process. Prints a table and
writes benchmarks/results/hub-cpu.json.
"""

import argparse
import contextlib
import datetime
import json
import logging
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scanl import hub

RESULTS = Path(__file__).parent / "results"
DECODED = 32  # tokens


def mamba(layers: int) -> Any:
    """state-spaces/mamba-130m."""
    from transformers import MambaConfig, MambaForCausalLM

    return MambaForCausalLM(
        MambaConfig(hidden_size=768, state_size=16, num_hidden_layers=layers, vocab_size=50280 * layers // 24)
    )


def mamba2(layers: int) -> Any:
    """state-spaces/mamba2-130m."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    return Mamba2ForCausalLM(
        Mamba2Config(
            hidden_size=768,
            num_heads=24,
            head_dim=64,
            state_size=128,
            n_groups=1,
            num_hidden_layers=layers,
            vocab_size=50288 * layers // 24,
        )
    )


def gated_deltanet(layers: int) -> Any:
    """Qwen/Qwen3.5-0.8B's gated DeltaNet layers, and one of attention, without which the original cannot run."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=layers + 1,
            layer_types=["linear_attention"] * layers + ["full_attention"],
            linear_num_key_heads=16,
            linear_num_value_heads=16,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            vocab_size=248320 * layers // 24,
        )
    )


def kimi_delta_attention(layers: int) -> Any:
    """moonshotai/Kimi-Linear-48B-A3B's delta attention layers, one expert wide, and one of attention."""
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    return KimiLinearForCausalLM(
        KimiLinearConfig(
            hidden_size=2304,
            intermediate_size=1024,
            num_hidden_layers=layers + 1,
            layer_types=["linear_attention"] * layers + ["full_attention"],
            mlp_layer_types=["dense"] * (layers + 1),
            num_attention_heads=32,
            vocab_size=163840 * layers // 27,
            pad_token_id=0,
        )
    )


def rwkv(layers: int) -> Any:
    """RWKV/rwkv-4-169m-pile."""
    from transformers import RwkvConfig, RwkvForCausalLM

    return RwkvForCausalLM(
        RwkvConfig(hidden_size=768, num_hidden_layers=max(2, layers), vocab_size=50277 * layers // 12)
    )


def recurrent_gemma(layers: int) -> Any:
    """google/recurrentgemma-2b's recurrent layers, and one of attention, without which the original cannot run."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    return RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            hidden_size=2560,
            lru_width=2560,
            intermediate_size=15360,
            num_hidden_layers=layers + 1,
            block_types=["recurrent"] * layers + ["attention"],
            vocab_size=256000 * layers // 26,
        )
    )


def xlstm(layers: int) -> Any:
    """NX-AI/xLSTM's mLSTM layers at the width of a small model."""
    from transformers import xLSTMConfig, xLSTMForCausalLM

    return xLSTMForCausalLM(
        xLSTMConfig(hidden_size=1024, num_heads=4, num_hidden_layers=layers, vocab_size=50304 * layers // 24)
    )


def lightning_attention(layers: int) -> Any:
    """MiniMax' lightning attention, heads of its width."""
    from transformers import MiniMaxConfig, MiniMaxForCausalLM

    return MiniMaxForCausalLM(
        MiniMaxConfig(
            hidden_size=2048,
            intermediate_size=2048,
            num_hidden_layers=layers,
            layer_types=["linear_attention"] * layers,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=128,
            num_local_experts=1,
            num_experts_per_tok=1,
            vocab_size=200064 * layers // 80,
        )
    )


def short_convolution(layers: int) -> Any:
    """LiquidAI/LFM2-350M's convolutions, and a layer of attention, without which the original cannot run."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return Lfm2ForCausalLM(
        Lfm2Config(
            hidden_size=1024,
            intermediate_size=6656,
            num_hidden_layers=layers + 1,
            layer_types=["conv"] * layers + ["full_attention"],
            num_attention_heads=16,
            num_key_value_heads=8,
            vocab_size=65536 * layers // 16,
        )
    )


MODELS: dict[str, Callable[[int], Any]] = {
    build.__name__: build
    for build in (
        mamba,
        mamba2,
        gated_deltanet,
        kimi_delta_attention,
        rwkv,
        recurrent_gemma,
        xlstm,
        lightning_attention,
        short_convolution,
    )
}


class Inside:
    """Seconds spent in the patched modules of a model, and in the linear projections inside them."""

    def __init__(self) -> None:
        self.modules = self.projections = 0.0

    @contextlib.contextmanager
    def watch(self, modules: list[nn.Module]) -> Iterator[None]:
        began: list[float] = []

        def before(*_: object) -> None:
            began.append(time.perf_counter())

        def after(module: nn.Module, *_: object) -> None:
            seconds = time.perf_counter() - began.pop()
            if isinstance(module, nn.Linear):
                self.projections += seconds
            else:
                self.modules += seconds

        watched = [*modules, *(child for m in modules for child in m.modules() if isinstance(child, nn.Linear))]
        hooks = [
            handle for m in watched for handle in (m.register_forward_pre_hook(before), m.register_forward_hook(after))
        ]
        yield
        for hook in hooks:
            hook.remove()


def patched_modules(model: nn.Module) -> list[nn.Module]:
    names = {row.module for row in hub.accelerate(model).accelerated}
    hub.restore(model)
    return [module for name, module in model.named_modules() if name in names]


@torch.no_grad()
def measure(name: str, tokens: int, rounds: int, decode: bool) -> dict[str, Any]:
    """Seconds before and after: prefill, inside the patched modules without projections, and a token."""
    torch.manual_seed(0)
    model = MODELS[name](2).eval()
    ids = torch.randint(2, 500, (1, tokens))
    patched = patched_modules(model)
    found: dict[str, list[list[float]]] = {"prefill": [[], []], "inside": [[], []]}
    if decode:
        found["token"] = [[], []]
    for turn in range(rounds + 1):
        for way in (0, 1):
            if way:
                hub.accelerate(model)
            inside = Inside()
            begin = time.perf_counter()
            model(ids)
            seconds = time.perf_counter() - begin
            with inside.watch(patched):
                model(ids)
            if turn:  # the first compiles and warms up
                found["prefill"][way].append(seconds)
                found["inside"][way].append(inside.modules - inside.projections)
            if decode:
                begin = time.perf_counter()
                model.generate(ids[:, :16], max_new_tokens=1, min_new_tokens=1, do_sample=False, pad_token_id=0)
                first = time.perf_counter() - begin
                begin = time.perf_counter()
                model.generate(
                    ids[:, :16], max_new_tokens=DECODED, min_new_tokens=DECODED, do_sample=False, pad_token_id=0
                )
                if turn:
                    found["token"][way].append((time.perf_counter() - begin - first) / (DECODED - 1))
            hub.restore(model)
    return {kind: [statistics.median(times) for times in both] for kind, both in found.items()}


def step(name: str, tokens: int, accelerated: bool) -> None:
    """One training step in this process: prints its seconds and the peak memory that it added, in bytes."""
    torch.manual_seed(0)
    model = MODELS[name](1).train()
    if accelerated:
        hub.accelerate(model)
        warm = torch.randint(2, 500, (1, 16))
        model(warm, labels=warm, use_cache=False).loss.backward()
    ids = torch.randint(2, 500, (1, tokens))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = _status("VmRSS")
    begin = time.perf_counter()
    model(ids, labels=ids, use_cache=False).loss.backward()
    seconds = time.perf_counter() - begin
    print(json.dumps([seconds, _status("VmHWM") - before]))


def _status(field: str) -> int:
    """Bytes that Linux tells of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def train(name: str, tokens: int) -> dict[str, Any]:
    both = []
    for accelerated in (False, True):
        argv = [sys.executable, __file__, "--step", name, "--tokens", str(tokens)]
        argv += ["--accelerated"] if accelerated else []
        both.append(
            json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        )
    return {"training step": [seconds for seconds, _ in both], "training memory": [size for _, size in both]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=MODELS, default=None)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--train", action="store_true", help="minutes for Mamba as it comes")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--accelerated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if not torch.cuda.is_available():
        # transformers would take flash-linear-attention's kernels, where installed, and fail for want of a GPU.
        sys.modules["fla"] = None  # pyright: ignore[reportArgumentType]
    if options.step:
        step(options.step, options.tokens, options.accelerated)
        return
    table = {}
    for name in options.families or MODELS:
        found = measure(name, options.tokens, options.rounds, options.decode)
        if options.train:
            found |= train(name, options.tokens)
        table[name] = found
        timed = {kind: pair for kind, pair in found.items() if kind != "training memory"}
        cells = [f"{kind} {a * 1e3:,.1f} -> {b * 1e3:,.1f} ms, {a / b:.1f} x" for kind, (a, b) in timed.items()]
        if "training memory" in found:
            a, b = found["training memory"]
            cells.append(f"memory {a / 2**20:,.0f} -> {b / 2**20:,.0f} MiB, {a / max(1, b):.0f} x")
        print(f"{name:<22}" + "   ".join(cells), flush=True)
    RESULTS.mkdir(exist_ok=True)
    about = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "tokens": options.tokens,
    }
    path = RESULTS / "hub-cpu.json"
    path.write_text(json.dumps({**about, "seconds": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
