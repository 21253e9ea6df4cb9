"""Checkpoints of runs in which every process has a shard of each tensor.

The numbers of divided tensors are in a folder beside the checkpoint, in one safetensors file a process, which
torch.distributed.checkpoint writes and reads. The checkpoint has everything else, and in the place of these tensors
others without numbers (torch's device "meta"). It names the folder and the digests of its files, and is renamed last: a
run that is killed while it writes still has the checkpoint before, and the folder of that one.
"""

import hashlib
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import empty as empty_shards
from torch.utils import _pytree as pytree

from scanl.errors import CheckpointError
from scanl.learning.run.checkpoint import read_checkpoint, write_checkpoint

STEM = "shards-"  # of the names of folders


def write_shards(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint with `DTensor`s. All processes call this, each with its shards.

    Raises CheckpointError when a file cannot be written.
    """
    divided = {key: leaf for key, leaf in _leaves(checkpoint).items() if isinstance(leaf, DTensor)}
    folder = _agreed(_unused(path.parent) if dist.get_rank() == 0 else None)
    try:
        save(divided, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        raise CheckpointError(f"{folder} cannot be written: {' '.join(str(error).split())}") from error
    digests = _digests(folder)
    if dist.get_rank() == 0:
        emptied = _mapped(lambda _, leaf: _without_numbers(leaf) if isinstance(leaf, DTensor) else leaf, checkpoint)
        write_checkpoint({**emptied, "shards": {"folder": folder.name, "digests": digests}}, path)
        for other in _folders(path.parent).values():
            if other != folder:
                shutil.rmtree(other)
    dist.barrier()


def read_shards(path: Path, mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Read a checkpoint, with or without shards.

    mesh: of the processes that want a shard of what was divided; None for whole tensors. Raises CheckpointError.
    """
    checkpoint = read_checkpoint(path)
    if "shards" not in checkpoint:
        return checkpoint
    folder = path.parent / checkpoint["shards"]["folder"]

    def room(leaf: Tensor) -> Tensor:
        if mesh is None:
            return torch.empty(leaf.shape, dtype=leaf.dtype)
        return empty_shards(leaf.shape, dtype=leaf.dtype, device_mesh=mesh, placements=[Shard(0)])

    emptied = [leaf for leaf in _leaves(checkpoint).values() if isinstance(leaf, Tensor) and leaf.is_meta]
    needed, held = sum(leaf.nbytes for leaf in emptied), sum(file.stat().st_size for file in folder.glob("*"))
    if needed > held:
        raise CheckpointError(
            f"checkpoint: {path} needs {needed} bytes of {folder}, which has {held}; put back a whole copy"
        )
    rooms = {key: room(leaf) for key, leaf in _leaves(checkpoint).items() if isinstance(leaf, Tensor) and leaf.is_meta}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each process reads for itself
            load(rooms, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (CheckpointException, OSError, SafetensorError, RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"checkpoint: {folder} cannot be read: {' '.join(str(error).split())}") from error
    return _mapped(lambda key, leaf: rooms.get(key, leaf), checkpoint)


def check_shards(checkpoint: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError unless the folder of shards, if the checkpoint has one, is as it was written."""
    if "shards" not in checkpoint:
        return
    folder = path.parent / checkpoint["shards"]["folder"]
    for name, digest in checkpoint["shards"]["digests"].items():
        try:
            complete = _digest(folder / name) == digest
        except OSError as error:
            raise CheckpointError(f"checkpoint: {folder / name} cannot be read: {error.strerror}") from error
        if not complete:
            raise CheckpointError(
                f"checkpoint: {folder / name} is damaged or cut short: its bytes do not fit its digest; put back a "
                f"whole copy, or remove {path.name} to start again"
            )


def _folders(parent: Path) -> dict[int, Path]:
    """Return the folders of shards by their numbers. A killed process may have left some; other names are not ours."""
    named = {path.name.removeprefix(STEM): path for path in parent.glob(f"{STEM}*")}
    return {int(number): path for number, path in named.items() if number.isdecimal()}


def _unused(parent: Path) -> Path:
    """Return the path of a folder with a number after all others."""
    return parent / f"{STEM}{max(_folders(parent), default=0) + 1}"


def _agreed(path: Path | None) -> Path:
    """Return the path that the first process names."""
    paths = [path]
    dist.broadcast_object_list(paths)
    (agreed,) = paths
    assert agreed is not None
    return agreed


def _digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file by its name. The processes divide the work."""
    files = sorted(folder.iterdir())[dist.get_rank() :: dist.get_world_size()]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, {file.name: _digest(file) for file in files})
    return {name: digest for digests in every for name, digest in digests.items()}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _without_numbers(leaf: DTensor) -> Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")


def _leaves(checkpoint: dict[str, Any]) -> dict[str, Any]:
    return {pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(checkpoint)}


def _mapped(change: Callable[[str, Any], Any], checkpoint: dict[str, Any]) -> dict[str, Any]:
    return pytree.tree_map_with_path(lambda path, leaf: change(pytree.keystr(path), leaf), checkpoint)
