"""Training checkpoints: written atomically with a digest, and read without unpickling objects."""

import re
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from scanl.digests import is_whole_zip, seal_zip
from scanl.errors import CheckpointError
from scanl.files import written_whole

NUMBER = int, float
PARTS: dict[str, tuple[type, ...]] = {  # what a checkpoint has, and the types
    "state_dict": (dict,), "optimizer_states": (list,), "lr_schedulers": (list,), "loops": (dict,),
    "callbacks": (dict,), "epoch": (int,), "global_step": (int,), "metrics": (dict,), "best": (dict,), "scanl": (dict,),
}  # fmt: skip
OWN_PARTS: dict[str, tuple[type, ...]] = {  # what its entry "scanl" has
    "config": (dict,), "corpus": (str,), "rows": (int,), "plan": (dict,), "seconds": NUMBER, "loss_sum": NUMBER,
    "loss_count": NUMBER, "carried": (dict,), "place": (dict,), "position": (dict, NoneType),
}  # fmt: skip


def write_checkpoint(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a checkpoint for `read_checkpoint`. Raises CheckpointError when the file cannot be written."""
    with written_whole(path) as temporary:
        try:
            with temporary.open("wb") as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:
            # On a full disk torch fails again when it closes the archive; raise the first error, not that one.
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        seal_zip(temporary)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote. Raises CheckpointError for a missing, damaged, foreign or incomplete file."""
    checkpoint = read_whole(path, "scanl train")
    _check(path, checkpoint, PARTS)
    _check(path, checkpoint["scanl"], OWN_PARTS)
    _check(path, checkpoint["scanl"]["plan"], {"steps": (int,)})
    _check(path, checkpoint["scanl"]["place"], {"batch": (int,), "step": (int,)})
    _check(path, checkpoint["metrics"], {"size": (int,), "sha256": (str,)})
    _check(path, checkpoint["state_dict"], dict.fromkeys(checkpoint["state_dict"], (Tensor,)))
    if "shards" in checkpoint:
        _check(path, checkpoint, {"shards": (dict,)})
        _check(path, checkpoint["shards"], {"folder": (str,), "digests": (dict,)})
        for name in (checkpoint["shards"]["folder"], *checkpoint["shards"]["digests"]):
            if not isinstance(name, str) or not re.fullmatch(r"\w[\w.-]*", name):
                raise CheckpointError(f"checkpoint: {path} names {name!r}, expected a file or a folder beside it")
    return checkpoint


def _check(path: Path, values: dict[str, Any], forms: dict[str, tuple[type, ...]]) -> None:
    """Raise CheckpointError unless the values have these names and types."""
    if lacking := [name for name in forms if name not in values]:
        raise CheckpointError(
            f"checkpoint: {path} lacks {', '.join(lacking)}; another version of scanl wrote it; resume with that "
            "version"
        )
    for name, kinds in forms.items():
        if not isinstance(values[name], kinds) or (isinstance(values[name], bool) and bool not in kinds):
            kind, expected = type(values[name]).__name__, " or ".join(each.__name__ for each in kinds)
            raise CheckpointError(
                f"checkpoint: {path} has a {name} of {kind}, expected {expected}; put back a whole copy"
            )


def read_whole(path: Path, command: str) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote for a command. Raises CheckpointError for a missing or damaged file."""
    try:
        complete = is_whole_zip(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True) if complete else {}
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint: {path} does not exist; name a run that has one") from error
    except Exception as error:  # a file that was made to do harm may raise anything
        raise CheckpointError(f"checkpoint: {path} cannot be read: {' '.join(str(error).split())}") from error
    if not complete:
        raise CheckpointError(
            f"checkpoint: {path} is damaged or cut short, or was not written by `{command}`: its bytes do not fit "
            "its digest; put back a whole copy, or remove it to start again"
        )
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"checkpoint: {path} holds a {type(checkpoint).__name__}, expected a dict")
    return checkpoint
