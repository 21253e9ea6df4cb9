"""The safetensors of a checkpoint, one file or several: names and shapes first, numbers one tensor at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scanl.errors import CheckpointError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DTYPES = ("F64", "F32", "BF16", "F16")


class Weights:
    """Every tensor of a checkpoint folder, by transformers' name. Nothing but safetensors is opened."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / INDEX
        if self.source.is_file():
            paths = [folder / name for name in dict.fromkeys(_index(self.source).values())]
        else:
            self.source = folder / ONE
            paths = [self.source]
            if not self.source.is_file():
                raise CheckpointError(_nothing(folder))
        self._files: dict[str, tuple[Path, Any]] = {}
        for path in paths:
            file = _open(path)
            self._files |= dict.fromkeys(file.keys(), (path, file))

    def check(self, expected: Mapping[str, tuple[int, ...]], spare: Mapping[str, str]) -> None:
        """CheckpointError unless these are the names and shapes.

        spare: names that may be there too, when they hold the same as another.
        """
        missing = sorted(expected.keys() - self._files.keys())
        over = sorted(self._files.keys() - expected.keys() - spare.keys())
        if missing or over:
            said = [f"{what} {', '.join(names)}" for what, names in (("lacks", missing), ("has also", over)) if names]
            raise CheckpointError(
                f"checkpoint: {self.source} {' and '.join(said)}; expected the weights that config.json describes"
            )
        for name, shape in expected.items():
            path, file = self._files[name]
            found = file.get_slice(name)
            if tuple(found.get_shape()) != shape:
                shapes = f"{tuple(found.get_shape())}, expected {shape} because of config.json"
                raise CheckpointError(f"checkpoint: {path}: {name} has shape {shapes}")
            if found.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"checkpoint: {path}: {name} is {found.get_dtype()}, expected one of {', '.join(DTYPES)}"
                )
        for name, same in spare.items():
            if name in self._files and not torch.equal(self.read(name), self.read(same)):
                raise CheckpointError(
                    f"checkpoint: {self._files[name][0]}: {name} differs from {same}, expected the same numbers "
                    "because config.json ties them (tie_word_embeddings)"
                )

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """A copy: the file is mapped to memory, where its tensors lie unaligned and change with it."""
        return self._files[name][1].get_tensor(name).to(device, dtype, copy=True)


def _index(path: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        names = set(found.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint: {path} is damaged, expected JSON with a weight_map") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"checkpoint: {path} names {name!r}, expected safetensors files in the same folder")
    return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint: {path} does not exist, expected because of {INDEX}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint: {path} is damaged or cut short ({error}), expected whole safetensors; copy it again"
        ) from error


def _nothing(folder: Path) -> str:
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if not pickled:
        return f"checkpoint: {folder} has no weights, expected {ONE} or {INDEX}"
    return (
        f"checkpoint: {folder} has pickled weights alone ({', '.join(pickled)}), expected {ONE}: unpickling may run "
        "any program; convert them with save_pretrained of transformers"
    )
