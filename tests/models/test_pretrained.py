"""The models that come with scanl can be read, are small, and expect text."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.models.pretrained import FOLDER, pretrained, pretrained_names


def test_models_are_small_and_expect_text() -> None:
    assert sum(path.stat().st_size for path in FOLDER.rglob("*.safetensors")) < 3 << 20
    text = torch.tensor(list(b"The President of the United States of America said"))[None]
    for name in pretrained_names():
        with torch.no_grad():
            logits, _ = pretrained(name)(text)
        bits = torch.nn.functional.cross_entropy(logits[0, :-1], text[0, 1:]) / torch.log(torch.tensor(2.0))
        assert bits < 3
    assert pretrained_names()[0] == "text"
    with pytest.raises(ConfigError, match="unknown pretrained model 'txet'; did you mean 'text'"):
        pretrained("txet")
