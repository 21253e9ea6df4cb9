"""The language model of bytes that a command line names."""

import os

from scanl.errors import ConfigError
from scanl.learning import RunFolder
from scanl.models import LanguageModel
from scanl.models.byte_models import byte_model


def text_model(command: str, name: str) -> LanguageModel:
    """Return the model of a run on text, or the one of that name that comes with scanl."""
    if not os.path.isdir(name):
        return byte_model(name)
    model = RunFolder.open(name).load_model()
    if not isinstance(model, LanguageModel):
        raise ConfigError(f"{command}: model is {name}, a {model.name}, expected a run on text")
    return model
