"""The weights of a checkpoint, in one file or several. Names and shapes are read first, numbers on demand."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from scanl.errors import CheckpointError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
NUMBERED_FILES = "model_[0-9]*.safetensors"  # the files of xlstm where there are several, without an index
PICKLED_FILES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INTEGERS = {"I8": torch.int8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Safetensors:
    """The tensors of an open safetensors file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the dtype as safetensors names it."""
        return self._file.get_slice(name).get_dtype()

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name)


class Member:
    """One of several vectors that a file stores as one tensor, (n, H) or (n, 1, 1, H): it has the shape (1, 1, H)."""

    def __init__(self, file: "Stored", stored: str, at: int) -> None:
        self._file, self._stored, self._at = file, stored, at

    def shape(self, name: str) -> tuple[int, ...]:
        return 1, 1, self._file.shape(self._stored)[-1]

    def dtype(self, name: str) -> str:
        return self._file.dtype(self._stored)

    def tensor(self, name: str) -> Tensor:
        return self._file.tensor(self._stored)[self._at].reshape(1, 1, -1)


class StateDict:
    """The tensors of a file of torch.save."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        dtype = self._tensors[name].dtype
        return NAMES.get(dtype, str(dtype))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]


Stored: TypeAlias = Safetensors | StateDict | Member


class Weights:
    """All tensors of a checkpoint, by the names in its files.

    source: a folder with safetensors files, or one file.   pickled: the file of torch.save that the folder has where it
    has no safetensors file; None for none. It is read with `weights_only=True`, which runs no program.
    described_by: what the sizes in messages come from.
    """

    def __init__(self, source: Path, pickled: str | None = None, described_by: str = "config.json") -> None:
        self._because = described_by
        self.source = source / ONE if source.is_dir() else source
        if pickled is not None and not self.source.is_file() and (source / pickled).is_file():
            self.source = source / pickled
        if self.source.is_file():  # transformers then ignores an index file
            self._files: dict[str, tuple[Path, Stored]] = _tensors(self.source)
            return
        numbered = sorted(source.glob(NUMBERED_FILES))
        if numbered and not (source / INDEX).is_file():
            self.source, self._files = source, _together(numbered)
            return
        self.source = source / INDEX
        if not self.source.is_file():
            raise CheckpointError(_nothing(source, pickled))
        index, contents = _index(self.source), set[tuple[str, str]]()
        self._files = {}
        for file in dict.fromkeys(index.values()):
            tensors = _tensors(source / file)
            self._files |= tensors
            contents |= {(name, file) for name in tensors}
        wrong = sorted(contents ^ set(index.items()))
        if wrong:
            name, file = wrong[0]
            named = index.get(name) == file
            holds, says = ("does not hold", "says that it does") if named else ("holds", "does not say so")
            raise CheckpointError(
                f"checkpoint: {source / file} {holds} {name!r}, but {INDEX} {says}; copy the checkpoint again"
            )

    def divide(self, end: str, ends: Sequence[str]) -> None:
        """Give the vectors of one tensor names of their own, with `ends` for `end`. Other files have them like that."""
        for name in [name for name in self._files if name.endswith(end)]:
            path, file = self._files[name]
            shape, members = file.shape(name), [name.removesuffix(end) + other for other in ends]
            if shape[:-1] in ((len(ends),), (len(ends), 1, 1)) and not self._files.keys() & members:
                del self._files[name]
                self._files |= {member: (path, Member(file, name, at)) for at, member in enumerate(members)}

    def names(self) -> Set[str]:
        """Return the names of all tensors."""
        return self._files.keys()

    def shape(self, name: str, axes: int) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises CheckpointError if there is none, or for another number of axes."""
        self._all_there(missing={name} - self._files.keys())
        path, file = self._files[name]
        shape = file.shape(name)
        if len(shape) != axes:
            raise CheckpointError(f"checkpoint: {path}: {name} has shape {shape}, expected {axes} axes")
        return shape

    def depth(self, blocks: str) -> int:
        """Return the number of blocks. blocks: prefix of the blocks' weights, before the number of the block."""
        return len({name.removeprefix(blocks).split(".")[0] for name in self._files if name.startswith(blocks)})

    def check_sizes(self, expected: Mapping[str, tuple[int, ...]], blocks: str, depth: int, entry: str) -> None:
        """Raise CheckpointError unless the weights in `expected` have these shapes, and there are `depth` blocks.

        blocks: prefix of the blocks' weights, before the number of the block.   entry: what `depth` is called there.
        Nothing is allocated, so a wrong size in config.json cannot ask for more memory than the weights take.
        """
        self._all_there(missing=expected.keys() - self._files.keys())
        for name, shape in expected.items():
            self._check_shape(name, shape)
        if self.depth(blocks) != depth:
            raise CheckpointError(
                f"checkpoint: {self.source} has {self.depth(blocks)} blocks named {blocks}*, expected {depth} because "
                f"of {entry} in {self._because}"
            )

    def check(
        self, expected: Mapping[str, tuple[int, ...]], spare: Mapping[str, str | None], integers: Set[str] = frozenset()
    ) -> None:
        """Raise CheckpointError unless the weights have the names and shapes in `expected`.

        spare: names that may exist too, each with the name of a weight that must have the same numbers; None for any.
        integers: names of weights that are whole numbers of 8 bits.
        """
        names = self._files.keys()
        self._all_there(missing=expected.keys() - names, over=names - expected.keys() - spare.keys())
        for name, shape in expected.items():
            self._check_shape(name, shape, INTEGERS if name in integers else DTYPES)
        for name, same in spare.items():
            if same is not None and name in self._files and not torch.equal(self.read(name), self.read(same)):
                raise CheckpointError(
                    f"checkpoint: {self._files[name][0]}: {name} differs from {same}, expected the same numbers "
                    "because the model has one tensor for both"
                )

    def _all_there(self, **names: Set[str]) -> None:
        """Raise CheckpointError when there are names in `missing` or `over`."""
        what = {"missing": "lacks", "over": "has the extra weights"}
        problems = [f"{what[kind]} {', '.join(sorted(weights))}" for kind, weights in names.items() if weights]
        if problems:
            raise CheckpointError(
                f"checkpoint: {self.source} {' and '.join(problems)}; "
                f"expected the weights that {self._because} describes"
            )

    def _check_shape(self, name: str, shape: tuple[int, ...], dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        path, file = self._files[name]
        if file.shape(name) != shape:
            shapes = f"{file.shape(name)}, expected {shape} because of {self._because}"
            raise CheckpointError(f"checkpoint: {path}: {name} has shape {shapes}")
        if file.dtype(name) not in dtypes:
            raise CheckpointError(
                f"checkpoint: {path}: {name} is {file.dtype(name)}, expected one of {', '.join(dtypes)}"
            )

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """Return a copy of a tensor. Tensors in the mapped file are not aligned, and they change with the file."""
        return self._files[name][1].tensor(name).to(device, dtype, copy=True)


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


def _tensors(path: Path) -> dict[str, tuple[Path, Stored]]:
    """Return the file's tensors by name, each with its path and the file that has it."""
    if path.suffix == ".safetensors":
        names, file = _safetensors(path)
    else:
        names, file = _state_dict(path)
    odd = [name for name in names if not name.isprintable()]  # would break the line of a message or move the cursor
    if odd:
        raise CheckpointError(f"checkpoint: {path} has a weight named {odd[0]!r}, expected a name that can be printed")
    return dict.fromkeys(names, (path, file))


def _together(paths: Sequence[Path]) -> dict[str, tuple[Path, Stored]]:
    """Return the tensors of several files by name. Raises CheckpointError for a name that two of them have."""
    files: dict[str, tuple[Path, Stored]] = {}
    for path in paths:
        tensors = _tensors(path)
        for name in sorted(tensors.keys() & files.keys()):
            raise CheckpointError(f"checkpoint: {path} holds {name!r}, expected it in {files[name][0].name} alone")
        files |= tensors
    return files


def _safetensors(path: Path) -> tuple[list[str], Safetensors]:
    try:
        file = safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint: {path} does not exist, but {INDEX} names it; copy it again") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint: {path} is damaged or cut short ({error}); copy it again") from error
    return file.keys(), Safetensors(file)


def _state_dict(path: Path) -> tuple[list[str], StateDict]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file may raise anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"checkpoint: {path} cannot be read without running what it contains ({reason}), expected tensors by "
            "name, as torch.save writes them"
        ) from error
    if not isinstance(tensors, Mapping):
        raise CheckpointError(f"checkpoint: {path} holds a {type(tensors).__name__}, expected tensors by name")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"checkpoint: {path} holds a {type(tensor).__name__} named {name!r}, expected dense tensors alone"
            )
        if tensor.nbytes > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"checkpoint: {path}: {name} repeats its numbers, expected each number once")
    return list(tensors), StateDict(tensors)


def _nothing(folder: Path, pickled: str | None) -> str:
    files = sorted(path.name for pattern in PICKLED_FILES for path in folder.glob(pattern))
    if pickled is not None:
        return f"checkpoint: {folder} has no weights, expected {ONE}, {INDEX} or {pickled}"
    if not files:
        return f"checkpoint: {folder} has no weights, expected {ONE} or {INDEX}"
    return (
        f"checkpoint: {folder} has pickled weights alone ({', '.join(files)}), expected {ONE}: unpickling may run "
        "any program; convert them with save_pretrained of transformers"
    )
