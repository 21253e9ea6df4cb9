"""A range coder of bits, of several streams.

A stream is a whole number x, 2^31 <= x < 2^63. It takes in a bit that has the chance f / 2^16 by
x' = (x // f) 2^16 + x % f + c: c is 0 for a one, and the chance of a one for a zero. First its lower 32 bits become a
word, if x' would be too large. So bits are read in the other order than they are written: the writer goes from the last
one to the first. All streams share one list of words, in the order in which the reader takes them.

Source: J. Duda, "Asymmetric numeral systems: entropy coding combining speed of Huffman coding with compression rate of
arithmetic coding", arXiv:1311.2540, section 3.3 (range variant). The widths are those of F. Giesen's `rans64.h`.
"""

import numpy as np

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._slots import part, units

CHANCE_BITS = 16  # of a chance: it is 1 to 2^CHANCE_BITS - 1
START = 1 << 31  # x of a stream that has no bit yet
BITS = 8  # of a symbol, the highest one first


@kernel("steps rows last symbols chances streams words count")
def write(slots):
    """Take in all symbols, the last one first. The words come to the end of `words`, and their number to `count`.

    last: how many rows have a symbol in the last step.   chances: of a one, for each bit.
    """
    for _ in units(slots):
        rows, size = slots.rows, slots.steps * slots.rows
        symbols, chances = part(slots.symbols, 0, size, np.uint8), part(slots.chances, 0, size * BITS, np.uint16)
        streams, words = part(slots.streams, 0, rows, np.uint64), part(slots.words, 0, size, np.uint32)
        place = size
        for back in range(size):
            at = size - 1 - back
            row = at % rows
            if at // rows == slots.steps - 1 and row >= slots.last:
                continue
            x = streams[row]
            for bit in range(BITS):  # the lowest one first
                ones = np.uint64(chances[at * BITS + BITS - 1 - bit])
                width, start = ones, np.uint64(0)
                if (np.int64(symbols[at]) >> bit) & 1 == 0:
                    width, start = np.uint64(1 << CHANCE_BITS) - ones, ones
                if x >= width << np.uint64(63 - CHANCE_BITS):
                    place -= 1
                    words[place] = np.uint32(x & np.uint64(0xFFFFFFFF))
                    x >>= np.uint64(32)
                x = ((x // width) << np.uint64(CHANCE_BITS)) + x % width + start
            streams[row] = x
        part(slots.count, 0, 1, np.int64)[0] = size - place


@helper()
def read_bit(ones, streams, row, words, place):
    """Return the next bit of a stream. ones: the chance of a one.

    place: of the next word; it passes the end where words are missing, and reads zeros.
    """
    x = streams[row]
    target = np.int64(x & np.uint64((1 << CHANCE_BITS) - 1))
    bit = np.int64(1)
    width, start = ones, np.int64(0)
    if target >= ones:
        bit, width, start = np.int64(0), np.int64(1 << CHANCE_BITS) - ones, ones
    x = np.uint64(width) * (x >> np.uint64(CHANCE_BITS)) + np.uint64(target - start)
    if x < np.uint64(START):
        word = words[place[0]] if place[0] < words.size else np.uint32(0)
        x = (x << np.uint64(32)) | np.uint64(word)
        place[0] += 1
    streams[row] = x
    return bit
