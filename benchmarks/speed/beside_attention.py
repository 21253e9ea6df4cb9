"""Linear RNNs beside softmax attention: the size of states, the speed of decoding and training, and the scan itself.

    python benchmarks/speed/beside_attention.py [state] [decoding] [training] [scan] [mamba]

state: numbers that one layer of width 512 carries after 1,000 to 100,000 tokens. decoding: a step of that layer after
as many tokens, batch 1; `attention in torch` is `scaled_dot_product_attention` over a cache that is there already, with
its four projections. training: a language model of four blocks of width 256 on (4, 1024) bytes, with AdamW, beside that
of attention; and the peak memory of a process that does nothing else. scan: linear_scan of (8, 1024, 1024) in three
dtypes beside adding two tensors and the scans of torch and JAX; the error is that from the reference in float64,
relative to its norm. mamba: selective_scan of (1, 1024, 1024) channels and 16 states, beside the same from one
linear_scan over all states; both passes, and the peak memory of a process. The rows are in
benchmarks/results/beside_attention.csv.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scanl import layers
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack
from scanl.ops import SegmentMemory, linear_scan, selective_scan

sys.path.append(str(Path(__file__).parents[1]))
from harness import Contender, Results, in_process, measure, parse, parser, race, resident
from speed.peers import Draw, contender, in_jax, scan_operands, selective, torch_associative

MODELS = ("attention", "linear_rnn", "mamba", "mamba2", "rwkv6")
LENGTHS, DIM, HEADS = (1_000, 10_000, 100_000), 512, 8
PIECE = 5_000  # tokens that are read at once on the way to a length
WIDTH, DEPTH, BATCH, STEPS = 256, 4, 4, 1024  # of the language model
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCAN, MAMBA = (8, 1024, 1024), (1, 1024, 1024, 16)
MIB = 2**20


def layer(name: str, length: int) -> layers.Layer:
    more = {"max_length": length} if name == "attention" else {}
    return layers.build(name, DIM, **more).eval()


def state(results: Results, options: argparse.Namespace) -> None:
    for name in MODELS:
        for length in LENGTHS:
            if not results.has(part="state", program=name, length=length):
                tensors = [value for _, value in leaves(layer(name, length).init_state(1))]
                numbers = sum(value.numel() for value in tensors if value.is_floating_point())
                results.add(part="state", program=name, length=length, numbers=numbers)


def read(name: str, length: int) -> Callable[[], object]:
    """Return a call that reads one token after as many others."""
    mixer, x = layer(name, length + 1), torch.randn(1, DIM)
    if name == "attention":  # the time does not depend on what the cache holds
        keys, values = torch.randn(2, 1, length + 1, HEADS, DIM // HEADS)
        carried = SegmentMemory(keys, values, torch.tensor([length]))
    else:
        carried = None
        for begin in range(0, length, PIECE):
            _, carried = mixer(torch.randn(1, min(PIECE, length - begin), DIM), carried)
    return lambda: mixer.step(x, carried)


def in_torch(length: int) -> Callable[[], object]:
    maps, x = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4)), torch.randn(1, DIM)
    keys, values = torch.randn(2, 1, HEADS, length + 1, DIM // HEADS)

    def step() -> Tensor:
        q, k, v = (each(x).view(HEADS, DIM // HEADS) for each in maps[:3])
        keys[0, :, -1], values[0, :, -1] = k, v
        return maps[3](F.scaled_dot_product_attention(q[None, :, None], keys, values).flatten())

    return step


@torch.no_grad()
def decoding(results: Results, options: argparse.Namespace) -> None:
    for length in (10, 20, 30) if options.quick else LENGTHS:
        if results.timed(part="decoding", length=length):
            continue
        calls = {name: read(name, length) for name in MODELS} | {"attention in torch": in_torch(length)}
        for name, took in measure(calls, options.rounds).items():
            results.add(part="decoding", program=name, length=length, tokens_a_second=1 / took.seconds)


def learner(name: str, batch: int, steps: int) -> Callable[[], object]:
    """Return a call that trains a model for a step."""
    torch.manual_seed(0)
    model = LanguageModel(256, Stack(WIDTH, DEPTH, name))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.randint(256, (batch, steps + 1))

    def step() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(text[:, :-1])[0].flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def peak(name: str, batch: int, steps: int, threads: int) -> float:
    """Return MiB that three steps of training add to a process."""
    torch.set_num_threads(threads)
    learner(name, 1, 8)()  # kernels are compiled, libraries loaded
    begin, step = resident("VmRSS"), learner(name, batch, steps)
    for _ in range(3):
        step()
    return (resident("VmHWM") - begin) / MIB


def training(results: Results, options: argparse.Namespace) -> None:
    if results.timed(part="training"):
        return
    batch, steps = (1, 16) if options.quick else (BATCH, STEPS)
    memory = {name: in_process(peak, name, batch, steps, torch.get_num_threads()) for name in MODELS}
    took = measure({name: learner(name, batch, steps) for name in MODELS}, options.rounds)
    for name, each in took.items():
        ratio = took["attention"].seconds / each.seconds
        rate = batch * steps / each.seconds
        results.add(part="training", program=name, tokens_a_second=rate, beside_attention=ratio, mib=memory[name])


def scan(results: Results, options: argparse.Namespace) -> None:
    shape = (2, 16, 8) if options.quick else SCAN
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        if results.timed(part="scan", dtype=kind):
            continue
        x, a, dy = (value.to(dtype) for value in scan_operands(Draw("cpu"), shape))
        exact = linear_scan(x.double(), a.double(), backend="reference")[0]
        y = torch.empty_like(x)
        programs = {
            "torch.add": Contender(lambda x=x, a=a, y=y: torch.add(x, a, out=y)),
            "linear_scan": contender(lambda x, a: linear_scan(x, a)[0], x, a, dy),
            "torch associative_scan": torch_associative(x, a, dy),
            "jax associative_scan": in_jax("associative")(x, a, dy),
            "jax scan": in_jax("loop")(x, a, dy),
        }
        errors = {}
        for name, program in programs.items():
            if name != "torch.add" and program.forward is not None:
                out = program.forward()
                out = out if isinstance(out, Tensor) else torch.tensor(np.asarray(out, np.float64))
                errors[name] = ((out.double() - exact).norm() / exact.norm()).item()
        for (name, way), each in (took := race(programs, options.rounds)).items():
            ratio = each.processor / took["torch.add", "forward"].processor
            error = errors.get(name) if way == "forward" else None
            ms = 1e3 * each.processor
            results.add(part="scan", dtype=kind, program=name, way=way, ms=ms, ratio=ratio, error=error)


def one_recursion(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, bias: Tensor
) -> Tensor:
    """Return what selective_scan does, from one linear_scan over all channels and states."""
    delta = F.softplus(delta + bias)
    decay = (delta.unsqueeze(-1) * A).exp()
    h, _ = linear_scan((delta * u).unsqueeze(-1) * B.unsqueeze(2), decay)
    return ((h * C.unsqueeze(2)).sum(-1) + D * u) * F.silu(z)


def fused(*operands: Tensor) -> Tensor:
    *inputs, z, bias = operands
    return selective_scan(*inputs, z, bias, delta_softplus=True)[0]


FORMS = {"selective_scan": fused, "one linear_scan": one_recursion}


def mamba_peak(form: str, shape: tuple[int, ...], threads: int) -> float:
    """Return MiB that both passes add to a process."""
    torch.set_num_threads(threads)
    *inputs, dy = selective(Draw("cpu"), (1, 8, *shape[2:]))
    contender(FORMS[form], *inputs, dy).both()
    *inputs, dy = selective(Draw("cpu"), shape)
    both, begin = contender(FORMS[form], *inputs, dy).both, resident("VmRSS")
    both()
    return (resident("VmHWM") - begin) / MIB


def mamba(results: Results, options: argparse.Namespace) -> None:
    if results.timed(part="mamba"):
        return
    shape = (1, 16, 8, 4) if options.quick else MAMBA
    *inputs, dy = selective(Draw("cpu"), shape)
    torch.testing.assert_close(fused(*inputs), one_recursion(*inputs), rtol=1e-4, atol=1e-4)
    memory = {form: in_process(mamba_peak, form, shape, torch.get_num_threads()) for form in FORMS}
    took = race({form: contender(call, *inputs, dy) for form, call in FORMS.items()}, options.rounds)
    for (form, way), each in took.items():
        ratio = each.seconds / took["selective_scan", way].seconds
        mib = memory[form] if way == "both" else None
        results.add(part="mamba", program=form, way=way, ms=1e3 * each.seconds, ratio=ratio, mib=mib)


PARTS = {"state": state, "decoding": decoding, "training": training, "scan": scan, "mamba": mamba}


def main() -> None:
    options = parse(parser(__doc__, PARTS, rounds=9, threads=2))
    results = Results("beside_attention", options)
    for name in options.names:
        PARTS[name](results, options)


if __name__ == "__main__":
    main()
