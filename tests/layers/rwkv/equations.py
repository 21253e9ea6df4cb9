"""Equations that several layers of this family are written with, and what their tests share."""

import torch

from scanl.models import Stack


def group_norm(o, norm):
    """o: heads by values."""
    o = (o - o.mean(1, keepdim=True)) / torch.sqrt(o.var(1, keepdim=True, correction=0) + norm.eps)
    return o.flatten() * norm.weight + norm.bias


def blocks(name, dim, depth):
    """(time mix, channel mix, a, c) of each block of a stack."""
    stack = Stack(dim, depth, name, channel_mixer=name)
    return [(b.mixer, b.channel, i / (depth - 1), 1 - i / depth) for i, b in enumerate(stack.blocks)]
