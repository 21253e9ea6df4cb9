"""Sessions, drafts and streams of language models: what they cost, and whether their tokens are those of `generate`.

    python benchmarks/speed/sessions.py [turns] [drafts] [equal] [streams] [kill] [hub]

turns: 50 turns of 16 tokens that are added and 16 that are drawn, in a session, and with the whole text as a prompt.
drafts: tokens a second without a draft, with a lookup in the text, and with a smaller model. Both models learn lines of
JSON before, so the text repeats itself.   equal: tokens of ten layers with drafts and in a session, beside those of
`generate` alone; all within `exact`.   streams: tokens a second of 1 to 16 texts in one batch; some join and leave.
kill: a process that holds a session is killed at some moment; another one goes on from its file.
hub: the same of accelerated models of transformers.

Times are of the processor, because other work on the machine disturbs them less. The programs take turns. The rows are
in benchmarks/results/sessions.csv.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import scanl
from scanl.models import LanguageModel, ModelDraft, PromptLookup, Session, Stack, Streams

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

TURNS, ADDED, DRAWN = 50, 16, 16
FAMILIES = ("hawk", "gru", "mamba", "mamba2", "gla", "gated_deltanet", "rwkv7", "mlstm", "hgrn", "min_gru")
TALKING = ("hawk", "gated_deltanet")
VOCAB = 256  # bytes
DIM, DEPTH = 128, 2
KILLS = 2
DRAWING: Mapping[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
}


def model(layer: str, dim: int, depth: int) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(VOCAB, Stack(dim, depth, layer)).eval()


def generated(model: LanguageModel, prompt: Tensor, count: int, **options: Any) -> list[int]:
    return [int(token) for token in itertools.islice(model.generate(prompt, **options), count)]


def timed(call: Callable[..., Any], *arguments: Any, **options: Any) -> tuple[Any, float]:
    begin = time.process_time()
    result = call(*arguments, **options)
    return result, time.process_time() - begin


def text(seed: int, length: int) -> Tensor:
    """Return lines of JSON, as bytes (1, length)."""
    draw, lines = random.Random(seed), ""
    while len(lines) < length:
        entry = {
            "layer": draw.choice(["hawk", "gla", "s5"]),
            "step": 100 * draw.randrange(1, 9),
            "loss": 0.5,
            "ok": True,
        }
        lines += json.dumps(entry) + "\n"
    return torch.tensor([list(lines.encode())[:length]])


def turns(results: Results, options: argparse.Namespace) -> None:
    for layer in TALKING:
        if results.timed(part="turns", layer=layer):
            continue
        talking = model(layer, DIM, DEPTH)
        session, took = Session(talking), []
        for turn in range(TURNS):
            prompt = text(turn, ADDED)
            whole = torch.cat([session.tokens[None], prompt], 1)
            _, again_seconds = timed(generated, talking, whole, DRAWN, temperature=0)
            _, seconds = timed(generated, talking, prompt, DRAWN, temperature=0, session=session)
            took.append((seconds, again_seconds))
        for first in range(0, TURNS, 10):
            seconds, again_seconds = map(statistics.median, zip(*took[first : first + 10], strict=True))
            results.add(
                part="turns", layer=layer, width=DIM, turns=f"{first + 1} to {first + 10}", seconds=seconds,
                again=again_seconds,
            )  # fmt: skip


def learned(layer: str, dim: int, depth: int, steps: int) -> LanguageModel:
    """Return a model that has learned lines of JSON."""
    made = model(layer, dim, depth)
    optimizer = torch.optim.AdamW(made.parameters(), 3e-3)
    for step in range(steps):
        x = torch.cat([text(8 * step + row, 129) for row in range(8)])
        loss = F.cross_entropy(made(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made


def drafts(results: Results, options: argparse.Namespace) -> None:
    dim, steps, count = (32, 3, 20) if options.quick else (DIM, 50, 150)
    for layer in TALKING:
        if results.timed(part="drafts", layer=layer):
            continue
        large, small = learned(layer, dim, DEPTH, steps), learned("gru", dim // 4, 1, steps)
        proposing = {
            "none": lambda: None,
            "lookup": PromptLookup,
            "smaller model": lambda small=small: ModelDraft(small),
        }
        for name, context in {"plain": nullcontext, "exact": scanl.exact}.items():
            took: dict[str, list[float]] = {draft: [] for draft in proposing}
            tokens = {}
            with context():
                for _, (draft, make) in itertools.product(range(options.rounds), proposing.items()):
                    tokens[draft], seconds = timed(generated, large, text(-1, 150), count, temperature=0, draft=make())
                    took[draft].append(seconds)
            for draft, seconds in took.items():
                rate, base = (count / statistics.median(each) for each in (seconds, took["none"]))
                results.add(
                    part="drafts", layer=layer, width=dim, bits=name, draft=draft, rate=rate, ratio=rate / base,
                    equal=tokens[draft] == tokens["none"],
                )  # fmt: skip


def equal(results: Results, options: argparse.Namespace) -> None:
    count = 10 if options.quick else 60
    for layer in FAMILIES[:2] if options.quick else FAMILIES:
        if results.has(part="equal", layer=layer):
            continue
        large, small, same = model(layer, 64, 2), model("gru", 32, 1), []
        with scanl.exact():
            for drawing in DRAWING.values():
                plain = generated(large, text(-1, 90), count, **drawing)
                ways: list[dict[str, Any]] = [
                    {"draft": PromptLookup()}, {"draft": small}, {"session": Session(large, every=32)},
                ]  # fmt: skip
                same += [generated(large, text(-1, 90), count, **way, **drawing) == plain for way in ways]
        results.add(part="equal", layer=layer, width=64, tokens=count, equal=all(same))


def streams(results: Results, options: argparse.Namespace) -> None:
    dim, steps = (32, 10) if options.quick else (DIM, 24)
    for layer in TALKING:
        shared, base = model(layer, dim, DEPTH), 0.0
        for beside in (1, 4, 16):
            if results.timed(part="streams", layer=layer, beside=beside):
                continue
            with scanl.exact():
                rate, same = streamed(shared, beside, steps)
            base = base or rate
            results.add(part="streams", layer=layer, width=dim, beside=beside, rate=rate, ratio=rate / base, equal=same)


def streamed(shared: LanguageModel, beside: int, steps: int) -> tuple[float, bool]:
    """Return the tokens a second of streams, and whether those that have left had the tokens of `generate`."""
    batch, draw, took, count = Streams(shared), random.Random(0), 0.0, 0
    live = {batch.join(text(i, 5 + i), temperature=0): 5 + i for i in range(beside)}
    ended: list[tuple[Session, int]] = []
    for step in range(steps):
        tokens, seconds = timed(batch.step)
        if step:  # the first step reads the prompts
            took, count = took + seconds, count + len(tokens)
        if step % 8 == 7:
            leaving = draw.choice(list(live))
            ended.append((batch.leave(leaving), live.pop(leaving)))
            live[batch.join(text(step, 9), temperature=0)] = 9
    same = True
    for session, length in ended:
        prompt, rest = session.tokens[None, :length], session.tokens[length:].tolist()
        same &= generated(shared, prompt, len(rest), temperature=0) == rest
    return count / took, same


def talk(path: str, turns_done: Any) -> None:
    """Take turns without end, and write the session after each."""
    with scanl.exact():
        session = Session(model("gla", 64, 2))
        for turn in itertools.count():
            generated(session.model, text(turn, 9), 12, session=session, temperature=0)
            session.save(path)
            turns_done.put(turn)


def kill(results: Results, options: argparse.Namespace) -> None:
    if results.has(part="kill"):
        return
    context, same = multiprocessing.get_context("spawn"), []
    for number in range(1 if options.quick else KILLS):
        with tempfile.TemporaryDirectory() as folder:
            path, turns_done = str(Path(folder, "session.safetensors")), context.Queue()
            process = context.Process(target=talk, args=(path, turns_done))
            process.start()
            while turns_done.get() < 3:
                pass
            time.sleep(0.01 * number)
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            with scanl.exact():
                session = Session.load(path, model("gla", 64, 2))
                whole = torch.cat([session.tokens[None], text(99, 9)], 1)
                expected = generated(session.model, whole, 12, temperature=0)
                same.append(generated(session.model, text(99, 9), 12, session=session, temperature=0) == expected)
    results.add(part="kill", layer="gla", width=64, times=len(same), equal=all(same))


def hub(results: Results, options: argparse.Namespace) -> None:
    from scanl.hub import CacheSession, accelerate

    width = 32 if options.quick else 2 * DIM
    for name, make in hub_models(width).items():
        if results.timed(part="hub", layer=name):
            continue
        large, decoding = make(), {"do_sample": False, "max_new_tokens": 8 if options.quick else 64, "pad_token_id": 0}
        accelerate(large)
        for bits, context in {"plain": nullcontext, "exact": scanl.exact}.items():
            with context():
                large.generate(text(-1, 150), custom_generate=CacheSession(large, draft=PromptLookup()), **decoding)
                session = CacheSession(large, draft=PromptLookup())  # all is compiled now
                ids, seconds = timed(large.generate, text(-1, 150), **decoding)
                drafted, drafted_seconds = timed(large.generate, text(-1, 150), custom_generate=session, **decoding)
                more = torch.cat([ids, text(1, 9)], 1)
                again, again_seconds = timed(large.generate, more, **decoding)
                turn, turn_seconds = timed(large.generate, more, custom_generate=session, **decoding)
            results.add(
                part="hub", layer=name, width=width, bits=bits, ratio=seconds / drafted_seconds,
                turn_ratio=again_seconds / turn_seconds,
                equal=torch.equal(ids, drafted) and torch.equal(again, turn),
            )  # fmt: skip


def hub_models(dim: int) -> dict[str, Callable[[], Any]]:
    """Return models of transformers with random weights."""
    from transformers import (
        FalconMambaConfig,
        FalconMambaForCausalLM,
        Mamba2Config,
        Mamba2ForCausalLM,
        MambaConfig,
        MambaForCausalLM,
    )

    size: dict[str, Any] = {"hidden_size": dim, "num_hidden_layers": 2, "vocab_size": VOCAB, "eos_token_id": None}
    heads = {"num_heads": dim // 8, "head_dim": 16, "n_groups": 1, "state_size": 32}
    made = {
        "Mamba": (MambaForCausalLM, MambaConfig(**size)),
        "Mamba2": (Mamba2ForCausalLM, Mamba2Config(**size, **heads)),
        "FalconMamba": (FalconMambaForCausalLM, FalconMambaConfig(**size)),
    }

    def make(kind: Any, config: Any) -> Any:
        torch.manual_seed(0)
        return kind(config).eval()

    return {name: lambda pair=pair: make(*pair) for name, pair in made.items()}


PARTS = {"turns": turns, "drafts": drafts, "equal": equal, "streams": streams, "kill": kill, "hub": hub}


def main() -> None:
    options = parse(parser(__doc__, PARTS, rounds=3))
    results = Results("sessions", options)
    for name in options.names:
        PARTS[name](results, options)


if __name__ == "__main__":
    main()
