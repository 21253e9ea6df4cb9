"""Files that contain the SHA-256 of their own bytes, so that a damaged file is detected.

The 64 hexadecimal digits are in the comment at the end of a zip archive, or in the metadata of a safetensors file. The
digest covers all other bytes. Other programs can read these files as usual.
"""

import hashlib
import json
from collections.abc import Mapping
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scanl.errors import CheckpointError
from scanl.files import written_whole

File = BufferedReader | BufferedRandom

DIGITS = 64
NO_DIGEST = b"0" * DIGITS
ZIP_MARK = b"scanl-sha256:"
# The metadata has only one entry, because safetensors writes several entries in arbitrary order. Its key and the
# beginning of its value are searched for separately: if a bit of one is flipped, the other still identifies our file.
KEY, VALUE = rb'"scanl":"', rb"{\"sha256\": \""


def seal_zip(path: Path) -> None:
    """Write the digest into the comment of an archive. The archive must have no comment; `torch.save` writes none."""
    with path.open("rb+") as file:
        file.seek(-2, 2)
        assert file.read(2) == b"\0\0", "the archive has a comment already"
        file.seek(-2, 2)
        file.write((len(ZIP_MARK) + DIGITS).to_bytes(2, "little") + ZIP_MARK)
        position = file.tell()
        file.write(NO_DIGEST)
        _write_digest(file, position)


def is_whole_zip(path: Path) -> bool:
    """Whether the archive has a correct digest from `seal_zip`."""
    with path.open("rb") as file:
        position = file.seek(0, 2) - DIGITS
        if position < len(ZIP_MARK):
            return False
        file.seek(position - len(ZIP_MARK))
        return file.read(len(ZIP_MARK)) == ZIP_MARK and file.read(DIGITS) == _digest(file, position)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write a safetensors file with its digest, atomically. about: further metadata, kept as JSON.

    Raises CheckpointError when the file cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    described = json.dumps({"sha256": NO_DIGEST.decode(), **(about or {})})
    with written_whole(path) as temporary:
        try:
            save_file(dict(tensors), temporary, metadata={"scanl": described})
        except SafetensorError as error:
            raise CheckpointError(f"{path} cannot be written: {error}") from error
        with temporary.open("rb+") as file:
            _write_digest(file, _header(file).index(KEY + VALUE) + len(KEY + VALUE))


def load_tensors(path: Path, who: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors of a safetensors file, and `about` as given to `save_tensors`; {} if another program wrote it.

    Raises CheckpointError when the file cannot be read or its digest is wrong. Files of other programs have no digest,
    so it is not checked.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with path.open("rb") as file:
            if not _is_whole(file):
                raise CheckpointError(f"{who}: {path} is damaged: its bytes do not fit its digest; copy it again")
        with safe_open(path, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
            about = json.loads((stored.metadata() or {}).get("scanl", "{}"))
    except CheckpointError:
        raise
    # torch opens the file too, with a RuntimeError where it cannot
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{who}: {path} cannot be read, or is damaged: {error}; copy it again") from error
    if not isinstance(about, dict):
        raise CheckpointError(f"{who}: {path} has metadata that are a {type(about).__name__}, expected an object")
    return tensors, about


def digest_of(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Return the SHA-256 of tensors with their names, dtypes and shapes, and of `about`, as hexadecimal digits."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _is_whole(file: File) -> bool:
    header = _header(file)
    if KEY not in header and VALUE not in header:
        return True  # from another program, or not safetensors at all, which the reader reports
    position = header.find(KEY + VALUE) + len(KEY + VALUE)
    return KEY + VALUE in header and header[position : position + DIGITS] == _digest(file, position)


def _header(file: File) -> bytes:
    """Return the header of a safetensors file: eight bytes with the length of the JSON, and the JSON."""
    size = file.seek(0, 2)
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    file.seek(0)
    return file.read(min(8 + length, size))


def _write_digest(file: File, position: int) -> None:
    digest = _digest(file, position)
    file.seek(position)
    file.write(digest)


def _digest(file: File, position: int) -> bytes:
    """Return the SHA-256 of all bytes except the digits at `position`."""
    digest, remaining = hashlib.sha256(), position
    file.seek(0)
    while remaining and (block := file.read(min(remaining, 2**20))):
        digest.update(block)
        remaining -= len(block)
    file.seek(position + DIGITS)
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest().encode()
