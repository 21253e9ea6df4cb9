"""Models that come with scanl: small language models of bytes, trained on source code and English prose.

`benchmarks/byte_model.py` has the commands that train them, and says what they have read.
"""

from scanl.errors import nearest
from scanl.files import BYTE_MODELS
from scanl.models.heads.language_model import LanguageModel
from scanl.models.saving import WEIGHTS


def byte_model_names() -> list[str]:
    """Return the names that `byte_model` takes."""
    return sorted((path.parent.name for path in BYTE_MODELS.glob(f"*/{WEIGHTS}")), reverse=True)


def byte_model(name: str = "text") -> LanguageModel:
    """Return a language model of bytes that comes with scanl, with weights of whole numbers of 8 bits.

    Raises ConfigError for an unknown name.
    """
    if name not in byte_model_names():
        raise nearest("byte model", name, byte_model_names())
    return LanguageModel.load(BYTE_MODELS / name)
