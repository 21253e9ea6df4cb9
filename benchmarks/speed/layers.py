"""Time each layer on a CPU beside `torch.nn.LSTM` of the same width, forward and backward.

    python benchmarks/speed/layers.py [NAME ...] [--threads 1]
    python benchmarks/speed/layers.py s4 s4d dss sgconv --s4 PATH/s4.py --sgconv PATH/gconv_standalone.py

NAME is a registered layer or preset; without names: every layer, and every preset that runs code of its own. x is (4,
1024, 256) in float32, options are the defaults, and the gradients are those of x and of all parameters. A ratio is the
layer's time over the LSTM's. By the processor it is disturbed less by other work on the machine.

With a path, the state-space layers are timed beside their authors' programs without CUDA, at (1, 4096, 256) with N =
64: models/s4/s4.py of state-spaces/s4, and the file of that name in ctlllll/SGConv. They need einops, opt_einsum and
omegaconf. The rows are in benchmarks/results/layers.csv.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from scanl import layers

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, of_module, parse, parser, race

SHAPE, QUICK = (4, 1024, 256), (2, 8, 16)
LONG, MODES = (1, 4096, 256), 64
BESIDE_AUTHORS: dict[str, dict[str, Any]] = {
    "s4": {"state_dim": MODES},
    "s4d": {"state_dim": MODES},
    "dss": {"state_dim": MODES // 2},  # conjugate pairs are not used: as many complex numbers as the others have
    "sgconv": {"max_length": LONG[1], "conv_size": MODES},
}


class TimeFirst(nn.Module):
    """Give a module of (B, D, T) inputs of (B, T, D)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x.transpose(1, 2))[0].transpose(1, 2)


def load(path: Path) -> Any:
    """Import an authors' file. It imports tools of notebooks and of multi-process training, which it does not use."""
    for name, attribute in (("IPython", "embed"), ("pytorch_lightning.utilities", "rank_zero_only")):
        if name not in sys.modules and importlib.util.find_spec(name.split(".")[0]) is None:
            stand_in: Any = types.ModuleType(name)
            setattr(stand_in, attribute, lambda function: function)
            sys.modules[name] = stand_in
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise SystemExit(f"layers: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def authors(name: str, s4: Path | None, sgconv: Path | None) -> nn.Module | None:
    """Return the authors' module for the long shape, or None if its file is not given."""
    if name == "sgconv":
        return sgconv and TimeFirst(load(sgconv).GConv(LONG[2], d_state=MODES, l_max=LONG[1], transposed=True))
    options = {"s4": {"mode": "dplr"}, "s4d": {"mode": "diag"}, "dss": {"mode": "diag", "disc": "dss"}}
    if s4 is None or name not in options:
        return None
    return TimeFirst(load(s4).S4Block(LONG[2], d_state=MODES, l_max=LONG[1], **options[name]))


def run(results: Results, name: str, shape: tuple[int, int, int], rounds: int) -> None:
    """Time a layer beside the LSTM, unless this machine has."""
    if not results.timed(name=name, shape=str(shape)):
        torch.manual_seed(0)
        x, width = torch.randn(shape), shape[-1]
        modules = {"torch.nn.LSTM": nn.LSTM(width, width, batch_first=True), name: layers.build(name, width)}
        took = race({who: of_module(module, x)._replace(forward=None) for who, module in modules.items()}, rounds)
        results.record(took, "torch.nn.LSTM", name=name, shape=str(shape))


def run_beside_authors(results: Results, name: str, module: nn.Module, rounds: int) -> None:
    if not results.timed(name=name, shape=str(LONG)):
        torch.manual_seed(0)
        x = torch.randn(LONG)
        ours = layers.build(name, LONG[2], **BESIDE_AUTHORS[name])
        took = race({"scanl": of_module(ours, x), "authors": of_module(module, x)}, rounds)
        results.record(took, "scanl", name=name, shape=str(LONG))


def timed(name: str) -> bool:
    layer = layers.get(name)
    return layer.preset_of is None or layer.own_path


def main() -> None:
    made = parser(__doc__, layers.names(), rounds=5, threads=2)
    made.set_defaults(names=[name for name in layers.names() if timed(name)])
    made.add_argument("--s4", type=Path, help="models/s4/s4.py of state-spaces/s4")
    made.add_argument("--sgconv", type=Path, help="gconv_standalone.py of ctlllll/SGConv")
    options = parse(made)
    results = Results("layers", options)
    for name in options.names:
        run(results, name, QUICK if options.quick else SHAPE, options.rounds)
        beside = authors(name, options.s4, options.sgconv)
        if beside is not None:
            run_beside_authors(results, name, beside, options.rounds)


if __name__ == "__main__":
    main()
