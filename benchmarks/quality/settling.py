"""Train a recurrent vision model for 6 steps, run it for 40, and see whether its answer stays.

    python benchmarks/quality/settling.py            # three ways to learn: two minutes on one core
    python benchmarks/quality/settling.py bptt       # one of them

An image has a few curves, and a mark on one of them. Which pixels belong to the marked curve? `hgru` reads the image at
each step, and the mark spreads along the curve. After Linsley et al., arXiv:2005.11362, whose images are larger.

bptt: backpropagation through 6 steps.   neumann_rbp: the gradient at the equilibrium.   penalty: the same, with the
Lipschitz coefficient penalty of weight 10. Scores are the intersection over the union of the marked curve, on new
images. `moved` is the change of the last step over the size of the map, after 40 steps: 0 where the map has settled.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scanl.data.batch import Batch
from scanl.learning.algorithms import BPTT, Algorithm, NeumannRBP
from scanl.models import HorizontalGRU
from scanl.models.whole.graph_network import node_loss
from scanl.ops.fixed_point import ConvergenceError

sys.path.append(str(Path(__file__).parents[1]))
from harness import Results, parse, parser

SIDE, TRAINED, LATER = 12, 6, (6, 12, 20, 40)
CURVES, LENGTH = 3, 9
UPDATES, ROWS, NEW = 120, 16, 200  # updates, images of an update, and new images

WAYS: dict[str, Callable[[], Algorithm]] = {
    "bptt": lambda: BPTT(node_loss),
    "neumann_rbp": lambda: NeumannRBP(node_loss, tolerance=1e-3, max_iterations=200),
    "penalty": lambda: NeumannRBP(node_loss, tolerance=1e-3, max_iterations=200, penalty=10.0),
}


def curve(draw: np.random.Generator, taken: np.ndarray) -> list[tuple[int, int]] | None:
    """Return the pixels of a random walk that goes near no other one; None if it does not fit."""
    y, x = draw.integers(0, SIDE, 2)
    turn, path = draw.integers(4), []
    for _ in range(LENGTH):
        if not (0 <= y < SIDE and 0 <= x < SIDE) or taken[y + 1, x + 1] or (y, x) in path:
            return None
        path.append((int(y), int(x)))
        turn = (turn + draw.choice([-1, 0, 0, 1])) % 4
        y, x = y + (0, 1, 0, -1)[turn], x + (1, 0, -1, 0)[turn]
    return path


def images(draw: np.random.Generator, count: int) -> tuple[Tensor, Tensor]:
    """Return images (N, 2, SIDE, SIDE), curves and marks, and the pixels of the marked curves (N, SIDE, SIDE)."""
    x, y = np.zeros((count, 2, SIDE, SIDE), np.float32), np.zeros((count, SIDE, SIDE), np.int64)
    for image, target in zip(x, y, strict=True):
        taken, curves = np.zeros((SIDE + 2, SIDE + 2), bool), 0
        while curves < CURVES:
            path = curve(draw, taken)
            if path is None:
                continue
            for row, column in path:
                taken[row : row + 3, column : column + 3] = True
                image[0, row, column] = 1
                target[row, column] = curves == 0
            if not curves:
                image[(1, *path[0])] = 1
            curves += 1
    return torch.from_numpy(x), torch.from_numpy(y)


def held(x: Tensor, y: Tensor, steps: int) -> Batch:
    """Return images that are held, with a target at the last step."""
    targets = torch.full((len(y), steps, *y.shape[1:]), -1)
    targets[:, -1] = y
    return Batch(x[:, None].expand(-1, steps, -1, -1, -1), targets)


def train(way: str, updates: int, rows: int) -> tuple[HorizontalGRU, str]:
    """Return a trained model, and how the training ended."""
    torch.manual_seed(0)
    model, algorithm = HorizontalGRU((SIDE, SIDE), 2, 8, 2, kernel=5), WAYS[way]()
    optimizer, draw = torch.optim.Adam(model.parameters(), 1e-2), np.random.default_rng(0)
    for update in range(updates):
        batch = held(*images(draw, rows), TRAINED if way == "bptt" else 1)
        optimizer.zero_grad()
        try:
            loss, _ = algorithm.update(model, algorithm.init(model, rows), batch)
        except ConvergenceError:
            return model, f"no equilibrium from update {update} on"
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, f"{updates} updates"


@torch.no_grad()
def scores(model: HorizontalGRU, x: Tensor, y: Tensor) -> tuple[list[float], float]:
    """Return intersection over union after each of `LATER` steps, and by how much the map moves after the last."""
    outputs, last = model(held(x, y, max(LATER)).inputs)
    overlaps = []
    for steps in LATER:
        answer = outputs[:, steps - 1].argmax(-1).bool()
        overlaps.append(((answer & y.bool()).sum() / (answer | y.bool()).sum()).item())
    _, after = model(x[:, None], last)
    return overlaps, ((after - last).norm() / last.norm()).item()


def main() -> int:
    options = parse(parser(__doc__, WAYS))
    results = Results("settling", options)
    updates, rows, new = (3, 4, 8) if options.quick else (UPDATES, ROWS, NEW)
    x, y = images(np.random.default_rng(1), new)
    for way in options.names:
        if results.has(way=way, updates=updates):
            continue
        begin = time.process_time()
        model, ending = train(way, updates, rows)
        overlaps, moved = scores(model, x, y)
        by_steps = {f"after {steps}": overlap for steps, overlap in zip(LATER, overlaps, strict=True)}
        seconds = time.process_time() - begin
        results.add(way=way, updates=updates, **by_steps, moved=moved, seconds=seconds, ending=ending)
    lost = {row["way"]: 1 - float(row["after 40"]) / max(float(row["after 6"]), 1e-9) for row in results.rows}
    return 0 if lost.get("penalty", 0.0) <= lost.get("bptt", 0.0) else 1


if __name__ == "__main__":
    sys.exit(main())
