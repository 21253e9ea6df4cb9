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
        """Return the symbols (steps, rows), int64; FIRST where a stream has ended."""
        symbols = np.full((self.rows, self.steps), FIRST, np.uint8)
        split = self.last * self.steps
        symbols[: self.last] = np.frombuffer(data[:split], np.uint8).reshape(self.last, self.steps)
        symbols[self.last :, :-1] = np.frombuffer(data[split:], np.uint8).reshape(self.rows - self.last, self.steps - 1)
        return torch.from_numpy(np.ascontiguousarray(symbols.T).astype(np.int64))

    def joined(self, symbols: Tensor) -> bytes:
        """Return the bytes of symbols as `divided` returns them."""
        rows = symbols.numpy().astype(np.uint8).T
        return rows[: self.last].tobytes() + rows[self.last :, :-1].tobytes()

    def count(self, step: int) -> int:
        """Return how many streams have a symbol in a step."""
        return self.rows if step < self.steps - 1 else self.last


def encoded(predictor: AnyPredictor, data: bytes, streams: int, moved: Moved) -> bytes | None:
    """Return the code of some bytes, at least one; None where the model makes them no shorter."""
    layout = Layout.of(len(data), streams)
    symbols = layout.divided(data)
    inputs = torch.cat([torch.full((1, layout.rows), FIRST), symbols[:-1]])
    writer = StreamWriter(layout.rows, layout.steps)
    with predictor.opened(layout.rows) as reading:
        for begin in range(0, layout.steps, predictor.turn):
            end = min(begin + predictor.turn, layout.steps)
            for step, logits in enumerate(reading.steps(inputs[begin:end]), begin):
                writer.put(logits, symbols[step, : layout.count(step)])
            done = min(end * layout.rows, len(data))
            if writer.bits() >= 8 * done:
                moved(len(data) - begin * layout.rows)
                return None
            moved(done - begin * layout.rows)
            reading.learn(inputs[begin:end], symbols[begin:end])
    code = writer.words()
    return code if len(code) < len(data) else None


def decoded(predictor: AnyPredictor, code: bytes, size: int, streams: int, moved: Moved) -> bytes | None:
    """Return the bytes of a code; None where the model's numbers are not those that made it."""
    layout = Layout.of(size, streams)
    known = torch.full((layout.steps + 1, layout.rows), FIRST)
    inputs, symbols = known[:-1], known[1:]
    reader = StreamReader(code, layout.rows, layout.steps)
    with predictor.opened(layout.rows) as reading:
        for step in range(layout.steps):
            count = layout.count(step)
            symbols[step, :count] = reader.take(reading.step(inputs[step]), count)
            if (step + 1) % predictor.turn == 0 or step + 1 == layout.steps:
                begin = step // predictor.turn * predictor.turn
                moved(min((step + 1) * layout.rows, size) - begin * layout.rows)
                reading.learn(inputs[begin : step + 1], symbols[begin : step + 1])
    return layout.joined(symbols) if reader.at_end else None
