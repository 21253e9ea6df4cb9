"""Reconstruct the Lorenz-63 system from noisy observations, with generalized teacher forcing and without.

    python benchmarks/quality/lorenz.py [--updates 3000] [--hidden 100] [--steps 100]

A shallow piecewise-linear network of 3 units learns from an orbit of 20,000 observations with 5 % of noise, with the
forcing α from their Jacobians, and with none (backpropagation through time). Then it runs freely for 10,000 steps. A
row has two distances of this orbit from one without noise that no network has read: the Kullback-Leibler divergence of
the points (`states`), and the Hellinger distance of the power spectra (`spectra`; Hess et al., arXiv:2306.04406).
`path` has the divergence after each tenth of the updates. The first row has the distances of another orbit of the true
system. Exits with 1 unless the forced network is nearer in both than the one without forcing.

Optimizer, network and batches are those of the authors' program. It makes 250,000 updates of 200 steps of 0.01, with a
learning rate from 1e-3 to 1e-6. The rows are in benchmarks/results/lorenz.csv.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.learning.algorithms import GTF
from scanl.models.whole.dynamics import Dynamics, distance, dynamics_loss
from scanl.tasks.lorenz import lorenz63, rk4

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, Row, parse, parser

STEP, DROPPED = 0.05, 200  # time between two observations; observations before the orbit is on the attractor
READ, FREE = 20_000, 10_000  # observations that a network learns from, and steps of a free run
RATE, BATCH = 5e-3, 16
LEARNERS = {"forcing by Jacobians": None, "no forcing": 0.0}


def orbit(steps: int, seed: int) -> Tensor:
    """Return an orbit (steps, 3), in float64."""
    state, points = np.random.default_rng(seed).standard_normal(3), []
    for step in range(DROPPED + steps):
        for _ in range(5):
            state = rk4(lorenz63, state, STEP / 5)
        if step >= DROPPED:
            points.append(state)
    return torch.tensor(np.array(points))


def learn(
    observed: Tensor, truth: Tensor, forcing: float | None, updates: int, hidden: int, steps: int
) -> dict[str, float | str]:
    """Train a network on an orbit (T, 3). Return its distances from the true one, and its last α."""
    torch.manual_seed(0)
    model = Dynamics(3, 3, layer_options={"hidden_dim": hidden})
    optimizer = torch.optim.RAdam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / updates))
    algorithm, path, losses = GTF(dynamics_loss, forcing, fade=0.99), [], []
    learner, begin = algorithm.init(model, BATCH), time.perf_counter()
    for update in range(1, updates + 1):
        starts = torch.randint(len(observed) - steps, (BATCH, 1))
        x = observed[starts + torch.arange(steps + 1)]
        learner = algorithm.renew(model, learner, BATCH)  # new orbits begin at the data; α and the count go on
        loss, learner = algorithm.update(model, learner, Batch(x[:, :-1], x[:, 1:]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if update % max(1, updates // 10) == 0:
            path.append(distance(model.run(truth[:1].float(), len(truth))[0], truth))
    return {
        **path[-1]._asdict(), "alpha": learner.forcing[0].item(), "loss": float(np.mean(losses[-updates // 10 :])),
        "path": " ".join(f"{each.states:.2f}" for each in path), "seconds": time.perf_counter() - begin,
    }  # fmt: skip


def main() -> int:
    made = parser(__doc__, LEARNERS)
    made.add_argument("--updates", type=int, default=3000)
    made.add_argument("--hidden", type=int, default=100, help="hidden units")
    made.add_argument("--steps", type=int, default=100, help="T, steps of an update")
    options = parse(made)
    results, updates = Results("lorenz", options), 20 if options.quick else options.updates
    read, truth, other = (orbit(500 if options.quick else steps, seed) for seed, steps in enumerate((READ, FREE, FREE)))
    read, truth, other = ((each - read.mean(0)) / read.std(0) for each in (read, truth, other))
    noisy = (read + 0.05 * torch.randn(read.shape, generator=torch.Generator().manual_seed(0))).float()
    if not results.has(learner="another true orbit"):
        results.add(learner="another true orbit", **distance(other, truth)._asdict())
    rows: dict[str, Row] = {}
    for name in options.names:
        key = {"learner": name, "updates": updates, "hidden": options.hidden, "steps": options.steps}
        if not results.has(**key):
            results.add(**key, **learn(noisy, truth, LEARNERS[name], updates, options.hidden, options.steps))
        rows[name] = results.of(**key)[-1]
    if options.quick or set(rows) != set(LEARNERS):
        return 0
    forced, alone = (rows[name] for name in LEARNERS)
    return 0 if all(float(forced[name]) < float(alone[name]) for name in ("states", "spectra")) else 1


if __name__ == "__main__":
    sys.exit(main())
