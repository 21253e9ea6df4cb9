"""How well a language model predicts bytes it has not been trained on."""

import math

import numpy as np
import torch
from torch.nn import functional as F

from scanl.models import LanguageModel
from scanl.tasks.text import Bytes


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
