"""Adapt a language model from a few examples: its first state alone, LoRA of equal size, or a prompt that it reads.

    python benchmarks/quality/adapting.py [NAME ...] [--seeds 3] [--steps 2000] [--examples 16]

A model of bytes, two blocks of width 64, trains on the source of Python's standard library. Then it learns to write
Python's help topics, which are English with marks, from the first `LENGTH` bytes of a few. Other topics are the
validation part, by which each method chooses its rate and when to stop, and the test part. The score is bits per byte
of the first `LENGTH` bytes of the test topics.

`prompt` reads the examples one after another, and begins each test topic at the state after them. `state` learns the
first state from the model's own; `state from the prompt` starts at the state of `prompt`. `lora` has the least rank
with at least as many numbers as the state, in all projections; one rank less has fewer. All take the same steps of Adam
on the same batches. Needs `pip install 'scanl[lora]'`. The rows are in benchmarks/results/adapting.csv.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser
from scanl.data import Text
from scanl.data.batch import Batch
from scanl.hub.lora import lora_config, projections
from scanl.layers.state import State
from scanl.learning import tune_state
from scanl.models import FirstState, LanguageModel, Stack

LAYERS = {"gated_deltanet": {"num_heads": 2}, "rwkv7": {}, "hawk": {"num_heads": 2}}
LENGTH, BATCH, VALIDATION = 192, 8, 16
RATES = {"state": (0.01, 0.1, 1.0), "lora": (0.001, 0.01, 0.1)}
STOPS = (20, 60)  # steps after which training may end, each with its own schedule

Score = Callable[[Tensor], float]  # of tokens (N, 1 + LENGTH)


def topics(seed: int) -> Tensor:
    """Return the first bytes of the help topics (N, 1 + LENGTH) in random order, a zero byte before each."""
    from pydoc_data.topics import topics

    texts = [text.strip().encode()[:LENGTH] for _, text in sorted(topics.items())]
    rows = torch.tensor([list(b"\0" + text) for text in texts if len(text) == LENGTH])
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def pretrained(layer: str, steps: int, runs: Path | None, dim: int) -> LanguageModel:
    """Train a model on the standard library, or load it where it has been trained."""
    folder = None if runs is None else runs / f"{layer}-{dim}-{steps}"
    if folder is not None and folder.exists():
        return LanguageModel.load(folder)
    torch.manual_seed(0)
    model, source = LanguageModel(256, Stack(dim, 2, layer, layer_options=LAYERS[layer])), Text(sequence_length=128)
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3, betas=(0.9, 0.95))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (step + 1) / 50, 1.05 - step / steps)
        batch = source.batch(step, 16).tensors()
        loss = F.cross_entropy(model(batch.inputs)[0].flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"{layer}: step {step}, {loss.item() / np.log(2):.3f} bits per byte", flush=True)
    if folder is not None:
        model.save(folder)
    return model.eval()


@torch.no_grad()
def bits(model: Callable[..., tuple[Tensor, State]], tokens: Tensor, state: State = None) -> float:
    """Return the bits per byte of rows, read from a state."""
    logits, _ = model(tokens[:, :-1], state)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item() / float(np.log(2))


def batches(examples: Tensor, steps: int, seed: int) -> list[Batch]:
    random = torch.Generator().manual_seed(seed)
    chosen = [examples[torch.randperm(len(examples), generator=random)[:BATCH]] for _ in range(steps)]
    return [Batch(rows[:, :-1], rows[:, 1:]) for rows in chosen]


def of_state(model: LanguageModel, start: State, sequence: list[Batch], lr: float) -> tuple[Score, int]:
    first = tune_state(model, sequence, lr=lr, state=start)
    return lambda tokens: bits(model, tokens, first(len(tokens))), sum(p.numel() for p in first.parameters())


def rank_of(model: LanguageModel, numbers: int) -> int:
    """Return the least rank with which LoRA has at least this many numbers."""
    sizes = [model.get_submodule(path).weight.shape for path in projections(model)]
    return -(-numbers // sum(map(sum, sizes)))


def of_lora(model: LanguageModel, rank: int, sequence: list[Batch], lr: float) -> tuple[Score, int]:
    from peft import get_peft_model

    torch.manual_seed(rank)
    adapted = get_peft_model(copy.deepcopy(model), lora_config(model, rank))
    learnt = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(learnt, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(sequence))
    for batch in sequence:
        loss = F.cross_entropy(adapted(batch.inputs)[0].flatten(0, 1), batch.targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(learnt, 1.0)
        optimizer.step()
        schedule.step()
    adapted.eval()
    return lambda tokens: bits(adapted, tokens), sum(p.numel() for p in learnt)


def main() -> None:
    made = parser(__doc__, LAYERS, seeds=True)
    made.add_argument("--steps", type=int, default=2000, help="of training on the standard library")
    made.add_argument("--dim", type=int, default=64, help="width of the model")
    made.add_argument("--examples", type=int, default=16, help="topics to learn from")
    made.add_argument("--runs", type=Path, metavar="FOLDER", help="keep the trained models here")
    options = parse(made)
    if options.quick:
        options.steps, options.dim = 2, 16
    results = Results("adapting", options)
    for layer in options.names:
        model = pretrained(layer, options.steps, options.runs, options.dim)
        for seed in range(options.seeds):
            rows = topics(seed)
            n = options.examples
            examples, validation, test = rows[:n], rows[n : n + VALIDATION], rows[n + VALIDATION :]
            with torch.no_grad():
                prompted = model(examples.flatten()[None])[1]
            first, read = FirstState(model.init_state(1)), FirstState(prompted)
            rank = rank_of(model, sum(p.numel() for p in first.parameters()))
            ways = {
                "state": partial(of_state, model, None),
                "state from the prompt": partial(of_state, model, prompted),
                "lora": partial(of_lora, model, rank),
                "lora of one rank less": partial(of_lora, model, rank - 1),
            }
            fixed = {"none": first, "prompt": read}
            for name in (*fixed, *list(ways)[: None if rank > 1 else -1]):
                key = {"layer": layer, "seed": seed, "examples": n, "pretraining": options.steps, "program": name}
                if results.has(**key):
                    continue
                if name in fixed:
                    score = bits(model, test, fixed[name](len(test)))
                    results.add(f"{layer} {name}: {score:.3f}", **key, numbers=0, bits=score)
                    continue
                best: tuple[float, Score, int, float, int] | None = None
                for stop in STOPS[: 1 if options.quick else None]:
                    for lr in RATES[name.split()[0]]:
                        score, numbers = ways[name](batches(examples, stop, seed), lr)
                        if best is None or score(validation) < best[0]:
                            best = score(validation), score, numbers, lr, stop
                assert best is not None
                value = best[1](test)
                line = f"{layer} {name}: {value:.3f} with {best[2]} numbers, rate {best[3]}, {best[4]} steps"
                results.add(line, **key, numbers=best[2], lr=best[3], steps=best[4], bits=value)


if __name__ == "__main__":
    main()
