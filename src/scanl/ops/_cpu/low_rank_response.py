"""Responses of low-rank systems as fused loops over blocks of channels, in float64.

With the matrix of a mode a, and l, r for the part of rank one, a step is, in real numbers,

    A = 2 Σ (r' s' - r'' s''),  s' <- a' s' - a'' s'' - l' A,  s'' <- a' s'' + a'' s' - l'' A

A unit of work is one block of channels. Its numbers are in scratch: for each mode the rows of FIELDS, of WIDTH channels
each. The state is a row like any other, so a step reads and writes the first-level cache alone.

The backward pass stores the state every CHUNK steps and recomputes the states in between once. It carries the adjoint
of the state, which is the same recurrence with the transposed matrix.
"""

import numpy as np
import torch

from scanl.ops._cpu._helper import helper
from scanl.ops._cpu._kernel import kernel
from scanl.ops._cpu._memory import contiguous, empty
from scanl.ops._cpu._slots import part, units
from scanl.ops._cpu._team import scratch

_HEAD = "modes steps starts batch width system begin x x_batch"

WIDTH = 16  # channels of a block; constant, so that the compiler knows that rows in scratch do not overlap
CHUNK = 32  # steps whose states the backward pass holds at a time
SYSTEM = 8  # rows of a mode: a, l, r and c, each as its real and its imaginary part
AR, AI, LR, LI, RR, RI, CR, CI, SR, SI = (n * WIDTH for n in range(10))
FORWARD_MODE = 10 * WIDTH
PR, PI = (n * WIDTH for n in (10, 11))  # the adjoint of the state
GRADIENT_OFFSET = 12 * WIDTH  # the gradients of the eight rows
BACKWARD_MODE = 20 * WIDTH


@helper(forceinline=True)
def _load(system, rows, q, modes, width):
    """Copy `rows` rows of each mode into q, in which a mode has `width` numbers."""
    for m in range(modes):
        for i in range(rows * WIDTH):
            q[m * width + i] = system[m * rows * WIDTH + i]


@helper(forceinline=True)
def _set(values, q, modes, width, first):
    """Copy two rows of each mode into q, at `first`."""
    for m in range(modes):
        for i in range(2 * WIDTH):
            q[m * width + first + i] = values[m * 2 * WIDTH + i]


@helper(forceinline=True)
def _get(q, values, modes, width, first):
    for m in range(modes):
        for i in range(2 * WIDTH):
            values[m * 2 * WIDTH + i] = q[m * width + first + i]


@helper(forceinline=True)
def _sums(q, modes, width, sums):
    """Write 2 Re Σ c s and 2 Re Σ r s of each channel."""
    for i in range(2 * WIDTH):
        sums[i] = 0.0
    for m in range(modes):
        mode = q[m * width : m * width + FORWARD_MODE]
        for i in range(WIDTH):
            sums[i] += mode[CR + i] * mode[SR + i] - mode[CI + i] * mode[SI + i]
            sums[WIDTH + i] += mode[RR + i] * mode[SR + i] - mode[RI + i] * mode[SI + i]
    for i in range(2 * WIDTH):
        sums[i] *= 2.0


@helper(forceinline=True)
def _step(q, modes, width, sums):
    for m in range(modes):
        mode = q[m * width : m * width + FORWARD_MODE]
        for i in range(WIDTH):
            real, imag, low = mode[SR + i], mode[SI + i], sums[WIDTH + i]
            mode[SR + i] = mode[AR + i] * real - mode[AI + i] * imag - mode[LR + i] * low
            mode[SI + i] = mode[AR + i] * imag + mode[AI + i] * real - mode[LI + i] * low


@helper(forceinline=True)
def _read(x, row):
    """Copy the block's part of a row of x; the rest of the block is zero."""
    for i in range(x.size):
        row[i] = x[i]


@helper(forceinline=True)
def _add(q, modes, width, row, total):
    """Add the state times a row of x to the sum of two rows for each mode."""
    for m in range(modes):
        mode, to = q[m * width : m * width + FORWARD_MODE], total[m * 2 * WIDTH : (m + 1) * 2 * WIDTH]
        for i in range(WIDTH):
            to[i] += mode[SR + i] * row[i]
            to[WIDTH + i] += mode[SI + i] * row[i]


@kernel(_HEAD + " kernel end driven")
def _forward(slots):
    modes, dtype = slots.modes, slots.dtype
    q, sums, row = scratch(modes * FORWARD_MODE, np.float64), scratch(2 * WIDTH, np.float64), np.zeros(WIDTH)
    size = modes * 2 * WIDTH
    for g in units(slots):
        _load(part(slots.system, g * modes * SYSTEM * WIDTH, modes * SYSTEM * WIDTH, np.float64), SYSTEM, q,
              modes, FORWARD_MODE)  # fmt: skip
        first = g * WIDTH
        here = min(WIDTH, slots.width - first)
        for n in range(slots.starts):
            at = n * slots.units + g
            _set(part(slots.begin, at * size, size, np.float64), q, modes, FORWARD_MODE, SR)
            for t in range(slots.steps):
                _sums(q, modes, FORWARD_MODE, sums)
                out = part(slots.kernel, (at * slots.steps + t) * WIDTH, WIDTH, np.float64)
                for i in range(WIDTH):
                    out[i] = sums[i]
                if n == 0 and slots.x != 0:
                    for b in range(slots.batch):
                        place = b * slots.x_batch + (slots.steps - 1 - t) * slots.width + first
                        _read(part(slots.x, place, here, dtype), row)
                        total = part(slots.driven, (b * slots.units + g) * size, size, np.float64)
                        _add(q, modes, FORWARD_MODE, row, total)
                _step(q, modes, FORWARD_MODE, sums)
            _get(q, part(slots.end, at * size, size, np.float64), modes, FORWARD_MODE, SR)


@helper(forceinline=True)
def _back(q, modes, sums, g):
    """Go back one step: q has the state before it and the adjoint of the state after it. Add to the gradients.

    sums[WIDTH:] is A of the step, and g the gradient of its output.
    """
    for i in range(WIDTH):
        sums[i] = 0.0
    for m in range(modes):
        mode = q[m * BACKWARD_MODE : (m + 1) * BACKWARD_MODE]
        for i in range(WIDTH):
            sums[i] -= 2.0 * (mode[LR + i] * mode[PR + i] + mode[LI + i] * mode[PI + i])
    for m in range(modes):
        mode = q[m * BACKWARD_MODE : (m + 1) * BACKWARD_MODE]
        for i in range(WIDTH):
            real, imag, low = mode[SR + i], mode[SI + i], sums[WIDTH + i]
            pr, pi, by, out = mode[PR + i], mode[PI + i], sums[i], 2.0 * g[i]
            mode[GRADIENT_OFFSET + AR + i] += pr * real + pi * imag
            mode[GRADIENT_OFFSET + AI + i] += pi * real - pr * imag
            mode[GRADIENT_OFFSET + LR + i] -= pr * low
            mode[GRADIENT_OFFSET + LI + i] -= pi * low
            mode[GRADIENT_OFFSET + RR + i] += by * real
            mode[GRADIENT_OFFSET + RI + i] -= by * imag
            mode[GRADIENT_OFFSET + CR + i] += out * real
            mode[GRADIENT_OFFSET + CI + i] -= out * imag
            mode[PR + i] = mode[AR + i] * pr + mode[AI + i] * pi + mode[RR + i] * by + mode[CR + i] * out
            mode[PI + i] = mode[AR + i] * pi - mode[AI + i] * pr - mode[RI + i] * by - mode[CI + i] * out


@helper(forceinline=True)
def _drive(q, modes, row, by, to_x):
    """Add the gradient of the driven states: to the adjoint, and to a row of x."""
    for m in range(modes):
        mode = q[m * BACKWARD_MODE : (m + 1) * BACKWARD_MODE]
        g = by[m * 2 * WIDTH : (m + 1) * 2 * WIDTH]
        for i in range(WIDTH):
            mode[PR + i] += g[i] * row[i]
            mode[PI + i] += g[WIDTH + i] * row[i]
            to_x[i] += g[i] * mode[SR + i] + g[WIDTH + i] * mode[SI + i]


@kernel(_HEAD + " d_kernel d_end d_driven d_system d_begin dx")
def _backward(slots):
    modes, steps, dtype = slots.modes, slots.steps, slots.dtype
    q, sums, row = scratch(modes * BACKWARD_MODE, np.float64), scratch(2 * WIDTH, np.float64), np.zeros(WIDTH)
    to_x = np.zeros(WIDTH)
    size = modes * 2 * WIDTH
    chunks = -(-steps // CHUNK)
    saved, states, lows = (
        scratch(chunks * size, np.float64),
        scratch(CHUNK * size, np.float64),
        np.zeros(CHUNK * WIDTH),
    )
    for g in units(slots):
        _load(part(slots.system, g * modes * SYSTEM * WIDTH, modes * SYSTEM * WIDTH, np.float64), SYSTEM, q,
              modes, BACKWARD_MODE)  # fmt: skip
        for m in range(modes):
            for i in range(SYSTEM * WIDTH):
                q[m * BACKWARD_MODE + GRADIENT_OFFSET + i] = 0.0
        first = g * WIDTH
        here = min(WIDTH, slots.width - first)
        for n in range(slots.starts):
            at = n * slots.units + g
            driven = n == 0 and slots.d_driven != 0
            _set(part(slots.begin, at * size, size, np.float64), q, modes, BACKWARD_MODE, SR)
            for t in range(steps):
                if t % CHUNK == 0:
                    _get(q, saved[t // CHUNK * size : (t // CHUNK + 1) * size], modes, BACKWARD_MODE, SR)
                _sums(q, modes, BACKWARD_MODE, sums)
                _step(q, modes, BACKWARD_MODE, sums)
            _set(part(slots.d_end, at * size, size, np.float64), q, modes, BACKWARD_MODE, PR)
            for k in range(chunks):
                c = chunks - 1 - k
                count = min(CHUNK, steps - c * CHUNK)
                _set(saved[c * size : (c + 1) * size], q, modes, BACKWARD_MODE, SR)
                for t in range(count):
                    _get(q, states[t * size : (t + 1) * size], modes, BACKWARD_MODE, SR)
                    _sums(q, modes, BACKWARD_MODE, sums)
                    for i in range(WIDTH):
                        lows[t * WIDTH + i] = sums[WIDTH + i]
                    _step(q, modes, BACKWARD_MODE, sums)
                for j in range(count):
                    t = count - 1 - j
                    step = c * CHUNK + t
                    _set(states[t * size : (t + 1) * size], q, modes, BACKWARD_MODE, SR)
                    for i in range(WIDTH):
                        sums[WIDTH + i] = lows[t * WIDTH + i]
                    _back(q, modes, sums, part(slots.d_kernel, (at * steps + step) * WIDTH, WIDTH, np.float64))
                    if driven:
                        for b in range(slots.batch):
                            place = b * slots.x_batch + (steps - 1 - step) * slots.width + first
                            _read(part(slots.x, place, here, dtype), row)
                            by = part(slots.d_driven, (b * slots.units + g) * size, size, np.float64)
                            for i in range(WIDTH):
                                to_x[i] = 0.0
                            _drive(q, modes, row, by, to_x)
                            into = part(slots.dx, place, here, dtype)
                            for i in range(here):
                                into[i] = to_x[i]
            _get(q, part(slots.d_begin, at * size, size, np.float64), modes, BACKWARD_MODE, PR)
        to = part(slots.d_system, g * modes * SYSTEM * WIDTH, modes * SYSTEM * WIDTH, np.float64)
        for m in range(modes):
            for i in range(SYSTEM * WIDTH):
                to[m * SYSTEM * WIDTH + i] = q[m * BACKWARD_MODE + GRADIENT_OFFSET + i]


def _packed(values: torch.Tensor) -> torch.Tensor:
    """Return (..., blocks, modes, 2 rows, WIDTH), float64, of complex values (..., D, modes), padded with zeros."""
    *lead, width, modes = values.shape
    blocks = -(-width // WIDTH)
    out = torch.zeros(*lead, blocks * WIDTH, modes, 2, dtype=torch.float64)
    out[..., :width, :, :] = torch.view_as_real(values.to(torch.complex128).resolve_conj())
    return out.unflatten(-3, (blocks, WIDTH)).movedim(-3, -1).contiguous()


def _unpacked(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Undo `_packed`."""
    pairs = packed.movedim(-1, -3).flatten(-4, -3)[..., :width, :, :]
    return torch.view_as_complex(pairs.contiguous())


def _shared(system: torch.Tensor, begin: torch.Tensor, steps: int, x: torch.Tensor | None) -> dict[str, object]:
    """Return the slots that both passes have. system: (4, D, N); begin: (R, D, N)."""
    _, width, modes = system.shape
    rows = _packed(system).movedim(0, 2).contiguous()  # (blocks, modes, 4, 2, WIDTH)
    return {
        "modes": modes, "steps": steps, "starts": begin.shape[0], "batch": 0 if x is None else x.shape[0],
        "width": width, "system": rows, "begin": _packed(begin), "x": x, "x_batch": steps * width,
    }  # fmt: skip


def forward(
    system: torch.Tensor, begin: torch.Tensor, steps: int, x: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    width, modes = system.shape[1:]
    blocks, x = -(-width // WIDTH), None if x is None else contiguous(x)
    shared = _shared(system, begin, steps, x)
    kernel = empty((len(begin), blocks, steps, WIDTH), torch.float64)
    end = torch.empty(len(begin), blocks, modes, 2, WIDTH, dtype=torch.float64)
    driven = None if x is None else torch.zeros(len(x), blocks, modes, 2, WIDTH, dtype=torch.float64)
    slots = _forward.pack(**shared, kernel=kernel, end=end, driven=driven)
    work = steps * len(begin) * width * modes
    _forward.run(torch.float32 if x is None else x.dtype, slots, blocks, work)
    kernel = kernel.transpose(2, 3).flatten(1, 2)[:, :width]
    return kernel, _unpacked(end, width), None if driven is None else _unpacked(driven, width)


def backward(
    d_kernel: torch.Tensor,
    d_end: torch.Tensor,
    d_driven: torch.Tensor | None,
    system: torch.Tensor,
    begin: torch.Tensor,
    steps: int,
    x: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    width, modes = system.shape[1:]
    blocks = -(-width // WIDTH)
    driven = None if d_driven is None or x is None else _packed(d_driven)
    x = None if driven is None or x is None else contiguous(x)
    shared = _shared(system, begin, steps, x)
    by = torch.zeros(len(begin), blocks * WIDTH, steps, dtype=torch.float64)
    by[:, :width] = d_kernel
    by = by.unflatten(1, (blocks, WIDTH)).transpose(2, 3).contiguous()
    d_system = torch.empty(blocks, modes, 4, 2, WIDTH, dtype=torch.float64)
    d_begin = torch.empty(len(begin), blocks, modes, 2, WIDTH, dtype=torch.float64)
    dx = None if x is None else torch.empty_like(x)
    slots = _backward.pack(
        **shared, d_kernel=by, d_end=_packed(d_end), d_driven=driven,
        d_system=d_system, d_begin=d_begin, dx=dx,
    )  # fmt: skip
    _backward.run(torch.float32 if x is None else x.dtype, slots, blocks, steps * len(begin) * width * modes)
    return _unpacked(d_system.movedim(2, 0), width), _unpacked(d_begin, width), dx
