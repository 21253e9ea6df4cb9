"""Models with weights of whole numbers: what they compute, their files, their compiled step, and what is refused."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import scanl
from scanl import ops
from scanl.errors import CheckpointError, ConfigError
from scanl.layers.parts.quantized import QuantizedEmbedding, QuantizedLinear
from scanl.layers.state import leaves
from scanl.models import LanguageModel, Stack, quantize


@pytest.fixture(autouse=True)
def _quickly() -> Iterator[None]:
    """Of the compiled kernels, only those of whole numbers run."""
    with ops.backend("reference", "cpu"):
        yield


def model_of(layer: str = "gla", depth: int = 1, **options: bool) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(300, Stack(64, depth, layer), **options).eval().requires_grad_(False)


def tokens_of(count: int = 9) -> torch.Tensor:
    return torch.randint(300, (2, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("weights", "error"), [("int8", 0.03), ("int4", 0.4)])
@pytest.mark.parametrize("tie", [False, True])
def test_a_quantized_model_is_near_the_float_one(weights: str, error: float, tie: bool) -> None:
    model, tokens = model_of(tie_embeddings=tie), tokens_of()
    expected = model(tokens)[0]
    report = quantize(model, weights)
    logits, state = model(tokens)
    assert (logits - expected).norm() <= error * expected.norm()
    assert not torch.equal(logits, expected)
    assert {leaf.dtype for _, leaf in leaves(state)} == {torch.float32}
    assert report.bytes < 0.5 * report.float_bytes
    assert "7 weights of 8 bits, " in str(report) or " weights of 4 bits" in str(report)
    assert isinstance(model.embedding, QuantizedEmbedding) == tie
    assert report.maps.get("embedding", 0) == (8 if tie else 0)
    assert all(isinstance(model.get_submodule(path), QuantizedLinear) for path in report.maps if path != "embedding")
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_bits_are_the_same_token_by_token() -> None:
    model, tokens = model_of(), tokens_of()
    quantize(model)
    with scanl.exact():
        whole, _ = model(tokens)
        state = None
        for t in range(tokens.shape[1]):
            y, state = model.step(tokens[:, t], state)
            assert torch.equal(y, whole[:, t])


@pytest.mark.parametrize("tie", [False, True])
def test_files_keep_whole_numbers(tmp_path: Path, tie: bool) -> None:
    model, tokens = model_of(tie_embeddings=tie), tokens_of()
    model.save(tmp_path / "float")
    quantize(model, "int4")
    model.save(tmp_path / "whole")
    again = LanguageModel.load(tmp_path / "whole")
    assert torch.equal(again(tokens)[0], model(tokens)[0])
    assert torch.equal(copy.deepcopy(again)(tokens)[0], model(tokens)[0])
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("float", "whole")]
    assert sizes[1] < 0.5 * sizes[0]


def test_a_damaged_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    quantize(model)
    monkeypatch.setattr("scanl.models.saving.quantized_paths", lambda _: {"stack.norm": 8})
    model.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"the weight of stack.norm has 8 bits, expected 4 or 8 of a linear map"):
        LanguageModel.load(tmp_path)


def test_training_is_refused() -> None:
    model = model_of().train()
    quantize(model)
    assert not model.training
    with pytest.raises(ConfigError, match="train: the model has weights of whole numbers, which are not trained"):
        model.train()
    model.eval().requires_grad_(True)
    with pytest.raises(ConfigError, match="quantized_linear: x needs a gradient, expected none because"):
        model(tokens_of())


def test_what_is_read_or_of_a_class_of_its_own_stays() -> None:
    model = LanguageModel(300, Stack(64, 1, "mamba", layer_options={"rank": 64})).eval()
    model.stack.blocks[0].channel.up.register_forward_hook(lambda *_: None)
    unquantized = quantize(model).unquantized
    assert {"embedding", "stack.blocks.0.mixer.dt_proj", "stack.blocks.0.channel.up"} <= set(unquantized)
    weight = model.get_submodule("stack.blocks.0.mixer.in_proj").weight
    assert (weight.shape, weight.dtype, weight.isnan().all()) == ((256, 64), torch.float32, True)
    assert "64, 256, bits=8" in repr(model)


def test_bad_input_is_refused() -> None:
    model = model_of()
    with pytest.raises(ConfigError, match="unknown weights of quantize 'int9'; did you mean 'int8'"):
        quantize(model, "int9")
    with pytest.raises(ConfigError, match=r"quantize: model is a str, expected a torch\.nn\.Module"):
        quantize("gla")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="quantize: Linear has no linear map that can be quantized, expected one"):
        quantize(nn.Linear(8, 8))
    quantize(model)
    with pytest.raises(ConfigError, match="quantize: the model is quantized already, expected a float model"):
        quantize(model)


class Tied(nn.Module):
    """An embedding, and a linear map to the logits that has its weight, as models of transformers have them."""

    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(rows, 64), nn.Linear(64, rows, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_a_tied_head_has_the_numbers_of_its_embedding() -> None:
    """Of 8 bits: a unit vector reads a column of the weight from the map, and the embedding has it too."""
    model = Tied(301, tied=True)
    report = quantize(model, "int4")
    assert report.maps == {"embedding": 8, "head": 8}
    columns = model.head(torch.eye(64))
    torch.testing.assert_close(columns.T, model.embedding(torch.arange(301)), rtol=1e-6, atol=0)
    assert quantize(Tied(301, tied=False), "int4").maps == {"head": 4}


@pytest.mark.parametrize("rows", [2**14, 2**14 - 1])
def test_an_embedding_alone_is_quantized_from_a_million_numbers_on(rows: int) -> None:
    assert ("embedding" in quantize(Tied(rows, tied=False)).maps) == (rows * 64 >= 2**20)
