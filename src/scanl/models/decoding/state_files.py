"""Files of a text with the state of a model after a part of it: whole or not at all, with a digest, for one model."""

from array import array
from pathlib import Path
from typing import NamedTuple

import torch

from scanl.digests import digest_of, load_tensors, save_tensors
from scanl.errors import CheckpointError
from scanl.layers.state import State, restored, stored
from scanl.models.decoding.decodable import Decodable
from scanl.models.decoding.prefix_tree import Text
from scanl.models.saving import recorded


class ReadText(NamedTuple):
    """A text of a model. state: after the first `length` of the tokens."""

    tokens: Text
    length: int
    state: State


def model_digest(model: Decodable) -> str:
    """Return the digest of a model's configuration and weights. It reads all weights."""
    return digest_of(model.state_dict(), recorded(model))


def write_text(path: Path, text: ReadText, digest: str) -> None:
    """Write a file for `read_text`. digest: of the model. Raises CheckpointError if it cannot be written."""
    tokens = torch.tensor(text.tokens, dtype=torch.int32)
    save_tensors({"tokens": tokens, **stored(text.state)}, path, {"model": digest, "length": text.length})


def read_text(path: Path, model: Decodable, digest: str, who: str) -> ReadText:
    """Read a file of `write_text` for the same model, onto its device.

    Raises CheckpointError if the file is missing or damaged, or of another model or other weights.
    """
    tensors, about = load_tensors(path, who)
    if about.get("model") != digest or "tokens" not in tensors:
        raise CheckpointError(f"{who}: {path} is of another model or of other weights, expected a file of this model")
    tokens, length = _text(tensors.pop("tokens"), path, model.vocab_size), about.get("length")
    if not isinstance(length, int) or isinstance(length, bool) or not 0 <= length <= len(tokens):
        raise CheckpointError(f"{who}: {path} has length {length!r}, expected 0 to {len(tokens)} because of tokens")
    if length == 0:
        return ReadText(tokens, 0, None)
    if odd := [name for name, value in tensors.items() if value.shape[:1] != (1,)]:
        shape = tuple(tensors[odd[0]].shape)
        raise CheckpointError(f"{who}: {odd[0]} in {path} has shape {shape}, expected one row")
    return ReadText(tokens, length, restored(tensors, _form(model), path))


def tokens_of(path: Path) -> Text:
    """Return the tokens of a file of `write_text` without its state; its digest is not checked."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as tensors:
            tokens = tensors.get_tensor("tokens")
    except (OSError, RuntimeError, SafetensorError, TypeError) as error:  # torch opens the file too
        raise CheckpointError(f"{path} cannot be read, or is damaged: {error}") from error
    return _text(tokens, path)


def _text(tokens: torch.Tensor, path: Path, vocab_size: int = 2**31) -> Text:
    """Return the tokens of a file as a text."""
    if tokens.dtype != torch.int32 or tokens.ndim != 1:
        form = f"{tokens.dtype} {tuple(tokens.shape)}"
        raise CheckpointError(f"{path} is damaged: tokens are {form}, expected torch.int32 (n,)")
    text = array("i", tokens.tolist())
    if text and not 0 <= min(text) <= max(text) < vocab_size:
        odd = min(text) if min(text) < 0 else max(text)
        raise CheckpointError(f"{path} is damaged: tokens hold {odd}, expected 0 to {vocab_size - 1}")
    return text


@torch.no_grad()
def _form(model: Decodable) -> State:
    """Return a state of one row after a token. Some layers know the form of their state only when they run."""
    return model.next_logits(torch.zeros(1, 1, dtype=torch.long, device=model.device))[1]
