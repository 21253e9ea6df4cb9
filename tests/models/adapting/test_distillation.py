"""A model of Hyena, distilled into one of Laughing Hyena."""

import pytest
import torch

from scanl.errors import ConfigError
from scanl.models import LanguageModel, Stack, distil_model, hyena_dna


def test_a_distilled_model():
    """In a pattern with another layer, whose options stay; and what has no Hyena is refused."""
    torch.manual_seed(0)
    pattern = {"layer_options": {"hyena": {"max_length": 32, "hidden_dim": 8}, "lru": {"r_min": 0.5}}}
    model = LanguageModel(11, Stack(8, 3, ["hyena", "lru", "hyena"], **pattern))
    tokens = torch.randint(11, (2, 32))
    made, fits = distil_model(model, tolerance=1e-6)
    assert len(fits) == 2
    assert made.stack.config["layer"] == ["laughing_hyena", "lru", "laughing_hyena"]
    expected, found = model(tokens)[0], made(tokens)[0]
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    single = LanguageModel(11, Stack(8, 1, "hyena", layer_options={"max_length": 16, "hidden_dim": 8}))
    assert distil_model(single)[0].stack.config["layer"] == "laughing_hyena"
    dna = hyena_dna(8, 2, max_length=14)
    made, fits = distil_model(dna, tolerance=1e-6)
    assert len(fits) == 2
    expected, found = dna(tokens[:, :16])[0], made(tokens[:, :16])[0]  # as many as the filters have lags
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
    mixed = LanguageModel(11, Stack(8, 2, ["hyena_dna", "lru"], layer_options={"hyena_dna": {"max_length": 16}}))
    assert distil_model(mixed)[0].stack.config["layer"] == ["laughing_hyena", "lru"]
    with pytest.raises(ConfigError, match=r"distil_model: layers are \['lru'\], expected a model with hyena"):
        distil_model(LanguageModel(11, Stack(8, 1, "lru")))
