"""The safetensors of a checkpoint, one file or several: names and shapes first, numbers one tensor at a time."""

import json
import re
from collections.abc import Mapping, Set
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
        self.source = folder / ONE
        if self.source.is_file():  # where an index is too, transformers leaves it alone
            self._files = _tensors(self.source)
            return
        self.source = folder / INDEX
        if not self.source.is_file():
            raise CheckpointError(_nothing(folder))
        index, held = _index(self.source), set[tuple[str, str]]()
        self._files = {}
        for file in dict.fromkeys(index.values()):
            tensors = _tensors(folder / file)
            self._files |= tensors
            held |= {(name, file) for name in tensors}
        wrong = sorted(held ^ set(index.items()))
        if wrong:
            name, file = wrong[0]
            says = "names" if index.get(name) == file else "does not name"
            raise CheckpointError(
                f"checkpoint: {self.source} {says} {file} for {name!r}, expected what each file holds"
            )

    def check_sizes(self, expected: Mapping[str, tuple[int, ...]], blocks: str, depth: int) -> None:
        """CheckpointError unless some weights have these shapes, and there are so many blocks, whose names so begin.

        It allocates nothing, so that no size in config.json can ask for more memory than the weights have.
        """
        self._all_there(missing=expected.keys() - self._files.keys())
        for name, shape in expected.items():
            self._check_shape(name, shape)
        numbers = {name.removeprefix(blocks).split(".")[0] for name in self._files if name.startswith(blocks)}
        if len(numbers) != depth:
            raise CheckpointError(
                f"checkpoint: {self.source} has {len(numbers)} blocks named {blocks}*, expected {depth} because of "
                "num_hidden_layers in config.json"
            )

    def check(self, expected: Mapping[str, tuple[int, ...]], spare: Mapping[str, str]) -> None:
        """CheckpointError unless these are the names and shapes.

        spare: names that may be there too, when they hold the same as another.
        """
        names = self._files.keys()
        self._all_there(missing=expected.keys() - names, over=names - expected.keys() - spare.keys())
        for name, shape in expected.items():
            self._check_shape(name, shape)
        for name, same in spare.items():
            if name in self._files and not torch.equal(self.read(name), self.read(same)):
                raise CheckpointError(
                    f"checkpoint: {self._files[name][0]}: {name} differs from {same}, expected the same numbers "
                    "because config.json ties them (tie_word_embeddings)"
                )

    def _all_there(self, **names: Set[str]) -> None:
        """names: those missing, and those over."""
        what = {"missing": "lacks", "over": "has also"}
        said = [f"{what[kind]} {', '.join(sorted(found))}" for kind, found in names.items() if found]
        if said:
            raise CheckpointError(
                f"checkpoint: {self.source} {' and '.join(said)}; expected the weights that config.json describes"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        path, file = self._files[name]
        found = file.get_slice(name)
        if tuple(found.get_shape()) != shape:
            shapes = f"{tuple(found.get_shape())}, expected {shape} because of config.json"
            raise CheckpointError(f"checkpoint: {path}: {name} has shape {shapes}")
        if found.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"checkpoint: {path}: {name} is {found.get_dtype()}, expected one of {', '.join(DTYPES)}"
            )

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """A copy: the file is mapped to memory, where its tensors lie unaligned and change with it."""
        return self._files[name][1].get_tensor(name).to(device, dtype, copy=True)


def _index(path: Path) -> dict[str, str]:
    """Which file holds which tensor."""
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        names = set(found.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint: {path} is damaged, expected JSON with a weight_map") from error
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(f"checkpoint: {path} names {name!r}, expected safetensors files in the same folder")
    return found


def _tensors(path: Path) -> dict[str, tuple[Path, Any]]:
    """Its tensors by name, each with the file and the handle that reads it."""
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint: {path} does not exist, expected because of {INDEX}") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint: {path} is damaged or cut short ({error}), expected whole safetensors; copy it again"
        ) from error
    names = file.keys()
    odd = [name for name in names if not name.isprintable()]  # a message of several lines, or one that moves the cursor
    if odd:
        raise CheckpointError(f"checkpoint: {path} has a weight named {odd[0]!r}, expected a name that can be printed")
    return dict.fromkeys(names, (path, file))


def _nothing(folder: Path) -> str:
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if not pickled:
        return f"checkpoint: {folder} has no weights, expected {ONE} or {INDEX}"
    return (
        f"checkpoint: {folder} has pickled weights alone ({', '.join(pickled)}), expected {ONE}: unpickling may run "
        "any program; convert them with save_pretrained of transformers"
    )
