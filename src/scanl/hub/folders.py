"""The folder of a checkpoint: find or download it, read its config.json, write a new one."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from scanl.errors import CheckpointError

PATTERNS = ["*.json", "*.safetensors"]  # files to download from a repository: none of them is pickled


def locate(path_or_id: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Return the folder of a checkpoint. If there is no folder of that name, download it from the hub."""
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"checkpoint: {folder} is a file, expected a folder with config.json")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path_or_id)):
        raise CheckpointError(f"checkpoint: {folder} does not exist; name a folder, or OWNER/NAME on the hub")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"checkpoint: {folder} is not a folder, and only huggingface_hub can download it; "
            "pip install huggingface_hub"
        ) from error
    try:
        return Path(snapshot_download(str(path_or_id), revision=revision, allow_patterns=PATTERNS))
    except (OSError, ValueError) as error:  # the base classes of the hub's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"checkpoint: {folder} is not a folder, and the hub does not give it: {reason}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Return the entries of the folder's config.json."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint: {path} does not exist; name a folder that transformers has saved"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint: {path} is damaged ({error}), expected JSON; copy it again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"checkpoint: {path} holds a {type(config).__name__}, expected an object of options")
    return config


@contextmanager
def folder_written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`. When the block succeeds, flush it to disk and rename it to `path`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"save: {path} exists and is not empty; choose another folder, or remove it")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"save: {path} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
