"""The training loop of models that are fitted in memory, without a run folder.

A run has Lightning's loop (`scanl.learning.run`), which saves, resumes and shares the work. For a small fit it costs
too much: 18 % more time of the processor for 300 steps of 7 ms, and seconds to import.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from scanl.errors import DivergenceError
from scanl.learning.optimizers import OPTIMIZERS
from scanl.learning.run.plan import RunLength, rate


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Draw weights and dropout from a seed, also on a GPU. Afterwards torch's generators are as they were before."""
    gpus = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(seed)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(seed)
        yield


def optimize(
    model: nn.Module,
    steps: int,
    lr: float,
    seed: int,
    step_loss: Callable[[int], Tensor],
    clip: float = 1.0,
    after: Callable[[int, float], bool] | None = None,
) -> None:
    """Train a model in place, with the optimizer and the learning rates of `scanl train`, then set it to evaluation.

    `step_loss`, `after` and what is raised: as in `descend`.
    """
    from scanl.learning.run.config import TrainConfig  # which imports the questions, and some of them this module

    config = TrainConfig.of(steps=steps, lr=lr, clip=clip, seed=seed)
    config.check()
    chosen, plan = config.training, RunLength(steps)
    optimizer = OPTIMIZERS[chosen.optimizer](model, chosen.lr, chosen.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(plan, chosen.warmup, step))
    try:
        model.train()
        descend(list(model.parameters()), optimizer, schedule, steps, step_loss, clip, after)
    finally:
        model.eval()


def descend(
    parameters: Sequence[Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    steps: int,
    step_loss: Callable[[int], Tensor],
    clip: float = math.inf,
    after: Callable[[int, float], bool] | None = None,
) -> list[float]:
    """Take steps with the gradients of a loss, change the parameters in place, and return the losses.

    parameters: the optimizer's parameters; only they get a gradient, if they require one.   step_loss: makes the loss
    of a step (from 0).   clip: largest norm of the gradient.   after: called with each step and its loss; training ends
    once it returns True.
    Raises DivergenceError when a loss, a gradient or, at the end, a parameter is not finite.
    """
    learnt, losses = [parameter for parameter in parameters if parameter.requires_grad], []
    for step in range(steps):
        optimizer.zero_grad()
        loss = step_loss(step)
        loss.backward(inputs=learnt)
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        for what, value in (("loss", loss), ("gradient's norm", norm)):
            if not value.isfinite():
                raise DivergenceError(f"fit: the {what} is {value.item()} at step {step + 1}; try a smaller lr")
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if after is not None and after(step, losses[-1]):
            break
    for parameter in parameters:
        if not parameter.isfinite().all():
            raise DivergenceError(f"fit: a parameter is not finite after step {len(losses)}; try a smaller lr")
    return losses
