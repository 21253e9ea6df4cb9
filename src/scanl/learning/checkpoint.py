"""Reading a checkpoint without trusting it: tensors and plain values only, never unpickled objects."""

import pickle
from pathlib import Path
from typing import Any

import torch

from scanl.errors import CheckpointError


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What `AtomicCheckpointIO` wrote; CheckpointError when it is missing, cut short or of another kind."""
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"checkpoint: {path} does not exist") from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"checkpoint: {path} is damaged or cut short; put back a whole copy, or remove it to start again"
        ) from error
    if not isinstance(checkpoint, dict) or "scanl" not in checkpoint:
        raise CheckpointError(f"checkpoint: {path} was not written by `scanl train`; name another run")
    return checkpoint
