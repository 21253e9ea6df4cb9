"""Time state-space layers beside `torch.nn.LSTM`, and beside their authors' programs for a CPU.

    python benchmarks/state_space.py [--s4 PATH/s4.py] [--sgconv PATH/gconv_standalone.py] [--rounds 7]

float32, forward and backward pass with all gradients, medians of interleaved runs in one process. The first table has
layers of width 256 over 4 rows of 1,024 steps; the ratio is their time over the LSTM's. The second has one row of 4,096
steps and N = 64; the ratio is the authors' time over ours. `--s4` is models/s4/s4.py of state-spaces/s4, which runs
S4, S4D and DSS on its path without CUDA and KeOps, and `--sgconv` is the file of that name in ctlllll/SGConv. They need
einops, opt_einsum and omegaconf. Without a path, a plain form of the same kernel is timed in its place: for every
channel, mode and step (or frequency) one complex number in memory. Writes benchmarks/results/state_space.json.
"""

import argparse
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from primitives import medians
from run import RESULTS, machine
from scanl import layers
from scanl.layers.ssm.s4 import S4

WIDTH, MODES = 256, 64
BESIDE_LSTM = {"s4": {}, "s4d": {}, "dss": {}, "sgconv": {}, "mega_ema": {}}
BESIDE_AUTHORS = {
    "s4": {"state_dim": MODES},
    "s4d": {"state_dim": MODES},
    "dss": {"state_dim": MODES // 2},  # conjugate pairs are not used: as many complex numbers as the others have
    "sgconv": {"max_length": 4096, "conv_size": MODES},
}


def step(module: nn.Module, x: Tensor) -> Callable[[], object]:
    leaves = [x, *(p for p in module.parameters() if p.requires_grad)]

    def run() -> object:
        y = module(x)
        return torch.autograd.grad((y[0] if isinstance(y, tuple) else y).sum(), leaves, allow_unused=True)

    return run


class Plain(nn.Module):
    """A layer's kernel from a table of D × N × T complex numbers, then a convolution and the layer's own end."""

    def __init__(self, layer: layers.Layer, steps: int) -> None:
        super().__init__()
        self.layer, self.steps = layer, steps

    def kernel(self) -> Tensor:
        if isinstance(self.layer, S4):
            return cauchy(self.layer, self.steps)
        found = self.layer.get_submodule("kernel").system()  # pyright: ignore[reportCallIssue]
        A, C, dt = (found[0], found[-2], found[-1])
        z = A * dt[:, None]
        powers = torch.exp(z[..., None] * torch.arange(self.steps))
        return 2 * torch.einsum("dn,dnt->dt", C * (z.exp() - 1) / A, powers).real

    def forward(self, x: Tensor) -> Tensor:
        u, size = x.transpose(1, 2), 2 * self.steps
        y = torch.fft.irfft(torch.fft.rfft(u, size) * torch.fft.rfft(self.kernel(), size), size)[..., : self.steps]
        held = self.layer.layer if isinstance(self.layer, S4) else self.layer
        y = F.gelu(y + u * held.get_parameter("D").view(-1, 1)).transpose(1, 2)
        mix = self.layer.get_submodule("output_linear")
        if isinstance(mix, nn.Sequential) and isinstance(mix[0], nn.Conv1d):
            return mix(y.transpose(1, 2))
        return mix(y)


def cauchy(layer: S4, steps: int) -> Tensor:
    """Return S4's kernel from its generating function at the roots of unity, with C for the released C (1 - Ā^T)."""
    Lambda, P, B, C, dt = (part.to(torch.complex64) for part in layer.layer.kernel.system())
    omega = torch.polar(torch.ones(steps // 2 + 1), torch.arange(steps // 2 + 1) * (-2 * torch.pi / steps))
    half = (1 + omega) / 2
    terms = 1 / ((1 - omega) - half * (dt[:, None] * Lambda)[..., None])
    mirrored = 1 / ((1 - omega) - half * (dt[:, None] * Lambda.conj())[..., None])

    def product(v: Tensor) -> Tensor:
        one, other = (torch.einsum("dn,dnf->df", w, t) for w, t in ((v, terms), (v.conj(), mirrored)))
        return dt[:, None] * (one + other)

    low = half * product(C * P) * product(P.conj() * B) / (1 + half * product(P.conj() * P))
    return torch.fft.irfft(product(C * B) - low, steps)


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
        raise SystemExit(f"state_space.py: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def theirs(name: str, s4: Path | None, sgconv: Path | None, steps: int, width: int) -> tuple[str, nn.Module] | None:
    """Return what a layer is timed beside, and its name; None if SGConv's file is not given."""
    if name == "sgconv":
        if sgconv is None:
            return None
        return "authors", TimeFirst(load(sgconv).GConv(width, d_state=MODES, l_max=steps, transposed=True))
    if s4 is None:
        return "plain form", Plain(layers.build(name, width, **BESIDE_AUTHORS[name]), steps)
    options = {"s4": {"mode": "dplr"}, "s4d": {"mode": "diag"}, "dss": {"mode": "diag", "disc": "dss"}}[name]
    return "authors", TimeFirst(load(s4).S4Block(width, d_state=MODES, l_max=steps, **options))


def beside_lstm(rounds: int, shape: tuple[int, int, int] = (4, 1024, WIDTH)) -> dict[str, float]:
    """Return median seconds, of the LSTM first."""
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    modules = {"torch.nn.LSTM": nn.LSTM(shape[-1], shape[-1], batch_first=True)}
    modules |= {name: layers.build(name, shape[-1], **options) for name, options in BESIDE_LSTM.items()}
    return medians({name: step(module, x) for name, module in modules.items()}, rounds)


def beside_authors(
    rounds: int, s4: Path | None, sgconv: Path | None, shape: tuple[int, int, int] = (1, 4096, WIDTH)
) -> dict[str, tuple[str, float, float]]:
    """Return, by layer, what it is timed beside, that one's median seconds, and ours."""
    torch.manual_seed(0)
    x, found = torch.randn(shape, requires_grad=True), {}
    for name, options in BESIDE_AUTHORS.items():
        other = theirs(name, s4, sgconv, *shape[1:])
        if other is None:
            print(f"{name}: left out; --sgconv gives its authors' file")
            continue
        took = medians({"ours": step(layers.build(name, shape[-1], **options), x), "other": step(other[1], x)}, rounds)
        found[name] = other[0], took["other"], took["ours"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--s4", type=Path, help="models/s4/s4.py of state-spaces/s4")
    parser.add_argument("--sgconv", type=Path, help="gconv_standalone.py of ctlllll/SGConv")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(machine("cpu"))
    first = beside_lstm(options.rounds)
    for name, seconds in first.items():
        print(f"{name:14} {1e3 * seconds:9.1f} ms  {seconds / first['torch.nn.LSTM']:6.2f} × the LSTM", flush=True)
    second = beside_authors(options.rounds, options.s4, options.sgconv)
    for name, (other, before, after) in second.items():
        print(f"{name:14} {other:10} {1e3 * before:9.1f} ms  ours {1e3 * after:9.1f} ms  {before / after:6.2f} ×")
    RESULTS.mkdir(exist_ok=True)
    rows = {"machine": machine("cpu"), "beside LSTM": first, "beside authors": second}
    (RESULTS / "state_space.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
