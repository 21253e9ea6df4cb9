"""The functions of causal-conv1d against plain sums over the window."""

import pytest
import torch
from torch.nn import functional as F

from scanl.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from scanl.errors import ConfigError, ShapeError

COVERS = ["compat/sequences"]

D, W, T = 3, 4, 6


def plain(x, weight, bias, before=None, silu=False):
    """Each output as a sum of W products."""
    before = x.new_zeros(*x.shape[:2], W - 1) if before is None else before
    window = torch.cat([before, x], -1)
    y = torch.stack([(window[..., t : t + W] * weight).sum(-1) for t in range(x.shape[-1])], -1) + bias[:, None]
    return F.silu(y) if silu else y


@pytest.fixture
def drawn():
    return torch.randn(2, D, T), torch.randn(D, W), torch.randn(D)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_convolution(drawn, activation, channels_last):
    x, weight, bias = drawn
    x = x.mT.contiguous().mT if channels_last else x
    before = torch.randn(2, D, W - 1)
    y = causal_conv1d_fn(x, weight, bias, activation=activation)
    torch.testing.assert_close(y, plain(x, weight, bias, silu=activation is not None))
    assert y.stride() == x.stride()
    out = torch.empty(2, D, W - 1)
    y, last = causal_conv1d_fn(x, weight, bias, None, before, True, out, activation)
    torch.testing.assert_close(y, plain(x, weight, bias, before, activation is not None))
    assert last is out
    torch.testing.assert_close(last, x[..., 1 - W :], rtol=0, atol=0)
    assert causal_conv1d_fn(x.half(), weight, bias, return_final_states=True)[1].dtype == torch.float16


def test_sequences_in_rows(drawn):
    x, weight, bias = drawn
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, -1, -1]], dtype=torch.int32)
    y = causal_conv1d_fn(x, weight, bias, seq_idx)
    for row, first, end in ((0, 0, 2), (0, 2, 5), (0, 5, 6), (1, 0, 4)):
        at = slice(row, row + 1), slice(None), slice(first, end)
        torch.testing.assert_close(y[at], plain(x[at], weight, bias))
    assert y[1, :, 4:].count_nonzero() == 0
    with pytest.raises(ConfigError, match="seq_idx is given, expected None because of initial_states or return_final"):
        causal_conv1d_fn(x, weight, bias, seq_idx, return_final_states=True)
    with pytest.raises(
        ShapeError, match=r"causal_conv1d_fn: seq_idx has shape \(2, 5\), expected \(B, T\) with B=2, T=6"
    ):
        causal_conv1d_fn(x, weight, bias, seq_idx[:, :5])
    with pytest.raises(ConfigError, match="causal_conv1d_fn: activation is 'relu', expected None, 'silu' or 'swish'"):
        causal_conv1d_fn(x, weight, bias, activation="relu")


@pytest.mark.parametrize("size", [W - 1, W, W + 2])
@pytest.mark.parametrize("steps", [(1, 1, 1, 1, 1, 1), (2, 1, 3)])
@pytest.mark.parametrize("ring", [False, True])
def test_steps_are_the_sequence(drawn, size, steps, ring):
    x, weight, bias = drawn
    if ring and max(steps) + W - 1 > size:
        size = max(steps) + W - 1  # a ring forgets what it overwrites
    state, ys, count = torch.zeros(2, D, size), [], torch.zeros(2, dtype=torch.int32)
    for piece in x.split(steps, -1):
        ys.append(causal_conv1d_update(piece, state, weight, bias, "silu", count if ring else None))
        count = count + piece.shape[-1]
    torch.testing.assert_close(torch.cat(ys, -1), plain(x, weight, bias, silu=True))
    recent = state[..., torch.arange(T - size, T) % size] if ring else state
    assert torch.equal(recent[..., -min(size, T) :], x[..., -size:])


def test_one_step_and_rows_of_a_larger_state(drawn):
    x, weight, bias = drawn
    state = torch.randn(5, D, W)
    original = state.clone()
    y = causal_conv1d_update(x[..., 0], state, weight, bias, conv_state_indices=torch.tensor([3, -1]))
    torch.testing.assert_close(y[:1], plain(x[:1, :, :1], weight, bias, original[3:4, :, 1:])[..., 0])
    assert y[1].count_nonzero() == 0
    assert torch.equal(state[3], torch.cat([original[3, :, 1:], x[0, :, :1]], -1))
    assert torch.equal(state[[0, 1, 2, 4]], original[[0, 1, 2, 4]])
    with pytest.raises(ShapeError, match="conv_state has 2 inputs, expected at least 3 from weight"):
        causal_conv1d_update(x, state[..., :2], weight)


def test_last_inputs_of_packed_sequences():
    x = torch.arange(1.0, 8)[:, None].expand(7, D)
    states = causal_conv1d_varlen_states(x, torch.tensor([0, 2, 2, 7]), 3)
    expected = torch.tensor([[0.0, 1, 2], [0, 0, 0], [5, 6, 7]])
    assert torch.equal(states, expected[:, None].expand(3, D, 3))
    assert causal_conv1d_varlen_states(x[:0], torch.tensor([0, 0]), 3).shape == (1, D, 3)
