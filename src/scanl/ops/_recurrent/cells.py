"""The cells of torch's recurrent modules, as vector code of some units of one row: a step, and its gradient.

A cell has a vector for each gate from the input and from the state: `by_input`, with its bias, and `by_state`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from scanl.ops._recurrent.writer import VECTOR, WORDS, CodeValue, Function

LARGE_INPUT = 20.0  # for 2 |x| above this, |tanh x| is 1 in float32


def exp(code: Function, x: CodeValue) -> CodeValue:
    """Return e^x, computed as by `_exp32` of _math.py, which states its error."""
    from scanl.ops._cpu import _math  # with numba, which code alone needs

    for order, bound in (("olt", _math.LOWEST_EXPONENT), ("ogt", _math.HIGHEST_EXPONENT)):
        x = code.where(code.compare(order, x, code.same(bound)), code.same(bound), x)
    rounded = code.fused(x, code.same(_math.LOG2E), code.same(_math.ROUND))
    n = code.minus(rounded, code.same(_math.ROUND))
    r = code.fused(n, code.same(-_math.LN2_HIGH), x)
    r = code.fused(n, code.same(-_math.LN2_LOW), r)
    p = code.same(_math.POLYNOMIAL[0])
    for coefficient in _math.POLYNOMIAL[1:]:
        p = code.fused(p, r, code.same(coefficient))
    y = code.plus(code.fused(code.times(p, r), r, r), code.same(1))
    power = code.new(f"add {WORDS} {code.cast('bitcast', rounded, WORDS).text}, {code.words(126).text}", WORDS)
    power = code.new(f"shl {WORDS} {power.text}, {code.words(23).text}", WORDS)
    return code.times(code.plus(y, y), code.cast("bitcast", power, VECTOR))


def sigmoid(code: Function, x: CodeValue) -> CodeValue:
    one = code.same(1)
    return code.over(one, code.plus(one, exp(code, code.times(x, code.same(-1)))))


def tanh(code: Function, x: CodeValue) -> CodeValue:
    """Return u / (u + 2), u = e^2|x| - 1 with its sign: exact for small x too. See `_tanh32` of _sigmoid.py."""
    from scanl.ops._cpu import _math  # with numba, which code alone needs

    bits = code.cast("bitcast", x, WORDS)
    sign = code.new(f"and {WORDS} {bits.text}, {code.words(-(1 << 31)).text}", WORDS)
    size = code.cast("bitcast", code.new(f"xor {WORDS} {bits.text}, {sign.text}", WORDS), VECTOR)
    twice = code.plus(size, size)
    large = code.same(LARGE_INPUT)
    inside = code.where(code.compare("ogt", twice, large), large, twice)  # NaN stays
    rounded = code.fused(inside, code.same(_math.LOG2E), code.same(_math.ROUND))
    n = code.minus(rounded, code.same(_math.ROUND))
    r = code.fused(n, code.same(-_math.LN2_HIGH), inside)
    r = code.fused(n, code.same(-_math.LN2_LOW), r)
    p = code.same(1 / 5040)
    for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5):
        p = code.fused(p, r, code.same(coefficient))
    power = code.new(f"add {WORDS} {code.cast('bitcast', rounded, WORDS).text}, {code.words(127).text}", WORDS)
    power = code.cast("bitcast", code.new(f"shl {WORDS} {power.text}, {code.words(23).text}", WORDS), VECTOR)
    u = code.fused(power, code.fused(code.times(p, r), r, r), code.minus(power, code.same(1)))
    y = code.cast("bitcast", code.over(u, code.plus(u, code.same(2))), WORDS)
    return code.cast("bitcast", code.new(f"or {WORDS} {y.text}, {sign.text}", WORDS), VECTOR)


class CellCode(ABC):
    """A cell.

    gates: in the order of torch's weights.   widths: vectors of units that a panel of the weight may have.
    kept: vectors for each unit that the gradient needs.   memory: whether a second state, c, is beside h.
    errors: vectors for each unit of the gradients of `by_input` and `by_state` in one row. Those of the input are the
    first `gates` of them, its gates rotated by `skip`; those of the state are the last `gates`, in torch's order.
    """

    gates: int
    widths: list[int]
    kept: int
    errors: int
    skip: int = 0
    memory: bool = False
    beside: bool = False  # whether a part of the gradient of h goes beside the weight
    sums_biases: bool = True  # whether both biases may be added up before a step

    @abstractmethod
    def step(
        self,
        code: Function,
        by_input: Sequence[CodeValue],
        by_state: Sequence[CodeValue],
        h: CodeValue,
        c: CodeValue | None,
    ) -> tuple[CodeValue, CodeValue | None, list[CodeValue]]:
        """Return the next h and c, and what is kept."""

    @abstractmethod
    def gradient(
        self,
        code: Function,
        dh: CodeValue,
        dc: CodeValue | None,
        kept: Sequence[CodeValue],
        h: CodeValue,
        y: CodeValue,
        c: CodeValue | None,
    ) -> tuple[list[CodeValue], CodeValue | None, CodeValue | None]:
        """Return the errors, and of the gradients of the states before the step: that of h beside what goes through
        the weight, None for zero, and that of c.

        h, c: the states before the step.   y: h after it.
        """


class LSTMCell(CellCode):
    gates, widths, kept, errors, memory = 4, [1], 5, 4, True

    def step(self, code, by_input, by_state, h, c):
        i, f, g, o = (code.plus(a, b) for a, b in zip(by_input, by_state, strict=True))
        i, f, g, o = sigmoid(code, i), sigmoid(code, f), tanh(code, g), sigmoid(code, o)
        assert c is not None
        c = code.fused(f, c, code.times(i, g))
        return code.times(o, tanh(code, c)), c, [i, f, g, o, c]

    def gradient(self, code, dh, dc, kept, h, y, c):
        i, f, g, o, last = kept
        assert dc is not None
        assert c is not None
        one, reached = code.same(1), tanh(code, last)
        dc = code.fused(code.times(dh, o), code.minus(one, code.times(reached, reached)), dc)
        errors = [
            code.times(code.times(code.times(dc, g), i), code.minus(one, i)),
            code.times(code.times(code.times(dc, c), f), code.minus(one, f)),
            code.times(code.times(dc, i), code.minus(one, code.times(g, g))),
            code.times(code.times(code.times(dh, reached), o), code.minus(one, o)),
        ]
        return errors, None, code.times(dc, f)


class GRUCell(CellCode):
    """The reset gate multiplies the state's part of the candidate with its bias: errors are n by input, r, z, n."""

    gates, widths, kept, errors, skip, beside, sums_biases = 3, [1], 4, 4, 2, True, False

    def step(self, code, by_input, by_state, h, c):
        r, z = (sigmoid(code, code.plus(by_input[at], by_state[at])) for at in range(2))
        n = tanh(code, code.fused(r, by_state[2], by_input[2]))
        return code.fused(z, code.minus(h, n), n), None, [r, z, n, by_state[2]]

    def gradient(self, code, dh, dc, kept, h, y, c):
        r, z, n, inner = kept
        one = code.same(1)
        dn = code.times(code.times(dh, code.minus(one, z)), code.minus(one, code.times(n, n)))
        dz = code.times(code.times(code.times(dh, code.minus(h, n)), z), code.minus(one, z))
        dr = code.times(code.times(code.times(dn, inner), r), code.minus(one, r))
        return [dn, dr, dz, code.times(dn, r)], code.times(dh, z), None


class TanhCell(CellCode):
    gates, widths, kept, errors = 1, [4, 2, 1], 0, 1

    def step(self, code, by_input, by_state, h, c):
        return tanh(code, code.plus(by_input[0], by_state[0])), None, []

    def gradient(self, code, dh, dc, kept, h, y, c):
        return [code.times(dh, code.minus(code.same(1), code.times(y, y)))], None, None


class ReLUCell(TanhCell):
    def step(self, code, by_input, by_state, h, c):
        x, zero = code.plus(by_input[0], by_state[0]), code.same(0)
        return code.where(code.compare("ole", x, zero), zero, x), None, []  # NaN stays

    def gradient(self, code, dh, dc, kept, h, y, c):
        zero = code.same(0)
        return [code.where(code.compare("ole", y, zero), zero, dh)], None, None


CELLS = {"LSTM": LSTMCell(), "GRU": GRUCell(), "RNN_TANH": TanhCell(), "RNN_RELU": ReLUCell()}
