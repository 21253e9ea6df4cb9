"""A piece of bytes as several streams, which a model predicts side by side."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from scanl.packing.adaptive import AdaptivePredictor
from scanl.packing.coder import StreamReader, StreamWriter
from scanl.packing.predictor import ContextsAlone, Predictor

FIRST = 0  # the symbol before the first one: in training texts it stands before a file
MIN_STREAM = 1 << 11  # bytes of a stream: a shorter one is mostly a start, of which the model knows nothing
AnyPredictor = Predictor | AdaptivePredictor | ContextsAlone
Moved = Callable[[int], None]  # takes how many bytes were coded


class Layout(NamedTuple):
    """The division of bytes into streams of `steps` and, behind the first `last` ones, of `steps` - 1 bytes."""

    rows: int
    steps: int
    last: int

    @classmethod
    def of(cls, size: int, streams: int) -> "Layout":
        rows = max(1, min(streams, size // MIN_STREAM))
        steps = -(-size // rows)
        return cls(rows, steps, size - rows * (steps - 1))

    def divided(self, data: bytes) -> Tensor:
        """Return the symbols (1 + steps, rows), uint8: FIRST before the first ones, and where a stream has ended."""
        symbols = np.full((1 + self.steps, self.rows), FIRST, np.uint8)
        read, split = np.frombuffer(data, np.uint8), self.last * self.steps
        symbols[1:, : self.last] = read[:split].reshape(self.last, self.steps).T
        symbols[1:-1, self.last :] = read[split:].reshape(self.rows - self.last, self.steps - 1).T
        return torch.from_numpy(symbols)

    def joined(self, symbols: Tensor) -> bytes:
        """Return the bytes of symbols as `divided` returns them."""
        rows = symbols[1:].numpy().T
        return rows[: self.last].tobytes() + rows[self.last :, :-1].tobytes()

    def count(self, step: int) -> int:
        """Return how many streams have a symbol in a step."""
        return self.rows if step < self.steps - 1 else self.last


def encoded(predictor: AnyPredictor, data: bytes, streams: int, moved: Moved) -> bytes | None:
    """Return the code of some bytes, at least one; None where the model makes them no shorter."""
    layout = Layout.of(len(data), streams)
    symbols = layout.divided(data)
    writer = StreamWriter(layout.rows, layout.steps)
    with predictor.opened(layout.rows) as reading:
        for begin in range(0, layout.steps, predictor.turn):
            end = min(begin + predictor.turn, layout.steps)
            known = symbols[begin : end + 1].long()  # whole numbers of 8 bytes, of a turn alone
            for step, logits in enumerate(reading.steps(known[:-1]), begin):
                writer.put(logits, symbols[step + 1, : layout.count(step)])
            done = min(end * layout.rows, len(data))
            if writer.bits() >= 8 * done:
                moved(len(data) - begin * layout.rows)
                return None
            moved(done - begin * layout.rows)
            reading.learn(known[:-1], known[1:])
    code = writer.words()
    return code if len(code) < len(data) else None


def decoded(predictor: AnyPredictor, code: bytes, size: int, streams: int, moved: Moved) -> bytes | None:
    """Return the bytes of a code; None where the model's numbers are not those that made it."""
    layout = Layout.of(size, streams)
    symbols = torch.full((1 + layout.steps, layout.rows), FIRST, dtype=torch.uint8)
    reader = StreamReader(code, layout.rows, layout.steps)
    with predictor.opened(layout.rows) as reading:
        for step in range(layout.steps):
            count = layout.count(step)
            symbols[step + 1, :count] = reader.take(reading.step(symbols[step].long()), count)
            if (step + 1) % predictor.turn == 0 or step + 1 == layout.steps:
                begin = step // predictor.turn * predictor.turn
                moved(min((step + 1) * layout.rows, size) - begin * layout.rows)
                known = symbols[begin : step + 2].long()
                reading.learn(known[:-1], known[1:])
    return layout.joined(symbols) if reader.at_end else None
