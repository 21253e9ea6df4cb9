"""The models that come with scanl can be read, are small, and expect text."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.models.byte_models import FOLDER, byte_model, byte_model_names


def test_models_are_small_and_expect_text() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")) < 3 << 20
    text = torch.tensor(list(b"The President of the United States of America said"))[None]
    for name in byte_model_names():
        with torch.no_grad():
            logits, _ = byte_model(name)(text)
        bits = torch.nn.functional.cross_entropy(logits[0, :-1], text[0, 1:]) / torch.log(torch.tensor(2.0))
        assert bits < 3
    assert byte_model_names()[0] == "text"
    with pytest.raises(ConfigError, match="unknown byte model 'txet'; did you mean 'text'"):
        byte_model("txet")
