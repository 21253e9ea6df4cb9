"""Attention by blocks against the plain form, at sizes past blocks, chunks of queries and vectors."""

import pytest
import torch

from scanl.ops import _attention
from scanl.ops._attention import softmax_attention

CASES = {
    "causal": ({"heads": 2, "groups": 2, "steps": 300, "keys": 300, "width": 32, "values": 48}, True, 0, 0),
    "shared keys": ({"heads": 4, "groups": 2, "steps": 70, "keys": 200, "width": 33, "values": 20}, False, 2, 2),
    "one mask": ({"heads": 2, "groups": 1, "steps": 270, "keys": 130, "width": 144, "values": 8}, False, 1, 1),
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
    bias = torch.randn(biases, heads, steps, keys, generator=generator) if biases else None
    return [q, k, v], visible, bias


def results(q, k, v, bias, visible, causal, dtype, form):
    """Return y and the gradients by q, k, v and the bias, in a dtype."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, *([] if bias is None else [bias]))]
    y = form(*leaves[:3], visible, *leaves[3:], is_causal=causal, scale=0.4)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)], leaves


def plain(q, k, v, visible, bias=None, *, is_causal, scale):
    """Compute the definition, a query without keys giving 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = scale * q @ k.mT + (0 if bias is None else bias)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen if visible is None else visible[:, None]
    powers = torch.where(seen, scores, -torch.inf).exp().to(scores.dtype)
    return powers @ v / powers.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_those_of_the_definition(case, monkeypatch):
    sizes, causal, masks, biases = CASES[case]
    (q, k, v), visible, bias = operands(**sizes, masks=masks, biases=biases)
    monkeypatch.setattr(_attention, "MIN_SCORES", 1)
    ours, leaves = results(q, k, v, bias, visible, causal, torch.float32, softmax_attention)
    truth, _ = results(q, k, v, bias, visible, causal, torch.float64, plain)
    same, _ = results(q, k, v, bias, visible, causal, torch.float32, plain)
    graph = softmax_attention(*leaves[:3], visible, is_causal=causal).grad_fn
    assert "BlockedAttention" in graph.name()
    eps = torch.finfo(torch.float32).eps
    for got, wanted, other in zip(ours, truth, same, strict=True):
        error = 2 * (other - wanted).abs().max() + eps * wanted.abs().max()
        assert (got - wanted).abs().max() <= error


def test_second_derivatives_are_those_of_the_plain_form():
    (q, k, v), visible, bias = operands(1, 1, 260, 256, 4, 4, 1, 1)
    visible[:, :, 0] = True

    def slope(form, dtype):
        x, added = q.to(dtype).requires_grad_(), bias.to(dtype)
        y = form(x, k.to(dtype), v.to(dtype), visible, added, is_causal=False, scale=0.4)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    torch.testing.assert_close(
        slope(softmax_attention, torch.float32), slope(plain, torch.float64).float(), rtol=1e-4, atol=1e-4
    )
