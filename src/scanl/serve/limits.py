"""Limits of a server's clients."""

from dataclasses import dataclass
from typing import Annotated

from scanl.options import above_zero, check, options

MEBIBYTE = 2**20


@dataclass(frozen=True)
class Limits:
    """Limits of a server. What is beyond one is answered by a sentence, with a status of 4xx."""

    streams: Annotated[int, above_zero, "answers that are written at the same time"] = 64
    body: Annotated[int, above_zero, "bytes of a request"] = MEBIBYTE
    tokens: Annotated[int, above_zero, "tokens of an answer"] = 4096
    context: Annotated[int, above_zero, "tokens of a session with its prompt and its answer"] = 2**20
    seconds: Annotated[float, above_zero, "time of an answer, which then ends as it is"] = 300.0
    idle: Annotated[
        float, above_zero, "seconds in which a client must send its request, or take a part of its answer"
    ] = 30.0
    sessions: Annotated[int, above_zero, "sessions that are kept; the one that was idle for longest goes first"] = 256
    memory: Annotated[int, above_zero, "MiB of states along the way of texts, for prompts that begin alike"] = 256

    def __post_init__(self) -> None:
        check("serve", options(type(self)), vars(self))
