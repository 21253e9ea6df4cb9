"""Time forecasts of TiRex-2 beside its authors' program, and a further patch beside the whole context.

    python benchmarks/speed/forecasters.py [NAME ...] [--threads 1]

NAME is a shape: `one` series, `many` series, or the variates of one group `together`. It needs PyPI's tirex-2. The
model has the sizes for which its authors count 38.4 and 44.1 million parameters, and random weights that their program
draws. A forecast is of one patch of 32 steps. `authors` and `whole` read 2,048 steps; `patch` reads 32 more after a
state. A ratio is to `authors`. The rows are in benchmarks/results/forecasters.csv.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scanl import hub

sys.path.append(str(Path(__file__).parents[1]))
from harness import Contender, Results, parse, parser, race

SHAPES = {"one": (1, 1), "many": (32, 1), "together": (1, 8)}  # groups, variates of each
WHOLE, QUICK = (512, 12, 4, 2048, 320, 2048), (16, 2, 2, 64, 32, 16)  # of the model: see `config`
PATCH = 32


def config(dim: int, depth: int, heads: int, context: int, future: int, hidden: int) -> dict[str, Any]:
    """Return the entries of config.json."""

    def template(kind: str) -> dict[str, Any]:
        sizes = {"embedding_dim": dim, "num_heads": heads}
        return {"time_mixer": {"model_type": kind, **sizes}, "variate_mixer": sizes, "dropout": 0.0, "eps": 1e-6}

    sizes = dict.fromkeys(("input_patch_size", "output_patch_size"), PATCH)
    stack = {"templates": {"s": template("bi-slstm"), "m": template("bi-mlstm")}, "recipe": ["s", "m"] * (depth // 2)}
    return {
        "stack_config": stack, "stack_out_norm_config": {"use_rmsnorm": True}, "num_blocks": depth,
        "embedding_dim": dim, "context_len": context, "future_len": future, "input_ff_dim": hidden,
        "h_expand": hidden / dim, **sizes,
        "tokenizer_cfg": {**sizes, "input_patch_stride": PATCH}, "act_func": "ReLU", "dropout": 0.0,
        "scaler_cfg": {"eps": 1e-8, "use_arcsinh": True, "binaryaware": True},
        "quantiles": [each / 10 for each in range(1, 10)],
    }  # fmt: skip


def both(entries: dict[str, Any]) -> tuple[Any, Any]:
    """Return the authors' model, and ours with its weights."""
    from tirex2.model import TiRex2

    torch.manual_seed(0)
    theirs = TiRex2(**entries, device="cpu").eval()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(entries), encoding="utf-8")
        own = {name: weight.detach() for name, weight in theirs.named_parameters()}
        save_file(own, folder / "model.safetensors")
        return theirs, hub.load(folder)


@torch.no_grad()
def run(results: Results, name: str, sizes: tuple[int, ...], rounds: int) -> None:
    """Time a shape, unless this machine has."""
    groups, variates = SHAPES[name]
    shape = (groups, sizes[3], variates)
    if results.timed(name=name, shape=str(shape)):
        return
    from tirex2 import TimeseriesType

    theirs, ours = both(config(*sizes))
    x, more = torch.randn(shape).cumsum(1), torch.randn(groups, PATCH, variates)
    series = [TimeseriesType(group.T.clone(), None, None) for group in x]
    found, state = ours.predict(x, horizon=PATCH)
    wanted = torch.stack(theirs.predict(series, PATCH)).permute(0, 3, 1, 2)
    error = (found.quantiles - wanted).abs().max() / wanted.abs().max()
    calls = {
        "authors": lambda: theirs.predict(series, PATCH),
        "whole": lambda: ours.predict(x, horizon=PATCH),
        "patch": lambda: ours.predict(more, state, horizon=PATCH),
    }
    took = race({who: Contender(torch.no_grad()(call)) for who, call in calls.items()}, rounds)
    results.record(took, "authors", name=name, shape=str(shape), error=float(error))


def main() -> None:
    options = parse(parser(__doc__, SHAPES, rounds=7))
    results = Results("forecasters", options)
    for name in options.names:
        run(results, name, QUICK if options.quick else WHOLE, options.rounds)


if __name__ == "__main__":
    main()
