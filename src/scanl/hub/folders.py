"""The folder of a checkpoint: find or download it, read its config.json, write a new one."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError

from scanl.errors import CheckpointError, ConfigError
from scanl.files import temporary_path

PATTERNS = ["*.json", "config.yaml", "*.safetensors"]  # files to download from a repository: none of them is pickled
FILES = (".pth", ".pt", ".safetensors")  # ends of the names of files that are checkpoints by themselves


def locate(path_or_id: str | os.PathLike[str], revision: str | None = None, pickled: str | None = None) -> Path:
    """Return the folder of a checkpoint, or its file. If there is none of that name, download a folder from the hub.

    pickled: a file that is downloaded too.
    """
    folder = Path(path_or_id)
    if folder.is_dir() or (folder.is_file() and folder.suffix in FILES):
        return folder
    if folder.exists():
        raise CheckpointError(
            f"checkpoint: {folder} is a file, expected a folder with config.json, or a file {', '.join(FILES)} of RWKV"
        )
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
        patterns = PATTERNS if pickled is None else [*PATTERNS, pickled]
        return Path(snapshot_download(str(path_or_id), revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the base classes of the hub's errors
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"checkpoint: {folder} is not a folder, and the hub does not give it: {reason}"
        ) from error


def read_config(folder: Path) -> tuple[dict[str, Any], Path]:
    """Return the entries of the folder's config.json, or of its config.yaml, and the path of that file."""
    path = next((folder / name for name in ("config.json", "config.yaml") if (folder / name).exists()), None)
    if path is None:
        raise CheckpointError(
            f"checkpoint: {folder / 'config.json'} does not exist; name a folder that transformers has saved, or a "
            "checkpoint of the authors' program"
        )
    try:
        config = json.loads(path.read_bytes()) if path.suffix == ".json" else yaml.safe_load(path.read_bytes())
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        expected = path.suffix[1:].upper()
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint: {path} is damaged ({reason}), expected {expected}; copy it again"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"checkpoint: {path} holds a {type(config).__name__}, expected an object of options")
    return config, path


@contextmanager
def folder_written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary folder next to `path`. When the block succeeds, flush it to disk and rename it to `path`."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CheckpointError(f"save: {path} exists and is not empty; choose another folder, or remove it")
    temporary = temporary_path(path)
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


def read_tokenizer(folder: Path, who: str) -> Any:
    """Return the tokenizer of transformers in a folder. who: what needs it, for messages."""
    try:
        # from its own module: through the package, a type checker reads every model of transformers
        from transformers.models.auto.tokenization_auto import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{who}: --hub reads text with transformers; pip install transformers") from error
    # Without tokenizer files transformers makes an empty tokenizer instead of failing.
    if not any(file.name.startswith(("tokenizer", "vocab")) for file in folder.glob("*")):
        raise CheckpointError(f"{who}: {folder} has no tokenizer, expected tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{who}: {folder} has no tokenizer that transformers reads: {reason}") from error
