"""Each layer against its paper's equation, evaluated step by step in plain float64, and against its initialisation."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from scanl import layers
from scanl.layers import HGRN, LRU, RGLRU, Bidirectional, Hawk, LinearRNN, MegaEMA, MinGRU, MultiScale, ShortConvolution

DIM, T = 8, 6


def silu(v):
    return v / (1 + torch.exp(-v))


def sigmoid(v):
    return 1 / (1 + torch.exp(-v))


def layer_norm(v, norm):
    return (v - v.mean()) / torch.sqrt(v.var(correction=0) + norm.eps) * norm.weight + norm.bias


def convolve(xs, conv):
    """y_t = b + sum_j c_j x_{t-j}; `weight` keeps the newest input's coefficient last."""
    weight = conv.weight[:, 0].flip(1)
    ys = []
    for t in range(len(xs)):
        y = conv.bias.clone()
        for j in range(min(weight.shape[1], t + 1)):
            y = y + weight[:, j] * xs[t - j]
        ys.append(y)
    return ys


def linear_rnn(layer, xs):
    mixed = [layer.in_proj.weight @ x + layer.in_proj.bias for x in xs]
    branch = [silu(v) for v in convolve([v[: layer.hidden_dim] for v in mixed], layer.conv.conv)]
    s, ys = torch.zeros(layer.hidden_dim), []
    for u, v in zip(branch, mixed, strict=True):
        s = sigmoid(layer.decay) * s + u
        y = layer_norm(s, layer.norm) * silu(v[layer.hidden_dim :])
        ys.append(layer.out_proj.weight @ y + layer.out_proj.bias)
    return ys


def lru(layer, xs):
    eigenvalues = torch.exp(torch.complex(-layer.nu_log.exp(), layer.theta_log.exp()))
    B, C = torch.complex(layer.B_re, layer.B_im), torch.complex(layer.C_re, layer.C_im)
    h, ys = torch.zeros(layer.state_dim, dtype=torch.complex128), []
    for x in xs:
        h = eigenvalues * h + layer.gamma_log.exp() * (B @ x.to(B.dtype))
        ys.append((C @ h).real + layer.D * x)
    return ys


def block_diagonal(gate, x):
    return torch.block_diag(*gate.w).t() @ x + gate.b.flatten()


def rglru(layer, xs):
    h, ys = torch.zeros(layer.dim), []
    for t, x in enumerate(xs):
        r, i = sigmoid(block_diagonal(layer.a_gate, x)), sigmoid(block_diagonal(layer.input_gate, x))
        a = torch.exp(-8 * r * torch.log(1 + layer.a_param.exp()))
        h = a * h + (torch.sqrt(1 - a**2) if t else 1) * (i * x)
        ys.append(h)
    return ys


def hawk(layer, xs):
    def gelu(v):
        return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))

    branch = convolve([layer.linear_x.weight @ x + layer.linear_x.bias for x in xs], layer.conv_1d.conv)
    gates = [gelu(layer.linear_y.weight @ x + layer.linear_y.bias) for x in xs]
    hs = rglru(layer.rg_lru, branch)
    return [layer.linear_out.weight @ (g * h) + layer.linear_out.bias for g, h in zip(gates, hs, strict=True)]


def hgrn(layer, xs, gamma=0.0):
    h, ys = torch.zeros(layer.dim, dtype=torch.complex128), []
    for x in xs:
        parts = silu(layer.input_proj.weight @ x + layer.input_proj.bias)
        c = torch.complex(parts[0::2], parts[1::2])
        keep = gamma + (1 - gamma) * sigmoid(layer.lambda_proj.weight @ x + layer.lambda_proj.bias)
        h = keep * torch.exp(1j * layer.theta[0, 0]) * h + (1 - keep) * c
        normed = layer_norm(torch.cat([h.real, h.imag]), layer.norm)
        gate = silu(layer.gate.weight @ x + layer.gate.bias)
        ys.append(layer.out_proj.weight @ (normed * gate) + layer.out_proj.bias)
    return ys


def mingru(layer, xs):
    h, ys = torch.zeros(layer.state_dim), []
    for x in xs:
        v, z = (layer.to_hidden_and_gate.weight @ x + layer.to_hidden_and_gate.bias).split(layer.state_dim)
        # log_g of the authors' appendix, exponentiated
        g = torch.exp(torch.where(v >= 0, torch.log(F.relu(v) + 0.5), -F.softplus(-v)))
        h = (1 - sigmoid(z)) * h + sigmoid(z) * g
        ys.append(layer.to_out.weight @ h + layer.to_out.bias)
    return ys


def mega_ema(layer, xs):
    """The released code, a step at a time: h = q h + p beta x, its step p the logit `delta`, its damping `alpha`."""
    p = sigmoid(layer.delta[..., 0])
    q = 1 - p * sigmoid(layer.alpha[..., 0])
    h, ys = torch.zeros(layer.dim, layer.ndim), []
    for x in xs:
        h = q * h + p * layer.beta[..., 0] * x[:, None]
        ys.append(silu((h * layer.gamma).sum(1) / math.sqrt(layer.ndim) + layer.omega * x))
    return ys


EQUATIONS = {
    "linear_rnn": (lambda: LinearRNN(DIM), linear_rnn),
    "lru": (lambda: LRU(DIM, 5), lru),
    "rglru": (lambda: RGLRU(DIM, 2), rglru),
    "hawk": (lambda: Hawk(DIM, 2, 6), hawk),
    "hgrn": (lambda: HGRN(DIM), hgrn),
    "mingru": (lambda: MinGRU(DIM, 1.5), mingru),
    "mega_ema": (lambda: MegaEMA(DIM, 3), mega_ema),
    "short_convolution": (lambda: ShortConvolution(DIM), lambda layer, xs: convolve(xs, layer.conv)),
    "bidirectional": (
        lambda: Bidirectional(DIM, "lru"),
        lambda layer, xs: [
            a + b for a, b in zip(lru(layer.forward_layer, xs), lru(layer.backward_layer, xs[::-1])[::-1], strict=True)
        ],
    ),
    "multi_scale": (
        lambda: MultiScale(DIM, "lru", 3),
        lambda layer, xs: [sum(ys) / 3 for ys in zip(*(lru(each, xs) for each in layer.layers), strict=True)],
    ),
}


def shaken(layer):
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_layer_has_its_equation():
    """Here, or in the file of its family; the first word of a case's name is the layer's."""
    families = [
        importlib.import_module(path.stem) for path in sorted(Path(__file__).parent.glob("test_equations_*.py"))
    ]
    cases = [case for family in families for case in family.EQUATIONS]
    missing = set(layers.names()) - EQUATIONS.keys()
    assert len(families) == 3
    assert not {name for name in missing if not any(f"{case}_".startswith(f"{name}_") for case in cases)}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", EQUATIONS)
def test_layer_is_its_equation(name):
    make, equation = EQUATIONS[name]
    layer, x = shaken(make()), torch.randn(1, T, DIM)
    torch.testing.assert_close(layer(x)[0][0], torch.stack(equation(layer, list(x[0]))))


@pytest.mark.usefixtures("double")
def test_released_parameters_of_mega_give_released_numbers():
    """A step of 1/2 and a damping of 1/4: by hand, after one step h = x/2, after two (1 - 1/8) x/2 + x'/2."""
    layer, quarter = MegaEMA(1, 1), math.log(1 / 3)
    released = {"delta": [[[0.0]]], "alpha": [[[quarter]]], "beta": [[[1.0]]], "gamma": [[1.0]], "omega": [0.0]}
    layer.load_state_dict({name: torch.tensor(value) for name, value in released.items()}, strict=True)
    y, _ = layer(torch.tensor([[[1.0], [3.0]]]))
    torch.testing.assert_close(y.flatten(), silu(torch.tensor([0.5, 0.4375 + 1.5])))


def test_rglru_bounds_the_derivative_of_its_root():
    layer = RGLRU(DIM, 2)
    torch.nn.init.constant_(layer.a_param, -200.0)  # a = 1: the square root stands at 0
    x = torch.ones(1, 3, DIM)
    y, _ = layer(x)
    y.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    plain = torch.zeros(1, requires_grad=True)
    root = layers.rglru.BoundedSqrt.apply(plain + torch.tensor([0.0, 1e-8, 0.25]))
    (gradient,) = torch.autograd.grad(root.sum(), plain)
    torch.testing.assert_close(gradient, torch.tensor([1000.0 + 1000.0 + 1.0]))


@pytest.mark.usefixtures("double")
def test_lower_bound_of_hgrn_rises_with_depth():
    stack = [HGRN(DIM) for _ in range(4)]
    for index, layer in enumerate(stack):
        layer.enter_stack(index, stack)
    assert [name for layer in stack for name, _ in layer.named_parameters() if "gamma" in name] == ["gamma"]
    for depth, layer in enumerate(stack):
        torch.testing.assert_close(torch.as_tensor(layer.lower_bound()).expand(DIM), torch.full((DIM,), depth / 4))
    torch.nn.init.normal_(stack[0].gamma)
    share = stack[0].gamma.softmax(0)
    for depth, layer in enumerate(stack):
        bound = share.cumsum(0)[depth] - share[0]
        x = torch.randn(1, T, DIM)
        torch.testing.assert_close(layer(x)[0][0], torch.stack(hgrn(layer, list(x[0]), bound)))
    assert torch.as_tensor(stack[3].lower_bound() > stack[2].lower_bound()).all()


def test_centred_convolution_is_torch_s():
    layer, x = ShortConvolution(DIM, 3, causal=False), torch.randn(2, T, DIM)
    expected = F.conv1d(x.mT, layer.conv.weight, layer.conv.bias, padding=1, groups=DIM).mT
    torch.testing.assert_close(layer(x)[0], expected)
    assert layer(x)[1] == ()


def test_multi_scale_impulse_response_is_a_mean_of_exponentials():
    layer = MultiScale(1, lambda dim: LinearRNN(dim, 1), 4)
    impulse = torch.zeros(1, T, 1)
    impulse[0, 0] = 1
    response = torch.stack([each.recurrent_forward(impulse, None)[0] for each in layer.layers]).mean(0)
    expected = torch.linspace(0.1, 0.9, 4)[:, None] ** torch.arange(T)
    torch.testing.assert_close(response[0, :, 0], expected.mean(0))


# --- initialisation: sample statistics over many draws, or the formula's exact range


def assert_normal(tensor, std, mean=0.0):
    """Mean and standard deviation within five standard errors."""
    n, values = tensor.numel(), tensor.detach().double()
    assert abs(values.mean() - mean) < 5 * std / math.sqrt(n)
    assert abs(values.std() - std) < 5 * std / math.sqrt(2 * n)


def assert_uniform(tensor, low, high):
    values = tensor.detach().double().flatten()
    assert low <= values.min()
    assert values.max() <= high
    assert abs(values.mean() - (low + high) / 2) < 5 * (high - low) / math.sqrt(12 * values.numel())
    assert abs(values.std() - (high - low) / math.sqrt(12)) < 5 * (high - low) / math.sqrt(12 * values.numel())


def test_init_of_linear_rnn():
    layer = LinearRNN(64)
    limit = math.sqrt(6 / (64 + 256))
    assert_uniform(layer.in_proj.weight, -limit, limit)
    limit = math.sqrt(6 / 128)
    assert_uniform(layer.out_proj.weight, -limit, limit)
    torch.testing.assert_close(layer.decay.sigmoid(), torch.full((128,), 0.9))
    assert not any(bias.any() for bias in (layer.in_proj.bias, layer.out_proj.bias, layer.conv.conv.bias))


@pytest.mark.parametrize(("r_min", "r_max", "max_phase"), [(0.0, 1.0, 2 * math.pi), (0.9, 0.999, math.pi / 10)])
def test_init_of_lru(r_min, r_max, max_phase):
    layer = LRU(16, 20_000, r_min, r_max, max_phase)
    radius, phase = torch.exp(-layer.nu_log.exp()), layer.theta_log.exp()
    assert_uniform(radius.double() ** 2, r_min**2 - 1e-6, r_max**2 + 1e-6)  # uniform over the ring's area
    assert_uniform(phase, 0, max_phase * (1 + 1e-6))
    normalised = layer.gamma_log.exp() ** 2 / (1 - radius.double() ** 2)
    torch.testing.assert_close(normalised.median(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-5, atol=0)
    assert layer.gamma_log.isfinite().all()
    assert layer.nu_log.isfinite().all()
    for B in (layer.B_re, layer.B_im):
        assert_normal(B, math.sqrt(1 / 32))
    for C in (layer.C_re, layer.C_im):
        assert_normal(C, math.sqrt(1 / 20_000))
    assert_normal(LRU(10_000, 1).D, 1.0)


def test_init_of_rglru_and_hawk():
    layer = RGLRU(20_000, 200)
    assert_uniform(torch.exp(-F.softplus(layer.a_param).double()) ** 2, 0.9**2 - 1e-6, 0.999**2 + 1e-6)
    for gate in (layer.a_gate, layer.input_gate):
        assert_normal(gate.w, math.sqrt(1 / 100))
        assert not gate.b.any()
    block = Hawk(96)
    assert block.width == 128
    assert [Hawk(dim).width for dim in (8, 256, 1024)] == [8, 320, 1344]
    assert_normal(block.linear_x.weight, math.sqrt(1 / 96))
    assert_normal(block.linear_y.weight, math.sqrt(1 / 96))
    assert_normal(block.linear_out.weight, math.sqrt(1 / 128))
    assert_normal(Hawk(4, 8, 4096).conv_1d.conv.weight, math.sqrt(0.01 / 4))
    assert not block.linear_out.bias.any()


def test_init_of_mega_ema():
    layer = MegaEMA(500, 16)
    assert_normal(layer.alpha, 0.2)
    assert_normal(layer.delta, 0.2)
    assert_normal(layer.beta[:, 0::2], 0.02, 1.0)
    assert_normal(layer.beta[:, 1::2], 0.02, -1.0)
    assert_normal(layer.gamma, 1.0)
    assert_normal(layer.omega, 1.0)


def test_init_of_hgrn_and_mingru():
    layer = HGRN(32)
    torch.testing.assert_close(layer.theta[0, 0], 10000 ** (-2 * torch.arange(32) / 32))
    gru = MinGRU(64, 2)
    assert_uniform(gru.to_hidden_and_gate.weight, -1 / 8, 1 / 8)
    assert gru.to_out.weight.shape == (64, 128)


# --- the four examples of the component document, as a user writes them


def test_example_1_trains_and_decodes():
    model = LinearRNN(dim=512, expand=2, use_short_conv=True, conv_size=4)
    output, state = model(torch.randn(2, 100, 512))
    assert output.shape == (2, 100, 512)
    assert state.shape == (2, 1024)
    state = model.init_state(batch_size=1, device="cpu")
    for _ in range(100):
        output, state = model(torch.randn(1, 1, 512), state)
        assert output.shape == (1, 1, 512)


def test_example_2_a_custom_recurrence_trains_and_streams():
    class MyCustomRNN(LinearRNN):
        def __init__(self, dim, expand=2):
            super().__init__(dim, expand)
            self.W_state = torch.nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
            self.decay = torch.nn.Parameter(torch.randn(self.hidden_dim))

        def recurrent_forward(self, x, state):
            batch_size, seq_len, hidden_dim = x.shape
            if state is None:
                state = torch.zeros(batch_size, hidden_dim, device=x.device)
            outputs = []
            for t in range(seq_len):
                state = torch.sigmoid(self.decay) * state + self.W_state(x[:, t])
                outputs.append(state)
            return torch.stack(outputs, dim=1), state

    model = MyCustomRNN(dim=16)
    x = torch.randn(2, 20, 16)
    target = x.roll(2, 1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(x)[0], target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    whole, last = model(x)
    state, ys = model.init_state(2), []
    for t in range(20):
        y, state = model(x[:, t : t + 1], state)
        ys.append(y)
    torch.testing.assert_close(torch.cat(ys, 1), whole)
    assert state.shape == last.shape == (2, 32)


def test_example_3_a_short_convolution_in_both_modes():
    conv = ShortConvolution(dim=512, kernel_size=4, causal=True)
    x = torch.randn(2, 100, 512)
    y, cache = conv(x)
    assert y.shape == (2, 100, 512)
    cache, ys = None, []
    for t in range(10):
        y_t, cache = conv(x[:, t : t + 1], cache)
        assert y_t.shape == (2, 1, 512)
        assert cache.shape == (2, 3, 512)
        ys.append(y_t)
    torch.testing.assert_close(torch.cat(ys, 1), y[:, :10])


def test_example_4_a_matrix_state():
    class ExponentialDecayRNN(LinearRNN):
        def __init__(self, dim, expand=2, num_heads=8):
            super().__init__(dim, expand)
            self.num_heads = num_heads
            self.head_dim = self.hidden_dim // num_heads
            self.decay = torch.nn.Parameter(torch.randn(num_heads, self.head_dim))
            self.k_proj = torch.nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)
            self.v_proj = torch.nn.Linear(self.hidden_dim, self.hidden_dim, bias=False)

        def recurrent_forward(self, x, state):
            batch, seq_len, _ = x.shape
            if state is None:
                state = torch.zeros(batch, self.num_heads, self.head_dim, self.head_dim, dtype=x.dtype)
            k = self.k_proj(x).view(batch, seq_len, self.num_heads, self.head_dim)
            v = self.v_proj(x).view(batch, seq_len, self.num_heads, self.head_dim)
            outputs = []
            decay_factor = torch.sigmoid(self.decay)
            for t in range(seq_len):
                state = state * decay_factor.unsqueeze(0).unsqueeze(-1)
                state = state + torch.einsum("bhd,bhe->bhde", k[:, t], v[:, t])
                outputs.append(torch.einsum("bhde,bhe->bhd", state, v[:, t]))
            return torch.stack(outputs, dim=1).reshape(batch, seq_len, self.hidden_dim), state

    rnn = ExponentialDecayRNN(dim=512, num_heads=8)
    x = torch.randn(2, 10, 512)
    output, state = rnn(x)
    assert output.shape == (2, 10, 512)
    assert state.shape == (2, 8, 128, 128)
    left, state = rnn(x[:, :4])
    right, _ = rnn(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([left, right], 1), output)
