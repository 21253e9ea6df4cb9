"""Real-time recurrent learning of channelwise layers, against backpropagation through time over whole sequences."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from gradients import LowRank
from scanl.data.batch import Batch
from scanl.data.questions import FeatureInputs, Numbers
from scanl.errors import ConfigError, ShapeError
from scanl.layers import build
from scanl.layers.channelwise import ChannelwiseLayer
from scanl.layers.registry import classes
from scanl.learning.algorithms import BPTT, DiagonalRTRL, OnlineLRU
from scanl.learning.questions import answerer
from scanl.models import Stack

COVERS = ["layers/channelwise"]

TASK = answerer(Numbers(FeatureInputs(3), count=2))
STEPS = 64
ABLE = [cls for cls in classes() if cls.left_out is not None and cls.preset_of is None and not cls.bidirectional]
OPTIONS = {"qrnn": [{"pooling": "ifo"}, {"pooling": "f", "variant": "new"}], "s5": [{"conj_sym": False}]}
CASES = [(cls.name, options) for cls in ABLE for options in ({}, *OPTIONS.get(cls.name, ()))]


def model_of(layer: str, options=None, width: int = 6, depth: int = 1):
    torch.manual_seed(0)
    sample = next(cls.sample for cls in ABLE if cls.name == layer)
    model = TASK.model(Stack(width, depth, layer, layer_options={**sample, **(options or {})})).double()
    with torch.no_grad():
        for parameter in model.parameters():  # none is 0 or 1 at the start, where an error would not show
            parameter += 0.1 * torch.randn_like(parameter)
    return model, torch.randn(2, STEPS, 3).double(), torch.randn(2, STEPS, 2).double()


def gradients(model) -> dict[str, torch.Tensor]:
    """Of the parameters of the layers, by their names in the layer."""
    named = {name: parameter.grad for name, parameter in model.named_parameters() if ".mixer." in name}
    return {name: torch.zeros(()) if grad is None else grad.clone() for name, grad in named.items()}


def learn(algorithm, model, x, y, cuts) -> dict[str, torch.Tensor]:
    """Return the gradient of the mean loss over all steps, from blocks of `cuts` steps."""
    model.zero_grad()
    learner, at = algorithm.init(model, len(x)), 0
    for cut in cuts:
        loss, learner = algorithm.update(model, learner, Batch(x[:, at : at + cut], y[:, at : at + cut]))
        (loss * cut / x.shape[1]).backward()
        at += cut
    return gradients(model)


@pytest.mark.parametrize(("layer", "options"), CASES)
@pytest.mark.parametrize("cuts", [pytest.param([1] * 16 + [48], marks=pytest.mark.long), [1, 1, 5, 18, 39]])
def test_the_gradient_of_every_layer_is_exact_but_for_the_parameters_that_it_leaves_out(layer, options, cuts):
    model, x, y = model_of(layer, options)
    expected = learn(BPTT(TASK.loss), copy.deepcopy(model), x, y, [STEPS])
    found = learn(DiagonalRTRL(TASK.loss), model, x, y, cuts)
    left_out = [*model.stack.mixers()[0].left_out]
    if layer == "columnar_constructive":  # a stack: earlier stages act on later states
        left_out += [f"stages.{index}" for index in range(len(model.stack.mixers()[0].stages) - 1)]
    for name, value in expected.items():
        own = name.split(".mixer.")[1]
        error = (found[name] - value).abs().max() / value.abs().max().clamp(min=1e-12)
        if any(own == part or own.startswith(part + ".") for part in left_out):
            assert error > 1e-6, f"{name} is exact: it need not be left out"
        else:
            assert error < 1e-9, f"{name}: {error}"


def test_in_a_stack_the_gradient_of_the_top_layer_is_exact_and_that_of_lower_ones_better_than_truncated():
    model, x, y = model_of("lru", depth=2)
    expected = learn(BPTT(TASK.loss), copy.deepcopy(model), x, y, [STEPS])
    truncated = learn(BPTT(TASK.loss), copy.deepcopy(model), x, y, [4] * 16)
    found = learn(DiagonalRTRL(TASK.loss), model, x, y, [4] * 16)
    for name, value in expected.items():
        error = (found[name] - value).norm() / value.norm()
        top = "blocks.1." in name
        assert error < (1e-9 if top else 1)
        assert top or not truncated[name].any() or error <= (truncated[name] - value).norm() / value.norm()


def test_what_is_trained_once_is_not_trained_again_through_the_influence():
    """A frozen layer, and a model none of whose layers is trained."""
    model, x, y = model_of("mingru")
    for parameter in model.stack.mixers()[0].parameters():
        parameter.requires_grad_(False)
    found = learn(DiagonalRTRL(TASK.loss), model, x, y, [32, 32])
    assert not any(value.any() for value in found.values())


def test_the_layers_are_left_as_they_were_even_where_the_loss_raises():
    model, x, y = model_of("lru")
    algorithm = DiagonalRTRL(TASK.loss)
    learner = algorithm.init(model, 2)
    with pytest.raises(ShapeError):
        algorithm.update(model, learner, Batch(x[..., :2], y))
    assert all(layer.watcher is None for layer in model.modules() if isinstance(layer, ChannelwiseLayer))


def test_other_layers_are_refused_with_the_names_of_those_that_will_do():
    model = TASK.model(Stack(6, 2, ["lru", "gru"]))
    with pytest.raises(
        ConfigError, match=r"diagonal_rtrl: the model has the layer 'gru', expected .*: .*lru, .*mingru"
    ):
        DiagonalRTRL(TASK.loss).init(model, 2)


def adapted(layer, path, **options):
    model, x, y = model_of(layer)
    mixer = model.stack.mixers()[0]
    base = mixer.get_submodule(path)
    mixer.set_submodule(path, LowRank(base, base.weight.shape[1], **options))
    return model, x, y


@pytest.mark.parametrize(
    ("layer", "path"),
    [
        ("mingru", "to_hidden_and_gate"),
        ("hgrn", "input_proj"),
        ("indrnn", "fc"),
        ("qrnn", "linear"),
        ("columnar", "gates"),
        ("columnar_constructive", "stages.2.gates"),
        ("mamba", "dt_proj"),
    ],
)
def test_the_weights_of_an_adapter_are_followed_as_those_of_the_map(layer, path):
    expected = learn(BPTT(TASK.loss), *adapted(layer, path), [STEPS])
    left_out = [] if layer == "mamba" else [f"stack.blocks.0.mixer.{path}.{name}" for name in ("down", "up")]
    for algorithm in (DiagonalRTRL, OnlineLRU) if layer == "mingru" else (DiagonalRTRL,):
        found = learn(algorithm(TASK.loss), *adapted(layer, path), [1, 1, 23, 39])
        for name in left_out:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=0)


def test_an_adapter_without_a_weight_is_refused_before_anything_is_learned():
    model, _, _ = adapted("mingru", "to_hidden_and_gate", drop=0.1)
    with pytest.raises(ConfigError, match="LowRank: the adapter has dropout, expected none because an algorithm fol"):
        DiagonalRTRL(TASK.loss).init(model, 2)
    DiagonalRTRL(TASK.loss).init(model.eval(), 2)
    model, _, _ = adapted("mingru", "to_hidden_and_gate", after=nn.Tanh())
    with pytest.raises(ConfigError, match="LowRank: the adapter is not affine, expected a weight and a bias because"):
        OnlineLRU(TASK.loss).init(model, 2)


class Alone(nn.Module):
    """A layer as a model by itself, without norms and residual connections."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.stack = layer, self

    def mixers(self):
        return [self.layer]

    def init_state(self, batch_size, device=None):
        return self.layer.init_state(batch_size, device=device)


@pytest.mark.parametrize("cuts", [[9], [4, 5]])
def test_elstm_authors_program(cuts):
    """rtrl_layers.py of IDSIA/rtrl-elstm, in float64: the last memory, and the gradients of Σ ||c_t||²/2."""
    figures = json.loads((Path(__file__).parents[2] / "outside" / "elstm.json").read_text())
    layer = build("elstm", 4, output_gate=False).double()
    with torch.no_grad():
        for index, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(torch.sin(1.3 * torch.arange(parameter.numel()).double() + index).view(parameter.shape) / 2)
    x = torch.cos(0.7 * torch.arange(72).double()).view(2, 9, 4)

    def loss(model, batch, state):
        c, state = model.layer(batch.inputs, state)
        return c.square().sum() / 2, state

    model, algorithm, at = Alone(layer), DiagonalRTRL(loss), 0
    learner = algorithm.init(model, 2)
    for cut in cuts:
        value, learner = algorithm.update(model, learner, Batch(x[:, at : at + cut], x[:, at : at + cut]))
        value.backward()
        at += cut
    exact = {"dtype": torch.float64}
    torch.testing.assert_close(learner.state.flatten(), torch.tensor(figures["state"], **exact), rtol=1e-12, atol=0)
    for name, figure in figures["gradients"].items():
        grad = layer.get_parameter(name).grad
        torch.testing.assert_close(grad.flatten(), torch.tensor(figure, **exact), rtol=1e-11, atol=1e-13)
