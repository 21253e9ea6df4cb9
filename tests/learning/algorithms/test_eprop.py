"""Local rules: against autograd with a constant recurrent input, and against the traces of the papers in a loop."""

import pytest
import torch
from torch.nn import functional as F

from gradients import QUESTION, by_bptt, cosine, difference, learned, numbers, parts, tiny
from scanl.errors import ConfigError
from scanl.layers import CTRNN
from scanl.learning.algorithms import RFLO, EProp, SnAp
from scanl.ops import backend
from scanl.ops.cell import products_hold_inputs

pytestmark = pytest.mark.cells_by_loop
LEAKY = {"ctrnn": {"substeps": 1, "dt": 0.25}}


def test_in_the_context_an_lstm_is_one_whose_recurrent_input_is_detached():
    layer = tiny("lstm").stack.blocks[0].mixer
    x = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    with backend("reference"), products_hold_inputs():
        y, _ = layer(x)
    weights = [layer.weight_ih_l0, layer.weight_hh_l0, layer.bias_ih_l0, layer.bias_hh_l0]
    w, u, b, b_u = weights
    h, c, hs = x.new_zeros(2, 4), x.new_zeros(2, 4), []
    for t in range(5):
        i, f, g, o = (F.linear(x[:, t], w, b) + F.linear(h.detach(), u, b_u)).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        hs.append(h)
    torch.testing.assert_close(y, torch.stack(hs, 1))
    cotangent = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, *weights], cotangent)
    for value, expected in zip(found, torch.autograd.grad(torch.stack(hs, 1), [x, *weights], cotangent), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.parametrize("layers", [("lstm",), ("ctrnn",), ("gru", "lstm")])
def test_eprop_is_backpropagation_with_a_constant_recurrent_input(layers):
    model, batch = tiny(*layers), numbers(8)
    with backend("reference"), products_hold_inputs():
        expected = by_bptt(model, batch)
    for size in (1, 4):
        gradients, learner = learned(EProp(QUESTION.loss), model, parts(batch, size))
        assert difference(gradients, expected) < 1e-9
    assert 0.5 < cosine(gradients, by_bptt(model, batch)) < 1 - 1e-6
    if len(layers) == 1:
        own = [leaf for leaf in learner.influence if leaf.shape[1] == 4]
        assert own
        assert all(leaf.shape[2] <= 2 for leaf in own)


def test_rflo_is_the_rule_of_the_paper():
    torch.manual_seed(0)
    model, batch = tiny("ctrnn", layer_options=LEAKY, channel_mixer="none"), numbers(7, rows=1)
    layer = model.stack.blocks[0].mixer
    assert isinstance(layer, CTRNN)
    gradients, _ = learned(RFLO(QUESTION.loss, seed=3), model, parts(batch, 1))
    feedback = torch.randn(2, 4, generator=torch.Generator().manual_seed(3)) / 2**0.5
    outputs, _ = model(batch.inputs)
    error = 2 * (outputs - batch.targets) / batch.targets.numel()
    with torch.no_grad():
        h, trace, total = torch.zeros(4).double(), torch.zeros(4, 9).double(), torch.zeros(4, 9).double()
        x = model.stack.blocks[0].mixer_norm(model.input(batch.inputs))[0]
        for t in range(7):
            joined = torch.cat([h, x[t], torch.ones(1).double()])
            phi = torch.tanh(layer.weight_hh @ h + layer.weight_ih @ x[t] + layer.bias)
            trace = (1 - 0.25) * trace + 0.25 * (1 - phi**2)[:, None] * joined
            h = (1 - 0.25) * h + 0.25 * phi
            total += (error[0, t] @ feedback.double())[:, None] * trace
    named = dict(zip(("weight_hh", "weight_ih", "bias"), total.split([4, 4, 1], 1), strict=True))
    expected = {f"stack.blocks.0.mixer.{name}": value.reshape(-1) for name, value in named.items()}
    assert difference({name: gradients[name].flatten() for name in expected}, expected) < 1e-9
    exact = by_bptt(model, batch)
    torch.testing.assert_close(gradients["head.weight"], exact["head.weight"])  # the readout has its own gradient


def test_the_traces_are_those_of_snap_1_if_no_unit_has_a_weight_to_itself():
    model, batch = tiny("ctrnn", layer_options=LEAKY, channel_mixer="none"), numbers(6)
    with torch.no_grad():
        model.stack.blocks[0].mixer.weight_hh.fill_diagonal_(0)
    _, local = learned(EProp(QUESTION.loss), model, parts(batch, 1))
    _, sparse = learned(SnAp(QUESTION.loss), model, parts(batch, 1))
    own = [leaf for leaf in local.influence if leaf.shape[1] == 4]
    same = [leaf for leaf in sparse.influence if leaf.shape[1] == 4]
    assert {leaf.shape for leaf in own} == {leaf.shape for leaf in same}
    largest = max(own, key=torch.Tensor.numel), max(same, key=torch.Tensor.numel)
    torch.testing.assert_close(*largest)


def test_random_feedback_is_for_one_layer():
    algorithm, model = RFLO(QUESTION.loss), tiny("elman", "elman")
    with pytest.raises(ConfigError, match="rflo: the stack has 2 layers, expected one because feedback is 'random'"):
        algorithm.update(model, algorithm.init(model, 2), numbers(1))


def test_random_feedback_is_for_rows_of_one_length():
    algorithm, model = RFLO(QUESTION.loss), tiny("elman")
    batch = numbers(3)._replace(mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(
        ConfigError, match="rflo: the batch has a mask, expected an answer at every step of rows of one"
    ):
        algorithm.update(model, algorithm.init(model, 2), batch)


def traces(layer, x, signal):
    """Return the gradient of the weights by e-prop, from the traces of the paper in a loop over steps and weights.

    x: what the layer reads (T, D).   signal: L (T, D), the error that reaches each neuron.
    """
    alpha, gamma, size = layer.leak, layer.gamma, len(x[0])
    rho, beta = getattr(layer, "decay", 0.0), getattr(layer, "beta", 0.0)
    u = layer.weight_hh.detach().clone().fill_diagonal_(0)
    v = a = z = psi = x.new_zeros(size)
    by_v, by_a = x.new_zeros(size, 2 * size + 1), x.new_zeros(size, 2 * size + 1)  # one vector for each synapse
    total = torch.zeros_like(by_v)
    for now, error in zip(x, signal, strict=True):
        before = torch.cat([z, now, x.new_ones(1)])
        by_a = psi[:, None] * by_v + (rho - beta * psi)[:, None] * by_a
        by_v = alpha * by_v + before
        a = rho * a + z
        v = alpha * v + u @ z + layer.weight_ih @ now + layer.bias - z
        off = v - 1 - beta * a
        z, psi = (off > 0).to(x.dtype), gamma * (1 - off.abs()).clamp(min=0)
        total += error[:, None] * psi[:, None] * (by_v - beta * by_a)
    recurrent, inputs, bias = total.split([size, size, 1], 1)
    return {"weight_hh": recurrent.fill_diagonal_(0), "weight_ih": inputs, "bias": bias[:, 0]}


@pytest.mark.parametrize("layer", ["lif", "alif"])
def test_eprop_of_spiking_neurons_has_the_traces_of_the_paper(layer):
    """LIF: presynaptic spikes, filtered, times ψ. ALIF: the eligibility vector of v and a."""
    options = {"tau": 3.0, **({"decay": 0.9, "beta": 0.4} if layer == "alif" else {})}
    model, batch = tiny(layer, layer_options={layer: options}, channel_mixer="none"), numbers(40, rows=1)
    neurons = model.stack.blocks[0].mixer
    torch.nn.init.constant_(neurons.bias, 0.2)
    gradients, learner = learned(EProp(QUESTION.loss), model, parts(batch, 8))
    seen = []
    hook = neurons.register_forward_hook(lambda _, inputs, result: seen.extend([inputs[0][0], result[0]]))
    outputs, _ = model(batch.inputs)
    hook.remove()
    x, z = seen
    (signal,) = torch.autograd.grad(F.mse_loss(outputs, batch.targets), z)
    assert 5 < z.sum() < 100
    with torch.no_grad():
        expected = {f"stack.blocks.0.mixer.{name}": value for name, value in traces(neurons, x, signal[0]).items()}
    assert difference(gradients, expected) < 1e-9
    own = {leaf.shape[2] for leaf in learner.influence if leaf.shape[1] == 4}
    assert own == {1 if layer == "lif" else 2}  # numbers of a neuron that a weight is followed in
