"""Ranks that are threads of one process, so that a law of several processes takes no time to start."""

import queue
import threading

import torch

from scanl import ops
from scanl.ops._frame.context import preferred


class Threads:
    def __init__(self, rank, size, boxes, barrier, board, backward=False):
        self.size, self.boxes, self.barrier, self.board, self.backward, self.own = (
            size,
            boxes,
            barrier,
            board,
            backward,
            rank,
        )
        self.rank = size - 1 - rank if backward else rank

    def _place(self, rank):
        return self.size - 1 - rank if self.backward else rank

    def reversed(self):
        return Threads(self.own, self.size, self.boxes, self.barrier, self.board, not self.backward)

    def in_turn(self):
        return self

    def everyone(self, numbers):
        self.board[self.own] = numbers
        self.barrier.wait(10)
        found = list(self.board)
        self.barrier.wait(10)
        return found[::-1] if self.backward else found

    def exchange(self, sent, to, source, like):
        if sent is not None and 0 <= to < self.size:
            self.boxes[self.own, self._place(to)].put(sent.detach().clone())
        if like is None or not 0 <= source < self.size:
            return None
        found = self.boxes[self._place(source), self.own].get(timeout=10)
        assert found.shape == like.shape
        assert found.dtype == like.dtype
        return found


def on_ranks(size, work):
    """Return what `work(ranks)` returns in each of `size` threads, which prefer the backends of this one."""
    backends = preferred()
    boxes = {(a, b): queue.SimpleQueue() for a in range(size) for b in range(size)}
    barrier, board, results, errors = threading.Barrier(size), [None] * size, [None] * size, []

    def begin(rank):
        try:
            torch.manual_seed(0)
            with ops.backend(*backends):
                results[rank] = work(Threads(rank, size, boxes, barrier, board))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
