"""How many pairs a matrix memory holds: the error of its answers against the number of stored keys.

    python benchmarks/capacity.py

Keys have 16 channels, and so have the values. For each number of keys the keys are learnt, so that a memory can place
them as well as its feature map allows; a feature map does not choose its keys. A memory writes each pair once, and is
then asked for all of them. The error is ‖answer - value‖² / ‖value‖² over new values: 0 is exact, and 1 is what an
answer of zeros has. Then the pairs of 8 keys are written several times, with new values each time, and the last value
is asked for. Nothing is learnt for that. Two minutes on one core. Writes docs/capacity.png and prints the tables.
"""

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops import delta_rule, feature_maps, normalized_linear_attention

PICTURE = Path(__file__).parents[1] / "docs" / "capacity.png"
K, V = 16, 16
KEYS = (4, 8, 16, 24, 32, 64, 96, 128)
TIMES = (1, 2, 3, 4)  # that each pair of WRITTEN keys is written
WRITTEN = 8
BATCH = 8

Parameters = Mapping[str, Tensor]


def answers(written: Tensor, values: Tensor, asked: Tensor, memory: Callable) -> Tensor:
    """Write pairs, then read: such a step writes a key of zeros. written: (T, K). values: (B, T, V). asked: (n, K)."""
    batch, steps = values.shape[:2]
    q = torch.cat([torch.zeros_like(written), asked]).expand(batch, -1, -1).unsqueeze(2)
    k = torch.cat([written, torch.zeros_like(asked)]).expand(batch, -1, -1).unsqueeze(2)
    v = F.pad(values, (0, 0, 0, len(asked))).unsqueeze(2)
    return memory(q, k, v)[0][:, steps:, 0]


def additive(feature_map: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(written: Tensor, values: Tensor, asked: Tensor, learnt: Parameters) -> Tensor:
        return answers(feature_map(written), values, feature_map(asked), normalized_linear_attention)

    return run


def corrected(feature_map: Callable[[Tensor], Tensor], *, gated: bool = False) -> Callable[..., Tensor]:
    def key(x: Tensor) -> Tensor:
        return F.normalize(feature_map(x), dim=-1)

    def run(written: Tensor, values: Tensor, asked: Tensor, learnt: Parameters) -> Tensor:
        def memory(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            strength = learnt["beta"].sigmoid().expand(k.shape[:3])
            g = F.logsigmoid(learnt["g"]).expand(k.shape[:3]) if gated else None
            return delta_rule(q, k, v, strength, g, scale=1.0)

        return answers(key(written), values, key(asked), memory)

    return run


def memories() -> dict[str, Callable[..., Tensor]]:
    projection = feature_maps.random_projection(64, K, generator=torch.Generator().manual_seed(0))
    return {
        "linear (elu + 1), 16 features": additive(feature_maps.elu_plus_one),
        "Performer, 64": additive(functools.partial(feature_maps.positive_random_features, projection=projection)),
        "DPFP (ν = 2), 64": additive(functools.partial(feature_maps.dpfp, nu=2)),
        "quadratic, 136": additive(feature_maps.quadratic),
        "delta rule, 16": corrected(feature_maps.identity),
        "gated delta rule, 16": corrected(feature_maps.identity, gated=True),
        "delta rule, quadratic, 136": corrected(feature_maps.quadratic),
    }


def error(answer: Tensor, values: Tensor) -> Tensor:
    return (answer - values).square().sum() / values.square().sum()


def learn(run: Callable[..., Tensor], count: int, steps: int) -> dict[str, Tensor]:
    """Learn keys, and the write strength and the decay of a delta rule."""
    learnt = {"keys": torch.randn(count, K), "beta": torch.tensor(2.0), "g": torch.tensor(4.0)}
    for value in learnt.values():
        value.requires_grad_()
    optimiser = torch.optim.Adam(learnt.values(), 0.05)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 0.05 * (1 - step / steps)
        values = torch.randn(BATCH, count, V)
        optimiser.zero_grad()
        error(run(learnt["keys"], values, learnt["keys"], learnt), values).backward()
        optimiser.step()
    return {name: value.detach() for name, value in learnt.items()}


def stored(run: Callable[..., Tensor], count: int, steps: int) -> tuple[float, dict[str, Tensor]]:
    learnt = learn(run, count, steps)
    values = torch.randn(64, count, V)
    return error(run(learnt["keys"], values, learnt["keys"], learnt), values).item(), learnt


def rewritten(run: Callable[..., Tensor], learnt: Mapping[str, Tensor], times: int) -> float:
    """The keys are written `times` times, in a new order and with new values each time."""
    orders = [torch.randperm(WRITTEN) for _ in range(times)]
    values = torch.randn(64, times * WRITTEN, V)
    answer = run(learnt["keys"][torch.cat(orders)], values, learnt["keys"][orders[-1]], learnt)
    return error(answer, values[:, -WRITTEN:]).item()


def draw(by_keys: Mapping[str, list[float]], by_times: Mapping[str, list[float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for (name, errors), marker in zip(by_keys.items(), "osD^vxP", strict=True):
        left.plot(KEYS, errors, marker=marker, label=name)
        right.plot(TIMES, by_times[name], marker=marker)
    left.axvline(K, color="grey", linestyle=":")
    left.annotate("as many as channels", (K, 1.0), xytext=(3, 0), textcoords="offset points", color="grey")
    left.set(xscale="log", xlabel="stored keys", ylabel="error of the answers", xticks=KEYS, xticklabels=KEYS)
    left.minorticks_off()
    left.legend(fontsize="small")
    right.set(xlabel=f"times that each of {WRITTEN} keys is written", xticks=TIMES)
    figure.savefig(path, dpi=110)


def table(first: str, columns: tuple[int, ...], rows: Mapping[str, list[float]]) -> str:
    lines = [[first, *map(str, columns)], ["---"] * (1 + len(columns))]
    lines += [[name, *(f"{value:.2f}" for value in errors)] for name, errors in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="of learning, for each number of keys")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = parser.parse_args()
    by_keys: dict[str, list[float]] = {}
    by_times: dict[str, list[float]] = {}
    for (name, run), count in itertools.product(memories().items(), KEYS):
        torch.manual_seed(count)
        found, learnt = stored(run, count, args.steps)
        by_keys.setdefault(name, []).append(found)
        if count == WRITTEN:
            by_times[name] = [rewritten(run, learnt, times) for times in TIMES]
    print(table("stored keys", KEYS, by_keys), end="\n\n")
    print(table("times written", TIMES, by_times))
    draw(by_keys, by_times, args.picture)


if __name__ == "__main__":
    main()
