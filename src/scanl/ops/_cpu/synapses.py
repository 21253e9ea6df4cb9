r"""Neurons with synapses: the kernels of liquid time-constant cells, in float32, by explicit vectors.

.. math:: a = 1 / (1 + 2^y), \quad y = -\sigma (v - \mu) \log_2 e

A vector is a source's synapses to adjacent neurons. Forwards, the two sums of a vector of neurons, Σ a w and Σ a w E,
stay in registers over all sources. Backwards, what a source gets stays in registers over all neurons that it reaches.
Each load of the parameters serves four sequences.

The backward pass computes the substeps of a step again, and keeps nothing but the states.
"""

# pyright: reportCallIssue=false
# numba passes the first argument of an intrinsic itself.

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba.core.cgutils import get_or_insert_function
from torch import Tensor
from torch.nn import functional as F

from scanl.ops._compiler.cells.compiled import rows
from scanl.ops._compiler.cells.kernels import OnCpu
from scanl.ops._compiler.cells.sizes import TracedAxes
from scanl.ops._compiler.cells.values import Sizes
from scanl.ops._cpu._cells import (
    add_up,
    apart,
    clear,
    copy,
    groups,
    length,
    longest,
    of_step,
    row_at,
    sequences,
    state_before,
)
from scanl.ops._cpu._flat import array
from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._math import LOG2E, ROUND
from scanl.ops._cpu._memory import empty
from scanl.ops._cpu._pointers import at, pointer, separate
from scanl.ops._cpu._slots import units
from scanl.ops._cpu._team import scratch
from scanl.ops._cpu._vectors import emitted

BYTES, LANES = 64, 16  # of a vector
FLUSH = 8  # steps of a partial sum
LARGEST_EXPONENT = 126.0  # of |y|: 2^y is a number of full precision
POWERS = (  # 2^r to 1.2e-7 for |r| <= 1/2
    0.0013277939287945628, 0.009675757959485054, 0.05550709739327431, 0.24022114276885986, 0.6931469440460205, 1.0,
)  # fmt: skip

# What the kernels know of a block of synapses, all from the sources to adjacent neurons: the first source, the sources,
# the first neuron, the neurons, their vectors, the address of the parameters, and where sums and gradients begin.
FIRST_SOURCE, SOURCES, FIRST_TARGET, TARGETS, VECTORS, PARAMETERS, AREA, GRADIENTS, FIELDS = range(9)


def _same(e: Any, number: Any) -> ir.Constant:
    return ir.Constant(e.strip, [float(number)] * LANES)


def _fused(e: Any, a: Any, b: Any, total: Any) -> Any:
    """Return a b + total with one rounding: the bits then do not depend on how many sequences the compiler sees."""
    kind = ir.FunctionType(e.strip, [e.strip] * 3)
    return e.builder.call(get_or_insert_function(e.builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, total])


def _opened(e: Any, difference: Any, sharpness: Any) -> Any:
    """Return a for v - μ and -σ log2 e."""
    b, words = e.builder, ir.VectorType(ir.IntType(32), LANES)
    y = b.fmul(difference, sharpness)
    for order, bound in (("<", -LARGEST_EXPONENT), (">", LARGEST_EXPONENT)):
        y = b.select(b.fcmp_ordered(order, y, _same(e, bound)), _same(e, bound), y)
    rounded = b.fadd(y, _same(e, ROUND))
    r = b.fsub(y, b.fsub(rounded, _same(e, ROUND)))
    p = _same(e, POWERS[0])
    for coefficient in POWERS[1:]:
        p = _fused(e, p, r, _same(e, coefficient))
    exponent = b.shl(b.bitcast(rounded, words), ir.Constant(words, [23] * LANES))
    power = b.bitcast(b.add(b.bitcast(p, words), exponent), e.strip)
    return b.fdiv(_same(e, 1), b.fadd(_same(e, 1), power))


def _synapses(e: Any, place: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return a vector of σ, μ, w, w E and -σ log2 e."""
    sharpness, middle, w, driven = (e.read(e.at(place, kind * LANES)) for kind in range(4))
    return sharpness, middle, w, driven, e.builder.fmul(sharpness, _same(e, -LOG2E))


def _receiving(height: int) -> Any:
    """Build an intrinsic: out = Σ_j a_j w_j E_j, and beside it Σ_j a_j w_j, for a vector of neurons of some sequences.

    out_next: from the first sum to the second.   v: the sources.   w_row: from the parameters of a source to the next.
    """

    @emitted(width=BYTES)
    def receive(e, out, out_at, out_row, out_next, v, v_at, v_row, w, w_at, w_row, sources):
        sums = e.sums(2 * height)
        with e.rows(sources) as j:
            _, middle, conductance, driven, sharpness = _synapses(e, e.at(w, w_at, (j, w_row)))
            for r in range(height):
                opened = _opened(e, e.builder.fsub(e.number_at(e.at(v, v_at, (r, v_row), j)), middle), sharpness)
                for total, factor in ((sums[2 * r], driven), (sums[2 * r + 1], conductance)):
                    e.builder.store(_fused(e, opened, factor, e.builder.load(total)), total)
        for r in range(height):
            e.keep(sums[2 * r], e.at(out, out_at, (r, out_row)))
            e.keep(sums[2 * r + 1], e.at(out, out_at, (r, out_row), out_next))

    return receive


def _learning(height: int) -> Any:
    """Build an intrinsic: the gradients of a source's synapses, and of the source, for some sequences; all are added.

    d: the gradient of the first sum; d_next: from it to that of the second.   dv: of the source.   The gradients of a
    vector are Σ s (v - μ) and Σ s, with the gradient s of σ (v - μ), then those of w and w E.
    """

    @emitted(width=BYTES)
    def learn(e, dw, dw_at, w, w_at, v, v_at, v_row, d, d_at, d_row, d_next, dv, dv_at, dv_row, vectors):
        b, sums = e.builder, e.sums(height)
        sources = [e.number_at(e.at(v, v_at, (r, v_row))) for r in range(height)]

        with e.rows(vectors) as n:
            sharpness, middle, conductance, driven, scaled = _synapses(e, e.at(w, w_at, (n, 4 * LANES)))
            gradients: list[Any] = [_same(e, 0)] * 4
            for r in range(height):
                difference = b.fsub(sources[r], middle)
                opened = _opened(e, difference, scaled)
                place = e.at(d, d_at, (r, d_row), (n, LANES))
                of_drive, of_conductance = e.read(place), e.read(e.at(place, d_next))
                slope = _fused(e, b.fneg(opened), opened, opened)
                s = b.fmul(slope, _fused(e, driven, of_drive, b.fmul(conductance, of_conductance)))
                pairs = (s, difference), (s, None), (opened, of_conductance), (opened, of_drive)
                gradients = [
                    b.fadd(total, x) if y is None else _fused(e, x, y, total)
                    for total, (x, y) in zip(gradients, pairs, strict=True)
                ]
                b.store(_fused(e, s, sharpness, b.load(sums[r])), sums[r])
            for kind, value in enumerate(gradients):
                place = e.at(dw, dw_at, (n, 4 * LANES), kind * LANES)
                e.write(b.fadd(e.read(place), value), place)
        four = e.totals([b.load(total) for total in (sums * 4)[:4]])
        for r in range(height):
            e.add_number(e.at(dv, dv_at, (r, dv_row)), b.extract_element(four, ir.Constant(ir.IntType(32), r)))

    return learn


_receive_four, _receive_one, _learn_four, _learn_one = _receiving(4), _receiving(1), _learning(4), _learning(1)


@helper()
def _receive(block, base, row_width, area, source, count, dtype):
    """Compute the sums of all neurons of a block for `count` sequences. source, area: where sources and sums are."""
    w, sources, vectors = pointer(block[PARAMETERS], dtype), block[SOURCES], block[VECTORS]
    for n in range(vectors):
        out, v, parameters = area + block[AREA] + n * LANES, source + block[FIRST_SOURCE], n * sources * 4 * LANES
        done = 0
        while done < count:
            o, a = out + done * row_width, v + done * row_width
            if count - done >= 4:
                _receive_four(
                    base, o, row_width, vectors * LANES, base, a, row_width, w, parameters, 4 * LANES, sources
                )
                done += 4
            else:
                _receive_one(base, o, row_width, vectors * LANES, base, a, row_width, w, parameters, 4 * LANES, sources)
                done += 1


@helper()
def _learn(block, base, row_width, area, source, dv, recent, count, dtype):
    """Add the gradients of a block. area: where those of its sums are.   dv: where those of the sources are."""
    w, vectors = pointer(block[PARAMETERS], dtype), block[VECTORS]
    for j in range(block[SOURCES]):
        v, to, d = source + block[FIRST_SOURCE] + j, dv + block[FIRST_SOURCE] + j, area + block[AREA]
        parameters, gradients, done = j * vectors * 4 * LANES, block[GRADIENTS] + j * vectors * 4 * LANES, 0
        while done < count:
            more = done * row_width
            if count - done >= 4:
                _learn_four(
                    recent, gradients, w, parameters, base, v + more, row_width, base, d + more, row_width,
                    vectors * LANES, base, to + more, row_width, vectors,
                )  # fmt: skip
                done += 4
            else:
                _learn_one(
                    recent, gradients, w, parameters, base, v + more, row_width, base, d + more, row_width,
                    vectors * LANES, base, to + more, row_width, vectors,
                )  # fmt: skip
                done += 1


@helper()
def _add(target, source, count):
    separate()
    for n in range(count):
        target[n] += source[n]


@helper(error_model="numpy", fastmath={"contract", "nsz"})
def _advance(new, v, above, below, c, dt, neurons):
    """Compute the state after a substep."""
    separate()
    for n in range(neurons):
        new[n] = (c[n] * v[n] + dt * above[n]) / (c[n] + dt * below[n])


@helper(error_model="numpy", fastmath={"contract", "nsz", "reassoc"})
def _retreat(dv, d_above, d_below, d_leak, new, v, above, below, c, dt, neurons):
    """Differentiate a substep: change dv from the gradient of the new state to that of the old one; return that of dt.

    The gradients of above and below are set, those of c, g and g v_leak added.
    """
    separate()
    d_dt = np.float32(0)
    for n in range(neurons):
        upper = dv[n] / (c[n] + dt * below[n])
        lower = -upper * new[n]
        d_dt += upper * above[n] + lower * below[n]
        d_above[n], d_below[n] = dt * upper, dt * lower
        d_leak[n] += upper * v[n] + lower
        d_leak[neurons + n] += dt * lower
        d_leak[2 * neurons + n] += dt * upper
        dv[n] = c[n] * upper
    return d_dt


@helper()
def _evolve(slots, base, blocks, row_width, count, stride, leak, dtype):
    """Take all substeps of a step. stride: from what is of a substep to the next one; with 0 only the last remains."""
    neurons = slots.neurons
    x = (slots.substeps + 1) * neurons if stride else neurons
    above = x + slots.inputs
    first = above + 2 * neurons * (slots.substeps if stride else 1)
    area = first + 2 * neurons
    _receive(blocks, base, row_width, area, x, count, dtype)
    for r in range(count):
        row, block = at(base, r * row_width), blocks
        to, sums = at(row, first + block[FIRST_TARGET]), at(row, area + block[AREA])
        copy(at(leak, 2 * neurons), at(row, first), neurons)
        copy(at(leak, neurons), at(row, first + neurons), neurons)
        _add(to, sums, block[TARGETS])
        _add(at(to, neurons), at(sums, block[VECTORS] * LANES), block[TARGETS])
    for k in range(slots.substeps):
        v, here = k * stride, above + 2 * k * stride
        for b in range(1, slots.count):
            _receive(at(blocks, b * FIELDS), base, row_width, area, v, count, dtype)
        for r in range(count):
            row = at(base, r * row_width)
            copy(at(row, first), at(row, here), 2 * neurons)
            for b in range(1, slots.count):
                block = at(blocks, b * FIELDS)
                to, sums = at(row, here + block[FIRST_TARGET]), at(row, area + block[AREA])
                _add(to, sums, block[TARGETS])
                _add(at(to, neurons), at(sums, block[VECTORS] * LANES), block[TARGETS])
            dt, new = row[area + slots.area], at(row, area + slots.area + 1)
            _advance(new, at(row, v), at(row, here), at(row, here + neurons), leak, dt, neurons)
            copy(new, at(row, v + stride), neurons)


_HEAD = "ranges sequences steps size reverse inputs neurons substeps blocks count area leak state"


@kernel(f"{_HEAD} y", rows="in_x in_dt")
def forward(slots):
    dtype, neurons, inputs = slots.dtype, slots.neurons, slots.inputs
    ranges, blocks = array(slots.ranges, 3 * slots.sequences, np.int64), pointer(slots.blocks, np.int64)
    leak, state, y = pointer(slots.leak, dtype), pointer(slots.state, dtype), pointer(slots.y, dtype)
    row_width = apart(6 * neurons + inputs + slots.area + 1, dtype)
    memory = scratch(slots.size * row_width, dtype)
    for unit in units(slots):
        base = pointer(memory.ctypes.data, dtype)
        first = unit * slots.size
        members = min(slots.size, slots.sequences - first)
        for r in range(members):
            copy(at(state, (first + r) * neurons), at(base, r * row_width), neurons)
        for i in range(longest(ranges, first, members)):
            count = 0
            while count < members and i < length(ranges, first + count):  # the longest are first
                row, here = row_at(ranges, first + count, i, slots.steps, slots.reverse), at(base, count * row_width)
                copy(of_step(slots.in_x, row, slots.steps, dtype), at(here, neurons), inputs)
                here[5 * neurons + inputs + slots.area] = of_step(slots.in_dt, row, slots.steps, dtype)[0]
                count += 1
            _evolve(slots, base, blocks, row_width, count, 0, leak, dtype)
            for r in range(count):
                row = row_at(ranges, first + r, i, slots.steps, slots.reverse)
                copy(at(base, r * row_width), at(y, row * neurons), neurons)
        for r in range(members):
            copy(at(base, r * row_width), at(state, (first + r) * neurons), neurons)


@kernel(f"{_HEAD} reading learning history carry dx ddt sums added", rows="in_x in_dt in_dy")
def backward(slots):
    dtype, neurons, inputs, substeps = slots.dtype, slots.neurons, slots.inputs, slots.substeps
    ranges = array(slots.ranges, 3 * slots.sequences, np.int64)
    reading, learning = pointer(slots.reading, np.int64), pointer(slots.learning, np.int64)
    leak, state, history = pointer(slots.leak, dtype), pointer(slots.state, dtype), pointer(slots.history, dtype)
    carry, dx, ddt = pointer(slots.carry, dtype), pointer(slots.dx, dtype), pointer(slots.ddt, dtype)
    sums, added = pointer(slots.sums, dtype), slots.added
    x_at = (substeps + 1) * neurons
    above = x_at + inputs
    area = above + 2 * neurons * substeps + 2 * neurons
    dt_at = area + slots.area  # then the new state, and the gradients of the inputs, of the state, and of the sums
    dx_at = dt_at + 1 + neurons
    dv_at = dx_at + inputs
    d_above = dv_at + neurons
    d_area = d_above + 2 * neurons
    row_width = apart(d_area + slots.area, dtype)
    memory = scratch(slots.size * row_width + added, dtype)
    for unit in units(slots):
        base = pointer(memory.ctypes.data, dtype)
        recent, total = at(base, slots.size * row_width), at(sums, unit * added)
        first = unit * slots.size
        members = min(slots.size, slots.sequences - first)
        for r in range(members):
            copy(at(carry, (first + r) * neurons), at(base, r * row_width + dv_at), neurons)
        steps = longest(ranges, first, members)
        for i in range(steps):
            count = 0
            while count < members and i < length(ranges, first + count):
                n, here = first + count, at(base, count * row_width)
                row = row_at(ranges, n, i, slots.steps, 1 - slots.reverse)
                before = state_before(ranges, n, i, row, slots.reverse, state, neurons, history, neurons)
                copy(before, here, neurons)
                copy(of_step(slots.in_x, row, slots.steps, dtype), at(here, x_at), inputs)
                here[dt_at] = of_step(slots.in_dt, row, slots.steps, dtype)[0]
                clear(at(here, dx_at), inputs)
                _add(at(here, dv_at), of_step(slots.in_dy, row, slots.steps, dtype), neurons)
                clear(at(here, d_area + learning[AREA]), 2 * learning[VECTORS] * LANES)
                ddt[row] = 0
                count += 1
            _evolve(slots, base, reading, row_width, count, neurons, leak, dtype)
            for m in range(substeps):
                k = substeps - 1 - m
                for r in range(count):
                    here, row = at(base, r * row_width), row_at(ranges, first + r, i, slots.steps, 1 - slots.reverse)
                    v, sums_at = at(here, k * neurons), at(here, above + 2 * k * neurons)
                    ddt[row] += _retreat(
                        at(here, dv_at), at(here, d_above), at(here, d_above + neurons), recent, at(v, neurons), v,
                        sums_at, at(sums_at, neurons), leak, here[dt_at], neurons,
                    )  # fmt: skip
                    for b in range(slots.count):
                        block = at(learning, b * FIELDS)
                        to, found = at(here, d_area + block[AREA]), at(here, d_above + block[FIRST_TARGET])
                        if b == 0:
                            _add(to, found, block[TARGETS])
                            _add(at(to, block[VECTORS] * LANES), at(found, neurons), block[TARGETS])
                        else:
                            copy(found, to, block[TARGETS])
                            copy(at(found, neurons), at(to, block[VECTORS] * LANES), block[TARGETS])
                for b in range(1, slots.count):
                    block = at(learning, b * FIELDS)
                    _learn(block, base, row_width, d_area, k * neurons, dv_at, recent, count, dtype)
            _learn(learning, base, row_width, d_area, x_at, dx_at, recent, count, dtype)
            for r in range(count):
                row = row_at(ranges, first + r, i, slots.steps, 1 - slots.reverse)
                copy(at(base, r * row_width + dx_at), at(dx, row * inputs), inputs)
            if i % FLUSH == FLUSH - 1 or i == steps - 1:
                add_up(total, recent, added)
        for r in range(members):
            copy(at(base, r * row_width + dv_at), at(carry, (first + r) * neurons), neurons)


class _Block(NamedTuple):
    """Synapses (4, P, R) from adjacent sources to adjacent neurons."""

    operand: str
    synapses: Tensor
    first_source: int
    first_target: int

    @property
    def vectors(self) -> int:
        return -(-self.synapses.shape[2] // LANES)

    def vectored(self, *order: int) -> Tensor:
        """Return the parameters in the order of `order`, of axes (kinds, sources, vectors, lanes)."""
        kinds, sources, targets = self.synapses.shape
        padded = F.pad(self.synapses, (0, self.vectors * LANES - targets))
        padded[0, :, targets:] = 1  # an infinite source times 0 would be no number
        return padded.view(kinds, sources, self.vectors, LANES).permute(order).contiguous()


class KernelsByHand(OnCpu):
    """The kernels of `ltc_cell` and `ncp_cell`; other dtypes than float32 have those that are made from the step."""

    def __init__(
        self, name: str, step: Callable[..., Any], shapes: Mapping[str, Any], output: tuple[str, ...],
        timed: frozenset[str], axes: TracedAxes, options: Mapping[str, Any], dtype: torch.dtype, *, frugal: bool,
    ) -> None:  # fmt: skip
        super().__init__(name, step, shapes, output, timed, axes, options, dtype, frugal=frugal)
        self.substeps = options["substeps"]

    def forward(
        self, values: Mapping[str, Tensor], sizes: Sizes, y_shape: Sequence[int], reverse: bool,
        cu_seqlens: Tensor | None, keep: bool, name: str,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        x = values["x"]
        if x.dtype != torch.float32:
            return super().forward(values, sizes, y_shape, reverse, cu_seqlens, keep, name)
        ranges, order = _longest_first(sequences(x, cu_seqlens, name))
        y, last = empty(tuple(y_shape), x.dtype), values["state"][order].clone(memory_format=torch.contiguous_format)
        blocks, kept, _ = self._blocks(values, (2, 1, 0, 3))
        count, head = self._call(values, ranges, reverse, len(blocks))
        slots = forward.pack(**head, blocks=blocks, state=last, y=y)
        forward.run(x.dtype, slots, count, y.numel() * len(blocks) * self.substeps * last.shape[1])
        del kept
        return y, _in_their_places(last, order), empty((*x.shape[:2], 0), x.dtype)

    def backward(
        self, dy: Tensor, dlast: Tensor, values: Mapping[str, Tensor], y: Tensor, residuals: Tensor, sizes: Sizes,
        reverse: bool, cu_seqlens: Tensor | None, name: str,
    ) -> list[Tensor]:  # fmt: skip
        x = values["x"]
        if x.dtype != torch.float32:
            return super().backward(dy, dlast, values, y, residuals, sizes, reverse, cu_seqlens, name)
        ranges, order = _longest_first(sequences(x, cu_seqlens, name))
        carry, state = (
            tensor[order].clone(memory_format=torch.contiguous_format) for tensor in (dlast, values["state"])
        )
        reading, read, _ = self._blocks(values, (2, 1, 0, 3))
        learning, learned, added = self._blocks(values, (1, 2, 0, 3))
        count, head = self._call(values, ranges, reverse, len(reading))
        dx, ddt = empty(tuple(x.shape), x.dtype), torch.zeros(values["dt"].shape)
        sums, history = torch.zeros(max(count, 1), added), y.contiguous()
        slots = backward.pack(
            **head, blocks=0, reading=reading, learning=learning, state=state, history=history, carry=carry, dx=dx,
            ddt=ddt, sums=sums, added=added, in_dy=rows(dy),
        )  # fmt: skip
        backward.run(x.dtype, slots, count, y.numel() * len(reading) * self.substeps * carry.shape[1])
        del read, learned
        total = sums.sum(0)
        gradients = {"x": dx, "dt": ddt, "state": _in_their_places(carry, order)}
        gradients["leak"] = total[: values["leak"].numel()].view_as(values["leak"])
        for block, fields in zip(self._places(values), learning, strict=True):
            _, sources, targets = block.synapses.shape
            of = total[fields[GRADIENTS] :][: sources * block.vectors * 4 * LANES].view(
                sources, block.vectors, 4, LANES
            )
            of = of.permute(2, 0, 1, 3).reshape(4, sources, -1)[..., :targets]
            gradients[block.operand] = torch.cat([of[:1], -block.synapses[:1] * of[1:2], of[2:]])
        return [gradients[operand] for operand in self.present]

    def _call(
        self, values: Mapping[str, Tensor], ranges: np.ndarray, reverse: bool, count: int
    ) -> tuple[int, dict[str, Any]]:
        """Return the number of units, and the slots that both kernels have."""
        x, size = values["x"], groups(len(ranges))
        return size[0], {
            "ranges": ranges, "sequences": len(ranges), "steps": x.shape[1], "size": size[1], "reverse": reverse,
            "inputs": x.shape[2], "neurons": values["state"].shape[1], "substeps": self.substeps, "count": count,
            "area": sum(2 * block.vectors * LANES for block in self._places(values)),
            "leak": values["leak"].contiguous(), "in_x": rows(x), "in_dt": rows(values["dt"]),
        }  # fmt: skip

    def _places(self, values: Mapping[str, Tensor]) -> list[_Block]:
        """Return the blocks, that of the inputs first."""
        neurons, sensory = values["state"].shape[1], values["sensory"]
        blocks = [_Block("sensory", sensory, 0, neurons - sensory.shape[2])]
        if "synapse" in values:
            return [*blocks, _Block("synapse", values["synapse"], 0, 0)]
        motor = values["motor"].shape[2]
        return [
            *blocks,
            _Block("command", values["command"], motor, motor),
            _Block("motor", values["motor"], motor, 0),
        ]

    def _blocks(self, values: Mapping[str, Tensor], order: Sequence[int]) -> tuple[np.ndarray, list[Tensor], int]:
        """Return the fields of all blocks, the memory that they point to, and the numbers of all gradients."""
        fields, kept, area, gradients = [], [], 0, values["leak"].numel()
        gradients += -gradients % LANES
        for block in self._places(values):
            _, sources, targets = block.synapses.shape
            kept.append(block.vectored(*order))
            fields.append((
                block.first_source, sources, block.first_target, targets, block.vectors, kept[-1].data_ptr(), area,
                gradients,
            ))  # fmt: skip
            area += 2 * block.vectors * LANES
            gradients += kept[-1].numel()
        return np.array(fields, np.int64), kept, gradients


def _longest_first(ranges: np.ndarray) -> tuple[np.ndarray, slice | Tensor]:
    """Return the ranges by falling length, and the numbers of their sequences; `slice(None)` if they were so before.

    A group of sequences shares each load of a matrix for as long as its longest one: so a group is of equal lengths.
    """
    lengths = ranges[:, 2] - ranges[:, 1]
    if (lengths[1:] <= lengths[:-1]).all():
        return ranges, slice(None)
    order = np.argsort(-lengths, kind="stable")
    return ranges[order], torch.from_numpy(order)


def _in_their_places(states: Tensor, order: slice | Tensor) -> Tensor:
    """Return states, which are those of the sequences `order`, in the order of the sequences."""
    return states if isinstance(order, slice) else torch.empty_like(states).index_copy_(0, order, states)
