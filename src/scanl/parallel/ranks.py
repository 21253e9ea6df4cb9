"""The processes that divide a sequence, in the order of time, and what they send each other."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from scanl.errors import ConfigError


class Ranks(Protocol):
    """Processes in the order of their stretches: `rank` of `size`, where rank 0 has the beginning of the sequence."""

    rank: int
    size: int

    def exchange(self, sent: Tensor | None, to: int, source: int, like: Tensor | None) -> Tensor | None:
        """Send a tensor to the rank `to` and return the one from the rank `source`, at the same time.

        Ranks outside of 0 ... size - 1 are nobody: what is sent to them is lost, and None comes from them.
        like: a tensor of the shape, dtype and device of what is received.
        """
        ...

    def everyone(self, numbers: Tensor) -> list[Tensor]:
        """Return the tensor of every rank; all have the same shape."""
        ...

    def reversed(self) -> "Ranks":
        """Return the same processes for a sequence that is read from its end."""
        ...


class Group:
    """The ranks of a group of torch.distributed. backward: time runs from the last rank to the first."""

    def __init__(self, group: ProcessGroup | None = None, *, backward: bool = False) -> None:
        if not dist.is_initialized():
            raise ConfigError("group: torch.distributed has no processes yet, expected init_process_group before")
        self.group, self.backward = group, backward
        self.size, number = dist.get_world_size(group), dist.get_rank(group)
        if number < 0:
            raise ConfigError("group: this process is not in the group, expected a group of which it is a member")
        self.rank = self._place(number)

    def _place(self, rank: int) -> int:
        return self.size - 1 - rank if self.backward else rank

    def reversed(self) -> "Group":
        return Group(self.group, backward=not self.backward)

    def everyone(self, numbers: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(tensors, numbers, group=self.group)
        return tensors[::-1] if self.backward else tensors

    def exchange(self, sent: Tensor | None, to: int, source: int, like: Tensor | None) -> Tensor | None:
        todo, received = [], None
        if sent is not None and 0 <= to < self.size:
            todo.append(dist.P2POp(dist.isend, _wire(sent), group=self.group, group_peer=self._place(to)))
        if like is not None and 0 <= source < self.size:
            received = torch.empty_like(_wire(like))
            todo.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=self._place(source)))
            _count.received += received.nbytes
        for work in dist.batch_isend_irecv(todo) if todo else ():
            work.wait()
        if received is None or like is None:
            return None
        return torch.view_as_complex(received) if like.is_complex() else received


def _wire(tensor: Tensor) -> Tensor:
    """Return what is sent: complex numbers as pairs, which every backend of torch.distributed sends."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous()


class _Count(threading.local):
    received = 0


_count = _Count()


@contextmanager
def received_bytes() -> Iterator[list[int]]:
    """A context whose list has one number at its end: the bytes that this process has received in it."""
    totals, start = [], _count.received
    yield totals
    totals.append(_count.received - start)
