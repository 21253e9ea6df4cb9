"""Softmax attention with sums in the order of the keys: a query has the same bits, whatever keys a mask hides.

A library sums over the keys of a block at once, so the bits depend on where blocks end. Here a query reads one key
after another, and a hidden key adds nothing. A unit of work is a query of a head.
"""

import numpy as np
import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import exp
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._rows import fill
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch


@helper(forceinline=True, fastmath={"contract", "nsz", "reassoc"})
def _product(x, y):
    total = x.dtype.type(0)
    for i in range(x.size):
        total += x[i] * y[i]
    return total


@helper(forceinline=True)
def _add(y, weight, x):
    for i in range(y.size):
        y[i] += weight * x[i]


@kernel("heads steps keys shared width values causal q k v bias bias_batch bias_head y")
def _attend(slots):
    dtype, keys, width, values = slots.dtype, slots.keys, slots.width, slots.values
    scores = scratch(keys, dtype)
    for unit in units(slots):
        row, t = unit // slots.steps, unit % slots.steps  # row: of batch and head
        batch, head, group = row // slots.heads, row % slots.heads, row // slots.shared
        count = min(keys, t + 1) if slots.causal else keys
        q = part(slots.q, unit * width, width, dtype)
        highest = dtype.type(-np.inf)
        for j in range(count):
            score = _product(q, part(slots.k, (group * keys + j) * width, width, dtype))
            if slots.bias != 0:
                at = batch * slots.bias_batch + head * slots.bias_head + t * keys + j
                score += part(slots.bias, at, 1, dtype)[0]
            scores[j] = score
            highest = highest if score <= highest else score  # NaN stays
        y = part(slots.y, ((batch * slots.steps + t) * slots.heads + head) * values, values, dtype)
        fill(y, 0, values, dtype.type(0))
        total = dtype.type(0)
        for j in range(count):
            if scores[j] != -np.inf:
                weight = exp(scores[j] - highest)
                total += weight
                _add(y, weight, part(slots.v, (group * keys + j) * values, values, dtype))
        if total != 0:
            for i in range(values):
                y[i] /= total


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, *, causal: bool, scale: float
) -> torch.Tensor:
    """Return (B, H, T, V) of q (B, H, T, K), k (B, G, S, K) and v (B, G, S, V), where G divides H.

    bias: (B or 1, H or 1, T, S), added to the scaled scores; -inf hides a key. A query without a key gives 0.
    causal: query t reads the keys up to t.
    """
    (batch, heads, steps, width), (groups, keys), values = q.shape, k.shape[1:3], v.shape[3]
    y = empty((batch, steps, heads, values), q.dtype)
    bias = None if bias is None else bias.contiguous()
    packed = _attend.pack(
        heads=heads,
        steps=steps,
        keys=keys,
        shared=heads // groups,
        width=width,
        values=values,
        causal=int(causal),
        q=(q * scale).contiguous(),
        k=k.contiguous(),
        v=v.contiguous(),
        bias=bias,
        bias_batch=0 if bias is None or bias.shape[0] == 1 else bias.shape[1] * steps * keys,
        bias_head=0 if bias is None or bias.shape[1] == 1 else steps * keys,
        y=y,
    )
    _attend.run(q.dtype, packed, batch * heads * steps, batch * heads * steps * keys * (width + values))
    return y.transpose(1, 2)
