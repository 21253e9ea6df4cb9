"""Tiny models in float64, the gradient of an algorithm over several updates, and that of the undivided sequence."""

import copy

import torch
from torch import nn

from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.learning.algorithms import BPTT
from scanl.learning.questions import answerer
from scanl.models import Stack

QUESTION = answerer(Numbers(FeatureInputs(3), count=2))


def tiny(*layers, dim=4, seed=0, **options):
    """Return a model of features, with one block for each layer."""
    torch.manual_seed(seed)
    return QUESTION.model(Stack(dim, len(layers), list(layers), **options)).double()


def numbers(length, rows=2, seed=1):
    draw = torch.Generator().manual_seed(seed)
    return Batch(*(torch.randn(rows, length, n, generator=draw, dtype=torch.float64) for n in (3, 2)))


def parts(batch, size):
    return [batch.steps(t, t + size, targets=True) for t in range(0, batch.length, size)]


def learned(algorithm, model, batches):
    """Return the gradient of the mean loss over the steps of all updates, by name, and the last learner."""
    model = copy.deepcopy(model)
    learner, length = algorithm.init(model, batches[0].size), sum(batch.length for batch in batches)
    for batch in batches:
        loss, learner = algorithm.update(model, learner, batch)
        (loss * batch.length / length).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, learner


def by_bptt(model, batch):
    return learned(BPTT(QUESTION.loss), model, [batch])[0]


def difference(gradients, expected):
    """Return the largest difference of two gradients, relative to the largest number of the second one's parameter."""
    both = [(gradients[name], value) for name, value in expected.items() if value is not None]
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-12)).item() for a, b in both)


def cosine(gradients, expected):
    flat = [
        torch.cat([g[name].flatten() for name, v in expected.items() if v is not None]) for g in (gradients, expected)
    ]
    return torch.nn.functional.cosine_similarity(*flat, dim=0).item()


class LowRank(nn.Module):
    """A linear map whose weight is constant, plus one of low rank that learns, as adapters have it."""

    def __init__(self, base, size, drop=0.0, after=None):
        super().__init__()
        self.base, self.drop, self.after = base.requires_grad_(False), nn.Dropout(drop), after or nn.Identity()
        rows = base(torch.zeros(size, dtype=base.weight.dtype)).shape[-1]
        self.down = nn.Parameter(0.3 * torch.randn(2, size, dtype=base.weight.dtype))
        self.up = nn.Parameter(0.3 * torch.randn(rows, 2, dtype=base.weight.dtype))

    def forward(self, x):
        return self.base(x) + self.after(self.drop(x) @ self.down.T @ self.up.T)
