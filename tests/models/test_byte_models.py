"""The models that come with scanl can be read, are small, and expect text."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import byte_model as training
from scanl.errors import ConfigError
from scanl.files import BYTE_MODELS
from scanl.models.byte_models import byte_model, byte_model_names


def test_models_are_small_and_expect_text() -> None:
    assert sum(path.stat().st_size for path in BYTE_MODELS.rglob("*.safetensors")) < 3 << 20
    text = torch.tensor(list(b"The President of the United States of America said"))[None]
    for name in byte_model_names():
        with torch.no_grad():
            logits, _ = byte_model(name)(text)
        bits = torch.nn.functional.cross_entropy(logits[0, :-1], text[0, 1:]) / torch.log(torch.tensor(2.0))
        assert bits < 3
    assert byte_model_names()[0] == "text"
    with pytest.raises(ConfigError, match="unknown byte model 'txet'; did you mean 'text'"):
        byte_model("txet")


def test_texts_are_copied_by_numbers(tmp_path, capfd) -> None:
    """A file is in or out by its name alone, so that the texts are the same on every machine."""
    (tmp_path / "a.py").write_bytes(b"one")
    training.write(tmp_path / "texts", [tmp_path / "a.py"])
    assert (tmp_path / "texts" / "00000.py").read_bytes() == b"one"
    assert "1 files, 3 bytes, sha256 7692c3ad" in capfd.readouterr().out
    assert training.share(Path("a.py")) == training.share(Path("a.py")) != training.share(Path("b.py"))
