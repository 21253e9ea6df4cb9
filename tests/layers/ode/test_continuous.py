"""Layers in continuous time: each against its equation, step by step, how it starts, and what only it knows."""

import re
import sys
from functools import partial

import numpy as np
import pytest
import torch

from by_hand import (
    DIM,
    T,
    assert_normal,
    assert_orthogonal,
    assert_uniform,
    follows_time,
    gelu,
    layer_norm,
    linear,
    shaken,
    sigmoid,
    silu,
    softplus,
    with_before,
)
from scanl import layers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import GRU, Elman
from scanl.layers.ode._timed import TimedCell
from scanl.layers.ode._wiring import neural_circuit_policy
from scanl.layers.ode.cfc import CfC
from scanl.layers.ode.cfc_ncp import CfCNCP
from scanl.layers.ode.ctrnn import CTRNN
from scanl.layers.ode.irnn import IRNN
from scanl.layers.ode.ltc import LTC, NCP
from scanl.layers.ode.ltc_fused import LTCFused
from scanl.layers.ode.neuralode import SOLVERS, NeuralODE
from scanl.layers.ode.odefwp import ODEFWP
from scanl.layers.ode.odernn import ODERNN
from scanl.layers.ode.tarnn import TARNN, TARNNState, tarnn_cell

pytestmark = pytest.mark.cells_by_loop


def ones(xs):
    return [1.0] * len(xs)


def ctrnn(layer, xs, spans=None):
    h, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        for _ in range(layer.substeps):
            feedback = 0 if layer.weight_hh is None else layer.weight_hh @ h
            h = h + layer.dt * span * (
                torch.tanh(layer.weight_ih @ x + feedback + layer.bias) - h / softplus(layer.raw_tau)
            )
        ys.append(h)
    return ys


def activated(name, v):
    if name == "lecun_tanh":
        return 1.7159 * torch.tanh(0.666 * v)
    return {"silu": silu, "gelu": gelu, "relu": lambda v: torch.where(v > 0, v, 0), "tanh": torch.tanh}[name](v)


def masked(module, name, v):
    """One of the maps of a closed form, with its mask if it has one."""
    own = getattr(module, name)
    weight = own.weight if module.sparsity_mask is None or "time" in name else own.weight * module.sparsity_mask
    return weight @ v + own.bias


def closed(module, mode, v, span):
    """Equation (2), its form without the gate, or the solution that it approximates."""
    f = masked(module, "ff1", v)
    if mode == "pure":
        return module.A[0] - module.A[0] * torch.exp(-span * (module.w_tau[0].abs() + f.abs())) * f
    share = sigmoid(masked(module, "time_a", v) * span + masked(module, "time_b", v))
    g, k = torch.tanh(f), torch.tanh(masked(module, "ff2", v))
    return g + share * k if mode == "no_gate" else (1 - share) * g + share * k


def mixed(memory, x, h, c):
    z, i, f, o = (linear(memory.input_map, x) + memory.recurrent_map.weight @ h).chunk(4)
    c = sigmoid(f + 1) * c + sigmoid(i) * torch.tanh(z)
    return sigmoid(o) * torch.tanh(c), c


def cfc(layer, xs, spans=None):
    h, c, ys = torch.zeros(layer.width), torch.zeros(layer.width), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        if layer.lstm is not None:
            h, c = mixed(layer.lstm, x, h, c)
        v = torch.cat([x, h])
        for each in layer.rnn_cell.backbone.values():
            v = activated(layer.activation, linear(each, v))
        h = closed(layer.rnn_cell, layer.variant, v, span)
        ys.append(h if layer.width == DIM else linear(layer.fc, h))
    return ys


def cfc_ncp(layer, xs, spans=None):
    parts = [layer.rnn_cell.layer_0, layer.rnn_cell.layer_1, layer.rnn_cell.layer_2]
    sizes = [len(part.ff1.bias) for part in parts]
    h, c, ys = torch.zeros(layer.width), torch.zeros(layer.width), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        if layer.lstm is not None:
            h, c = mixed(layer.lstm, x, h, c)
        below, news = x, []
        for part, own in zip(parts, h.split(sizes), strict=True):
            below = closed(part, layer.variant, torch.cat([below, own]), span)
            news.append(below)
        h = torch.cat(news)
        ys.append(below)
    return ys


def ltc(layer, xs, spans=None):
    """Algorithm 1, neuron by neuron, as a fraction of currents over conductances."""
    own = layer.rnn_cell
    made_positive = softplus if layer.implicit_param_constraints else lambda v: torch.where(v > 0, v, 0)
    w, g, c, sensory_w = (made_positive(v) for v in (own.w, own.gleak, own.cm, own.sensory_w))
    v, ys = torch.zeros(layer.width), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        u = own.input_w * x + own.input_b
        for _ in range(layer.substeps):
            new = []
            for i in range(layer.width):
                a = own.sparsity_mask[:, i] * w[:, i] * sigmoid(own.sigma[:, i] * (v - own.mu[:, i]))
                b = sensory_w[:, i] * sigmoid(own.sensory_sigma[:, i] * (u - own.sensory_mu[:, i]))
                b = own.sensory_sparsity_mask[:, i] * b
                inertia = c[i] * layer.substeps / span
                above = inertia * v[i] + g[i] * own.vleak[i] + a @ own.erev[:, i] + b @ own.sensory_erev[:, i]
                new.append(above / (inertia + g[i] + a.sum() + b.sum() + 1e-8))
            v = torch.stack(new)
        ys.append(own.output_w * v[:DIM] + own.output_b)
    return ys


def ltc_fused(layer, xs, spans=None):
    h, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        dt = span / layer.substeps
        for _ in range(layer.substeps):
            f = sigmoid(linear(layer.input_map, x) + layer.recurrent_map.weight @ h)
            h = (h + dt * f * layer.A) / (1 + dt * (1 / torch.exp(layer.log_tau) + f))
        ys.append(h)
    return ys


def cosine(layer):
    """The layer with every parameter made of cosines; those of an LTC are positive, so that none is constrained."""
    middle = 0.6 if isinstance(layer, LTC) else 0.0
    with torch.no_grad():
        for at, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.copy_((middle + 0.4 * torch.cos(numbers + at)).view(parameter.shape))
    return layer


def last_output(layer):
    """The last output for two rows of four inputs and time spans, the first and last channel of each row."""
    x = torch.cos(torch.arange(2.0 * 4 * DIM)).view(2, 4, DIM)
    y, _ = layer(x, timespans=1 + 0.5 * torch.sin(torch.arange(8.0)).view(2, 4))
    return y[:, -1, [0, -1]].flatten()


def phi(name, v):
    return torch.tanh(v) if name == "tanh" else torch.where(v > 0, v, 0)


def irnn(layer, xs, spans=None):
    before, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        h = before if layer.init == "state" else torch.zeros(DIM)
        for eta in layer.eta:
            if layer.rank is None:
                inner = layer.U.weight @ (h + before) + linear(layer.W, x)
            else:
                inner = h + before + (h + before) @ layer.V2 @ layer.V + linear(layer.W, x)
                inner = inner + inner @ layer.V2 @ layer.V
            moved = phi(layer.activation, inner) - layer.alpha * (h + before)
            h = h + span * eta * moved
        before = h
        ys.append(h)
    return ys


def tarnn(layer, xs, spans=None):
    """The loops of the authors' program, with 0 before the first input."""
    before, ys = torch.zeros(DIM), []
    spans = spans if spans is not None else ones(xs)
    for (x, last), span in zip(with_before(xs), spans, strict=True):
        g = sigmoid(before @ layer.Ug + x @ layer.Wg + layer.bg)
        held = before @ layer.U2 + x @ layer.W1 + last @ layer.W2 + layer.b1
        h = before
        for a in layer.A1[:, 0] * span:
            flow = phi(layer.activation, h @ layer.U1 + held) - h - before + x @ layer.B1 + before @ layer.B2
            h = (1 - a) * h + a * flow if layer.variant == "b" else h + a * g * flow
        before = (1 - g) * before + g * h if layer.variant == "b" else h
        ys.append(before)
    return ys


def along(field, v):
    """What the perceptron gives for v."""
    z = torch.tanh(linear(field.first, v))
    for each in field.deep:
        z = torch.tanh(linear(each, z))
    return linear(field.last, z)


def moved(flow, h, span, method, substeps):
    dt = span / substeps
    for _ in range(substeps):
        k1 = flow(h)
        k2 = flow(h + dt * k1 / 2)
        if method == "euler":
            h = h + dt * k1
        elif method == "midpoint":
            h = h + dt * k2
        else:
            k3 = flow(h + dt * k2 / 2)
            k4 = flow(h + dt * k3)
            h = h + dt * (k1 / 6 + k2 / 3 + k3 / 3 + k4 / 6)
    return h


def odernn(layer, xs, spans=None):
    h, gru, ys = torch.zeros(DIM), layer.GRU_update, []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        h = moved(lambda h: along(layer.ode_func, h), h, span, layer.method, layer.substeps)
        (r, z, n), (to_r, to_z, to_n) = (
            (gru.weight_ih @ x + gru.bias_ih).chunk(3), (gru.weight_hh @ h + gru.bias_hh).chunk(3)
        )  # fmt: skip
        z = sigmoid(z + to_z)
        h = (1 - z) * torch.tanh(n + sigmoid(r + to_r) * to_n) + z * h
        ys.append(h)
    return ys


def neuralode(layer, xs, spans=None):
    h, ys = torch.zeros(DIM), []
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        flow = partial(lambda x, h: along(layer.func, torch.cat([h, x])), x)
        h = moved(flow, h, span, layer.method, layer.substeps)
        ys.append(h)
    return ys


def odefwp(layer, xs, spans=None):
    """With W (V, K) of each head, as in the paper."""
    net, K, ys = layer.update_net, DIM // layer.num_heads, []
    ws = [torch.zeros(K, K) for _ in range(layer.num_heads)]
    for x, span in zip(xs, spans if spans is not None else ones(xs), strict=True):
        h, read = layer_norm(linear(net.input_proj, x), net.input_layer_norm), []
        parts = linear(net.kvb_net, h).chunk(layer.num_heads)
        queries = linear(layer.query_net, h).chunk(layer.num_heads)
        for head, (part, q) in enumerate(zip(parts, queries, strict=True)):
            k, v, beta = part[:K], part[K : 2 * K], sigmoid(part[2 * K])

            def rule(w, k=k, v=v, beta=beta):
                if layer.variant == "oja":
                    return torch.outer(torch.tanh(v), beta * torch.softmax(k - w.T @ torch.tanh(v), 0))
                k = torch.softmax(k, 0)
                missing = {
                    "hebb": torch.tanh(v),
                    "delta": torch.tanh(v - w @ k),
                    "delta_linear": torch.tanh(v) - w @ k,
                }[layer.variant]
                return beta * torch.outer(missing, k)

            ws[head] = moved(rule, ws[head], span, layer.method, layer.substeps)
            read.append(ws[head] @ torch.softmax(q, 0))
        ys.append(linear(layer.out_proj, torch.cat(read)))
    return ys


EQUATIONS = {
    "ctrnn": (lambda: CTRNN(DIM), ctrnn),
    "ctrnn_linear": (lambda: CTRNN(DIM, 3, tau=2.0, global_feedback=False), ctrnn),
    "ctrnn_trained_tau": (lambda: CTRNN(DIM, 2, 0.3, trained=True), ctrnn),
    "cfc": (lambda: CfC(DIM, hidden_dim=6), cfc),
    "cfc_no_gate": (lambda: CfC(DIM, 5, "no_gate", 6, 2, "silu"), cfc),
    "cfc_pure": (lambda: CfC(DIM, variant="pure", hidden_dim=6, activation="gelu"), cfc),
    "cfc_without_backbone": (lambda: CfC(DIM, 5, depth=0, mixed_memory=True), cfc),
    "cfc_mixed": (lambda: CfC(DIM, 5, "pure", 6, 3, "tanh", True), cfc),
    "cfc_ncp": (lambda: CfCNCP(DIM), cfc_ncp),
    "cfc_ncp_pure": (lambda: CfCNCP(DIM, 15, 0.2, 3, "pure"), cfc_ncp),
    "cfc_ncp_mixed": (lambda: CfCNCP(DIM, 13, variant="no_gate", mixed_memory=True), cfc_ncp),
    "ltc": (lambda: LTC(DIM, substeps=2), ltc),
    "ncp": (lambda: NCP(DIM), ltc),
    "ltc_softplus": (lambda: LTC(DIM, 10, 3, True), ltc),
    "ltc_ncp": (lambda: NCP(DIM, 14, 2), ltc),
    "irnn": (lambda: IRNN(DIM), irnn),
    "irnn_from_zero": (lambda: IRNN(DIM, 5, 0.5, "tanh", "zero"), irnn),
    "irnn_of_low_rank": (lambda: IRNN(DIM, 2, 0.5, "tanh", rank=2), irnn),
    "tarnn": (lambda: TARNN(DIM), tarnn),
    "tarnn_plain": (lambda: TARNN(DIM, 3, "plain", "tanh"), tarnn),
    "odernn": (lambda: ODERNN(DIM, 6), odernn),
    "odernn_midpoint": (lambda: ODERNN(DIM, 5, 0, "midpoint", 2), odernn),
    "odernn_rk4": (lambda: ODERNN(DIM, 5, 2, "rk4", 1), odernn),
    "neuralode": (lambda: NeuralODE(DIM), neuralode),
    "neuralode_euler": (lambda: NeuralODE(DIM, 5, 2, "euler", 3), neuralode),
    "neuralode_midpoint": (lambda: NeuralODE(DIM, 5, 1, "midpoint", 2), neuralode),
    "odefwp": (lambda: ODEFWP(DIM, 2), odefwp),
    "odefwp_euler": (lambda: ODEFWP(DIM, 4, "delta", "euler", 2), odefwp),
    "odefwp_oja": (lambda: ODEFWP(DIM, 2, "oja"), odefwp),
    "odefwp_hebb": (lambda: ODEFWP(DIM, 2, "hebb", substeps=2), odefwp),
    **{
        f"odefwp_linear_{method}": (partial(ODEFWP, DIM, 2, "delta_linear", method, 3), odefwp)
        for method in ("euler", "midpoint", "rk4")
    },
    "ltc_fused": (lambda: LTCFused(DIM, 3, 0.5), ltc_fused),
}


WIRINGS = {  # (inputs, units, outputs, sparsity, seed)
    (4, 10, 3, 0.5, 22222): [10, 4, 228, 8, -2, -16],
    (20, 28, 8, 0.5, 22222): [88, -12, -3372, 120, 6, 2735],
    (8, 50, 8, 0.9, 3): [47, 3, 5048, 29, -3, -586],
}
GOLDEN = {
    "cfc": [-0.376695068232, -0.310034555904, -0.417038991945, -0.383350113039],
    "cfc_no_gate": [0.597655090131, 0.281202764141, 0.612317906637, 0.254535635788],
    "cfc_pure": [0.420132855850, 0.373641013052, 0.442535189090, 0.353696940450],
    "cfc_without_backbone": [0.918218033497, -0.135279523116, 0.988925351622, -0.096426321159],
    "cfc_mixed": [0.187429764025, 0.664023332028, 0.194416368553, 0.652052347146],
    "cfc_ncp": [-0.200596263119, -0.086434395237, -0.195160408512, -0.080757693579],
    "cfc_ncp_pure": [-0.077766101860, -0.357887598301, -0.074278596257, -0.349696917529],
    "cfc_ncp_mixed": [0.085810244936, -0.162521323051, 0.017965533478, -0.253097307141],
    "ltc": [1.563419845653, 1.350459447498, 1.561478327640, 1.349220204189],
    "ltc_softplus": [1.545648967620, 1.348062771730, 1.548202589026, 1.350281359494],
    "ltc_ncp": [1.844750132483, 1.311043656659, 1.799713682224, 1.256507436738],
}
OF_ODEFWP = {
    "odefwp": [0.482755439241, 0.612831212937, 0.450682814957, 0.496334105230],
    "odefwp_oja": [0.502815048352, 0.693209474471, 0.460275630008, 0.534895359474],
    "odefwp_hebb": [0.505032576611, 0.692867085585, 0.461035783105, 0.534679067983],
    "odefwp_linear_rk4": [0.478105672662, 0.591599326089, 0.448301957189, 0.487790763728],
}
OF_TARNN = {
    "tarnn": [0.030604279540, 0.043991528243, 0.021695526754, 0.023844234208],
    "tarnn_plain": [-0.152783140599, -0.086728493850, -0.144346668224, -0.090543228938],
}


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", EQUATIONS)
def test_a_layer_follows_the_time_between_its_steps(name):
    follows_time(*EQUATIONS[name])


@pytest.mark.usefixtures("double")
def test_one_euler_step_of_length_one_is_an_elman_network():
    layer, elman, x = shaken(CTRNN(DIM, 1, 1.0)), Elman(DIM, bias=False), torch.randn(2, T, DIM)
    with torch.no_grad():
        layer.bias.zero_()
    elman.load_state_dict({"weight_ih_l0": layer.weight_ih, "weight_hh_l0": layer.weight_hh})
    torch.testing.assert_close(layer(x)[0], elman(x)[0])


@pytest.mark.usefixtures("double")
def test_euler_steps_converge_with_their_length():
    """Twice the steps of half the length: half the distance from the solution."""
    torch.manual_seed(0)
    x, ys = torch.randn(1, 3, DIM), []
    for unfolds in (10, 20, 40, 2000):
        torch.manual_seed(1)
        ys.append(CTRNN(DIM, unfolds, 1 / unfolds)(x)[0])
    coarse, middle, fine = ((y - ys[3]).abs().max() for y in ys[:3])
    assert 1.8 < coarse / middle < 2.2
    assert 1.8 < middle / fine < 2.2


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("implicit", [False, True])
def test_voltages_of_ltc_stay_between_the_potentials_that_pull_them(implicit):
    layer = LTC(DIM, implicit_param_constraints=implicit)
    state, own = 5 * torch.rand(3, DIM) - 2.5, layer.rnn_cell
    _, last = layer(20 * torch.randn(3, 30, DIM), state, timespans=10 * torch.rand(3, 30))
    pulls = torch.cat([own.vleak[None], own.erev, own.sensory_erev])
    assert (last <= torch.maximum(state, pulls.max(0).values) + 1e-9).all()
    assert (last >= torch.minimum(state, pulls.min(0).values) - 1e-9).all()


@pytest.mark.usefixtures("double")
def test_state_of_a_fused_ltc_stays_between_zero_and_a():
    layer = shaken(LTCFused(DIM, 2))
    y, _ = layer(50 * torch.randn(3, 40, DIM), timespans=10 * torch.rand(3, 40))
    assert (y * layer.A.sign() >= 0).all()
    assert (y.abs() <= layer.A.abs()).all()
    assert (y.abs() > 0.5 * layer.A.abs()).any()


@pytest.mark.usefixtures("double")
def test_a_step_of_no_length_keeps_the_state():
    x, spans = torch.randn(2, T, DIM), torch.zeros(2, T)
    for layer in (CTRNN(DIM), CTRNN(DIM, global_feedback=False), LTC(DIM), LTCFused(DIM)):
        state = torch.rand(2, *layer.init_state(1).shape[1:])
        _, last = layer(x, state, timespans=spans)
        torch.testing.assert_close(last, state, atol=1e-12, rtol=0)


def test_a_wiring_is_that_of_ncps():
    """Numbers of synapses, sums of their signs, and sums weighted by the place, of ncps 1.0.1 for the same seeds."""
    for arguments, expected in WIRINGS.items():
        wiring = neural_circuit_policy(*arguments)
        found = []
        for matrix in (wiring.synapses, wiring.sensory):
            place = np.arange(matrix.size).reshape(matrix.shape)
            found += [abs(matrix).sum(), matrix.sum(), (matrix * place).sum()]
        assert found == expected
        inter, command, motor = wiring.layers()
        assert abs(inter).sum() == found[3]
        recurrent = wiring.synapses[wiring.motor : wiring.motor + wiring.command]
        recurrent = recurrent[:, wiring.motor : wiring.motor + wiring.command]
        assert abs(command).sum() + abs(motor).sum() + abs(recurrent).sum() == found[0]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", GOLDEN)
def test_outputs_of_ncps(name):
    """Outputs of ncps 1.0.1 in float64 with the same parameters, made of cosines, as are the inputs and time spans."""
    torch.testing.assert_close(last_output(cosine(EQUATIONS[name][0]())), torch.tensor(GOLDEN[name]), atol=1e-9, rtol=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OF_TARNN)
def test_outputs_of_the_authors_tarnn(name):
    """Of their PyTorch program, with cosines as in `test_outputs_of_ncps`. It takes the first input twice."""
    x = torch.cos(torch.arange(2.0 * 4 * DIM)).view(2, 4, DIM)
    y, _ = cosine(EQUATIONS[name][0]())(x, TARNNState(torch.zeros(2, DIM), x[:, :1]))
    torch.testing.assert_close(y[:, -1, [0, -1]].flatten(), torch.tensor(OF_TARNN[name]), atol=1e-9, rtol=0)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", OF_ODEFWP)
def test_rules_of_the_authors_odefwp(name):
    """Two Euler steps for each input along the vector fields of their program, with cosines as above."""
    layer = cosine(EQUATIONS[name][0]())
    layer.method, layer.substeps = "euler", 2
    torch.testing.assert_close(last_output(layer), torch.tensor(OF_ODEFWP[name]), atol=1e-9, rtol=0)


@pytest.mark.usefixtures("double")
def test_rounds_of_irnn_reach_the_equilibrium_where_the_state_neither_fades_nor_grows():
    """With a weak U the rounds converge; there the derivative by the state before is minus the identity."""
    layer = IRNN(DIM, 1, 1.0, "tanh")
    with torch.no_grad():
        layer.U.weight.mul_(0.5)
    before, x = torch.randn(1, DIM), torch.randn(1, 1, DIM)
    distances = []
    for rounds in (2, 4, 200):
        layer.eta = torch.nn.Parameter(torch.full((rounds,), 0.5))
        h = layer(x, before)[1][0]
        both = h + before[0]
        moved = torch.tanh(layer.U.weight @ both + linear(layer.W, x[0, 0])) - both
        distances.append(moved.norm().item())
    assert distances[0] > 2 * distances[1]
    assert distances[2] < 1e-12
    slope = torch.autograd.functional.jacobian(lambda state: layer(x, state)[1][0], before)[:, 0]
    torch.testing.assert_close(slope, -torch.eye(DIM), atol=1e-9, rtol=0)


@pytest.mark.usefixtures("double")
def test_a_shut_gate_of_tarnn_keeps_the_state():
    for variant in ("b", "plain"):
        layer = shaken(TARNN(DIM, 2, variant))
        with torch.no_grad():
            layer.bg.fill_(-1000)
        state = TARNNState(torch.randn(2, DIM), torch.zeros(2, 1, DIM))
        y, last = layer(torch.randn(2, T, DIM), state)
        torch.testing.assert_close(last.h, state.h, rtol=0, atol=0)
        torch.testing.assert_close(y[:, 0], state.h, rtol=0, atol=0)


@pytest.mark.usefixtures("double")
def test_an_ode_rnn_without_time_is_a_gru():
    layer, gru, x = shaken(ODERNN(DIM, 6)), GRU(DIM), torch.randn(2, T, DIM)
    gru.load_state_dict({f"{name}_l0": value for name, value in layer.GRU_update.state_dict().items()})
    torch.testing.assert_close(layer(x, timespans=torch.zeros(2, T))[0], gru(x)[0])


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("midpoint", 2), ("rk4", 4)])
def test_fixed_steps_converge_with_their_order(method, order):
    """Half the length of the steps: 2 to the order times nearer to the solution."""
    layer, x = shaken(NeuralODE(DIM, method=method), 0.5), torch.randn(1, 2, DIM)
    ys = []
    for substeps in (4, 8, 16, 512):
        layer.substeps = substeps
        ys.append(layer(x)[0])
    coarse, middle, fine = ((y - ys[3]).abs().max() for y in ys[:3])
    assert 0.8 * 2**order < coarse / middle < 1.25 * 2**order
    assert 0.8 * 2**order < middle / fine < 1.25 * 2**order


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["euler", "midpoint"])
def test_fixed_steps_are_those_of_torchdiffeq(method):
    """Its "rk4" is another method of the fourth order, with thirds."""
    torchdiffeq = pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer, x, h = shaken(NeuralODE(DIM, 5, 1, method, 4), 0.5), torch.randn(2, 1, DIM), torch.randn(2, DIM)
    _, last = layer(x, h)

    def flow(_, h):
        return torch.stack([along(layer.func, torch.cat(pair)) for pair in zip(h, x[:, 0], strict=True)])

    theirs = torchdiffeq.odeint(flow, h, torch.tensor([0.0, 1.0]), method=method, options={"step_size": 0.25})[1]
    torch.testing.assert_close(last, theirs, rtol=0, atol=1e-12)


def nearly_linear(layer):
    """f = A h + B x to nine digits, because tanh is the identity near 0."""
    with torch.no_grad():
        for weight in (layer.func.first.weight, layer.func.last.weight):
            torch.nn.init.normal_(weight, 0, 0.3)
        layer.func.first.weight.mul_(1e-5)
        layer.func.last.weight.mul_(1e5)
    into_h, into_x = (layer.func.last.weight @ layer.func.first.weight).detach().split(DIM, 1)
    return into_h, into_x


SOLVED = [
    ("rk4", {"substeps": 64}),
    *((method, {"adjoint": adjoint}) for method in SOLVERS for adjoint in (False, True)),
]


def need_torchdiffeq(method):
    if method in SOLVERS:
        pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["rk4", *SOLVERS])
def test_a_linear_ode_is_a_matrix_exponential(method):
    if method in SOLVERS:
        pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer = NeuralODE(DIM, method=method, substeps=20, rtol=1e-5, atol=1e-6)
    into_h, into_x = nearly_linear(layer)
    x, h, span = torch.randn(2, 1, DIM), torch.randn(2, DIM), torch.tensor([[0.5], [1.5]])
    _, last = layer(x, h, timespans=span)
    for row in range(2):  # of the system that has x as a part of its state
        whole = torch.zeros(2 * DIM, 2 * DIM)
        whole[:DIM] = torch.cat([into_h, into_x], 1)
        expected = torch.linalg.matrix_exp(span[row] * whole) @ torch.cat([h[row], x[row, 0]])
        torch.testing.assert_close(last[row], expected[:DIM], rtol=0, atol=5e-3)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("method", ["dopri5", "dopri8", "bosh3"])
def test_an_adaptive_solver_keeps_its_tolerance_at_the_end_of_a_step(method):
    """Within ten tolerances of scipy's solution. A solution interpolated there misses by up to 900."""
    pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    solve_ivp = pytest.importorskip("scipy.integrate", reason="needs the extra `series`").solve_ivp
    torch.manual_seed(0)
    layer, x, spans = NeuralODE(3, 8, 0, method), torch.randn(1, 3, 3), torch.tensor([[0.3, 1.0, 2.5]])
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    first, last, expected, h = layer.func.first, layer.func.last, [], torch.zeros(3)
    for now, span in zip(x[0], spans[0].tolist(), strict=True):

        def flow(_, h, now=now):
            return last(first(torch.cat([torch.from_numpy(h), now])).tanh()).detach().numpy()

        h = torch.from_numpy(solve_ivp(flow, (0, span), h.numpy(), "DOP853", rtol=1e-13, atol=1e-14).y[:, -1])
        expected.append(h)
    torch.testing.assert_close(layer(x, timespans=spans)[0][0], torch.stack(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", [name for name in layers.names() if "timespans" in layers.get(name).takes])
def test_steps_of_no_duration_give_numbers_and_gradients(name):
    """The first step, one in the middle, and all of them."""
    cls = layers.get(name)
    layer, x = layers.build(name, 12, **cls.sample), torch.randn(2, 4, 12, requires_grad=True)
    for without in ([0, 1], [2], [0, 1, 2, 3]):
        spans = torch.rand(2, 4) + 0.5
        spans[:, without] = 0
        y, _ = layer(x, timespans=spans.requires_grad_())
        learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(y.cos().sum(), [x, spans, *learned], allow_unused=True)
        assert all(part.isfinite().all() for part in (y, *gradients) if part is not None)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("adjoint", [False, True])
def test_gradients_of_an_adaptive_solver(adjoint):
    """Those of the adjoint equation, and those through the solver's steps, are those of many steps of fixed length."""
    pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer = shaken(NeuralODE(DIM, 5, 1), 0.5)
    other = NeuralODE(DIM, 5, 1, "dopri5", rtol=1e-8, atol=1e-9, adjoint=adjoint)
    other.load_state_dict(layer.state_dict())
    layer.substeps = 60
    given = torch.randn(2, 2, DIM), torch.randn(2, DIM), torch.rand(2, 2) + 0.5
    found = []
    for each in (layer, other):
        x, state, spans = (value.clone().requires_grad_() for value in given)
        y, last = each(x, state, timespans=spans)
        loss = y.square().sum() + last.sin().sum()
        found.append((y, *torch.autograd.grad(loss, [x, state, spans, *each.parameters()])))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("double")
def test_an_adaptive_solver_streams_and_packs():
    pytest.importorskip("torchdiffeq", reason="needs the extra `ode`")
    layer, x, spans = shaken(NeuralODE(DIM, method="bosh3", rtol=1e-6)), torch.randn(1, 9, DIM), torch.rand(1, 9)
    whole, last = layer(x[:, :4], timespans=spans[:, :4])
    left, state = layer(x[:, :2], timespans=spans[:, :2])
    right, state = layer(x[:, 2:4], state, timespans=spans[:, 2:4])
    torch.testing.assert_close(torch.cat([left, right], 1), whole)
    torch.testing.assert_close(state, last)
    y, last = layer(x, cu_seqlens=torch.tensor([0, 4, 4, 9]), timespans=spans)
    torch.testing.assert_close(y[:, :4], whole)
    torch.testing.assert_close(y[:, 4:], layer(x[:, 4:], timespans=spans[:, 4:])[0])
    assert not last[1].any()
    assert layer(x[:, :0])[0].shape == (1, 0, DIM)


def test_a_solver_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    message = (
        r"neuralode: method is 'dopri5', expected one of euler, midpoint, rk4 because torchdiffeq is not installed"
    )
    with pytest.raises(ConfigError, match=message):
        NeuralODE(4, method="dopri5")(torch.zeros(1, 2, 4))


# --- the cells alone

CELLS = {layers.get(name).cell for name in layers.names() if issubclass(layers.get(name), TimedCell)} | {tarnn_cell}


@pytest.mark.parametrize("op", sorted(CELLS, key=lambda op: op.name), ids=lambda op: op.name)
def test_samples_of_a_cell(op):
    """Each sample runs; a state of None is zeros; its gradients are its derivatives; the wrong ones are refused."""
    for sample in op.samples:
        names = list(sample.operands)
        given = [sample.operands[name].requires_grad_() for name in names]

        def run(*values, names=names, options=sample.options):
            return op(**dict(zip(names, values, strict=True)), **options)

        assert torch.autograd.gradcheck(run, given, fast_mode=True)
        assert names[-1] == "state"
        torch.testing.assert_close(run(*given[:-1], None), run(*given[:-1], torch.zeros_like(given[-1])))
    assert any("cu_seqlens" in sample.options for sample in op.samples)
    assert any("cu_seqlens" not in sample.options for sample in op.samples)
    errors = list(op.errors)
    assert len(errors) >= 2
    for sample, message in errors:
        with pytest.raises(ShapeError, match=re.escape(f"{op.name}: {message}")):
            op(**sample.operands, **sample.options)


# --- initialisation


def test_init_of_ctrnn():
    layer = CTRNN(64)
    for weight in (layer.weight_ih, layer.weight_hh):
        assert_uniform(weight, -((6 / 192) ** 0.5), (6 / 192) ** 0.5)
    assert not layer.bias.any()
    torch.testing.assert_close(layer.time_constant(), torch.ones(1))
    assert_uniform(CTRNN(64, global_feedback=False).weight_ih, -((6 / 128) ** 0.5), (6 / 128) ** 0.5)


def test_init_of_cfc():
    """Xavier-uniform matrices: sqrt(6 / (fan in + fan out))."""
    layer = CfC(64, 96, hidden_dim=32, mixed_memory=True)
    assert_xavier(layer.rnn_cell.backbone["0"].weight)
    for name in ("ff1", "ff2", "time_a", "time_b"):
        assert_xavier(getattr(layer.rnn_cell, name).weight)
        assert_uniform(getattr(layer.rnn_cell, name).bias, -(32**-0.5), 32**-0.5)
    assert_xavier(layer.lstm.input_map.weight)
    assert_uniform(layer.lstm.input_map.bias, -0.1, 0.1)
    assert_orthogonal(layer.lstm.recurrent_map.weight, 1)
    pure = CfC(256, variant="pure").rnn_cell
    assert_xavier(pure.w_tau)
    assert (pure.A == 1).all()
    for part in CfCNCP(64).rnn_cell.maps():
        assert_xavier(part.ff1.weight)
        below, own = part.sparsity_mask.split([part.sparsity_mask.shape[1] - len(part.ff1.bias), len(part.ff1.bias)], 1)
        assert 0.4 < below.mean() < 0.7
        assert (own == 1).all()


def assert_xavier(weight):
    limit = (6 / sum(weight.shape)) ** 0.5
    assert_uniform(weight, -limit, limit)


def test_init_of_ltc():
    own = LTC(48, 64).rnn_cell
    for prefix, shape in (("", (64, 64)), ("sensory_", (48, 64))):
        for name, low, high in (("w", 0.001, 1), ("sigma", 3, 8), ("mu", 0.3, 0.8)):
            assert getattr(own, prefix + name).shape == shape
            assert_uniform(getattr(own, prefix + name), low, high)
        signs = getattr(own, f"{prefix}erev")
        assert (signs.abs() == 1).all()
        assert abs((signs == 1).float().mean() - 2 / 3) < 5 * (2 / 9 / signs.numel()) ** 0.5
    for name, low, high in (("gleak", 0.001, 1), ("vleak", -0.2, 0.2), ("cm", 0.4, 0.6)):
        assert_uniform(getattr(own, name), low, high)
    assert (own.input_w == 1).all()
    assert (own.output_w == 1).all()
    assert not own.input_b.any()
    assert not own.output_b.any()
    wired = NCP(48).rnn_cell
    assert torch.equal(wired.erev.abs(), wired.sparsity_mask)
    assert torch.equal(wired.sensory_erev.abs(), wired.sensory_sparsity_mask)
    fused = LTCFused(400, tau=2.0)
    torch.testing.assert_close(fused.log_tau.exp(), torch.full((400,), 2.0))
    assert (fused.A.abs() == 1).all()
    assert abs(fused.A.mean()) < 5 / 20
    assert_uniform(fused.recurrent_map.weight, -1 / 20, 1 / 20)


def test_init_of_irnn_and_tarnn():
    irnn = IRNN(64, 4)
    for weight in (irnn.W.weight, irnn.W.bias, irnn.U.weight):
        assert_uniform(weight, -1 / 8, 1 / 8)
    assert (irnn.eta == 0.01).all()
    low = IRNN(64, rank=20)
    assert (low.V2.shape, low.V.shape) == ((64, 20), (20, 64))
    for weight in (low.V2, low.V):
        assert_uniform(weight, -1 / 8, 1 / 8)
    for variant, start in (("b", -3), ("plain", 0)):
        layer = TARNN(64, 2, variant)
        for weight in (layer.W1, layer.W2, layer.Wg, layer.U1, layer.U2, layer.Ug, layer.B1, layer.B2):
            assert_normal(weight, 0.1)
        assert not layer.b1.any()
        assert (layer.bg == start).all()
        assert (layer.A1 == 0.01).all()


def test_init_of_fields():
    for field in (ODERNN(64).ode_func, NeuralODE(64, 100, 2).func):
        for each in (field.first, *field.deep, field.last):
            assert_normal(each.weight, 0.1)
            assert not each.bias.any()
    assert ODERNN(64).ode_func.deep[0].weight.shape == (100, 100)
    for weight in ODERNN(64).GRU_update.parameters():
        assert_uniform(weight, -1 / 8, 1 / 8)


# --- options

WRONG = [
    (lambda: ODEFWP(8, 3), "odefwp: num_heads is 3, expected a divisor of dim=8"),
    (lambda: ODEFWP(8, variant="heb"), "odefwp: unknown variant 'heb'; did you mean 'hebb'"),
    (lambda: ODEFWP(8, method="rk5"), "odefwp: unknown method 'rk5'; did you mean 'rk4'"),
    (lambda: ODEFWP(8, substeps=0), "odefwp: substeps is 0, expected at least 1"),
    (lambda: ODERNN(8, method="eulr"), "odernn: unknown method 'eulr'; did you mean 'euler'"),
    (lambda: ODERNN(8, substeps=0), "odernn: substeps is 0, expected at least 1"),
    (lambda: ODERNN(8, depth=-1), "odernn: depth is -1, expected at least 0"),
    (lambda: NeuralODE(8, method="dopri"), "neuralode: unknown method 'dopri'; did you mean 'dopri"),
    (lambda: NeuralODE(8, hidden_dim=0), "neuralode: hidden_dim is 0, expected at least 1"),
    (lambda: NeuralODE(8, rtol=0.0), "neuralode: rtol is 0.0, expected more than 0"),
    (lambda: NeuralODE(8, adjoint=True), "neuralode: adjoint is True, expected False because of method='rk4'"),
    (lambda: IRNN(8, 0), "irnn: substeps is 0, expected at least 1"),
    (lambda: IRNN(8, rank=0), "irnn: rank is 0, expected at least 1"),
    (lambda: IRNN(8, activation="rel"), "irnn: unknown activation 'rel'; did you mean 'relu'"),
    (lambda: IRNN(8, init="stat"), "irnn: unknown init 'stat'; did you mean 'state'"),
    (lambda: TARNN(8, 0), "tarnn: substeps is 0, expected at least 1"),
    (lambda: TARNN(8, variant="plan"), "tarnn: unknown variant 'plan'; did you mean 'plain'"),
    (lambda: TARNN(8, activation="tan"), "tarnn: unknown activation 'tan'; did you mean 'tanh'"),
    (lambda: CfC(8, 0), "cfc: width is 0, expected at least 1"),
    (lambda: CfC(8, depth=-1), "cfc: depth is -1, expected at least 0"),
    (lambda: CfC(8, variant="nogate"), "cfc: unknown variant 'nogate'; did you mean 'no_gate'"),
    (lambda: CfC(8, activation="lecun"), "cfc: unknown activation 'lecun'; did you mean 'lecun_tanh'"),
    (lambda: CfCNCP(8, 10), "cfc_ncp: width is 10, expected at least 3 more than dim=8"),
    (lambda: CfCNCP(8, sparsity_level=1.0), "cfc_ncp: sparsity_level is 1.0, expected less than 1"),
    (lambda: CfCNCP(8, seed=-1), "cfc_ncp: seed is -1, expected 0 to 4294967295"),
    (lambda: CfCNCP(8, variant="pur"), "cfc_ncp: unknown variant 'pur'; did you mean 'pure'"),
    (lambda: LTC(8, 7), "ltc: width is 7, expected at least dim=8"),
    (lambda: LTC(8, wiring="nc"), "ltc: unknown wiring 'nc'; did you mean 'ncp'"),
    (lambda: NCP(8, 10), "ncp: width is 10, expected at least 3 more than dim=8"),
    (lambda: LTC(8, substeps=0), "ltc: substeps is 0, expected at least 1"),
    (lambda: LTCFused(8, tau=0.0), "ltc_fused: tau is 0.0, expected more than 0"),
    (lambda: CTRNN(8, 0), "ctrnn: substeps is 0, expected at least 1"),
    (lambda: CTRNN(8, dt=0.0), r"ctrnn: dt is 0.0, expected more than 0"),
    (lambda: CTRNN(8, tau=-1.0), r"ctrnn: tau is -1.0, expected more than 0"),
]


@pytest.mark.parametrize(("build", "message"), WRONG)
def test_wrong_options_are_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
