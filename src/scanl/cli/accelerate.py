"""`scanl accelerate MODEL`: report which modules of a transformers model run on scanl's ops, and the speed-up."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from scanl import hub
from scanl.cli.parser import Parser
from scanl.errors import CheckpointError, ConfigError
from scanl.hub import patches
from scanl.options import Positive

ROUNDS = 5


def run(argv: Sequence[str]) -> int:
    """Load a model and print the report. With --bench, print a table of its speed before and after."""
    examples = {
        "scanl accelerate state-spaces/mamba-130m-hf --bench": "which modules become faster, and by how much here",
    }
    description = (
        "Run the recurrent modules of a pretrained transformers model on scanl's ops, and print which these are. In a "
        "program: `scanl.hub.accelerate(model)`."
    )
    parser = Parser("accelerate", description, examples=examples)
    parser.add_argument("model", type=str, help="the model's folder, or its name on the Hugging Face hub")
    parser.add_argument(
        "--bench", action="store_true", help="measure the model's speed on this machine, before and after"
    )
    parser.add("--length", Positive, "tokens of the prompt and of the training step", 1024)
    parser.add("--decode", Positive, "tokens to generate after the prompt", 64)
    args = parser.parse(argv)
    model = _load(args.model)
    report = hub.accelerate(model)
    print(report)
    if args.bench and report.accelerated:
        print(f"\n{_bench(model, args.length, args.decode)}")
    return 0


def table() -> str:
    """Return the Markdown table of all patches for docs/hub.md."""
    rows = ["| modules | before | now | corrected |", "| --- | --- | --- | --- |"]
    for name in patches.names():
        patch = patches.get(name)
        cells = (", ".join(patch.modules), patch.original, patch.runs, "; ".join(patch.corrects))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _load(path: str) -> Any:
    try:
        # from its own module: through the package, a type checker reads every model of transformers
        from transformers.models.auto.modeling_auto import AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("accelerate: transformers is not installed; pip install 'scanl[hub]'") from error
    try:
        return AutoModelForCausalLM.from_pretrained(path, use_safetensors=True, trust_remote_code=False).eval()
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f"accelerate: cannot load {path}: {reason[0]}") from error


def _bench(model: Any, length: int, decode: int) -> str:
    """Report medians over rounds that alternate between the model before and after. The first round is dropped."""
    ids = torch.randint(model.get_input_embeddings().num_embeddings, (1, length), device=model.device)
    sides: dict[str, Callable[[], object]] = {
        "before": lambda: hub.restore(model),
        "after": lambda: hub.accelerate(model),
    }
    times: dict[str, list[tuple[float, ...]]] = {side: [] for side in sides}
    for _ in range(1 + ROUNDS):
        for side, change in sides.items():
            change()
            times[side].append((*_generate(model, ids, decode), _train(model, ids)))
    old_times, new_times = ([median(column) for column in zip(*times[side][1:], strict=True)] for side in sides)
    rows = [("", *sides, "times faster")]
    what = (f"prefill of {length}, tokens/s", f"decode of {decode}, tokens/s", "forward and backward, s")
    for name, amount, old, new in zip(what, (length, decode, None), old_times, new_times, strict=True):
        shown = (f"{value:.3f}" if amount is None else f"{amount / value:,.0f}" for value in (old, new))
        rows.append((name, *shown, f"{old / new:.2f}"))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(line) for line in lines)


class _Clock:
    """A streamer for `generate` that records the time of the prompt and of each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


@torch.no_grad()
def _generate(model: Any, ids: Tensor, decode: int) -> tuple[float, float]:
    """Return the seconds up to the first token, and from the first to the last."""
    clock, count = _Clock(), 1 + decode
    options = {"do_sample": False, "num_beams": 1, "pad_token_id": 0, "min_new_tokens": count, "max_new_tokens": count}
    model.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
    return clock.times[1] - clock.times[0], clock.times[-1] - clock.times[1]


def _train(model: Any, ids: Tensor) -> float:
    """Return the seconds of a forward and backward pass with gradients of all parameters."""
    model.train()
    begin = time.perf_counter()
    model(ids, labels=ids, use_cache=False).loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    model.eval().zero_grad()
    return seconds
