"""Limits of a server's clients."""

from dataclasses import dataclass
from typing import Annotated

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of a server. What is beyond one is answered by a sentence, with a status of 4xx."""

    streams: Annotated[int, "answers that are written at the same time"] = 64
    body: Annotated[int, "bytes of a request"] = MEBIBYTE
    tokens: Annotated[int, "tokens of an answer"] = 4096
    context: Annotated[int, "tokens of a session with its prompt and its answer"] = 2**20
    seconds: Annotated[float, "time of an answer, which then ends as it is"] = 300.0
    idle: Annotated[float, "seconds in which a client must send its request, or take a part of its answer"] = 30.0
    sessions: Annotated[int, "sessions that are kept; the one that was idle for longest goes first"] = 256
    memory: Annotated[int, "MiB of states along the way of texts, for prompts that begin alike"] = 256
