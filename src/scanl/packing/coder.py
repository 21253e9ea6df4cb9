r"""An entropy coder of several streams: whole-number frequencies of logits, and a range coder by them.

The frequencies of V symbols are a rule of the logits l alone, with the same bits on every machine:

.. math::
    w_i = \lfloor 2^{30} e^{\max(l_i - \max l, -60)} \rfloor \qquad
    f_i = 1 + \lfloor w_i (2^{24} - V) / \textstyle\sum_j w_j \rfloor

The first symbol of the largest logit gets the rest, so that all sum to 2^24. e^x is a polynomial of ours, products of
which no compiler contracts; the division is by a reciprocal in float64.

A stream is a whole number x, 2^31 <= x < 2^63. It takes a symbol in by x' = (x // f) 2^24 + x % f + c, c the sum of
the frequencies before; first its lower 32 bits become a word, if x' would be too large. So symbols are read in the
other order than they are written: the writer goes from the last one to the first. All streams share one list of words,
in the order in which the reader takes them.

Source: J. Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of
arithmetic coding", arXiv:1311.2540, section 3.3 (range variant). The widths are those of F. Giesen's `rans64.h`.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# numba passes the first argument of an intrinsic itself, and its types of numbers are functions.

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import fixed_exp
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch

TOTAL_BITS = 24  # the frequencies of a symbol sum to 2^TOTAL_BITS
TOTAL = 1 << TOTAL_BITS
START = 1 << 31  # x of a stream that has no symbol yet
FLOOR = np.float32(-60)  # a logit that is further below the largest one counts as that
SCALE = np.float32(1 << 30)  # of the largest symbol, before the frequencies are made to sum to TOTAL


@helper(error_model="numpy")
def _set_frequencies(logits, bits, frequencies):
    """Set the frequencies of symbols to those of their logits. bits: the memory of the logits as whole numbers."""
    highest = np.int32(-(1 << 31))
    for k in range(bits.size):  # whole numbers in the order of the floats: their maximum is found in vectors
        highest = max(highest, np.int32(bits[k] ^ ((bits[k] >> np.int32(31)) & np.int32(0x7FFFFFFF))))
    largest = np.int32(highest ^ ((highest >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32)
    total = np.int64(0)
    for k in range(logits.size):
        below = logits[k] - largest
        below = below if below > FLOOR else FLOOR  # NaN too
        weight = np.int32(fixed_exp(below) * SCALE)
        frequencies[k] = weight
        total += np.int64(weight)
    by, rest = np.float64(TOTAL - logits.size) / np.float64(max(total, np.int64(1))), np.int64(TOTAL)
    for k in range(logits.size):
        frequency = np.int32(np.float64(frequencies[k]) * by) + np.int32(1)
        frequencies[k] = frequency
        rest -= np.int64(frequency)
    first = 0
    while first < logits.size - 1 and bits[first] != np.int32(
        highest ^ ((highest >> np.int32(31)) & np.int32(0x7FFFFFFF))
    ):
        first += 1
    frequencies[first] += np.int32(rest)


@kernel("rows symbols logits chosen starts widths")
def _choose(slots):
    """Write the start and the width of the interval of a symbol of each row."""
    rows, symbols = slots.rows, slots.symbols
    frequencies = scratch(symbols, np.int32)
    chosen = part(slots.chosen, 0, rows, np.int64)
    starts, widths = part(slots.starts, 0, rows, np.int32), part(slots.widths, 0, rows, np.int32)
    for row in units(slots):
        at = row * symbols
        logits, bits = part(slots.logits, at, symbols, np.float32), part(slots.logits, at, symbols, np.int32)
        _set_frequencies(logits, bits, frequencies)
        start = np.int32(0)
        for k in range(chosen[row]):
            start += frequencies[k]
        starts[row], widths[row] = start, frequencies[chosen[row]]


@kernel("steps rows last starts widths streams words count")
def _write(slots):
    """Take in all symbols, the last one first. The words come to the end of `words`, and their number to `count`.

    last: how many rows have a symbol in the last step.
    """
    for _ in units(slots):
        rows, size = slots.rows, slots.steps * slots.rows
        starts, widths = part(slots.starts, 0, size, np.int32), part(slots.widths, 0, size, np.int32)
        streams, words = part(slots.streams, 0, rows, np.uint64), part(slots.words, 0, size, np.uint32)
        place = size
        for back in range(size):
            at = size - 1 - back
            row = at % rows
            if at // rows == slots.steps - 1 and row >= slots.last:
                continue
            width, x = np.uint64(widths[at]), streams[row]
            if x >= width << np.uint64(63 - TOTAL_BITS):
                place -= 1
                words[place] = np.uint32(x & np.uint64(0xFFFFFFFF))
                x >>= np.uint64(32)
            streams[row] = ((x // width) << np.uint64(TOTAL_BITS)) + x % width + np.uint64(starts[at])
        part(slots.count, 0, 1, np.int64)[0] = size - place


@kernel("rows symbols logits streams words size place chosen")
def _read(slots):
    """Read a symbol of each row. place: of the next word; it passes `size` where words are missing, and reads zeros."""
    for _ in units(slots):
        rows, symbols = slots.rows, slots.symbols
        frequencies = scratch(symbols, np.int32)
        streams, words = part(slots.streams, 0, rows, np.uint64), part(slots.words, 0, slots.size, np.uint32)
        place, chosen = part(slots.place, 0, 1, np.int64), part(slots.chosen, 0, rows, np.int64)
        for row in range(rows):
            at = row * symbols
            logits, bits = part(slots.logits, at, symbols, np.float32), part(slots.logits, at, symbols, np.int32)
            _set_frequencies(logits, bits, frequencies)
            x = streams[row]
            target, symbol, start = np.int32(x & np.uint64(TOTAL - 1)), 0, np.int32(0)
            while symbol < symbols - 1 and start + frequencies[symbol] <= target:
                start += frequencies[symbol]
                symbol += 1
            x = np.uint64(frequencies[symbol]) * (x >> np.uint64(TOTAL_BITS)) + np.uint64(target - start)
            if x < np.uint64(START):
                word = words[place[0]] if place[0] < slots.size else np.uint32(0)
                x = (x << np.uint64(32)) | np.uint64(word)
                place[0] += 1
            streams[row], chosen[row] = x, symbol


class StreamWriter:
    """Codes the symbols of several streams: `put` in the order of the steps, then `words`.

    rows: streams.   steps: symbols of the longest.   symbols: how many there are, V.
    """

    def __init__(self, rows: int, steps: int, symbols: int) -> None:
        self._symbols, self._steps = symbols, 0
        self._starts, self._widths = np.zeros((2, steps, rows), np.int32)
        self._last = rows

    def put(self, logits: Tensor, chosen: Tensor) -> None:
        """Take the next symbol (n,) of the first n streams, and the logits (N, V) before it, float32."""
        self._last = len(chosen)
        slots = _choose.pack(
            rows=self._last, symbols=self._symbols, logits=logits.contiguous(), chosen=chosen.contiguous(),
            starts=self._starts[self._steps], widths=self._widths[self._steps],
        )  # fmt: skip
        _choose.run(torch.float32, slots, self._last, self._last * self._symbols)
        self._steps += 1

    def bits(self) -> float:
        """Return how many bits the symbols so far need."""
        widths = self._widths[: self._steps].ravel()
        return float(np.sum(TOTAL_BITS - np.log2(widths[widths > 0])))

    def words(self) -> bytes:
        """Return the code: a number of 64 bits for each stream, then the words of 32 bits, all little-endian."""
        _, rows = self._starts.shape
        streams, count = np.full(rows, START, np.uint64), np.zeros(1, np.int64)
        words = np.empty(self._steps * rows, np.uint32)
        slots = _write.pack(
            steps=self._steps, rows=rows, last=self._last, starts=self._starts, widths=self._widths, streams=streams,
            words=words, count=count,
        )  # fmt: skip
        _write.run(torch.float32, slots, 1, 1)
        return streams.astype("<u8").tobytes() + words[words.size - int(count[0]) :].astype("<u4").tobytes()


class StreamReader:
    """Reads the symbols of several streams from what `StreamWriter.words` returned."""

    def __init__(self, code: bytes, rows: int, symbols: int) -> None:
        self._symbols = symbols
        self._streams: NDArray[np.uint64] = np.frombuffer(code[: 8 * rows], "<u8").astype(np.uint64)
        self._words: NDArray[np.uint32] = np.frombuffer(code[8 * rows :], "<u4").astype(np.uint32)
        self._place = np.zeros(1, np.int64)

    def take(self, logits: Tensor, rows: int) -> Tensor:
        """Return the next symbol (rows,) of the first streams. logits: (N, V), float32, of all streams."""
        chosen = torch.empty(rows, dtype=torch.int64)
        slots = _read.pack(
            rows=rows, symbols=self._symbols, logits=logits.contiguous(), streams=self._streams, words=self._words,
            size=self._words.size, place=self._place, chosen=chosen,
        )  # fmt: skip
        _read.run(torch.float32, slots, 1, 1)
        return chosen

    @property
    def at_end(self) -> bool:
        """Whether all words are read, and the streams are as they were before the first symbol."""
        return int(self._place[0]) == self._words.size and bool((self._streams == START).all())
