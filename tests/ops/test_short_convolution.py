"""Short convolutions against torch's own, with a window of one, and over many pieces of time."""

import pytest
import torch
from torch import nn

import laws
from scanl.ops.registry import OpSample
from scanl.ops.short_convolution import short_convolution

BACKENDS = pytest.mark.parametrize("backend", ["reference", "parallel", "cpu"])
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])


def _sample(batch, steps, width, window, sequences=None, **options):
    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64)

    state = draw(sequences or batch, window - 1, width)
    operands = {"x": draw(batch, steps, width), "w": draw(width, window), "bias": draw(width), "state": state}
    return OpSample(operands, options)


@BACKENDS
@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("silu", [False, True])
def test_it_is_a_depthwise_convolution(backend, window, silu):
    conv, x = nn.Conv1d(6, 6, window, groups=6), torch.randn(2, 20, 6)
    expected = conv(nn.functional.pad(x.mT, (window - 1, 0))).mT
    expected = nn.functional.silu(expected) if silu else expected
    y, last = short_convolution(x, conv.weight[:, 0], conv.bias, silu=silu, backend=backend)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(last, x[:, 20 - window + 1 :])


@BACKENDS
@DIRECTIONS
def test_a_window_of_one_has_no_state(backend, reverse):
    sample = _sample(2, 5, 3, 1, silu=True)
    assert short_convolution(sample.operands["x"], sample.operands["w"], backend=backend)[1].shape == (2, 0, 3)
    laws.truth(short_convolution, sample, {"reverse": reverse}, backend, torch.float64)
    laws.pieces(short_convolution, sample, reverse, backend, [2, 3], torch.float32)
    packed = _sample(1, 5, 3, 1, 3, cu_seqlens=torch.tensor([0, 2, 2, 5]))
    laws.truth(short_convolution, packed, {"reverse": reverse}, backend, torch.float64)


@DIRECTIONS
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("window", [2, 4, 7, 130])
def test_pieces_of_time_and_blocks_of_channels(reverse, silu, window):
    """Several pieces, whose last steps reach into the next, and several blocks; the last piece may be short."""
    for sample in (
        _sample(2, 603, 3, window, silu=silu),
        _sample(1, 260, 517, window, silu=silu),
        _sample(1, 605, 2, window, 4, silu=silu, cu_seqlens=torch.tensor([0, 1, 301, 303, 605])),
    ):
        options = {**sample.options, "reverse": reverse}
        expected = laws.evaluate(short_convolution, sample.operands, options, "parallel")
        for name, value in laws.evaluate(short_convolution, sample.operands, options, "cpu").items():
            torch.testing.assert_close(value, expected[name], msg=lambda m, n=name: f"{n}: {m}")


def test_sums_over_long_sequences():
    """Gradients of weights sum over every step."""
    operands = {name: value.float() for name, value in _sample(1, 2**16, 2, 4).operands.items()}
    exact = laws.evaluate(short_convolution, laws.wide(operands), {"silu": True}, "cpu")
    got = laws.evaluate(short_convolution, operands, {"silu": True}, "cpu")
    for name, value in exact.items():
        assert (got[name] - value).norm() < 3e-6 * value.norm(), name
