"""Reconstruct the Lorenz-63 system from noisy observations, with generalized teacher forcing and without.

    python benchmarks/quality/lorenz.py [--quick] [--updates 1200] [--hidden 50] [--steps 100]

A shallow piecewise-linear network of 3 units learns from an orbit of 10,000 observations with 5 % of noise, with the
forcing α from their Jacobians, and with none (backpropagation through time). Then it runs freely for 5,000 steps. The
table has two distances of this orbit from one without noise that no network has read: the
Kullback-Leibler divergence of the points, and the Hellinger distance of the power spectra (Hess et al.,
arXiv:2306.04406). The first row has those of another orbit of the true system. Exits with 1 unless the forced network
is nearer in both than the one without forcing.
"""

import argparse
import sys
import time

import numpy as np
import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.learning.algorithms import GTF
from scanl.models.dynamics import Dynamics, Spectrum, distance, dynamics_loss
from scanl.tasks.lorenz import lorenz63, rk4

STEP, DROPPED = 0.05, 200  # time between two observations; observations before the orbit is on the attractor
FREE = 5000


def orbit(steps: int, seed: int) -> Tensor:
    """Return a standardised orbit (steps, 3), in float64."""
    state, points = np.random.default_rng(seed).standard_normal(3), []
    for step in range(DROPPED + steps):
        for _ in range(5):
            state = rk4(lorenz63, state, STEP / 5)
        if step >= DROPPED:
            points.append(state)
    points = torch.tensor(np.array(points))
    return (points - points.mean(0)) / points.std(0)


def learnt(observed: Tensor, forcing: float | None, updates: int, hidden: int, steps: int) -> tuple[Dynamics, float]:
    """Return a trained model, and its last α."""
    torch.manual_seed(0)
    model = Dynamics(3, 3, layer_options={"hidden_dim": hidden})
    optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / updates))
    algorithm, alpha = GTF(dynamics_loss, forcing, fade=0.95), torch.ones(16)
    for update in range(updates):
        starts = torch.randint(len(observed) - steps, (16,))
        x = torch.stack([observed[start : start + steps + 1] for start in starts.tolist()])
        learner = algorithm.init(model, 16)
        # New orbits begin at the data; α and the count go on.
        learner = learner._replace(forcing=alpha if forcing is None else learner.forcing)
        learner = learner._replace(state=x[:, 0], updates=torch.full((16,), update))
        loss, learner = algorithm.update(model, learner, Batch(x[:, :-1], x[:, 1:]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        alpha = learner.forcing
    return model, alpha[0].item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 updates: shows that it runs")
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--hidden", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100, help="T, steps of an update")
    options = parser.parse_args()
    torch.set_num_threads(1)
    updates = 20 if options.quick else options.updates
    noisy = orbit(10_000, 0)
    noisy = (noisy + 0.05 * torch.randn(noisy.shape, generator=torch.Generator().manual_seed(0))).float()
    truth = orbit(FREE, 1)
    print(f"{'':24}{'states':>9}{'spectra':>9}{'alpha':>9}{'seconds':>9}", flush=True)

    def report(name: str, result: Spectrum, alpha: float, seconds: float) -> None:
        print(f"{name:24}{result.states:9.2f}{result.spectra:9.3f}{alpha:9.3f}{seconds:9.0f}", flush=True)

    report("another true orbit", distance(orbit(FREE, 2), truth), float("nan"), 0.0)
    results = {}
    for name, forcing in {"forcing by Jacobians": None, "no forcing": 0.0}.items():
        begin = time.perf_counter()
        model, alpha = learnt(noisy, forcing, updates, options.hidden, options.steps)
        free = model.run(truth[:1].float(), FREE)[0]
        results[name] = distance(free, truth)
        report(name, results[name], alpha, time.perf_counter() - begin)
    forced, alone = results["forcing by Jacobians"], results["no forcing"]
    return 0 if options.quick or (forced.states < alone.states and forced.spectra < alone.spectra) else 1


if __name__ == "__main__":
    sys.exit(main())
