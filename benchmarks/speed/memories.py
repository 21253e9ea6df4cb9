"""Time ops and linear memories on a CPU beside what a user could take instead.

    python benchmarks/speed/memories.py [NAME ...] [--rounds 5]

The others are the naive forms of flash-linear-attention, the forms of transformers and mambapy for a CPU, torch's own
attention over as many steps, and for recurrences with nonlinear feedback their Python loop. A package that is missing
is left out. Results are compared first. A ratio is the other's time over that of scanl, so 4.0 means that scanl is four
times as fast. `memory` is the growth of a fresh process's peak over one forward and backward pass, in multiples of the
operands, on Linux. float32. The rows are in benchmarks/results/memories.csv.
"""

import importlib
import inspect
import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl import layers, ops
from scanl.layers.attention import path_attention
from scanl.layers.memory import _mini_batches, mesanet, ttt_linear
from scanl.layers.parts.levels import count_levels, levels

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, in_process, in_torch, parse, parser, race, resident

SHAPE = (1, 2048, 8, 64)
HF = "transformers.models"
LONG, SHORT = (1, 4096, 8, 64), (1, 1024, 8, 64)
LOOP = (1, 256, 512)  # a loop takes milliseconds a step


class Case(NamedTuple):
    """Functions of the same leaves: ours, and the other's."""

    what: str
    leaves: tuple[Tensor, ...]
    ours: Callable[..., Tensor]
    other: Callable[..., Tensor]
    same: bool = True  # whether the two compute the same
    within: float = 1e-3  # how far they may be apart
    backward: bool = True  # whether the other's backward pass ends in seconds
    memory: bool = False  # whether memory is measured, too


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def decay(*shape: int) -> Tensor:
    return F.logsigmoid(torch.randn(shape) + 2)


def theirs(module: str, name: str) -> Callable:
    """Return a function of another library, without what would swap GPU kernels in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return inspect.unwrap(getattr(importlib.import_module(module), name))


def attention(q: Tensor, k: Tensor, v: Tensor, *g: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def qkv(shape: tuple[int, ...] = SHAPE) -> tuple[Tensor, Tensor, Tensor]:
    return draw(*shape), F.normalize(draw(*shape), dim=-1), draw(*shape)


def naive(where: str, name: str, *, heads_first: bool = False) -> Callable[..., Tensor]:
    """Return a form of flash-linear-attention as a function of tensors (B, T, H, ·)."""
    function = theirs(f"fla.ops.{where}", name)

    def run(*leaves: Tensor) -> Tensor:
        if heads_first:
            leaves = tuple(leaf.transpose(1, 2) for leaf in leaves)
        y = function(*leaves)
        y = y[0] if isinstance(y, tuple) else y
        return y.transpose(1, 2) if heads_first else y

    return run


def swapped(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Take beta before g, as we do, for a function that takes it after g."""
    return lambda q, k, v, beta, g: function(q, k, v, g, beta)


def additive(*leaves: Tensor) -> Tensor:
    return ops.linear_attention(*leaves)[0]


def delta(*leaves: Tensor) -> Tensor:
    return ops.delta_rule(*leaves)[0]


def low_rank(q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, g: Tensor) -> Tensor:
    return ops.dplr_scan(q, k, v, a, b, g)[0]


def based(feature_map: Callable[[Tensor], Tensor], what: str, where: str, name: str) -> Case:
    """A feature map of 16 keys, with its denominator."""
    q, k, v = draw(1, 2048, 8, 16), draw(1, 2048, 8, 16), draw(1, 2048, 8, 64)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.normalized_linear_attention(feature_map(q * 16**-0.5), feature_map(k), v)[0]

    return Case(what, (q, k, v), ours, naive(where, name, heads_first=True))


def hgrn2(q: Tensor, v: Tensor, g: Tensor) -> Tensor:
    return ops.linear_attention(q, -torch.expm1(g), v, g)[0]


def over_slots(q: Tensor, k: Tensor, v: Tensor, write: Tensor, g: Tensor) -> Tensor:
    """Gated slot attention, 64 slots."""
    logits, _ = ops.linear_attention(q, k, write, gv=g)
    return ops.linear_attention(logits.softmax(-1), write, v, g, scale=1.0)[0]


def bounded(q: Tensor, k: Tensor, v: Tensor, s: Tensor) -> Tensor:
    """Attention with bounded memory, 64 slots."""
    e = s.exp()
    z, _ = ops.linear_scan(e, e.new_ones(()))
    sums, _ = ops.linear_attention(q, k, e)
    return ops.linear_attention((sums / z).softmax(-1) / z, e, v, scale=1.0)[0]


def lightning() -> Case:
    rates = -torch.arange(1.0, 9.0) / 8
    chunks = naive("simple_gla.naive", "naive_chunk_simple_gla")

    def other(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return chunks(q, k, v, rates.expand(*q.shape[:3]))

    return Case("fla, chunks", qkv(), lambda q, k, v: additive(q, k, v, rates), other)


def comba() -> Case:
    """Erase at half of k, before the decay."""
    q, k, v = qkv()

    def ours(q: Tensor, k: Tensor, v: Tensor, p: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        strength = beta[..., None]
        return ops.dplr_scan(q, k, strength * v, -strength * k, p, g)[0]

    chunks = naive("comba.naive", "naive_chunk_comba")

    def other(q: Tensor, k: Tensor, v: Tensor, p: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return chunks(q, k, v, p, g, beta)

    return Case("fla, chunks", (q, k, v, k / 2, beta(), decay(*SHAPE[:3])), ours, other)


def delta_product() -> Case:
    """Two writes a step, and no decay."""
    steps = (1, 4096, *SHAPE[2:])
    q, k, v = draw(*SHAPE), F.normalize(draw(*steps), dim=-1), draw(*steps)

    def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, 1, 0)).flatten(1, 2)
        return ops.delta_rule(q, k, v, beta)[0][:, 1::2]

    form = theirs("fla.ops.gated_delta_product.naive", "naive_recurrent_gated_delta_product")

    def other(q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
        return form(q, k, v, None, beta, q.shape[-1] ** -0.5, num_householder=2)[0]

    return Case("fla, steps", (q, k, v, 2 * draw(*steps[:3]).sigmoid()), ours, other)


def mesa() -> Case:
    """Ten steps of conjugate gradients."""
    q, k, v = qkv()
    leaves = (F.normalize(q, dim=-1), k, v, beta(), decay(*SHAPE[:3]), F.softplus(draw(*SHAPE[2:])) + 0.25)
    form = theirs("fla.ops.mesa_net.naive", "naive_mesa_net_CG")

    def ours(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, damping: Tensor) -> Tensor:
        write = beta[..., None] * k
        return ops.linear_attention(mesanet._solve(q, k, write, g, damping, None, None, 10), write, v, g, scale=1.0)[0]

    def other(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, damping: Tensor) -> Tensor:
        return form(q, k, v, g, damping, beta, 64, 10)[0]

    # Ours is within 1e-6 of float64, the other within 2e-3.
    return Case("fla, chunks", leaves, ours, other, within=4e-3)


def written_by_gates() -> Callable[..., Tensor]:
    steps = naive("gla.naive", "naive_recurrent_gla")
    return lambda q, v, g: steps(q, -torch.expm1(g), v, g)


def log_linear() -> Case:
    """Ten levels, 512 steps: the other has a matrix of all pairs of steps for each level and head."""
    q, k, v, g = (each[:, :512] for each in (*qkv(), decay(*SHAPE[:3])))
    at = levels(torch.arange(512)[None], count_levels(512))

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, weights: Tensor) -> Tensor:
        g = g[..., None].masked_fill(at.begins[:, :, None], -torch.inf)
        values = torch.where(at.writes[:, :, None, :, None], v[:, :, :, None], 0)
        q, k = (each.repeat_interleave(g.shape[3], 2) for each in (q, k))
        o, _ = ops.linear_attention(q, k, values.flatten(2, 3), g.flatten(2, 3), scale=1.0)
        read = torch.where(at.reads[:, :, None], weights[..., 1:], 0)
        own = (q[:, :, :: g.shape[3]] * k[:, :, :: g.shape[3]]).sum(-1)
        return (read[..., None] * o.unflatten(2, (8, -1))).sum(3) + (weights[..., 0] * own)[..., None] * v

    other = theirs("fla.ops.log_linear_attn.naive", "naive_log_linear_attn")
    weights = draw(*q.shape[:3], count_levels(512)).sigmoid()
    return Case("fla, scores", (q, k, v, g, weights), ours, other)


def path() -> Case:
    q, k, v = qkv()
    form = theirs("fla.ops.path_attn.naive", "naive_path_attn")

    def ours(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
        return path_attention._attended(q / 8, k, v, w, beta, k, v, None)[0]

    def other(q: Tensor, k: Tensor, v: Tensor, w: Tensor, beta: Tensor) -> Tensor:
        return form(q, k, v, w, beta, q.new_zeros(q.shape[:3]), 1 / 8)

    return Case("fla, chunks", (q, k, v, F.normalize(draw(*SHAPE), dim=-1), beta()), ours, other)


def forgetting() -> Case:
    other = theirs("fla.ops.forgetting_attn.naive", "naive_forgetting_attn")
    return Case("fla, scores", (*qkv(), decay(*SHAPE[:3])), attend_forgetting, other)


def attend_forgetting(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
    since, _ = ops.linear_scan(log_f, log_f.new_ones(()))
    q = F.pad(q / math.sqrt(q.shape[-1]), (0, 1), value=1.0) * math.sqrt(q.shape[-1] + 1)
    return ops.segment_attention(q, torch.cat([k, -since[..., None]], -1), v, window=q.shape[1])[0]


def taught(hidden: int) -> Case:
    """A memory that learns by gradients in mini-batches of 16, beside one token after the other: (1, 256, 8, 64)."""
    q, k, v = qkv((1, 256, 8, 64))
    widths = [64, *[256] * hidden, 64]
    weights = [torch.cat([draw(8, a, b) / a**0.5, draw(8, 1, b)], 1)[None] for a, b in pairwise(widths)]
    norm, factor = _mini_batches.Norm(torch.ones(8, 64), torch.zeros(8, 64)), 1 / torch.arange(1.0, 17.0)

    def ours(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *weights: Tensor) -> Tensor:
        zeros = [torch.zeros_like(each) for each in weights]
        return ttt_linear._ttt(q, k, v, gate, factor, *norm, list(weights), zeros, None, 16)[0]

    def other(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, *weights: Tensor) -> Tensor:
        outputs, last = [], list(weights)
        for t in range(q.shape[1]):
            if t % 16 == 0:
                start, sums = last, [torch.zeros_like(each) for each in weights]
            key = k[:, t, :, None]
            inputs, hidden = [F.pad(key, (0, 1), value=1.0)], []
            for each in start[:-1]:
                hidden.append(inputs[-1] @ each)
                inputs.append(F.pad(F.gelu(hidden[-1], approximate="tanh"), (0, 1), value=1.0))
            slope = norm.gradient(inputs[-1] @ start[-1], v[:, t, :, None] - key)
            for index in range(len(start) - 1, -1, -1):
                sums[index] = sums[index] - gate[:, t, :, None] * (inputs[index].mT @ slope)
                if index:
                    slope = slope @ start[index][:, :, :-1].mT
                    slope = torch.ops.aten.gelu_backward(slope, hidden[index - 1], approximate="tanh")
            last = [each + factor[t % 16] * part for each, part in zip(start, sums, strict=True)]
            z = q[:, t, :, None]
            for index, each in enumerate(last):
                z = F.pad(F.gelu(z, approximate="tanh") if index else z, (0, 1), value=1.0) @ each
            outputs.append(q[:, t] + norm(z)[:, :, 0])
        return torch.stack(outputs, 1)

    return Case("Python loop", (q, k, v, draw(1, 256, 8, 1).sigmoid() / 640, *weights), ours, other)


def versus_attention(*decays: int, shape: tuple[int, ...] = LONG) -> Case:
    g = (decay(*decays),) if decays else ()
    return Case("softmax attention", (*qkv(shape), *g), additive, attention, same=False)


def versus_parallel() -> Case:
    def other(*leaves: Tensor) -> Tensor:
        return ops.linear_attention(*leaves, backend="parallel")[0]

    return Case("parallel", (*qkv(), decay(*SHAPE)), additive, other)


def mamba2() -> Case:
    """Mamba-2: 24 heads of 64 over state 128, one group."""
    A = -torch.rand(24) - 0.5
    scan = theirs(f"{HF}.mamba2.modeling_mamba2", "mamba2_chunk_scan")

    def ours(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return ops.linear_attention(C, B, x * dt[..., None], dt * A, scale=1.0)[0]

    def other(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return scan(x, dt, A, B, C, 256)

    leaves = draw(1, 1024, 24, 64), torch.rand(1, 1024, 24), draw(1, 1024, 1, 128), draw(1, 1024, 1, 128)
    return Case("transformers", leaves, ours, other, memory=True)


def qwen() -> Case:
    """The gated delta rule over 1,024 steps."""
    chunks = theirs(f"{HF}.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")

    def other(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> Tensor:
        return chunks(q, k, v, g, beta)[0]

    leaves = *qkv(SHORT), draw(*SHORT[:3]).sigmoid(), decay(*SHORT[:3])
    return Case("transformers", leaves, delta, other, memory=True)


def mamba(package: str) -> Case:
    """Mamba: u (1, 1024, 1536), N = 16."""
    A = -torch.arange(1.0, 17).repeat(1536, 1)
    leaves = draw(1, 1024, 1536), F.softplus(draw(1, 1024, 1536) - 2), A, draw(1, 1024, 16), draw(1, 1024, 16)
    own = package == "mambapy"
    scan = theirs(*(("mambapy.pscan", "pscan") if own else (f"{HF}.mamba.modeling_mamba", "mamba_selective_scan")))

    def transformers(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        y = scan(u.mT, delta.mT, A, B.mT, C.mT)
        return (y[0] if isinstance(y, tuple) else y).mT

    def mambapy(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        h = scan((delta[..., None] * A).exp(), (delta * u)[..., None] * B[:, :, None])
        return (h @ C[..., None])[..., 0]

    def ours(*leaves: Tensor) -> Tensor:
        return ops.selective_scan(*leaves)[0]

    # The backward pass of transformers is quadratic in T: minutes.
    return Case(package, leaves, ours, mambapy if own else transformers, backward=own, memory=own)


def loop(name: str) -> Case:
    layer: Any = layers.build(name, dim=LOOP[-1])

    def ours(x: Tensor) -> Tensor:
        return layer(x)[0]

    def other(x: Tensor) -> Tensor:
        with ops.backend("reference"):
            return layer(x)[0]

    return Case("Python loop", (draw(*LOOP),), ours, other)


def beta() -> Tensor:
    return draw(*SHAPE[:3]).sigmoid()


CASES: dict[str, Callable[[], Case]] = {
    "linear attention": lambda: Case("fla, chunks", qkv(), additive, naive("linear_attn.naive",
        "naive_chunk_linear_attn")),
    "one decay a head": lambda: Case("fla, chunks", (*qkv(), decay(*SHAPE[:3])), additive, naive("simple_gla.naive",
        "naive_chunk_simple_gla")),
    "gated linear attention": lambda: Case("fla, steps", (*qkv(), decay(*SHAPE)), additive, naive("gla.naive",
        "naive_recurrent_gla")),
    "lightning attention": lightning,
    "HGRN2": lambda: Case("fla, steps", (draw(*SHAPE), draw(*SHAPE), decay(*SHAPE)), hgrn2, written_by_gates()),
    "gated slot attention": lambda: Case("fla, steps", (*qkv(), draw(*SHAPE).sigmoid(), decay(*SHAPE)), over_slots,
        naive("gsa.naive", "naive_recurrent_gsa")),
    "bounded-memory control": lambda: Case("fla, steps", (*qkv(), draw(*SHAPE)), bounded, naive("abc.naive",
        "naive_recurrent_abc", heads_first=True)),
    "based": partial(based, ops.feature_maps.taylor, "fla, chunks", "based.naive", "naive_chunk_based"),
    "rebased": partial(based, ops.feature_maps.quadratic, "fla, scores", "rebased.naive", "naive_parallel_rebased"),
    "delta rule": lambda: Case("fla, chunks", (*qkv(), beta()), delta, naive("delta_rule.naive",
        "delta_rule_chunkwise", heads_first=True)),
    "gated delta rule": lambda: Case("fla, chunks", (*qkv(), beta(), decay(*SHAPE[:3])), delta,
        swapped(naive("gated_delta_rule.naive", "naive_chunk_gated_delta_rule"))),
    "gated delta rule, negative eigenvalues": lambda: Case("fla, chunks", (*qkv(), 2 * beta(), decay(*SHAPE[:3])),
        delta, swapped(naive("gated_delta_rule.naive", "naive_chunk_gated_delta_rule"))),
    "Kimi delta attention": lambda: Case("fla, chunks", (*qkv(), beta(), decay(*SHAPE)), delta,
        swapped(naive("kda.naive", "naive_chunk_kda"))),
    "diagonal plus low rank": lambda: Case("fla, chunks", (*qkv(), F.normalize(draw(*SHAPE), dim=-1),
        F.normalize(draw(*SHAPE), dim=-1) / 2, decay(*SHAPE)), low_rank, naive("generalized_delta_rule.dplr.naive",
        "dplr_chunkwise", heads_first=True)),
    "comba": comba,
    "delta product": delta_product,
    "mesa": mesa,
    "log-linear": log_linear,
    "forgetting attention": forgetting,
    "PaTH attention": path,
    "mamba3": partial(loop, "mamba3"),
    "mamba3_mimo": partial(loop, "mamba3_mimo"),
    "momentum_deltanet": partial(loop, "momentum_deltanet"),
    "linear attention, 4096 steps": versus_attention,
    "one decay a head, 4096 steps": partial(versus_attention, *LONG[:3]),
    "gated linear attention, 4096 steps": partial(versus_attention, *LONG),
    "per key channel": partial(versus_attention, *SHAPE, shape=SHAPE),
    "per key channel, parallel": versus_parallel,
    "per head": partial(versus_attention, *SHAPE[:3], shape=SHAPE),
    "Mamba-2, 1024 steps": mamba2,
    "gated delta rule, 1024 steps": qwen,
    "selective scan, transformers": partial(mamba, "transformers"),
    "selective scan, mambapy": partial(mamba, "mambapy"),
    "rdn": partial(loop, "rdn"),
    "srwm": partial(loop, "srwm"),
    "ttt_linear": partial(taught, 0),
    "ttt_mlp": partial(taught, 1),
}  # fmt: skip


def peak(name: str, ours: bool) -> int:
    """Return the bytes by which this process's peak grows over one forward and backward pass."""
    case = CASES[name]()
    function = case.ours if ours else case.other
    short = tuple(leaf[:, :16] if leaf.ndim > 2 else leaf for leaf in case.leaves)
    for call in in_torch(function, short):  # compiles, and loads what is loaded lazily
        assert call is not None
        call()
    leaves = [leaf.detach().requires_grad_() for leaf in case.leaves]
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = resident("VmRSS")
    torch.autograd.grad(function(*leaves).sum(), leaves, allow_unused=True)
    return resident("VmHWM") - before


def run(results: Results, name: str, rounds: int) -> None:
    """Compare and time one case, unless this machine has."""
    if results.timed(name=name):
        return
    torch.manual_seed(0)
    try:
        case = CASES[name]()
    except ModuleNotFoundError as error:
        print(f"{name}: left out: {error}")
        return
    if case.same:
        with torch.no_grad():
            ours, other = (function(*case.leaves) for function in (case.ours, case.other))
        torch.testing.assert_close(ours, other, rtol=case.within, atol=case.within)
    programs = {"scanl": in_torch(case.ours, case.leaves), case.what: in_torch(case.other, case.leaves)}
    if not case.backward:
        programs[case.what] = programs[case.what]._replace(both=None)
    results.record(race(programs, rounds), "scanl", name=name, shape=str(tuple(case.leaves[0].shape)))
    if case.memory:
        operands = sum(leaf.nbytes for leaf in case.leaves)
        for program in programs:
            grown = in_process(peak, name, program == "scanl") / operands
            results.add(name=name, program=program, way="memory", memory=grown)


def main() -> None:
    options = parse(parser(__doc__, CASES, rounds=5, threads=2))
    results = Results("memories", options)
    for name in options.names:
        run(results, name, options.rounds)


if __name__ == "__main__":
    main()
