"""Quantized models of transformers: accelerated, decoded, saved and read; and checkpoints that scanl reads."""

from pathlib import Path

import pytest
import torch

from scanl import hub, ops
from scanl.errors import CheckpointError
from scanl.layers.parts.quantized import QuantizedWeight
from scanl.models import quantize

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(2, 14).view(1, -1)


def mamba(tie: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 70, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 4}
    config = transformers.MambaConfig(**sizes, tie_word_embeddings=tie)
    model = transformers.MambaForCausalLM(config).eval().requires_grad_(False)
    hub.accelerate(model)
    return model


@pytest.mark.parametrize("tie", [True, False])
def test_folders_keep_whole_numbers(tie: bool, tmp_path: Path) -> None:
    model = mamba(tie)
    with ops.backend("reference", "cpu"):
        expected = model(TOKENS).logits
        report = hub.quantize(model, "int4")
        logits = model(TOKENS).logits
        assert (logits - expected).norm() <= 0.3 * expected.norm()
        assert "backbone.layers.0.mixer.dt_proj" in report.unquantized  # the patch reads its weight
        assert report.maps.get("backbone.embeddings") == (8 if tie else None)
        generated = model.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.save_pretrained(tmp_path)
        hub.enable_quantized()
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        hub.accelerate(again)
        assert torch.equal(again(TOKENS).logits, logits)
        assert torch.equal(again.generate(TOKENS, max_new_tokens=3, do_sample=False, pad_token_id=0), generated)
        ours = hub.load(tmp_path)
        assert sum(isinstance(module, QuantizedWeight) for module in ours.modules()) == len(report.maps) - tie
        torch.testing.assert_close(ours(TOKENS)[0], logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tie", [True, False])
def test_a_checkpoint_is_quantized_saved_and_read(tie: bool, tmp_path: Path) -> None:
    mamba(tie).save_pretrained(tmp_path / "float")
    model = hub.load(tmp_path / "float")
    with ops.backend("reference", "cpu"), torch.no_grad():
        quantize(model)
        hub.save(model, tmp_path / "whole", like=tmp_path / "float")
        again = hub.load(tmp_path / "whole", dtype=torch.float32)
        assert torch.equal(again(TOKENS)[0], model(TOKENS)[0])
    config = tmp_path / "whole" / "config.json"
    config.write_text(config.read_text().replace('"modules": {', '"modules": [], "other": {'))
    with pytest.raises(CheckpointError, match=r"quantization_config has modules \[\], expected bits by paths"):
        hub.load(tmp_path / "whole")
