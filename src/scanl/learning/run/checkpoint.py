"""Training checkpoints: written atomically with a digest, and read without unpickling objects."""

import pickle
from pathlib import Path
from typing import Any

import torch

from scanl.digests import is_whole_zip, seal_zip
from scanl.errors import CheckpointError
from scanl.files import written_whole

PARTS = (
    "state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "epoch", "global_step", "metrics", "best",
    "scanl",
)  # fmt: skip
OWN_PARTS = (
    "config",
    "corpus",
    "rows",
    "plan",
    "seconds",
    "loss_sum",
    "loss_count",
    "carried",
    "position",
)  # keys in "scanl"


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
    lacking = [name for name in PARTS if name not in checkpoint]
    lacking = lacking or [name for name in OWN_PARTS if name not in checkpoint["scanl"]]
    if lacking:
        raise CheckpointError(
            f"checkpoint: {path} lacks {', '.join(lacking)}; another version of scanl wrote it; resume with that "
            "version"
        )
    return checkpoint


def read_whole(path: Path, command: str) -> dict[str, Any]:
    """Read what `write_checkpoint` wrote for a command. Raises CheckpointError for a missing or damaged file."""
    try:
        complete = is_whole_zip(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True) if complete else {}
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint: {path} does not exist; name a run that has one") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"checkpoint: {path} cannot be read: {' '.join(str(error).split())}") from error
    if not complete:
        raise CheckpointError(
            f"checkpoint: {path} is damaged or cut short, or was not written by `{command}`: its bytes do not fit "
            "its digest; put back a whole copy, or remove it to start again"
        )
    return checkpoint
