"""The selective scan on a GPU: a program goes along time for a block of channels, with their N states in registers.

Tiles are (steps, states, channels). Steps are processed row by row. If the compiler distributes threads over channels
and states only, as it does forwards at N = 16, rows are registers, all masked work is removed, and a step is one
multiply-add. The loop returns the state before each step, because the gradients of decays need it.

Costs per token and channel: the forward pass reads u, Δ (and z), writes y, and does N exponentials and 5 N
multiply-adds. The backward pass recomputes states in three stages: states between chunks of CHUNK steps (reading Δ and
u, writing and reading 8 N / CHUNK bytes); from these, the states between the tiles of a chunk, which stay in the
second-level cache; from these, all others (reading u, Δ, dy (z), writing du, dΔ (dz)). This takes 3 N exponentials in
all. dB and dC are summed over a program's channels in the kernel, and over programs by torch: 8 N / CHANNELS bytes for
each of the two.

If there are few programs, time is cut into pieces. A first pass computes the state after each piece from a zero state,
and the product of its decays, exp(A Σ Δ). A linear scan over the pieces then gives the state before each. The channels
of a block belong to one group of B and one group of C.

Legend: p_ is a pointer, i_ an index, b_ a block. E channels, N states; a row is a step of a sequence.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import Config

from scanl.ops._triton import linear_scan
from scanl.ops._triton._rows import place, ranges, rows, sigmoid
from scanl.ops._triton._tuned import HAS_SMALL_TILES, tuned

ELEMENTS = 8192  # elements of a tile: 32 registers of each of 256 threads
CHANNELS = 8 if HAS_SMALL_TILES else 64  # most channels of a block; each block writes its sums for dB and dC
STEPS = 8  # most steps of a tile
CHUNK = 16 if HAS_SMALL_TILES else 32
MIN_PIECE_STEPS = 64  # least steps of a piece
WARPS = 8
_tuned = tuned(
    [Config({"STAGES": stages}, num_warps=None) for stages in (2, 1, 3)],
    ("B_TIMED", "C_TIMED", "POSITIVE", "GIVES", "ADJOINT", "STEPS", "STATES", "CHANNELS"),
)
_sum = tl.standard._sum_combine  # in the interpreter, calling functions such as tl.sum costs far more than the sum


@triton.jit
def _before(a, x, b_h, i_row, STEPS: tl.constexpr, TURNED: tl.constexpr):
    """Run h = a h + x down a tile (up, if TURNED) from b_h; return h before each step, and the last h.

    It goes row by row. Rows are registers, so the compiler removes masked work.
    """
    b = tl.zeros_like(a)
    for i in tl.static_range(STEPS):
        here = i_row == (STEPS - 1 - i if TURNED else i)
        b = tl.where(here, b_h, b)
        b_h = tl.reduce(tl.where(here, a * b_h + x, 0.0), 0, _sum, keep_dims=True)
    return b, b_h


@triton.jit
def _softplus(x):
    """Return softplus(x) as torch computes it: x itself above 20. log(1 + e) is corrected for the rounding of 1 + e."""
    small = tl.exp2(tl.abs(x) * -1.4426950408889634)
    more = 1.0 + small
    return tl.where(x > 20.0, x, tl.maximum(x, 0.0) + (tl.log(more) - ((more - 1.0) - small) / more))


@triton.jit
def _step_size(p, offsets, mask, b_bias, POSITIVE: tl.constexpr, dtype: tl.constexpr):
    """Return Δ, 0 where masked, which leaves the state unchanged; and the argument of its softplus."""
    b_raw = tl.load(p + offsets, mask=mask, other=0.0).to(dtype) + b_bias
    b_delta = _softplus(b_raw) if POSITIVE else b_raw
    return tl.where(mask, b_delta, 0.0), b_raw


@triton.jit
def _block(i_unit, p_table, length, size, pieces, sequences, span, blocks, groups, TABLE: tl.constexpr,
           CHANNELS: tl.constexpr):  # fmt: skip
    """Return a program's range, group of channels, block in the group, and channels."""
    i_block, i_group = i_unit % blocks, i_unit // blocks % groups
    i_range = (i_unit // blocks // groups).to(tl.int64)
    begin, steps, _, carry_before, carry_after = place(
        i_range, p_table, length, length, size, pieces, sequences, True, TABLE
    )
    i_inner = i_block * CHANNELS + tl.arange(0, CHANNELS)[None, None, :]
    return i_range, i_group, i_block, begin, steps, carry_before, carry_after, i_group * span + i_inner, i_inner < span


@triton.jit
def _constant(p_A, p_B, p_C, p_D, p_bias, i_channel, there, states, dtype: tl.constexpr, B_TIMED: tl.constexpr,
              C_TIMED: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """Return the indices of states, and the constants over time: A for exponents of 2, B, C, D, the bias of Δ."""
    i_state = tl.arange(0, STATES)[None, :, None]
    named = i_state < states
    i_fixed, all_there = i_channel * states + i_state, there & named
    b_A = tl.load(p_A + i_fixed, mask=all_there, other=0.0).to(dtype) * 1.4426950408889634
    b_B, b_C = b_A, b_A
    if not B_TIMED:
        b_B = tl.load(p_B + i_fixed, mask=all_there, other=0.0).to(dtype)
    if not C_TIMED:
        b_C = tl.load(p_C + i_fixed, mask=all_there, other=0.0).to(dtype)
    b_D, b_bias = tl.full((1, 1, CHANNELS), 0.0, dtype), tl.full((1, 1, CHANNELS), 0.0, dtype)
    if p_D is not None:
        b_D += tl.load(p_D + i_channel, mask=there, other=0.0).to(dtype)
    if p_bias is not None:
        b_bias += tl.load(p_bias + i_channel, mask=there, other=0.0).to(dtype)
    return i_state, named, i_fixed, all_there, b_A, b_B, b_C, b_D, b_bias


@triton.jit
def _of_step(p, offsets, mask, b_own, TIMED: tl.constexpr):
    """Return B or C of each step, or the one for all steps."""
    if TIMED:
        return tl.load(p + offsets, mask=mask, other=0.0).to(b_own.dtype)
    else:
        return b_own


@_tuned
@triton.jit(do_not_specialize=["length", "size", "pieces", "sequences"])
def _forward(
    p_u, p_delta, p_A, p_B, p_C, p_D, p_z, p_bias, p_carry, p_y, p_last, p_table, length, size, pieces, sequences,
    u_row, delta_row, B_row, C_row, z_row, B_groups, C_groups, width, span, blocks, groups, states,
    REVERSE: tl.constexpr, TABLE: tl.constexpr, B_TIMED: tl.constexpr, C_TIMED: tl.constexpr, POSITIVE: tl.constexpr,
    GIVES: tl.constexpr, ADJOINT: tl.constexpr, STEPS: tl.constexpr, STATES: tl.constexpr, CHANNELS: tl.constexpr,
    CHUNK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Write the last state of each range, and to y what GIVES says.

    GIVES: "y", the states at the "borders" of chunks, or the "product" of decays. With "product" the scan starts from
    zero. The adjoint scans a C dy: dy is passed as u and C as B.
    """
    i_range, i_group, _i_block, begin, steps, carry_before, carry_after, i_channel, there = _block(
        tl.program_id(0), p_table, length, size, pieces, sequences, span, blocks, groups, TABLE, CHANNELS
    )
    dtype: tl.constexpr = p_carry.dtype.element_ty
    sign: tl.constexpr = -1 if REVERSE else 1
    first = begin + steps - 1 if REVERSE else begin
    i_row = tl.arange(0, STEPS)[:, None, None]
    i_state, named, i_fixed, all_there, b_A, b_own_B, b_own_C, b_D, b_bias = _constant(
        p_A, p_B, p_C, p_D, p_bias, i_channel, there, states, dtype, B_TIMED, C_TIMED, STATES, CHANNELS
    )
    i_B, i_C = i_group % B_groups * states + i_state, i_group % C_groups * states + i_state
    if GIVES == "product":
        b_h = tl.full((1, STATES, CHANNELS), 0.0, dtype)
        b_sum = tl.full((1, 1, CHANNELS), 0.0, dtype)
    else:
        b_h = tl.load(
            p_carry + (carry_after if REVERSE else carry_before) * width * states + i_fixed, mask=all_there, other=0.0
        ).to(dtype)
    for i in tl.range(0, steps, STEPS, num_stages=STAGES):
        live = i + i_row < steps
        mask, row = live & there, first + sign * i
        at, aside = sign * i_row, live & named
        b_delta, _b_raw = _step_size(
            p_delta + row * delta_row, at * delta_row + i_channel, mask, b_bias, POSITIVE, dtype
        )
        b_u = tl.load(p_u + row * u_row + (at * u_row + i_channel), mask=mask, other=0.0).to(dtype)
        b_B = _of_step(p_B + row * B_row, at * B_row + i_B, aside, b_own_B, B_TIMED)
        b_a = tl.exp2(b_delta * b_A)
        if ADJOINT:
            if p_z is not None:
                b_z = tl.load(p_z + row * z_row + (at * z_row + i_channel), mask=mask, other=0.0).to(dtype)
                b_u *= b_z * sigmoid(b_z)
            b_x = b_a * (b_u * b_B)
        else:
            b_x = (b_delta * b_u) * b_B
        if GIVES == "borders":
            p_border = p_y + (begin // CHUNK + i_range + i // CHUNK) * width * states
            i_border = i_state * width + i_channel
            tl.store(p_border + i_border, b_h, mask=all_there & (i % CHUNK == 0))
        b_b, b_h = _before(b_a, b_x, b_h, i_row, STEPS, False)
        if GIVES == "y":
            b_C = _of_step(p_C + row * C_row, at * C_row + i_C, aside, b_own_C, C_TIMED)
            b_y = tl.sum((b_a * b_b + b_x) * b_C, 1, keep_dims=True)
            if p_D is not None:
                b_y += b_D * b_u
            if p_z is not None:
                b_z = tl.load(p_z + row * z_row + (at * z_row + i_channel), mask=mask, other=0.0).to(dtype)
                b_y *= b_z * sigmoid(b_z)
            tl.store(p_y + row * width + (at * width + i_channel), b_y, mask=mask)
        elif GIVES == "product":
            b_sum += tl.sum(b_delta, 0, keep_dims=True)
    tl.store(p_last + i_range * width * states + i_fixed, b_h, mask=all_there)
    if GIVES == "product":
        tl.store(p_y + i_range * width * states + i_fixed, tl.exp2(b_sum * b_A), mask=all_there)


@_tuned
@triton.jit(do_not_specialize=["length", "size", "pieces", "sequences", "all_rows"])
def _backward(
    p_dy, p_u, p_delta, p_A, p_B, p_C, p_D, p_z, p_bias, p_border, p_scratch, p_carry, p_du, p_ddelta, p_dA, p_dB, p_dC,
    p_dD, p_dz, p_dbias, p_dstate, p_table, length, size, pieces, sequences, all_rows, dy_row, u_row, delta_row, B_row,
    C_row, z_row, B_groups, C_groups, width, span, blocks, groups, states, REVERSE: tl.constexpr, TABLE: tl.constexpr,
    B_TIMED: tl.constexpr, C_TIMED: tl.constexpr, POSITIVE: tl.constexpr, STEPS: tl.constexpr, STATES: tl.constexpr,
    CHANNELS: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr
):  # fmt: skip
    """Compute the gradients. s_t = C_t dy_t + a_u s_u, u the step after t, is the gradient of h_t. With p_t = a_t
    h_{t-1} s_t,

    dA = Σ Δ_t p_t,  dΔ_t = Σ_n A p_t + u_t Σ_n B_t s_t,  du_t = Δ_t Σ_n B_t s_t + D dy_t,  dB_t = Σ Δ_t u_t s_t and
    dC_t = Σ dy_t h_t, the last two summed over channels. The loop carries a_t s_t from step to step.
    """
    i_unit = tl.program_id(0)
    i_range, i_group, i_block, begin, steps, carry_before, carry_after, i_channel, there = _block(
        i_unit, p_table, length, size, pieces, sequences, span, blocks, groups, TABLE, CHANNELS
    )
    dtype: tl.constexpr = p_carry.dtype.element_ty
    sign: tl.constexpr = -1 if REVERSE else 1
    first = begin + steps - 1 if REVERSE else begin
    i_row = tl.arange(0, STEPS)[:, None, None]
    i_state, named, i_fixed, all_there, b_A, b_own_B, b_own_C, b_D, b_bias = _constant(
        p_A, p_B, p_C, p_D, p_bias, i_channel, there, states, dtype, B_TIMED, C_TIMED, STATES, CHANNELS
    )
    i_B, i_C = i_group % B_groups * states + i_state, i_group % C_groups * states + i_state
    b_dD, b_dbias = tl.full((1, 1, CHANNELS), 0.0, dtype), tl.full((1, 1, CHANNELS), 0.0, dtype)
    b_dA = tl.full((1, STATES, CHANNELS), 0.0, dtype)
    b_dB, b_dC = b_dA, b_dA
    p_scratch += i_unit.to(tl.int64) * (CHUNK // STEPS * STATES * CHANNELS)
    i_scratch = i_state * CHANNELS + tl.arange(0, CHANNELS)[None, None, :]
    # slots for the sums over this block's channels: one for each of the programs that use the same row of B, or of C
    B_slot = i_block if B_groups == groups else i_group * blocks + i_block
    C_slot = i_block if C_groups == groups else i_group * blocks + i_block

    b_e = tl.load(
        p_carry + (carry_before if REVERSE else carry_after) * width * states + i_fixed, mask=all_there, other=0.0
    ).to(dtype)
    for back in range(tl.cdiv(steps, CHUNK)):
        chunk = tl.cdiv(steps, CHUNK) - 1 - back
        start = chunk * CHUNK
        tiles = tl.cdiv(tl.minimum(steps - start, CHUNK), STEPS)
        p_from = p_border + (begin // CHUNK + i_range + chunk) * width * states
        b_h = tl.load(p_from + i_state * width + i_channel, mask=all_there, other=0.0)
        tl.store(p_scratch + i_scratch, b_h)
        for tile in tl.range(1, tiles, num_stages=STAGES):
            row, at = first + sign * (start + (tile - 1) * STEPS), sign * i_row
            mask, aside = there, named
            b_delta, b_raw = _step_size(
                p_delta + row * delta_row, at * delta_row + i_channel, mask, b_bias, POSITIVE, dtype
            )
            b_u = tl.load(p_u + row * u_row + (at * u_row + i_channel), mask=mask, other=0.0).to(dtype)
            b_B = _of_step(p_B + row * B_row, at * B_row + i_B, aside, b_own_B, B_TIMED)
            b_a, b_x = tl.exp2(b_delta * b_A), (b_delta * b_u) * b_B
            b_b, b_h = _before(b_a, b_x, b_h, i_row, STEPS, False)
            tl.store(p_scratch + tile * (STATES * CHANNELS) + i_scratch, b_h)
        tl.debug_barrier()
        for turn in tl.range(0, tiles, num_stages=STAGES):
            tile = tiles - 1 - turn
            i = start + tile * STEPS
            live = i + i_row < steps
            mask, row = live & there, first + sign * i
            at, aside = sign * i_row, live & named
            b_h = tl.load(p_scratch + tile * (STATES * CHANNELS) + i_scratch)
            b_delta, b_raw = _step_size(
                p_delta + row * delta_row, at * delta_row + i_channel, mask, b_bias, POSITIVE, dtype
            )
            b_u = tl.load(p_u + row * u_row + (at * u_row + i_channel), mask=mask, other=0.0).to(dtype)
            b_dy = tl.load(p_dy + row * dy_row + (at * dy_row + i_channel), mask=mask, other=0.0).to(dtype)
            b_B = _of_step(p_B + row * B_row, at * B_row + i_B, aside, b_own_B, B_TIMED)
            b_C = _of_step(p_C + row * C_row, at * C_row + i_C, aside, b_own_C, C_TIMED)
            i_out = at * width + i_channel

            b_a, b_du = tl.exp2(b_delta * b_A), b_delta * b_u
            b_b, b_h = _before(b_a, b_du * b_B, b_h, i_row, STEPS, False)
            b_b *= b_a
            b_after = b_b + b_du * b_B
            if p_z is not None:
                b_z = tl.load(p_z + row * z_row + (at * z_row + i_channel), mask=mask, other=0.0).to(dtype)
                b_gate = sigmoid(b_z)
                b_y = tl.sum(b_after * b_C, 1, keep_dims=True)
                if p_D is not None:
                    b_y += b_D * b_u
                tl.store(p_dz + row * width + i_out, b_dy * b_y * (b_gate + b_z * b_gate * (1 - b_gate)), mask=mask)
                b_dy *= b_z * b_gate
            if C_TIMED:
                p_to = p_dC + ((C_slot.to(tl.int64) * all_rows + row) * C_groups + i_group % C_groups) * states
                b_to = tl.sum(b_dy * b_after, 2, keep_dims=True)
                tl.store(p_to + (at * C_groups * states + i_state), b_to, mask=aside)
            else:
                b_dC += tl.sum(b_dy * b_after, 0, keep_dims=True)

            b_s = b_dy * b_C
            b_later, b_e = _before(b_a, b_a * b_s, b_e, i_row, STEPS, True)
            b_s += b_later
            if B_TIMED:
                p_to = p_dB + ((B_slot.to(tl.int64) * all_rows + row) * B_groups + i_group % B_groups) * states
                b_to = tl.sum(b_du * b_s, 2, keep_dims=True)
                tl.store(p_to + (at * B_groups * states + i_state), b_to, mask=aside)
            else:
                b_dB += tl.sum(b_du * b_s, 0, keep_dims=True)
            b_written = tl.sum(b_s * b_B, 1, keep_dims=True)
            b_s *= b_b
            b_dA += tl.sum(b_delta * b_s, 0, keep_dims=True)
            b_ddelta = tl.sum(b_s * b_A, 1, keep_dims=True) * 0.6931471805599453 + b_u * b_written
            if POSITIVE:
                b_ddelta *= tl.where(b_raw > 20.0, 1.0, sigmoid(b_raw))
            b_du = b_delta * b_written
            if p_D is not None:
                b_dD += tl.sum(b_dy * b_u, 0, keep_dims=True)
                b_du += b_D * b_dy
            b_dbias += tl.sum(tl.where(mask, b_ddelta, 0.0), 0, keep_dims=True)
            tl.store(p_du + row * width + i_out, b_du, mask=mask)
            tl.store(p_ddelta + row * width + i_out, b_ddelta, mask=mask)
        tl.debug_barrier()
    i_out = i_range * width * states + i_fixed
    tl.store(p_dstate + i_out, b_e, mask=all_there)
    tl.store(p_dA + i_out, b_dA, mask=all_there)
    if not B_TIMED:
        tl.store(p_dB + i_out, b_dB, mask=all_there)
    if not C_TIMED:
        tl.store(p_dC + i_out, b_dC, mask=all_there)
    if p_D is not None:
        tl.store(p_dD + i_range * width + i_channel, b_dD, mask=there)
    if p_bias is not None:
        tl.store(p_dbias + i_range * width + i_channel, b_dbias, mask=there)


class _Plan:
    """Launch parameters for operands of given sizes."""

    def __init__(self, u: Tensor, A: Tensor, B: Tensor, C: Tensor, cu_seqlens: Tensor | None):
        self.width, self.states = A.shape
        self.groups = max(_groups(B), _groups(C))
        self.span = self.width // self.groups
        states = triton.next_power_of_2(self.states)
        channels = min(CHANNELS, triton.next_power_of_2(self.span), max(ELEMENTS // states, 16))
        self.blocks = triton.cdiv(self.span, channels)
        self.ranges = ranges(u, cu_seqlens, self.groups * self.blocks, max(MIN_PIECE_STEPS, CHUNK))
        self.steps = min(STEPS, max(ELEMENTS // (states * channels), 1))
        self.steps_back = max(self.steps // 2, 1)  # three tiles are in registers at a time
        self.numbers = (u.shape[1], self.ranges.size, self.ranges.pieces, self.ranges.sequences)
        self.sizes = (self.width, self.span, self.blocks, self.groups, self.states)
        self.flags = {
            "TABLE": self.ranges.table is not None,
            "STATES": states,
            "CHANNELS": channels,
            "CHUNK": CHUNK,
            "num_warps": max(min(states * channels // 128, WARPS), 1),  # one thread has all steps of a state
            "enable_fp_fusion": True,
        }

    @property
    def units(self) -> int:
        return self.ranges.count * self.groups * self.blocks

    def launch(self, kernel: Any, *arguments: Any, **flags: Any) -> None:
        with torch.cuda.device_of(arguments[0]):
            kernel[self.units,](*arguments, *self.sizes, **flags, **self.flags)

    def forward(self, u, delta, A, B, C, D, z, bias, carry, y, last, **flags) -> None:
        """Launch `_forward`. u, delta, B, C and z are pairs of a tensor and its row stride."""
        pointers = (u[0], delta[0], A, B[0], C[0], D, z[0], bias, carry, y, last, self.ranges.table, *self.numbers)
        strides = (u[1], delta[1], B[1], C[1], z[1], _groups(B[0]), _groups(C[0]))
        timed = {"B_TIMED": B[0].ndim > 2, "C_TIMED": C[0].ndim > 2}
        self.launch(_forward, *pointers, *strides, STEPS=self.steps, maxnreg=128, **timed, **flags)

    def enter(self, u, delta, A, B, z, bias, carry, **flags) -> tuple[Tensor, Tensor]:
        """Return the carries before the sequences and after each piece, and the carries after each sequence."""
        ends = carry.new_empty(*self.ranges.joined, *A.shape)
        products = torch.empty_like(ends)
        self.forward(u, delta, A, B, B, None, z, bias, carry, products, ends, GIVES="product", **flags)
        ends, exit_state = linear_scan.forward(ends, products, carry, flags["REVERSE"], self.ranges.cut)
        return torch.cat([carry, ends.flatten(0, 1)]), exit_state


def _groups(B: Tensor) -> int:
    return B.shape[2] if B.ndim == 4 else 1


def _operands(u, delta, A, B, C, D, z, delta_bias, state, cu_seqlens):
    """Return the plan, and the operands as `_Plan.forward` takes them."""
    plan = _Plan(u, A, B, C, cu_seqlens)
    B, C = (rows(value) if value.ndim > 2 else (value.contiguous(), 0) for value in (B, C))
    A, D, delta_bias = (value if value is None else value.contiguous() for value in (A, D, delta_bias))
    z = (None, 0) if z is None else rows(z)
    return plan, rows(u), rows(delta), A, B, C, D, z, delta_bias, state.contiguous()


def forward(u, delta, A, B, C, D, z, delta_bias, state, reverse, cu_seqlens, delta_softplus):
    y = torch.empty_like(u, memory_format=torch.contiguous_format)
    if u.numel() == 0:
        return y, state.clone(memory_format=torch.contiguous_format)
    operands = _operands(u, delta, A, B, C, D, z, delta_bias, state, cu_seqlens)
    plan, u, delta, A, B, C, D, z, bias, carry = operands
    flags = {"REVERSE": reverse, "POSITIVE": delta_softplus, "ADJOINT": False}
    exit_state = None
    if not plan.ranges.whole:
        carry, exit_state = plan.enter(u, delta, A, B, (None, 0), bias, carry, **flags)
    last = carry.new_empty(plan.ranges.count, *A.shape)
    plan.forward(u, delta, A, B, C, D, z, bias, carry, y, last, GIVES="y", **flags)
    return y, last if exit_state is None else exit_state


def backward(dy, dlast, u, delta, A, B, C, D, z, delta_bias, state, reverse, cu_seqlens, delta_softplus):
    inputs = (u, delta, A, B, C, D, z, delta_bias, state)
    if u.numel() == 0:
        return [*[torch.zeros_like(value) for value in inputs[:-1] if value is not None], dlast.clone()]
    plan, *operands = _operands(*inputs, cu_seqlens)
    u, delta, A, B, C, D, z, bias, carry = operands
    dy, dcarry, count = rows(dy), dlast.contiguous(), plan.ranges.count
    flags = {"REVERSE": reverse, "POSITIVE": delta_softplus, "ADJOINT": False}
    exit_state = None
    if not plan.ranges.whole:
        carry, _ = plan.enter(u, delta, A, B, (None, 0), bias, carry, **flags)
        adjoint = {"REVERSE": not reverse, "POSITIVE": delta_softplus, "ADJOINT": True}
        dcarry, exit_state = plan.enter(dy, delta, A, C, z, bias, dcarry, **adjoint)
    all_rows = u[0].shape[0] * u[0].shape[1]
    border = carry.new_empty(all_rows // CHUNK + count, *A.shape)
    dstate = carry.new_empty(count, *A.shape)
    plan.forward(u, delta, A, B, C, None, (None, 0), bias, carry, border, dstate, GIVES="borders", **flags)

    tile = plan.flags["STATES"] * plan.flags["CHANNELS"]
    scratch = carry.new_empty(plan.units * (CHUNK // plan.steps_back) * tile)
    du, ddelta = (torch.empty(u[0].shape, dtype=u[0].dtype, device=carry.device) for _ in range(2))
    dz = None if z[0] is None else torch.empty_like(du)
    dB, dC = (_sums(value, plan, carry) for value in (B[0], C[0]))
    dA = carry.new_empty(count, *A.shape)
    dD, dbias = (carry.new_empty(count, plan.width) for _ in range(2))
    pointers = (dy[0], u[0], delta[0], A, B[0], C[0], D, z[0], bias, border, scratch, dcarry)
    results = (du, ddelta, dA, dB, dC, dD, dz, dbias, dstate)
    strides = (dy[1], u[1], delta[1], B[1], C[1], z[1], _groups(B[0]), _groups(C[0]))
    timed = {"B_TIMED": B[0].ndim > 2, "C_TIMED": C[0].ndim > 2}
    del flags["ADJOINT"]
    flags["STEPS"] = plan.steps_back
    plan.launch(_backward, *pointers, *results, plan.ranges.table, *plan.numbers, all_rows, *strides, **timed, **flags)
    gradients = (du, ddelta, _total(dA, A), _total(dB, B[0]), _total(dC, C[0]))
    gradients += (None if D is None else _total(dD, D), dz, None if bias is None else _total(dbias, bias))
    return [*[value for value in gradients if value is not None], dstate if exit_state is None else exit_state]


def _sums(B: Tensor, plan: _Plan, carry: Tensor) -> Tensor:
    """Allocate the gradient of B, one for each of the programs that use the same B."""
    slots = plan.ranges.count if B.ndim == 2 else plan.blocks * plan.groups // _groups(B)
    return torch.empty(slots, *B.shape, dtype=B.dtype if slots == 1 else carry.dtype, device=B.device)


def _total(parts: Tensor, of: Tensor) -> Tensor:
    return parts[0].to(of.dtype) if len(parts) == 1 else parts.sum(0).to(of.dtype)
