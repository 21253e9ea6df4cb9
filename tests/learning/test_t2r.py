"""A softmax transformer becomes a T2R model, whose feature maps are learned from it."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.layers.memory.t2r import T2R
from scanl.learning import t2r
from scanl.models import LanguageModel, Stack

VOCAB = 40
OPTIONS = {"num_heads": 4, "num_kv_heads": 2, "rope_base": 50.0}


def teacher():
    torch.manual_seed(0)
    return LanguageModel(VOCAB, Stack(16, 2, "attention", layer_options=OPTIONS), tie_embeddings=True).eval()


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (4, 12), generator=generator) for _ in range(count)]


def test_a_converted_model_has_the_weights_of_the_transformer():
    model = teacher()
    converted = t2r.convert(model, 8)
    mine, theirs = converted.state_dict(), model.state_dict()
    assert {name for name in mine if ".phi_" not in name} == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    mixer = [module for module in converted.modules() if isinstance(module, T2R)][1]
    assert (mixer.num_kv_heads, mixer.rope_base, mixer.rotated, mixer.num_features) == (2, 50.0, 4, 8)


def test_feature_maps_are_learned_and_nothing_else_changes():
    model = teacher()
    converted = t2r.convert(model, 16)
    before = {name: value.clone() for name, value in converted.state_dict().items()}
    losses = t2r.learn_feature_maps(converted, model, batches(25), lr=3e-2)
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    for name, value in converted.state_dict().items():
        assert torch.equal(value, before[name]) == (".phi_" not in name), name
    assert not any(parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_the_loss_is_relative():
    """Without features every layer gives 0, which is as far from the teacher's outputs as these are large."""
    model = teacher()
    converted = t2r.convert(model, 4)
    for name, parameter in converted.named_parameters():
        if ".phi_" in name:
            torch.nn.init.zeros_(parameter)
    assert t2r.learn_feature_maps(converted, model, batches(1)) == pytest.approx([1.0])


def test_the_rate_falls_as_a_cosine():
    """While the gradient stays the same, each step of Adam is as long as its rate."""
    model = teacher()
    converted = t2r.convert(model, 4)
    before = {name: value.clone() for name, value in converted.state_dict().items()}
    t2r.learn_feature_maps(converted, model, batches(1) * 10, lr=1e-5)
    moved = max((value - before[name]).abs().max().item() for name, value in converted.state_dict().items())
    assert moved == pytest.approx(5.5e-5, rel=0.02)  # the sum of ten rates that fall from 1e-5


def test_a_converted_model_is_saved_and_read_back(tmp_path):
    converted = t2r.convert(teacher(), 8)
    converted.save(tmp_path)
    tokens = batches(1)[0]
    assert torch.equal(LanguageModel.load(tmp_path)(tokens)[0], converted(tokens)[0])


def test_another_model_is_refused():
    model = LanguageModel(VOCAB, Stack(16, 1, "hawk", layer_options={"num_heads": 2}))
    with pytest.raises(ConfigError, match="t2r: a mixer of the model is 'hawk', expected 'attention' in every block"):
        t2r.convert(model)
    with pytest.raises(ConfigError, match="t2r: a mixer of the model is 'attention', expected 't2r' in every block"):
        t2r.learn_feature_maps(teacher(), teacher(), batches(1))
