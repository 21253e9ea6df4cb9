"""What the equations of all families are written with, and checks of how parameters start."""

import math
from itertools import pairwise

import torch

DIM, T = 8, 7


def silu(v):
    return v / (1 + torch.exp(-v))


def sigmoid(v):
    return 1 / (1 + torch.exp(-v))


def softplus(v):
    return torch.log(1 + torch.exp(v))


def gelu(v):
    return 0.5 * v * (1 + torch.erf(v / math.sqrt(2)))


def gelu_tanh(v):
    """The approximation of GELU by tanh."""
    return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def relu_squared(v):
    return torch.where(v > 0, v, 0) ** 2


def layer_norm(v, norm):
    return (v - v.mean()) / torch.sqrt(v.var(correction=0) + norm.eps) * norm.weight + norm.bias


def rms(v, eps=1e-5):
    return v / torch.sqrt((v**2).mean() + eps)


def unit(v):
    return v / torch.sqrt((v**2).sum() + 1e-6)


def linear(module, v):
    return module.weight @ v + (0 if module.bias is None else module.bias)


def convolve(xs, conv):
    """The causal convolution y_t = b + sum_j c_j x_{t-j}; `weight` keeps the newest input's coefficient last."""
    weight, ys = conv.weight[:, 0].flip(1), []
    for t in range(len(xs)):
        y = torch.zeros_like(xs[t]) if conv.bias is None else conv.bias.clone()
        for j in range(min(weight.shape[1], t + 1)):
            y = y + weight[:, j] * xs[t - j]
        ys.append(y)
    return ys


def with_before(xs):
    """Each input with the one before it, zeros at the start."""
    return list(zip(xs, [torch.zeros_like(xs[0]), *xs[:-1]], strict=True))


def shaken(layer, by=0.1):
    """The layer with every parameter moved away from its special values."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(by * torch.randn_like(parameter))
    return layer


def channels(formula, width):
    """The formula channel by channel, over (1, 1, width)."""
    return torch.tensor([float(formula(j)) for j in range(width)])


# --- how parameters start: the exact range, and sample statistics within five standard errors


def assert_normal(tensor, std, mean=0.0):
    n, values = tensor.numel(), tensor.detach().double()
    assert abs(values.mean() - mean) < 5 * std / math.sqrt(n)
    assert abs(values.std() - std) < 5 * std / math.sqrt(2 * n)


def assert_uniform(tensor, low, high):
    values = tensor.detach().double().flatten()
    slack = 1e-5 * max(abs(low), abs(high))
    assert low - slack <= values.min()
    assert values.max() <= high + slack
    assert abs(values.mean() - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * values.numel())
    assert abs(values.std() - (high - low) / math.sqrt(12)) < 5 * (high - low) / math.sqrt(12 * values.numel())


def assert_orthogonal(weight, gain):
    """Rows, or columns where there are fewer, orthogonal and of length `gain`."""
    few = weight if weight.shape[0] <= weight.shape[1] else weight.T
    torch.testing.assert_close(few @ few.T, gain**2 * torch.eye(len(few)), atol=1e-5, rtol=1e-5)


def follows_time(make, equation):
    """With timespans a layer is its equation, in pieces, packed, and in the gradient of the spans."""
    layer, x, spans = shaken(make()), torch.randn(2, T, DIM), 2 * torch.rand(2, T) + 0.1
    y, last = layer(x, timespans=spans)
    for row in range(2):
        torch.testing.assert_close(y[row], torch.stack(equation(layer, list(x[row]), spans[row])))
    torch.testing.assert_close(layer(x, timespans=torch.ones(2, T))[0], layer(x)[0])
    left, state = layer(x[:, :3], timespans=spans[:, :3])
    right, state = layer(x[:, 3:], state, timespans=spans[:, 3:])
    torch.testing.assert_close(torch.cat([left, right], 1), y)
    torch.testing.assert_close(state, last)
    cuts = [0, 4, 4, 10, 14]
    packed, packed_spans = x.reshape(1, -1, DIM), spans.reshape(1, -1)
    y, _ = layer(packed, cu_seqlens=torch.tensor(cuts), timespans=packed_spans)
    for start, end in pairwise(cuts):
        alone, _ = layer(packed[:, start:end], timespans=packed_spans[:, start:end])
        torch.testing.assert_close(y[:, start:end], alone)
    spans.requires_grad_()
    assert torch.autograd.gradcheck(lambda spans: layer(x, timespans=spans)[0], (spans,), fast_mode=True)
    (slope,) = torch.autograd.grad(layer(x, timespans=spans)[0].square().sum(), spans)
    assert slope.ne(0).any(1).all()
