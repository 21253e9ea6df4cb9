"""How many pairs a matrix memory holds: the error of its answers against the number of stored keys.

    python benchmarks/quality/capacity.py [NAME ...]

Keys have 16 channels, and so have the values. For each number of keys the keys are learned, so that a memory can place
them as well as its feature map allows; a feature map does not choose its keys. A memory writes each pair once, and is
then asked for all of them. The error is ‖answer - value‖² / ‖value‖² over new values: 0 is exact, and 1 is what an
answer of zeros has. Then the pairs of 8 keys are written several times, with new values each time, and the last value
is asked for. Nothing is learned for that. Two minutes on one core. The rows are in benchmarks/results/capacity.csv,
and docs/capacity.png shows them.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.ops import delta_rule, feature_maps, normalized_linear_attention

sys.path.append(str(Path(__file__).parents[1]))
from harness import Panel, Results, parse, parser, picture

K, V = 16, 16
KEYS = (4, 8, 16, 24, 32, 64, 96, 128)
TIMES = (1, 2, 3, 4)  # that each pair of WRITTEN keys is written
WRITTEN = 8
BATCH, STEPS = 8, 150  # of learning, for each number of keys

Parameters = Mapping[str, Tensor]


def answers(written: Tensor, values: Tensor, asked: Tensor, memory: Callable) -> Tensor:
    """Write pairs, then read: such a step writes a key of zeros. written: (T, K). values: (B, T, V). asked: (n, K)."""
    batch, steps = values.shape[:2]
    q = torch.cat([torch.zeros_like(written), asked]).expand(batch, -1, -1).unsqueeze(2)
    k = torch.cat([written, torch.zeros_like(asked)]).expand(batch, -1, -1).unsqueeze(2)
    v = F.pad(values, (0, 0, 0, len(asked))).unsqueeze(2)
    return memory(q, k, v)[0][:, steps:, 0]


def additive(feature_map: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(written: Tensor, values: Tensor, asked: Tensor, learned: Parameters) -> Tensor:
        return answers(feature_map(written), values, feature_map(asked), normalized_linear_attention)

    return run


def corrected(feature_map: Callable[[Tensor], Tensor], *, gated: bool = False) -> Callable[..., Tensor]:
    def key(x: Tensor) -> Tensor:
        return F.normalize(feature_map(x), dim=-1)

    def run(written: Tensor, values: Tensor, asked: Tensor, learned: Parameters) -> Tensor:
        def memory(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            strength = learned["beta"].sigmoid().expand(k.shape[:3])
            g = F.logsigmoid(learned["g"]).expand(k.shape[:3]) if gated else None
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
    learned = {"keys": torch.randn(count, K), "beta": torch.tensor(2.0), "g": torch.tensor(4.0)}
    for value in learned.values():
        value.requires_grad_()
    optimizer = torch.optim.Adam(learned.values(), 0.05)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 - step / steps)
        values = torch.randn(BATCH, count, V)
        optimizer.zero_grad()
        error(run(learned["keys"], values, learned["keys"], learned), values).backward()
        optimizer.step()
    return {name: value.detach() for name, value in learned.items()}


def stored(run: Callable[..., Tensor], count: int, steps: int) -> tuple[float, dict[str, Tensor]]:
    learned = learn(run, count, steps)
    values = torch.randn(64, count, V)
    return error(run(learned["keys"], values, learned["keys"], learned), values).item(), learned


def rewritten(run: Callable[..., Tensor], learned: Mapping[str, Tensor], times: int) -> float:
    """The keys are written `times` times, in a new order and with new values each time."""
    orders = [torch.randperm(WRITTEN) for _ in range(times)]
    values = torch.randn(64, times * WRITTEN, V)
    answer = run(learned["keys"][torch.cat(orders)], values, learned["keys"][orders[-1]], learned)
    return error(answer, values[:, -WRITTEN:]).item()


def draw(results: Results) -> None:
    panels = []
    for kind, title in (("keys", "stored keys"), ("times", f"times that each of {WRITTEN} keys is written")):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row in results.of(kind=kind):
            lines.setdefault(row["memory"], []).append((int(row["count"]), float(row["error"])))
        panels.append(Panel("", title, "error of the answers", lines, log="x" if kind == "keys" else ""))
    picture(results.pictures / "capacity.png", panels)


def main() -> None:
    options = parse(parser(__doc__, memories()))
    results = Results("capacity", options)
    for name in options.names:
        run = memories()[name]
        for count in (4, WRITTEN) if options.quick else KEYS:
            if results.has(kind="keys", memory=name, count=count):
                continue
            torch.manual_seed(count)
            wrong, learned = stored(run, count, 2 if options.quick else STEPS)
            results.add(kind="keys", memory=name, count=count, error=wrong)
            for times in TIMES if count == WRITTEN else ():
                results.add(kind="times", memory=name, count=times, error=rewritten(run, learned, times))
    draw(results)


if __name__ == "__main__":
    main()
