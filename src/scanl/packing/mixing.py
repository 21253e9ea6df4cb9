r"""What is expected of the next bit: a language model and what stood behind the same bytes before, mixed.

A byte is eight bits, the highest one first. Each of several *inputs* gives the log odds x_i of a one: the logits of a
language model, summed over the bytes that go on with a one or a zero; a counter for each of the last 0 to 6 bytes and
for the last two words; the byte that followed the longest repeat. They are mixed, and what is mixed is compared with
what came after the last two bytes at such odds:

.. math::
    d = \tfrac{1}{2} \sum_s \sum_i w_{s i} x_i \qquad
    p = \tfrac{1}{2} (\sigma(d) + r[\text{bytes}, d]) \qquad
    w_{s i} \leftarrow w_{s i} + \eta\, x_i (\text{bit} - \sigma(\textstyle\sum_i w_{s i} x_i))

A set of weights w_s is that of the bits so far, another one that of how many contexts are known and how long the repeat
is. Counters and r move to each bit that comes. All of it is learnt anew in each frame, alike by who writes and who
reads, over all streams in the order of the steps. Everything but e^x of the logits is whole numbers, and e^x is a
polynomial of ours whose products no compiler contracts, so the bits are those of every machine.

Source: M. V. Mahoney, "Adaptive weighing of context models for lossless data compression", Florida Institute of
Technology CS-2005-16, sections 3 and 4, and his lpaq1. Beside it: the language model, and two sets at a time.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# numba passes the first argument of an intrinsic itself, and its types of numbers are functions.

from decimal import Context, Decimal
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import fixed_exp
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch
from scanl.packing.range_coder import BITS, CHANCE_BITS, read_bit

PLACES = 22  # bits of a probability in here
ONE = 1 << PLACES
SPAN = 3071  # largest log odds, in 256ths
CONTEXTS = 8  # 0 to 6 bytes, and two words
MODEL, REPEAT, CONSTANT, INPUTS = CONTEXTS, CONTEXTS + 1, CONTEXTS + 2, CONTEXTS + 3
LINE = 16  # of a table of counters: its mark, and a counter for each beginning of four bits
LINES = 1 << 12, 1 << 18  # of a context: at least and at most
COUNT_BITS, MOST = 10, 255  # of a counter: how many bits it has seen, at most so many
PADDING = 8  # zeros before the bytes of a stream
ANCHOR, SHORTEST, LONGEST = 6, 5, 32  # bytes: hashed, and of a repeat when it is found
RECENT = 1 << 18  # places of repeats
LENGTHS = 8  # classes of the length of a repeat; 0 for none
FIRST_SETS = 2 << BITS
SETS = FIRST_SETS + (CONTEXTS + 1) * LENGTHS * 2
WEIGHT_BITS, RATE_BITS = 16, 23
CONTEXT_WEIGHT, MODEL_WEIGHT, REPEAT_WEIGHT = (1 << WEIGHT_BITS) // 5, (3 << WEIGHT_BITS) // 4, (1 << WEIGHT_BITS) // 3
KNOTS, PAIRS = 33, 1 << 16  # of r: of the log odds, and of hashed bytes
FLOOR = np.float32(-60)  # a logit that is further below the largest one counts as that
SCALE = np.float32(1 << 30)  # of the largest symbol


@cache
def tables() -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """Return the log odds of probabilities of 16 bits, and the probabilities of log odds from -SPAN on.

    Decimal numbers are rounded alike on every machine.
    """
    decimals = Context(prec=20)
    odds = (decimals.exp(Decimal(-x) / 256) for x in range(-SPAN, SPAN + 1))
    chances = np.array([int(Decimal(ONE) / (1 + each)) for each in odds], np.int32)
    middles = (np.arange(1 << 16) << (PLACES - 16)) + (1 << (PLACES - 17))
    return np.clip(np.searchsorted(chances, middles) - SPAN, -SPAN, SPAN).astype(np.int16), chances


@helper()
def _hashed(a, b):
    x = (a * np.uint64(0x9E3779B97F4A7C15)) ^ (b * np.uint64(0xC2B2AE3D27D4EB4F))
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


@helper()
def _line(counters, first, lines, mark):
    """Return where the line of a hashed context begins. A new one takes the place of the one of two that saw less."""
    own = np.int32(mark >> np.uint64(40)) | np.int32(1)
    at = np.int64(mark & np.uint64(lines - 1))
    line, other = (first + at) * LINE, (first + (at ^ 1)) * LINE
    if counters[line] == own:
        return line
    if counters[other] == own:
        return other
    seen = np.int32((1 << COUNT_BITS) - 1)
    if counters[other + 1] & seen < counters[line + 1] & seen:
        line = other
    counters[line] = own
    for k in range(1, LINE):
        counters[line + k] = np.int32(0)
    return line


@helper()
def _set_contexts(history, at, latest, row, contexts):
    """Set the contexts of the byte at a place. latest: hashes of the word so far and of the word before."""
    last = np.uint64(0)
    contexts[0] = np.uint64(0)
    for k in range(1, CONTEXTS - 1):
        last |= np.uint64(history[at - k]) << np.uint64(8 * (k - 1))
        contexts[k] = _hashed(last, np.uint64(k))
    contexts[CONTEXTS - 1] = _hashed(latest[2 * row], latest[2 * row + 1] + np.uint64(CONTEXTS))


@helper(error_model="numpy")
def _set_shares(logits, shares):
    """Set the shares of symbols: whole numbers in the proportions of e^logit."""
    largest = logits[0]
    for k in range(logits.size):
        largest = logits[k] if logits[k] > largest else largest
    for k in range(logits.size):
        below = logits[k] - largest
        below = below if below > FLOOR else FLOOR  # NaN too
        shares[k] = np.int64(np.int32(fixed_exp(below) * SCALE)) + np.int64(1)


@helper()
def _model_chance(shares, first, width):
    """Return the chance of a one where the symbols `first` to `first + width` are left."""
    half = width >> 1
    zeros, ones = np.int64(0), np.int64(0)
    for k in range(first, first + half):
        zeros += shares[k]
        ones += shares[k + half]
    return (ones << PLACES) // (zeros + ones)


@helper()
def _limited(odds):
    return min(max(odds, np.int64(-SPAN)), np.int64(SPAN))


@helper()
def _mixed(inputs, weights, first):
    """Return the log odds by the set of weights that begins at `first`."""
    total = np.int64(0)
    for k in range(INPUTS):
        total += inputs[k] * np.int64(weights[first + k])
    return _limited(total >> WEIGHT_BITS)


@helper()
def _learn(inputs, weights, first, error):
    for k in range(INPUTS):
        weights[first + k] += np.int32((inputs[k] * error + np.int64(1 << (RATE_BITS - 1))) >> RATE_BITS)


@helper()
def _count(counters, at, bit):
    """Move a counter to a bit: a chance less a half above the number of bits that it has seen."""
    count = np.int64(counters[at] & np.int32((1 << COUNT_BITS) - 1))
    chance = np.int64(counters[at] >> np.int32(COUNT_BITS)) + ONE // 2
    chance += ((bit << PLACES) - chance) * 2 // (2 * count + 3)
    chance = min(max(chance, np.int64(0)), np.int64(ONE - 1)) - ONE // 2
    counters[at] = np.int32((chance << COUNT_BITS) | min(count + 1, np.int64(MOST)))


@helper()
def _move(chances, at, bit, shift):
    """Move a chance to a bit, by a part 2^-shift of the way."""
    chance = np.int64(chances[at])
    chances[at] = np.int32(chance + (((bit * (ONE - 1)) - chance) >> shift))


@helper()
def _follow(history, at, row, step, stride, latest, repeats, recent):
    """Take in the byte at a place: into the words and the repeat of its stream.

    repeats: place of the byte that is expected next, and how many bytes before it were alike; 0 for none.
    """
    byte = np.int64(history[at])
    letter = byte | 32
    if (97 <= letter <= 122) or (48 <= byte <= 57) or byte == 95 or byte >= 128:
        latest[2 * row] = _hashed(latest[2 * row], np.uint64(letter))
    elif latest[2 * row] != np.uint64(0):
        latest[2 * row + 1], latest[2 * row] = latest[2 * row], np.uint64(0)
    if repeats[2 * row + 1] > 0 and np.int64(history[repeats[2 * row]]) == byte:
        repeats[2 * row] += 1
        repeats[2 * row + 1] += 1
    else:
        repeats[2 * row + 1] = 0
    last = np.uint64(0)
    for k in range(ANCHOR):
        last = (last << np.uint64(8)) | np.uint64(history[at - k])
    slot = np.int64(_hashed(last, np.uint64(ANCHOR)) & np.uint64(RECENT - 1))
    found = np.int64(recent[slot])
    if repeats[2 * row + 1] == 0 and found > 0 and found % stride - PADDING < step:  # what follows it is known
        length = 0
        while length < LONGEST and history[found - length] == history[at - length]:
            length += 1
        if length >= SHORTEST:
            repeats[2 * row], repeats[2 * row + 1] = found + 1, length
    recent[slot] = np.int32(at)


@kernel(
    "rows count step steps symbols lines reading logits history latest repeats recent counters hits weights refined "
    "log_odds odds_chances chances streams words size place"
)
def _code(slots):
    """Code a byte of each of the first `count` rows.

    reading: whether the byte is read from the code, and written into the history; else it is there, and the chances
    of its bits are written.
    """
    for _ in units(slots):
        rows, symbols, lines, stride = slots.rows, slots.symbols, slots.lines, slots.steps + PADDING
        history = part(slots.history, 0, rows * stride, np.uint8)
        latest, repeats = part(slots.latest, 0, 2 * rows, np.uint64), part(slots.repeats, 0, 2 * rows, np.int64)
        recent, hits = part(slots.recent, 0, RECENT, np.int32), part(slots.hits, 0, LONGEST * BITS, np.int32)
        counters = part(slots.counters, 0, CONTEXTS * lines * LINE, np.int32)
        weights = part(slots.weights, 0, SETS * INPUTS, np.int32)
        refined = part(slots.refined, 0, PAIRS * KNOTS, np.int32)
        log_odds = part(slots.log_odds, 0, 1 << 16, np.int16)
        odds_chances = part(slots.odds_chances, 0, 2 * SPAN + 1, np.int32)
        chances = part(slots.chances, 0, rows * BITS, np.uint16)
        streams, words = part(slots.streams, 0, rows, np.uint64), part(slots.words, 0, slots.size, np.uint32)
        place = part(slots.place, 0, 1, np.int64)
        contexts, line = scratch(CONTEXTS, np.uint64), scratch(CONTEXTS, np.int64)
        inputs, shares = scratch(INPUTS, np.int64), scratch(1 << BITS, np.int64)
        inputs[CONSTANT] = 256
        for row in range(slots.count):
            at = row * stride + PADDING + slots.step
            if symbols > 0:
                _set_shares(part(slots.logits, row * symbols, symbols, np.float32), shares)
            _set_contexts(history, at, latest, row, contexts)
            two_bytes = np.uint64(history[at - 1]) | (np.uint64(history[at - 2]) << np.uint64(8))
            length = min(repeats[2 * row + 1], np.int64(LONGEST - 1))
            expected = np.int64(-1)
            if length > 0:
                expected = np.int64(history[repeats[2 * row]])
            so_far, first, width = np.int64(1), np.int64(0), np.int64(1 << BITS)
            for step in range(BITS):
                if step % 4 == 0:
                    for k in range(CONTEXTS):
                        line[k] = _line(counters, k * lines, lines, _hashed(contexts[k], np.uint64(so_far)))
                node = so_far if step < 4 else (so_far & ((1 << (step - 4)) - 1)) | (1 << (step - 4))
                known = np.int64(0)
                for k in range(CONTEXTS):
                    counter = counters[line[k] + node]
                    chance = np.int64(counter >> np.int32(COUNT_BITS)) + ONE // 2
                    inputs[k] = np.int64(log_odds[chance >> (PLACES - 16)]) if counter != 0 else np.int64(0)
                    known += np.int64(counter != 0)
                if symbols > 0:
                    inputs[MODEL] = np.int64(log_odds[_model_chance(shares, first, width) >> (PLACES - 16)])
                repeat, wanted, hit = np.int64(0), np.int64(0), np.int64(0)
                inputs[REPEAT] = 0
                if expected >= 0 and (expected | (1 << BITS)) >> (BITS - step) == so_far:
                    repeat, wanted = 1 + (length >> 2) * (LENGTHS - 1) // (LONGEST // 4), (expected >> (7 - step)) & 1
                    hit = length * BITS + step
                    odds = np.int64(log_odds[hits[hit] >> (PLACES - 16)])
                    inputs[REPEAT] = odds if wanted == 1 else -odds
                one = (so_far + (1 << BITS) * np.int64(repeat > 0)) * INPUTS
                two = (FIRST_SETS + (known * LENGTHS + repeat) * 2 + np.int64(step >= 4)) * INPUTS
                odds_one, odds_two = _mixed(inputs, weights, one), _mixed(inputs, weights, two)
                odds = (odds_one + odds_two) >> 1
                scaled = (odds + SPAN) * ((KNOTS - 1) << 12) // (2 * SPAN + 1)
                knot, between = scaled >> 12, scaled & 4095
                pair = _hashed(np.uint64(so_far), two_bytes)
                knot += np.int64(pair & np.uint64(PAIRS - 1)) * KNOTS
                came = (np.int64(refined[knot]) * (4096 - between) + np.int64(refined[knot + 1]) * between) >> 12
                chance = (np.int64(odds_chances[odds + SPAN]) + came) >> 1
                ones = min(max(chance >> (PLACES - CHANCE_BITS), np.int64(1)), np.int64((1 << CHANCE_BITS) - 1))
                if slots.reading != 0:
                    bit = read_bit(ones, streams, row, words, place)
                else:
                    bit = (np.int64(history[at]) >> (7 - step)) & 1
                    chances[row * BITS + step] = np.uint16(ones)
                _learn(inputs, weights, one, (bit << PLACES) - np.int64(odds_chances[odds_one + SPAN]))
                _learn(inputs, weights, two, (bit << PLACES) - np.int64(odds_chances[odds_two + SPAN]))
                _move(refined, knot + (between >> 11), bit, 6)
                for k in range(CONTEXTS):
                    _count(counters, line[k] + node, bit)
                if repeat > 0:
                    _move(hits, hit, np.int64(bit == wanted), 6)
                so_far = 2 * so_far + bit
                width >>= 1
                first += width * bit
            history[at] = np.uint8(so_far & 255)
            _follow(history, at, row, slots.step, stride, latest, repeats, recent)


class ContextMixer:
    """What the bytes of several streams have taught so far.

    history: the bytes (N, PADDING + T), zeros before each stream.
    chances: of ones (T, N, 8), where bytes are written.
    streams, words, place: of the code, where bytes are read.
    """

    def __init__(self, rows: int, steps: int, code: bytes = b"") -> None:
        self._rows, self._steps = rows, steps
        self.history = np.zeros((rows, PADDING + steps), np.uint8)
        self.chances = np.zeros((steps, rows, BITS) if not code else (1, 1, 1), np.uint16)
        self.streams: NDArray[np.uint64] = np.frombuffer(code[: 8 * rows], "<u8").astype(np.uint64)
        self.words: NDArray[np.uint32] = np.frombuffer(code[8 * rows :], "<u4").astype(np.uint32)
        self.place = np.zeros(1, np.int64)
        self._lines = min(max(LINES[0], 1 << (rows * steps // 4).bit_length()), LINES[1])
        log_odds, odds_chances = tables()
        weights = np.zeros((SETS, INPUTS), np.int32)
        weights[:, :CONTEXTS], weights[:, MODEL], weights[:, REPEAT] = CONTEXT_WEIGHT, MODEL_WEIGHT, REPEAT_WEIGHT
        knots = odds_chances[np.arange(KNOTS) * 2 * SPAN // (KNOTS - 1)]
        self._memory = {
            "latest": np.zeros((rows, 2), np.uint64), "repeats": np.zeros((rows, 2), np.int64),
            "recent": np.zeros(RECENT, np.int32), "counters": np.zeros((CONTEXTS, self._lines, LINE), np.int32),
            "hits": np.full((LONGEST, BITS), ONE // 2, np.int32), "weights": weights,
            "refined": np.tile(knots, (PAIRS, 1)), "log_odds": log_odds, "odds_chances": odds_chances,
        }  # fmt: skip

    def code(self, step: int, count: int, logits: Tensor, *, reading: bool) -> None:
        """Code the bytes (n,) of a step of the first n streams. logits: (N, 256), float32; (N, 0) without a model."""
        slots = _code.pack(
            rows=self._rows, count=count, step=step, steps=self._steps, symbols=logits.shape[1], lines=self._lines,
            reading=int(reading), logits=logits.contiguous(), history=self.history,
            chances=self.chances[0 if reading else step], streams=self.streams, words=self.words,
            size=self.words.size, place=self.place, **self._memory,
        )  # fmt: skip
        _code.run(torch.float32, slots, 1, 1)
