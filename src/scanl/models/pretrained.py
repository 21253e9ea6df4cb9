"""Models that come with scanl: small language models of bytes, trained on source code and English prose.

`benchmarks/byte_model.py` has the commands that train them, and says what they have read.
"""

from pathlib import Path

from scanl.errors import nearest
from scanl.models.heads.language_model import LanguageModel
from scanl.models.saving import WEIGHTS

FOLDER = Path(__file__).with_name("weights")


def pretrained_names() -> list[str]:
    """Return the names that `pretrained` takes: "text" before the smaller "fast"."""
    return sorted((path.parent.name for path in FOLDER.glob(f"*/{WEIGHTS}")), reverse=True)


def pretrained(name: str = "text") -> LanguageModel:
    """Return a language model of bytes that comes with scanl, with weights of whole numbers of 8 bits.

    Raises ConfigError for an unknown name.
    """
    if name not in pretrained_names():
        raise nearest("pretrained model", name, pretrained_names())
    return LanguageModel.load(FOLDER / name)
