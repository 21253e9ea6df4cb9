"""How good a model is on what it has not been trained on: bits per byte of text, the score of a task."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from scanl.data.text import Bytes
from scanl.layers.state import State
from scanl.learning.run.config import Model
from scanl.models import LanguageModel
from scanl.tasks import IGNORED, Task


def spread(data: Bytes, count: int, parts: int = 32) -> Bytes:
    """A sample of at most `count` bytes: as many parts, of equal length, at equal distances over all of `data`."""
    if len(data) <= count:
        return data
    parts = min(parts, count)
    starts = np.arange(parts) * len(data) // parts
    return np.concatenate([data[start : start + count // parts] for start in starts])


@torch.no_grad()
def bits_per_byte(model: LanguageModel, data: Bytes, *, streams: int = 32, chunk: int = 256) -> float:
    """Mean of -log2 p(byte | all before it) over every byte of `data`.

    The text is read as `streams` contiguous parts side by side, each chunk after chunk with the state carried; a part
    begins knowing only the byte before it (a zero byte at the very start). Short texts get fewer parts.
    """
    streams = max(1, min(streams, len(data) // (4 * chunk)))
    length = math.ceil(len(data) / streams)
    padded = np.zeros(streams * length + 1, np.int64)
    padded[1 : len(data) + 1] = data
    starts = np.arange(streams)[:, None] * length
    device = model.embedding.weight.device
    state, nats, training = None, 0.0, model.training
    model.eval()
    for begin in range(0, length, chunk):
        places = starts + np.arange(begin, min(begin + chunk, length))
        inputs = torch.from_numpy(padded[places]).to(device)
        targets = torch.from_numpy(np.where(places < len(data), padded[places + 1], -100)).to(device)
        logits, state = model(inputs, state)
        nats += F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum").item()
    model.train(training)
    return nats / math.log(2) / len(data)


def answer(model: Model, inputs: Tensor, targets: Tensor, state: State = None) -> tuple[Tensor, Tensor, State]:
    """What a model makes of a task's inputs, what was asked for, and the state.

    Logits (n, V) and tokens (n,) at the steps that are scored; or numbers (B,), after the last step, and numbers (B,).
    """
    if isinstance(model, LanguageModel):
        scored = targets != IGNORED
        logits, state = model.logits_at(inputs, scored, state)
        return logits, targets[scored], state
    outputs, state = model(inputs, state)
    return outputs[:, 0], targets, state


@torch.no_grad()
def score(model: Model, task: Task, count: int, seed: Sequence[int], *, chunk: int = 256, tokens: int = 2**16) -> float:
    """The mean of the task's scores over `count` examples.

    As many as hold about `tokens` are read side by side, chunk after chunk with the state carried, so that the model
    takes the memory of a chunk however long the sequences are. A bidirectional model reads them in one piece.
    """
    device = next(model.parameters()).device
    steps = task.generate(1, seed).inputs.shape[1]
    chunk = steps if model.stack.bidirectional else chunk
    at_once = max(1, min(64, tokens // steps))
    total, scored, training = 0.0, 0, model.training
    model.eval()
    for number, begin in enumerate(range(0, count, at_once)):
        inputs, targets = map(torch.from_numpy, task.generate(min(at_once, count - begin), (*seed, number)))
        state = None
        for start in range(0, steps, chunk):
            now = slice(start, start + chunk)
            asked = targets[:, now] if targets.ndim == 2 else targets
            outputs, asked, state = answer(model, inputs[:, now].to(device), asked.to(device), state)
            if targets.ndim == 2 or now.stop >= steps:
                answers = outputs.argmax(-1) if outputs.ndim == 2 else outputs.float()
                scores = task.scores(answers.cpu().numpy(), asked.cpu().numpy())
                total, scored = total + scores.sum(), scored + len(scores)
    model.train(training)
    return float(total / scored)
