"""LoRA by peft reaches every projection that is called."""

import importlib.util

import pytest
import torch
from torch import nn

from scanl import hub
from scanl.errors import ConfigError
from scanl.hub.lora import lora_config, projections, unreached
from scanl.models import LanguageModel, Stack

TOKENS = torch.tensor([[1, 2, 3, 4]])


def made(layer, **options):
    torch.manual_seed(0)
    return LanguageModel(7, Stack(8, 1, layer, layer_options=options))


def test_projections_are_the_linear_maps_that_are_called():
    model = made("gated_deltanet", num_heads=2)
    maps = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {*projections(model), "head"} == maps
    assert "stack.blocks.0.mixer.A_log" not in unreached(model)  # of one axis
    assert "stack.blocks.0.mixer.q_conv1d.weight" in unreached(model)
    reading = made("cornn")  # which reads the weights of i2h
    assert "stack.blocks.0.mixer.i2h" not in projections(reading)
    assert "stack.blocks.0.mixer.i2h.weight" in unreached(reading)


@pytest.mark.parametrize("layer", ["gated_deltanet", "cornn"])
def test_every_matrix_of_lora_gets_a_gradient(layer):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'scanl[lora]'")
    model = made(layer, **({"num_heads": 2} if layer == "gated_deltanet" else {}))
    expected, paths = model(TOKENS)[0], projections(model)
    adapted = peft.get_peft_model(model, lora_config(model, 2))
    torch.testing.assert_close(adapted(TOKENS)[0], expected)
    learnt = {name: weight for name, weight in adapted.named_parameters() if weight.requires_grad}
    assert len(learnt) == 2 * len(paths)
    with torch.no_grad():
        for name, weight in learnt.items():
            weight.copy_(torch.randn_like(weight) if "lora_B" in name else weight)
    logits, _ = adapted(TOKENS)
    logits.square().sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.any()) for weight in learnt.values())
    torch.testing.assert_close(adapted.merge_and_unload()(TOKENS)[0], logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft reads it
def test_lora_of_an_accelerated_model_leaves_out_what_the_patches_read():
    pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'scanl[lora]'")
    from hub_models import CASES

    model = CASES["mamba"].build()
    before = projections(model)
    hub.accelerate(model)
    assert projections(model) == before
    assert not any(path.endswith("dt_proj") for path in before)
    adapted = peft.get_peft_model(model, hub.lora_config(model, 2))
    adapted(TOKENS).logits.sum().backward()
    assert all(weight.grad is not None for name, weight in adapted.named_parameters() if "lora_B" in name)


@pytest.mark.skipif(importlib.util.find_spec("peft") is not None, reason="peft is installed")
def test_without_peft_the_extra_is_named():
    with pytest.raises(ConfigError, match=r"peft is not installed; pip install 'scanl\[lora\]'"):
        lora_config(made("gru"), 2)


def test_bad_arguments_are_refused():
    with pytest.raises(ConfigError, match="lora_config: rank is 0, expected"):
        lora_config(made("gru"), 0)
