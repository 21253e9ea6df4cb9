"""The code of several streams of bytes, written and read in the order of the steps."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.packing.mixing import PADDING, ContextMixer
from scanl.packing.range_coder import CHANCE_BITS, START, write


class StreamWriter:
    """Codes the bytes of several streams: `put` in the order of the steps, then `words`.

    rows: streams.   steps: bytes of the longest.
    """

    def __init__(self, rows: int, steps: int) -> None:
        self._mixer, self._step, self._last = ContextMixer(rows, steps), 0, rows
        self._bits, self._counted = 0.0, 0

    def put(self, logits: Tensor, chosen: Tensor) -> None:
        """Take the next byte (n,) of the first n streams, and the logits (N, 256) before it, or (N, 0) of no model."""
        self._last = len(chosen)
        self._mixer.history[: self._last, PADDING + self._step] = chosen.numpy()
        self._mixer.code(self._step, self._last, logits, reading=False)
        self._step += 1

    def bits(self) -> float:
        """Return how many bits the bytes so far need."""
        ones = self._mixer.chances[self._counted : self._step] / (1 << CHANCE_BITS)
        bits = np.unpackbits(self._symbols(self._counted, self._step)[:, :, None], axis=2)
        needed = -np.log2(np.where(bits == 1, ones, 1 - ones))
        self._bits += float(needed[ones > 0].sum())
        self._counted = self._step
        return self._bits

    def words(self) -> bytes:
        """Return the code: a number of 64 bits for each stream, then the words of 32 bits, all little-endian."""
        steps, rows, _ = self._mixer.chances.shape
        streams, count = np.full(rows, START, np.uint64), np.zeros(1, np.int64)
        words = np.empty(steps * rows, np.uint32)
        slots = write.pack(
            steps=steps, rows=rows, last=self._last, symbols=self._symbols(0, steps), chances=self._mixer.chances,
            streams=streams, words=words, count=count,
        )  # fmt: skip
        write.run(torch.float32, slots, 1, 1)
        return streams.astype("<u8").tobytes() + words[words.size - int(count[0]) :].astype("<u4").tobytes()

    def _symbols(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return the bytes (T, N) of some steps."""
        return np.ascontiguousarray(self._mixer.history[:, PADDING + begin : PADDING + end].T)


class StreamReader:
    """Reads the bytes of several streams from what `StreamWriter.words` returned."""

    def __init__(self, code: bytes, rows: int, steps: int) -> None:
        self._mixer, self._step = ContextMixer(rows, steps, code), 0

    def take(self, logits: Tensor, count: int) -> Tensor:
        """Return the next byte (n,) of the first n streams. logits: as in `StreamWriter.put`."""
        self._mixer.code(self._step, count, logits, reading=True)
        self._step += 1
        return torch.from_numpy(self._mixer.history[:count, PADDING + self._step - 1].astype(np.int64))

    @property
    def at_end(self) -> bool:
        """Whether all words are read, and the streams are as they were before the first symbol."""
        return int(self._mixer.place[0]) == self._mixer.words.size and bool((self._mixer.streams == START).all())
