"""Follow a Mackey-Glass series whose delay switches: recursive least squares beside a frozen ridge readout.

    python benchmarks/quality/force.py [--quick] [--samples 8000] [--units 100]

An echo state network reads the series and answers with the value 15 samples ahead. All readouts read the same states.
Ridge regression is fitted to the first samples, in which the delay is 17, and then frozen; FORCE goes on learning after
each answer, and forgets with λ or not. The table has the root mean squared error over the spread of the series, after
the first samples, by delay. Exits with 1 unless FORCE with forgetting is better than the frozen readout.
"""

import argparse
import itertools
import sys

import numpy as np
import torch
from torch import Tensor, nn

from scanl.data.batch import Batch
from scanl.layers.rnn.esn import ESN
from scanl.learning.algorithms import FORCE
from scanl.learning.forecasting.readout import fit_readout
from scanl.tasks.mackey_glass_regimes import regimes

AHEAD, WASHOUT = 15, 100


class Readout(nn.Module):
    """The readout of a reservoir as a model of its own, which reads the states."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.head = nn.Linear(units, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def init_state(self, batch_size: int, device: torch.device | None = None) -> None:
        return None

    def forward(self, x: Tensor, state: None = None) -> tuple[Tensor, None]:
        return self.head(x), state


def errors(states: Tensor, targets: Tensor, forgetting: float) -> Tensor:
    """Return the errors (T,) of answers to samples one after another, each learnt from after it was given."""
    model, answers = Readout(states.shape[1]).double(), []

    def squared(model: nn.Module, batch: Batch, state: None) -> tuple[Tensor, None]:
        y, _ = model(batch.inputs, state)
        answers.append(y[0, :, 0])
        return (y - batch.targets).square().mean(), None

    algorithm = FORCE(squared, penalty=1e-6, forgetting=forgetting)
    learner = algorithm.init(model, 1)
    for t in range(len(states)):
        _, learner = algorithm.update(model, learner, Batch(states[None, t : t + 1], targets[None, t : t + 1, None]))
    return torch.cat(answers) - targets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="2,500 samples and 40 units")
    parser.add_argument("--samples", type=int, default=8000)
    parser.add_argument("--units", type=int, default=100)
    options = parser.parse_args()
    samples, units = (2500, 40) if options.quick else (options.samples, options.units)
    stay, first = samples // 8, samples // 4
    torch.manual_seed(0)
    torch.set_num_threads(1)
    alone = itertools.islice(regimes((17,), 1.0, np.random.default_rng(0)), 300, 300 + first)
    mixed = itertools.islice(regimes((17, 30), stay, np.random.default_rng(1)), 300, 300 + samples - first + AHEAD)
    pairs = [*alone, *mixed]
    values, delays = torch.tensor([x for x, _ in pairs]).double() - 1, torch.tensor([delay for _, delay in pairs])
    layer = ESN(1, units, spectral_radius=1.1, leak=0.35, input_connectivity=1.0, bias_scaling=0.3).double()
    features: list[Tensor] = []
    layer.readout.register_forward_pre_hook(lambda _module, inputs: features.append(inputs[0]))
    with torch.no_grad():
        layer(values[None, :-AHEAD, None])
    states, targets, late = features[0][0], values[AHEAD:], delays[AHEAD:]
    frozen = Readout(units).double()
    pair = (states[None, :first], targets[None, :first, None])
    fit_readout(frozen, frozen.head, [pair], penalty=1e-6, washout=WASHOUT)
    rows = {"ridge, frozen": (frozen(states)[0][:, 0] - targets).detach()}
    rows |= {f"force, forgetting {rate}": errors(states, targets, rate) for rate in (1.0, 0.999, 0.99)}
    scored, spread = torch.arange(len(targets)) >= first, targets.std()
    print(f"{'error over spread':24}{'all':>9}{'delay 17':>9}{'delay 30':>9}")
    scores = {}
    for name, error in rows.items():
        parts = [scored, scored & (late == 17), scored & (late == 30)]
        scores[name], *others = [(error[chosen].square().mean().sqrt() / spread).item() for chosen in parts]
        print(f"{name:24}{scores[name]:9.4f}" + "".join(f"{other:9.4f}" for other in others))
    return (
        0 if min(scores["force, forgetting 0.999"], scores["force, forgetting 0.99"]) < scores["ridge, frozen"] else 1
    )


if __name__ == "__main__":
    sys.exit(main())
