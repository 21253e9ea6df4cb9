"""Time each primitive on a CPU beside what a user could pick instead.

    python benchmarks/primitives.py [--only NAME ...] [--rounds 7]

float32, medians of runs interleaved with the peers' in one process; the ratio is the peer's time over that of scanl's
`cpu` backend, so 4.0 means that scanl is four times as fast. Peers that are not installed are left out by name. Memory
is the growth of a fresh process's peak over one forward and backward pass, on Linux. Growth is the time of a step at
2^17 steps over that at 2^12. Overhead is a call at T = B = 1 beside its bare arithmetic in torch. Writes
benchmarks/results/primitives.json and .png.
"""

import argparse
import importlib
import inspect
import itertools
import json
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from run import RESULTS, machine
from scanl import ops


class Case(NamedTuple):
    """Functions of the same leaves, each giving one tensor; ours first."""

    leaves: tuple[Tensor, ...]
    functions: dict[str, Callable[..., Tensor]]
    forward_only: tuple[str, ...] = ()


def draw(*shape: int) -> Tensor:
    return torch.randn(shape)


def decay(*shape: int) -> Tensor:
    return F.logsigmoid(torch.randn(shape) + 2)


def theirs(module: str, name: str) -> Callable | None:
    """A function of another library, without what would swap GPU kernels in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return inspect.unwrap(getattr(importlib.import_module(module), name))
        except ImportError as error:
            print(f"  left out: {module}: {error}")
            return None


def present(functions: dict[str, Callable | None]) -> dict[str, Callable]:
    return {name: function for name, function in functions.items() if function is not None}


def attention(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return y + 0 * g.sum() if g.requires_grad else y


def gated_linear_attention() -> Case:
    """Per-channel decay, (1, 2048, 8, 64, 64)"""
    leaves = (draw(1, 2048, 8, 64), draw(1, 2048, 8, 64), draw(1, 2048, 8, 64), decay(1, 2048, 8, 64))
    return Case(
        leaves,
        {
            "scanl": lambda *a: ops.linear_attention(*a)[0],
            "scanl parallel": lambda *a: ops.linear_attention(*a, backend="parallel")[0],
            "torch attention": attention,
        },
    )


def simple_linear_attention() -> Case:
    """One decay a head, (1, 2048, 8, 64, 64)"""
    leaves = (draw(1, 2048, 8, 64), draw(1, 2048, 8, 64), draw(1, 2048, 8, 64), decay(1, 2048, 8))
    chunked = theirs("fla.ops.simple_gla.naive", "naive_chunk_simple_gla")
    return Case(
        leaves,
        present(
            {
                "scanl": lambda *a: ops.linear_attention(*a)[0],
                "fla naive chunk": chunked and (lambda *a: chunked(*a)[0]),
                "torch attention": attention,
            }
        ),
    )


def mamba2() -> Case:
    """Mamba-2: 24 heads of 64 over state 128, one group, (1, 1024)"""
    A = -torch.rand(24) - 0.5
    scan = theirs("transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan")

    def ours(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
        return ops.linear_attention(C, B, x * dt[..., None], dt * A, scale=1.0)[0]

    return Case(
        (draw(1, 1024, 24, 64), torch.rand(1, 1024, 24), draw(1, 1024, 1, 128), draw(1, 1024, 1, 128)),
        present({"scanl": ours, "transformers": scan and (lambda x, dt, B, C: scan(x, dt, A, B, C, 256))}),
    )


def delta_rule() -> Case:
    """Gated delta rule, (1, 1024, 8, 64, 64)"""
    k = F.normalize(draw(1, 1024, 8, 64), dim=-1)
    leaves = (draw(1, 1024, 8, 64), k, draw(1, 1024, 8, 64), torch.rand(1, 1024, 8), decay(1, 1024, 8))
    chunked = theirs("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule")
    return Case(
        leaves,
        present(
            {
                "scanl": lambda *a: ops.delta_rule(*a)[0],
                "transformers": chunked and (lambda q, k, v, b, g: chunked(q, k, v, g, b)[0]),
            }
        ),
    )


def selective_scan() -> Case:
    """Mamba, u (1, 1024, 1536), N = 16"""
    A = -torch.arange(1.0, 17).repeat(1536, 1)
    slow = theirs("transformers.models.mamba.modeling_mamba", "mamba_selective_scan")
    parallel = theirs("mambapy.pscan", "pscan")

    def transformers(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        assert slow is not None
        y = slow(u.mT, delta.mT, A, B.mT, C.mT)
        return (y[0] if isinstance(y, tuple) else y).mT

    def mambapy(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        assert parallel is not None
        h = parallel((delta[..., None] * A).exp(), (delta * u)[..., None] * B[:, :, None])
        return (h @ C[..., None])[..., 0]

    return Case(
        (draw(1, 1024, 1536), F.softplus(draw(1, 1024, 1536) - 2), A, draw(1, 1024, 16), draw(1, 1024, 16)),
        present(
            {
                "scanl": lambda *a: ops.selective_scan(*a)[0],
                "transformers": slow and transformers,
                "mambapy": parallel and mambapy,
            }
        ),
        forward_only=("transformers",),  # its backward pass is quadratic in T: minutes here
    )


def lstm(batch: int, steps: int, width: int) -> Callable[..., Tensor]:
    layer = torch.nn.LSTM(width, width, batch_first=True)
    x = draw(batch, steps, width)

    def run(*leaves: Tensor) -> Tensor:
        nothing = 0 * sum(leaf.sum() for leaf in leaves)  # so that the gradient of the leaves goes through the layer
        return layer(x + nothing if leaves[0].requires_grad else x)[0]

    return run


def cell(name: str, shapes: dict[str, tuple[int, ...]]) -> Callable[[], Case]:
    def make() -> Case:
        op = getattr(ops, name)
        leaves = tuple(draw(*shape) / 16 for shape in shapes.values())
        return Case(
            leaves,
            {
                "scanl": lambda *a: op(*a)[0],
                "Python loop": lambda *a: op(*a, backend="reference")[0],
                "torch.nn.LSTM": lstm(8, 4096, 128),
            },
        )

    make.__doc__ = f"{name}, (8, 4096, 128)"
    return make


X = (8, 4096, 128)
CASES: dict[str, Callable[[], Case]] = {
    "linear_attention per channel": gated_linear_attention,
    "linear_attention per head": simple_linear_attention,
    "linear_attention shared keys": mamba2,
    "delta_rule": delta_rule,
    "selective_scan": selective_scan,
    "indrnn": cell("indrnn", {"x": X, "w": (128,)}),
    "sru": cell("sru", {"x": X, "f": X, "r": X, "u": X, "v_f": (128,), "v_r": (128,)}),
    "ligru": cell("ligru", {"x": (8, 4096, 2, 128), "u": (2, 128, 128)}),
    "slstm": cell("slstm", {"x": (8, 4096, 4, 4, 32), "r": (4, 4, 32, 32)}),
}


def both(function: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> Callable[[], object]:
    leaves = tuple(leaf.detach().clone().requires_grad_() for leaf in leaves)
    with torch.no_grad():
        dy = torch.randn_like(function(*leaves))
    return lambda: torch.autograd.grad(function(*leaves), leaves, dy)


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _, (name, call) in itertools.product(range(rounds), calls.items()):
        start = time.perf_counter()
        call()
        found[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in found.items()}


def resident(key: str) -> int:
    """Kilobytes: VmRSS now, or VmHWM at most since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key))


def peak(name: str, function: str, queue: "multiprocessing.Queue[int]") -> None:
    case = CASES[name]()
    short = tuple(leaf[:, :16] if leaf.ndim > 2 else leaf for leaf in case.leaves)
    both(case.functions[function], short)()  # compiles, and loads what is loaded lazily
    leaves = tuple(leaf.detach().requires_grad_() for leaf in case.leaves)
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    before = resident("VmRSS")
    y = case.functions[function](*leaves)
    torch.autograd.grad(y.sum(), leaves)
    queue.put(resident("VmHWM") - before)


def memory(name: str, function: str) -> int:
    """Kilobytes."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak, args=(name, function, queue))
    process.start()
    grown = queue.get(timeout=600)
    process.join()
    return grown


def compare(name: str, rounds: int) -> dict:
    torch.manual_seed(0)
    case = CASES[name]()
    print(f"\n{name}: {CASES[name].__doc__}", flush=True)
    with torch.no_grad():
        right = case.functions["scanl"](*case.leaves)
        for other, function in case.functions.items():
            if other in ("scanl parallel", "fla naive chunk", "transformers", "mambapy", "Python loop"):
                torch.testing.assert_close(function(*case.leaves), right, rtol=1e-3, atol=1e-3)
        forward = medians({k: (lambda f=f: f(*case.leaves)) for k, f in case.functions.items()}, rounds)
    timed = {k: both(f, case.leaves) for k, f in case.functions.items() if k not in case.forward_only}
    whole = medians(timed, rounds)
    operands = sum(leaf.nbytes for leaf in case.leaves) / 1024
    rows = {}
    for other in case.functions:
        grown = None if other in case.forward_only else memory(name, other)
        rows[other] = {"forward": forward[other], "both": whole.get(other), "memory_kb": grown}
        ratio = f"forward {forward[other] / forward['scanl']:7.2f} ×"
        if other in whole:
            ratio += f"   forward + backward {whole[other] / whole['scanl']:7.2f} ×"
        if grown is not None:
            ratio += f"   peak memory {grown / operands:6.2f} × operands"
        print(f"  {other:16} {1e3 * forward[other]:9.2f} ms   {ratio}", flush=True)
    return rows


def lengths(steps: int) -> dict[str, Callable[[], object]]:
    """Every linear op at a length, small enough that 2^17 steps fit."""
    x, narrow = draw(1, steps, 64), (1, steps, 2, 32)
    q, k, v, g = draw(*narrow), F.normalize(draw(*narrow), dim=-1), draw(*narrow), decay(*narrow)
    beta, A = torch.rand(1, steps, 2), -torch.rand(64, 16)
    B = draw(1, steps, 16)
    return {
        "linear_scan": lambda: ops.linear_scan(x, x.sigmoid()),
        "linear_attention": lambda: ops.linear_attention(q, k, v, g),
        "delta_rule": lambda: ops.delta_rule(q, k, v, beta, g),
        "dplr_scan": lambda: ops.dplr_scan(q, k, v, -k, k, g),
        "selective_scan": lambda: ops.selective_scan(x, x.abs(), A, B, B),
        "weighted_average": lambda: ops.weighted_average(x, x, -torch.rand(64), torch.rand(64)),
        "short_convolution": lambda: ops.short_convolution(x, torch.rand(64, 4)),
    }


def growth(rounds: int) -> dict[str, float]:
    """Time of a step at 2^17 over that at 2^12."""
    calls = {n: lengths(2**n) for n in (12, 17)}
    ratios = {}
    print("\ntime of a step at 2^17 steps / at 2^12")
    for name in calls[12]:
        took = medians({"short": lambda n=name: [calls[12][n]() for _ in range(8)], "long": calls[17][name]}, rounds)
        ratios[name] = took["long"] / took["short"] / 4
        print(f"  {name:18} {ratios[name]:.3f}", flush=True)
    return ratios


def bare() -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Each op at T = B = 1, and its arithmetic in torch."""
    x, h, a = draw(1, 1, 64), draw(1, 64), torch.rand(1, 1, 64)
    q, k, v, g, S = draw(1, 1, 4, 32), draw(1, 1, 4, 32), draw(1, 1, 4, 32), decay(1, 1, 4, 32), draw(1, 4, 32, 32)
    beta, b = torch.rand(1, 1, 4), draw(1, 1, 4, 32)
    yield "linear_scan", lambda: ops.linear_scan(x, a, h), lambda: a[:, 0] * h + x[:, 0]

    def attend() -> Tensor:
        state = g[:, 0].exp().unsqueeze(-1) * S + k[:, 0].unsqueeze(-1) * v[:, 0].unsqueeze(-2)
        return (q[:, 0].unsqueeze(-2) @ state) * 32**-0.5

    yield "linear_attention", lambda: ops.linear_attention(q, k, v, g, state=S), attend

    def delta() -> Tensor:
        state = g[:, 0].exp().unsqueeze(-1) * S
        missing = v[:, 0] - (k[:, 0].unsqueeze(-2) @ state).squeeze(-2)
        state = state + k[:, 0].unsqueeze(-1) * (beta[:, 0].unsqueeze(-1) * missing).unsqueeze(-2)
        return (q[:, 0].unsqueeze(-2) @ state) * 32**-0.5

    yield "delta_rule", lambda: ops.delta_rule(q, k, v, beta, g, S), delta

    def dplr() -> Tensor:
        read = b[:, 0].unsqueeze(-2) @ S
        state = (
            g[:, 0].exp().unsqueeze(-1) * S + b[:, 0].unsqueeze(-1) * read + k[:, 0].unsqueeze(-1) * v[:, 0, :, None]
        )
        return (q[:, 0].unsqueeze(-2) @ state) * 32**-0.5

    yield "dplr_scan", lambda: ops.dplr_scan(q, k, v, b, b, g, S), dplr
    A, B, H = -torch.rand(64, 16), draw(1, 1, 16), draw(1, 64, 16)

    def select() -> Tensor:
        state = (x[:, 0].unsqueeze(-1) * A).exp() * H + (x[:, 0] * x[:, 0]).unsqueeze(-1) * B[:, 0].unsqueeze(1)
        return (state @ B[:, 0].unsqueeze(-1)).squeeze(-1)

    yield "selective_scan", lambda: ops.selective_scan(x, x, A, B, B, state=H), select
    w, u, past = -torch.rand(64), torch.rand(64), draw(1, 3, 64).abs()

    def average() -> Tensor:
        p, z, m = past.unbind(1)
        top = torch.maximum(m, u + x[:, 0])
        old, new = (m - top).exp(), (u + x[:, 0] - top).exp()
        y = (old * p + new * x[:, 0]) / (old * z + new)
        top = torch.maximum(m + w, x[:, 0])
        old, new = (m + w - top).exp(), (x[:, 0] - top).exp()
        return torch.stack([old * p + new * x[:, 0], old * z + new, top], 1) + 0 * y.unsqueeze(1)

    yield "weighted_average", lambda: ops.weighted_average(x, x, w, u, past), average
    taps, window = torch.rand(64, 4), draw(1, 3, 64)

    def convolve() -> Tensor:
        return (torch.cat([window, x], 1) * taps.mT).sum(1)

    yield "short_convolution", lambda: ops.short_convolution(x, taps, state=window), convolve


def overhead(rounds: int) -> dict[str, float]:
    """Microseconds that a call costs more than the bare arithmetic."""
    found = {}
    print("\na call at T = B = 1, µs over the bare arithmetic in torch")
    with torch.no_grad():
        for name, ours, arithmetic in bare():
            calls = {
                "ours": lambda f=ours: [f() for _ in range(200)],
                "bare": lambda f=arithmetic: [f() for _ in range(200)],
            }
            took = medians(calls, rounds)
            found[name] = 1e6 * (took["ours"] - took["bare"]) / 200
            print(
                f"  {name:18} {1e6 * took['ours'] / 200:6.1f} - {1e6 * took['bare'] / 200:6.1f} = {found[name]:6.1f}",
                flush=True,
            )
    return found


def picture(found: dict[str, dict], title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [
        (f"{case}: {other}", way, row[way] / rows["scanl"][way])
        for case, rows in found.items()
        for other, row in rows.items()
        if other != "scanl"
        for way in ("forward", "both")
        if row[way] is not None
    ]
    names = list(dict.fromkeys(name for name, _, _ in bars))
    figure, axis = pyplot.subplots(figsize=(10, 0.5 * len(names) + 1.5), layout="constrained")
    for way, shift, colour in (("forward", 0.2, "tab:blue"), ("both", -0.2, "tab:orange")):
        mine = {name: ratio for name, w, ratio in bars if w == way}
        places = [-names.index(name) + shift for name in mine]
        label = {"forward": "forward", "both": "forward + backward"}[way]
        drawn = axis.barh(places, list(mine.values()), 0.36, color=colour, label=label)
        axis.bar_label(drawn, [f"{ratio:.3g} ×" for ratio in mine.values()], padding=3, fontsize=8)
    axis.set_yticks([-i for i in range(len(names))], names, fontsize=8)
    axis.set(xscale="log", xlabel="time of the peer / time of scanl's cpu backend")
    axis.axvline(1, color="black", linewidth=1, linestyle="--")
    axis.margins(x=0.15)
    axis.legend(loc="lower right")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*CASES, "growth", "overhead"], help="some of them")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    wanted = options.only or [*CASES, "growth", "overhead"]
    title = machine("cpu")
    print(title)
    found = {name: compare(name, options.rounds) for name in CASES if name in wanted}
    report: dict = {"machine": title, "dtype": "float32", "seconds": found}
    if "growth" in wanted:
        report["step_at_2^17_to_2^12"] = growth(options.rounds)
    if "overhead" in wanted:
        report["overhead_us"] = overhead(options.rounds)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / "primitives.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    if found:
        picture(found, title, path.with_suffix(".png"))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
