"""The safetensors of a checkpoint, in one file or several. Names and shapes are read first, numbers on demand."""

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
    """All tensors of a checkpoint folder, by transformers' names. Only safetensors files are opened."""

    def __init__(self, folder: Path) -> None:
        self.source = folder / ONE
        if self.source.is_file():  # transformers then ignores an index file
            self._files = _tensors(self.source)
            return
        self.source = folder / INDEX
        if not self.source.is_file():
            raise CheckpointError(_nothing(folder))
        index, contents = _index(self.source), set[tuple[str, str]]()
        self._files = {}
        for file in dict.fromkeys(index.values()):
            tensors = _tensors(folder / file)
            self._files |= tensors
            contents |= {(name, file) for name in tensors}
        wrong = sorted(contents ^ set(index.items()))
        if wrong:
            name, file = wrong[0]
            named = index.get(name) == file
            holds, says = ("does not hold", "says that it does") if named else ("holds", "does not say so")
            raise CheckpointError(
                f"checkpoint: {folder / file} {holds} {name!r}, but {INDEX} {says}; copy the checkpoint again"
            )

    def check_sizes(self, expected: Mapping[str, tuple[int, ...]], blocks: str, depth: int) -> None:
        """Raise CheckpointError unless the weights in `expected` have these shapes, and there are `depth` blocks.

        blocks: prefix of the blocks' weights, before the number of the block. Nothing is allocated, so a wrong size in
        config.json cannot ask for more memory than the weights take.
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
        """Raise CheckpointError unless the weights have the names and shapes in `expected`.

        spare: names that may exist too, each with the name of a weight that must have the same numbers.
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
        """Raise CheckpointError when there are names in `missing` or `over`."""
        what = {"missing": "lacks", "over": "has the extra weights"}
        problems = [f"{what[kind]} {', '.join(sorted(weights))}" for kind, weights in names.items() if weights]
        if problems:
            raise CheckpointError(
                f"checkpoint: {self.source} {' and '.join(problems)}; expected the weights that config.json describes"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        path, file = self._files[name]
        tensor = file.get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            shapes = f"{tuple(tensor.get_shape())}, expected {shape} because of config.json"
            raise CheckpointError(f"checkpoint: {path}: {name} has shape {shapes}")
        if tensor.get_dtype() not in DTYPES:
            raise CheckpointError(
                f"checkpoint: {path}: {name} is {tensor.get_dtype()}, expected one of {', '.join(DTYPES)}"
            )

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return a copy of a tensor. Tensors in the mapped file are not aligned, and they change with the file."""
        return self._files[name][1].get_tensor(name).to(device, dtype, copy=True)


def _index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor."""
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        names = set(weight_map.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint: {path} is damaged, expected JSON with a weight_map; copy it again"
        ) from error
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(f"checkpoint: {path} names {name!r}, expected safetensors files in the same folder")
    return weight_map


def _tensors(path: Path) -> dict[str, tuple[Path, Any]]:
    """Return the file's tensors by name, each with its path and the handle that reads it."""
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint: {path} does not exist, but {INDEX} names it; copy it again") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint: {path} is damaged or cut short ({error}); copy it again") from error
    names = file.keys()
    odd = [name for name in names if not name.isprintable()]  # would break the line of a message or move the cursor
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
