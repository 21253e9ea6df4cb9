"""torchrun as the launcher: the number of its processes, and the message of the first to the others."""

import json
import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from scanl.errors import ConfigError

WAIT = timedelta(hours=1)  # for the first process, which reads the data before


def started() -> bool:
    """Return whether torchrun has started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def processes() -> int:
    """Return the number of processes on all machines."""
    return int(os.environ["WORLD_SIZE"]) if started() else 1


def machines() -> int:
    """Return the number of machines; torchrun starts as many processes on each."""
    return processes() // int(os.environ["LOCAL_WORLD_SIZE"]) if started() else 1


def rank() -> int:
    """Return the number of this process, counted over all machines."""
    return int(os.environ["RANK"])


def tell(folder: str = "", error: str = "") -> None:
    """Tell the other processes the folder of the run, or why there is none."""
    _store().set(_key(), json.dumps({"folder": folder, "error": error}))


def told() -> str:
    """Return the folder of the run, once the first process has told it. Raises ConfigError if it has failed instead."""
    try:
        message = json.loads(_store().get(_key()))
    except dist.DistError as error:
        raise ConfigError("train: the first process of torchrun does not answer; see what it says") from error
    if message["error"]:
        raise ConfigError(message["error"])
    return message["folder"]


def _store() -> TCPStore:
    """Return a connection to the store by which torchrun's processes find each other."""
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=WAIT)


def _key() -> str:
    return f"scanl/{os.environ['TORCHELASTIC_RESTART_COUNT']}"
