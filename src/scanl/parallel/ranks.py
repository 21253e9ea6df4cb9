"""The processes that divide a sequence, in the order of time, and what they send each other."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from scanl.errors import ConfigError, ProcessError

TIMEOUT = timedelta(seconds=45)  # every rank has raised its error within a minute
NOTICE = timedelta(seconds=0.5)  # of waiting, after which a rank notes where it is
ANSWER = timedelta(seconds=2)  # in which the others note it, and the store answers


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

    def in_turn(self) -> "Ranks":
        """Return the same processes, each of which waits for others while they work."""
        ...


class RankGroup:
    """The ranks of a group of torch.distributed. backward: time runs from the last rank to the first.

    timeout: how long a rank waits for another.   patient: it waits as long as the group does. Then it raises
    ProcessError, as it does at once for a rank that has ended.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        backward: bool = False,
        timeout: timedelta = TIMEOUT,
        patient: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("group: torch.distributed has no processes yet, expected init_process_group before")
        self.group, self.backward, self.timeout, self.patient = group, backward, timeout, patient
        self.size, number = dist.get_world_size(group), dist.get_rank(group)
        if number < 0:
            raise ConfigError("group: this process is not in the group, expected a group of which it is a member")
        self.rank = self._place(number)

    def _place(self, rank: int) -> int:
        return self.size - 1 - rank if self.backward else rank

    def reversed(self) -> "RankGroup":
        return RankGroup(self.group, backward=not self.backward, timeout=self.timeout, patient=self.patient)

    def in_turn(self) -> "RankGroup":
        return RankGroup(self.group, backward=self.backward, timeout=self.timeout, patient=True)

    def everyone(self, numbers: Tensor) -> list[Tensor]:
        tensors = [torch.empty_like(numbers) for _ in range(self.size)]
        work = dist.all_gather(tensors, numbers, group=self.group, async_op=True)
        assert work is not None
        self._meet(work)
        return tensors[::-1] if self.backward else tensors

    def _meet(self, work: Work) -> None:
        """Wait until all ranks have come. Raises ProcessError that says which have not."""
        group = self.group or dist.group.WORLD
        assert group is not None
        _count.meetings[group.group_name] += 1
        notes = _Notes(group, _count.meetings[group.group_name])
        begin, pause = time.monotonic(), 2e-5
        try:
            while not work.is_completed():  # a wait with a time limit returns at once with NCCL
                waited = timedelta(seconds=time.monotonic() - begin)
                if waited >= NOTICE:
                    notes.write(dist.get_rank(group))
                if waited >= self.timeout and not self.patient:
                    raise TimeoutError
                time.sleep(pause)
                pause = min(1.5 * pause, 0.01)
            work.wait()
        except (RuntimeError, TimeoutError) as error:
            missing = sorted(map(self._place, notes.missing(dist.get_rank(group), self.size)))
            late = f"has not come within {self.timeout.total_seconds():g} seconds"
            state = late if isinstance(error, TimeoutError) else "has ended, or lost its connection"
            raise ProcessError(
                f"parallel: {_ranks(missing)} {state}, expected all {self.size} ranks to begin call {notes.call}; rank "
                f"{self.rank} has. Look at what it printed, or give a longer timeout if it had other work"
            ) from error

    def exchange(self, sent: Tensor | None, to: int, source: int, like: Tensor | None) -> Tensor | None:
        todo, received, others = [], None, set[int]()
        if sent is not None and 0 <= to < self.size:
            todo.append(dist.P2POp(dist.isend, _wire(sent), group=self.group, group_peer=self._place(to)))
            others.add(to)
        if like is not None and 0 <= source < self.size:
            received = torch.empty_like(_wire(like))
            todo.append(dist.P2POp(dist.irecv, received, group=self.group, group_peer=self._place(source)))
            others.add(source)
            _count.received += received.nbytes
        try:
            for work in dist.batch_isend_irecv(todo) if todo else ():
                work.wait() if self.patient else work.wait(self.timeout)
        except RuntimeError as error:
            limit = "the timeout of the group" if self.patient else f"{self.timeout.total_seconds():g} seconds"
            raise ProcessError(
                f"parallel: rank {self.rank} has lost {_ranks(sorted(others))} in an exchange, expected an answer "
                f"within {limit}: it has ended, hangs, or waits itself for another. Look at what it printed"
            ) from error
        if received is None or like is None:
            return None
        return torch.view_as_complex(received) if like.is_complex() else received


def _ranks(numbers: list[int]) -> str:
    """Return "rank 2", or "rank 2 or 5": one of them at least."""
    return f"rank {' or '.join(map(str, numbers))}" if numbers else "a rank"


class _Notes:
    """Notes of the ranks that wait for others, in the store through which they met. call: the number of the meeting.

    A store may lie in a process that hangs. So each question is asked by a thread, and has a time limit.
    """

    def __init__(self, group: ProcessGroup, call: int) -> None:
        self.store, self.call = group.get_group_store(), call
        self.written = False

    def write(self, rank: int) -> None:
        if not self.written:
            self.written = True
            _within(ANSWER, lambda: self.store.set(self._key(rank), str(self.call)))

    def missing(self, rank: int, size: int) -> list[int]:
        """Return the ranks that have left no note of this call; none if the store does not answer."""
        self.write(rank)
        time.sleep(ANSWER.total_seconds())
        silent: list[int] = []
        _within(ANSWER, lambda: silent.extend(rank for rank in range(size) if self._last(rank) < self.call))
        return silent

    def _last(self, rank: int) -> int:
        key = self._key(rank)
        return int(self.store.get(key)) if self.store.check([key]) else 0

    def _key(self, rank: int) -> str:
        return f"scanl/rank {rank} waits in call"


def _within(limit: timedelta, question: Callable[[], object]) -> None:
    def ask() -> None:
        with suppress(RuntimeError):  # the store is gone
            question()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(limit.total_seconds())


def _wire(tensor: Tensor) -> Tensor:
    """Return what is sent: complex numbers as pairs, which every backend of torch.distributed sends."""
    tensor = tensor.detach()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous()


class _Count(threading.local):
    """Bytes received, and meetings of each group."""

    def __init__(self) -> None:
        self.received, self.meetings = 0, Counter[str]()


_count = _Count()


@contextmanager
def received_bytes() -> Iterator[list[int]]:
    """A context whose list has one number at its end: the bytes that this process has received in it."""
    totals, start = [], _count.received
    yield totals
    totals.append(_count.received - start)
