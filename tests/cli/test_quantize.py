"""`scanl quantize`: a run becomes a run, a model a model; what is refused."""

from pathlib import Path

import pytest
import torch

from scanl.cli import main
from scanl.layers.parts.quantized import QuantizedWeight
from scanl.learning import RunFolder, TrainConfig
from scanl.learning.run.config import build_model
from scanl.models import LanguageModel, Stack

TEXT = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that has ended, without training."""
    config = TrainConfig.of(data=[str(TEXT)], out=str(tmp_path / "run"), layer="lru", dim=64, depth=1)
    folder = RunFolder.fresh(config)
    folder.create(config)
    folder.save_model(build_model(config, folder.source.question), folder.source.digest())
    return folder.path


def test_a_run_becomes_a_run(run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "whole"
    assert main(["quantize", str(run), str(out), "--weights", "int4"]) == 0
    assert "weights of 4 bits" in capfd.readouterr().out
    folder = RunFolder.open(out)
    assert folder.stored()[1]["corpus"] == folder.source.digest()
    model = folder.load_model()
    assert isinstance(model, LanguageModel)
    assert any(isinstance(module, QuantizedWeight) for module in model.modules())
    tokens = torch.arange(9).view(1, -1)
    with torch.no_grad():
        assert torch.equal(LanguageModel.load(out)(tokens)[0], model(tokens)[0])
    for words, message in (
        (["quantize", out, tmp_path / "again"], "quantize: the model is quantized already"),
        (["quantize", run, out], "which is not empty, expected a new folder"),
        (["quantize", run, tmp_path / "other", "--weights", "int3"], "unknown weights of quantize 'int3'"),
        (["quantize", tmp_path / "none", tmp_path / "other"], "is not a folder, expected a run or the folder"),
        (["train", "--resume", out], "has weights of whole numbers, which are not trained"),
    ):
        assert main([str(word) for word in words]) == 2
        assert message in capfd.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_model_becomes_a_model(tmp_path: Path) -> None:
    LanguageModel(300, Stack(64, 1, "lru")).save(tmp_path / "float")
    assert main(["quantize", str(tmp_path / "float"), str(tmp_path / "whole")]) == 0
    assert any(isinstance(module, QuantizedWeight) for module in LanguageModel.load(tmp_path / "whole").modules())
