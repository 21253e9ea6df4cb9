"""Attention by blocks against the plain form, at sizes past blocks, chunks of queries and vectors."""

import functools

import pytest
import torch

from scanl.ops import _attention
from scanl.ops._attention import of_pairs, softmax_attention, squared_attention

CASES = {
    "causal": ({"heads": 2, "groups": 2, "steps": 300, "keys": 300, "width": 32, "values": 48}, 0, 0),
    "shared keys": ({"heads": 4, "groups": 2, "steps": 70, "keys": 200, "width": 33, "values": 20}, 2, (2, 4, 70, 200)),
    "one mask": ({"heads": 2, "groups": 1, "steps": 270, "keys": 130, "width": 144, "values": 8}, 1, (1, 2, 399)),
    "squares": ({"heads": 1, "groups": 1, "steps": 140, "keys": 130, "width": 16, "values": 40}, 2, (1, 1, 269)),
}


def operands(heads, groups, steps, keys, width, values, masks, biases):
    """Return q, k, v, the mask and the bias of two rows, drawn so that rows of numbers lie apart."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((steps, heads, width), (keys, groups, width), (keys, groups, values))
    q, k, v = (torch.randn(2, *size, generator=generator).transpose(1, 2) for size in sizes)
    visible = None
    if masks:
        visible = torch.rand(masks, steps, keys, generator=generator) > 0.4
        visible[:, : steps // 2, keys // 3 :] = False  # whole blocks
        visible[:, 3] = False  # a query that sees nothing
    return [q, k, v], visible, torch.randn(biases, generator=generator) if biases else None


def results(q, k, v, bias, visible, dtype, form):
    """Return y and the gradients by q, k, v and the bias, in a dtype."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *([] if bias is None else [bias]))]
    y = form(*leaves[:3], visible, *leaves[3:], scale=0.4)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)], y.grad_fn


def plain(q, k, v, visible, bias=None, *, scale, squared=False):
    """Compute the definition; a query without keys gives 0, and all keys up to a query's are seen without a mask."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.mT + (0 if bias is None else of_pairs(bias, q.shape[2], k.shape[2]))
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if visible is None else visible[:, None]
    scores = torch.where(seen, scores, -torch.inf)
    if squared:
        return scores.relu().square() @ v
    return scores.exp() @ v / scores.exp().sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_definition(case, monkeypatch):
    sizes, masks, biases = CASES[case]
    (q, k, v), visible, bias = operands(**sizes, masks=masks, biases=biases)
    monkeypatch.setattr(_attention, "MIN_SCORES", 1)
    form = functools.partial(softmax_attention, is_causal=True) if visible is None else softmax_attention
    form, squared = (squared_attention, True) if case == "squares" else (form, False)
    ours, graph = results(q, k, v, bias, visible, torch.float32, form)
    truth, _ = results(q, k, v, bias, visible, torch.float64, functools.partial(plain, squared=squared))
    same, _ = results(q, k, v, bias, visible, torch.float32, functools.partial(plain, squared=squared))
    assert "BlockedAttention" in graph.name()
    for got, wanted, other in zip(ours, truth, same, strict=True):
        error = 2 * (other - wanted).abs().max() + torch.finfo(torch.float32).eps * wanted.abs().max()
        assert (got - wanted).abs().max() <= error


@pytest.mark.parametrize("form", [softmax_attention, squared_attention])
def test_second_derivatives_are_those_of_the_plain_form(form):
    (q, k, v), visible, bias = operands(1, 1, 260, 256, 4, 4, 1, (1, 1, 515))
    visible[:, :, 0] = True

    def slope(form, dtype):
        x = q.to(dtype).requires_grad_()
        y = form(x, k.to(dtype), v.to(dtype), visible, bias.to(dtype), scale=0.4)
        (dx,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    expected = slope(functools.partial(plain, squared=form is squared_attention), torch.float64).float()
    torch.testing.assert_close(slope(form, torch.float32), expected)
