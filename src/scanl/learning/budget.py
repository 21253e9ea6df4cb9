"""From minutes to steps."""

import copy
import math
import time
from dataclasses import replace

import torch
from torch.nn import functional as F

from scanl.learning.config import TrainConfig
from scanl.learning.optimizer import make_optimizer
from scanl.models import LanguageModel
from scanl.tasks.text import Corpus, Windows


def fix_steps(config: TrainConfig, model: LanguageModel, corpus: Corpus) -> TrainConfig:
    """Turn `minutes` into a number of steps, measured on a copy of the model; the schedule needs the number.

    The estimate includes the held-out measurements, a forward pass being a third of a step.
    """
    if config.minutes is None:
        return replace(config, steps=config.steps or 1000)
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model, config)
    order = Windows(corpus.train, config.sequence_length, config.seed)
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < 8 or time.perf_counter() - began < min(6.0, 3 * config.minutes):
        start = time.perf_counter()
        batch = torch.from_numpy(order.batch(0, config.batch_size))
        loss = F.cross_entropy(model(batch[:, :-1])[0].flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    step = sorted(times[3:])[len(times[3:]) // 2]  # the first ones compile
    tokens = config.batch_size * config.sequence_length
    evaluations = 10 * min(config.eval_bytes, len(corpus.held_out)) / 3 / tokens * step
    left = max(config.minutes * 60 - (time.perf_counter() - began) - evaluations, 0)
    return replace(config, steps=max(1, math.floor(left / step)), minutes=None)
