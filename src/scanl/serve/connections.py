"""A connection to a client, which has a limited time for everything that it must do."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol  # pyright: ignore[reportMissingImports]


class Connection(H11Protocol):
    """A connection of uvicorn that ends when its client is idle for `timeout_keep_alive` seconds.

    It has this time to send the whole head of its first request, after each answer to take the rest of it and to send
    the next head, and to take what fills the buffers while an answer is written. uvicorn alone waits for ever for a
    first request, for the rest of a head, and for a client to take what was written before it closes.
    """

    _head: asyncio.TimerHandle | None = None
    _taking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = self._limited()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head, self._taking = _cancelled(self._head), _cancelled(self._taking)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:  # a head is complete
            self._head = _cancelled(self._head)

    def on_response_complete(self) -> None:
        _cancelled(self._head)
        self._head = self._limited()
        before = self.cycle
        super().on_response_complete()
        if self.cycle is not before:  # a head that had come meanwhile
            self._head = _cancelled(self._head)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._taking = self._limited()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._taking = _cancelled(self._taking)

    def _limited(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.timeout_keep_alive, self.transport.abort)


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
