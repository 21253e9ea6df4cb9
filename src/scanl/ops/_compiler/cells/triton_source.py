"""Write the plans of a cell as the source of Triton kernels.

A program takes some sequences, one group (head) and a block of channels, and walks along time. The state and all values
of a step are tiles in registers, see tiles.py. So a view of a value costs nothing, as long as it has whole tiles of it.
A product with a matrix needs all channels, and so does a sum over them: then a program has them all. Matrices are
loaded once, before the loop, if they fit the registers, and else at each step. The backward pass loads the state before
each step, and what else the forward pass has kept. It writes the gradient of every step. Sums over time stay in
registers; each program writes its own, and torch adds them.

Legend: p_ pointer, r_ offset of a row, i_ index, b_ tile, n_ next tile, s_ tile of the carried state, a_ sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from scanl.ops._compiler.cells.plan import Root, StepPlan
from scanl.ops._compiler.cells.source import value_of
from scanl.ops._compiler.cells.tiles import ChannelTile, Tiles
from scanl.ops._compiler.cells.trace import Ref, TraceNode, contiguous
from scanl.ops._compiler.expressions import Expression, Name, as_number
from scanl.ops._compiler.print_triton import TritonPrinter
from scanl.ops._compiler.rules import UnsupportedOperation

HEADER = '''"""Triton kernels of the cell {name}, generated from its step."""

import triton
import triton.language as tl
from triton import Config

from scanl.ops._triton._cells import {helpers}
from scanl.ops._triton._tuned import tuned
'''
MAX_STEP_TILES = 512  # tiles of a step
WARPS = {True: (8, 16), False: (2, 4)}  # whether a program has a matrix: numbers of warps to measure


@dataclass
class TritonWriter:
    """Writes one kernel: `which` is "forward" or "backward".

    rows: results with a row for every step, and the numbers of a row.   sums: sums over time, and their sizes.
    """

    which: str
    plan: StepPlan
    tiles: Tiles
    timed: Sequence[str]
    rows: dict[str, int]
    sums: dict[str, int]
    kept: Sequence[TraceNode]
    y_is_state: bool
    prologue: list[str] = field(default_factory=list)  # lines before the loop over time
    body: list[str] = field(default_factory=list)  # of the loop
    after: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size = self.plan.traced.axes.expression
        self.back = self.which == "backward"
        self.carried = "dlast" if self.back else "state"
        self.printer = TritonPrinter(self._constant)
        self._names: dict[tuple[TraceNode, ChannelTile], str] = {}
        self._constants: dict[str, str] = {}
        self._loaded: dict[tuple[str, ChannelTile], str] = {}
        self._masked: dict[tuple[str, str], str] = {}
        self.matrices: dict[str, tuple[str, str]] = {}  # the axes of every tile of a matrix
        state = self.plan.traced.operands["state"]
        self._state = self.tiles.of(Ref(state.node, 0, state.shape, contiguous(state.shape)))
        node = self.plan.traced.operands[self.carried].node
        for i, tile in enumerate(self._state):
            self._names[node, tile] = f"s_{i}"
        for node in self.plan.needed:
            {"elementwise": self._compute, "product": self._multiply, "reduce": self._reduce, "join": self._join}[
                node.kind
            ](node)
            if len(self._names) > MAX_STEP_TILES:
                raise UnsupportedOperation(f"more than {MAX_STEP_TILES} values for each channel")
        for root in self.plan.roots:
            self._root(root)
        self._end()

    # --- addresses

    def _at(self, pointer: str, tile: ChannelTile, row: str, *, start: str = "") -> str:
        terms = [pointer, row, *([start] if start else [])]
        if tile.offset:
            terms.append(f"({self.size(tile.offset)})")
        if tile.group:
            terms.append(f"i_h * ({self.size(tile.group)})")
        if tile.axis:
            terms.append(f"i_{tile.axis}" + (f" * ({self.size(tile.channel)})" if tile.channel != 1 else ""))
        return " + ".join(terms)

    def _mask(self, tile: ChannelTile, *rows: str) -> str:
        return " & ".join([*rows, *([f"there_{tile.axis}"] if tile.axis else [])]) or "None"

    def _load(self, pointer: str, tile: ChannelTile, row: str, live: Sequence[str], *, start: str = "") -> str:
        mask = self._mask(tile, *live)
        masked = "" if mask == "None" else f", mask={mask}, other=0.0"
        return f"tl.load({self._at(pointer, tile, row, start=start)}{masked})"

    def _store(
        self, pointer: str, tile: ChannelTile, row: str, live: Sequence[str], value: str, *, start: str = ""
    ) -> str:
        mask = self._mask(tile, *live)
        masked = "" if mask == "None" else f", mask={mask}"
        return f"tl.store({self._at(pointer, tile, row, start=start)}, {value}{masked})"

    # --- values

    def _constant(self, value: float) -> str:
        text = repr(value) if math.isfinite(value) else f'float("{value}")'
        if text not in self._constants:
            self._constants[text] = name = f"c_{len(self._constants)}"
            self.prologue.append(f"{name} = tl.full((1, 1), {text}, dtype)")
        return self._constants[text]

    def read(self, ref: "Ref | float") -> list[str]:
        """Return the names of the tiles of a value, loaded where it is in memory."""
        if not isinstance(ref, Ref):
            return [self._constant(float(ref))]
        if ref.node.kind == "literal":
            return [self._constant(float(ref.node.what))] * self.tiles.count(ref.shape)
        return [self._tile(ref.node, tile) for tile in self.tiles.of(ref)]

    def _tile(self, node: TraceNode, tile: ChannelTile) -> str:
        buffer = self.plan.buffer(node)
        if not node.batched:
            load = f"tl.load({self._value(node, tile)})" + (" != 0" if node.truth else "")
            return self._kept_load(buffer, tile, load, self.prologue)
        if node.kind == "operand" and node.what in (*self.timed, "dy"):
            return self._kept_load(buffer, tile, self._load(f"p_{node.what}", tile, f"r_{node.what}", ["live"]))
        if node.kind == "operand" and node.what == "state" and self.back:
            first = self._kept_load("first", tile, self._load("p_state", tile, f"i_n * ({self._whole()})", ["some"]),
                                    self.prologue)  # fmt: skip
            place = self._load("p_history", tile, "r_history", ["live", "~starts"])
            return self._kept_load(buffer, tile, f"tl.where(starts, {first}, {place})")
        if node in self.plan.kept:
            start = self._kept_offsets()[node]
            return self._kept_load(buffer, tile, self._load("p_kept", tile, "r_kept", ["live"], start=start))
        name = self._names.get((node, tile))
        if name is None:
            raise UnsupportedOperation("a value with its channels in another order than they are computed in")
        return name

    def _value(self, node: TraceNode, tile: ChannelTile) -> str:
        mask = self._mask(tile)
        return self._at(f"p_v{node.index}", tile, "i_0") + ("" if mask == "None" else f", mask={mask}, other=0.0")

    def _kept_load(self, buffer: str, tile: ChannelTile, text: str, lines: "list[str] | None" = None) -> str:
        """Load a tile once."""
        key = buffer, tile
        if key not in self._loaded:
            self._loaded[key] = name = f"b_{buffer}_{sum(1 for other, _ in self._loaded if other == buffer)}"
            (self.body if lines is None else lines).append(f"{name} = {text}")
        return self._loaded[key]

    def _whole(self) -> Expression:
        return self.size(self.plan.traced.operands["state"].node.size)

    def _kept_offsets(self) -> dict[TraceNode, str]:
        """Return where the products of a step are among the numbers that the forward pass keeps of it."""
        terms, places = [] if self.y_is_state else [self._whole()], {}
        for node in self.kept:
            places[node] = " + ".join(f"({term})" for term in terms)
            terms.append(self.size(node.size))
        return places

    def _numbers_kept(self) -> str:
        terms = [*([] if self.y_is_state else [self._whole()]), *(self.size(node.size) for node in self.kept)]
        return " + ".join(f"({term})" for term in terms) or "0"

    # --- nodes

    def _new(self, node: TraceNode, tile: ChannelTile, text: str) -> None:
        name = f"b_{node.index}_{sum(1 for other, _ in self._names if other is node)}"
        self.body.append(f"{name} = {text}")
        self._names[node, tile] = name

    def _compute(self, node: TraceNode) -> None:
        tiles = self.tiles.of(node.whole)
        of_truths = [isinstance(arg, Ref) and arg.node.truth and arg.node.kind != "literal" for arg in node.args]
        args = [self.read(arg) for arg in node.args]
        args = [names * len(tiles) if len(names) == 1 else names for names in args]
        for i, tile in enumerate(tiles):
            value = value_of(node, [Name(names[i], truth) for names, truth in zip(args, of_truths, strict=True)])
            if isinstance(value, Name):
                self._names[node, tile] = value.name
            else:
                self._new(node, tile, self.printer.text(value))

    def _number(self, name: str) -> str:
        """Return the number that a truth is."""
        return self.printer.text(as_number(Name(name, truth=True)))

    def _inside(self, name: str, axis: str, other: str = "0.0") -> str:
        """Return a tile with `other` beyond its channels."""
        key = name, f"{axis}, {other}"
        if key not in self._masked:
            self._masked[key] = masked = f"b_in{len(self._masked)}"
            self.body.append(f"{masked} = tl.where(there_{axis}, {name}, {other})")
        return self._masked[key]

    def _multiply(self, node: TraceNode) -> None:
        lhs, rhs, result = node.args[0], node.args[1], node.what
        lefts, results = self.tiles.of(lhs), self.tiles.of(result)
        names = self.read(lhs)
        axes = [tile.axis for tile in (lefts[0], results[0])]
        if not all(axes):
            raise UnsupportedOperation("a product with a matrix that has not the channels on both axes")
        *heads, terms, columns = rhs.shape
        count, wide = self.tiles.counts(result.shape, len(result.shape) - 1)
        _, high = self.tiles.counts(lhs.shape, len(lhs.shape) - 1)
        groups = self.tiles.groups if heads and heads[0] % self.tiles.groups == 0 else 1
        matrices = heads[0] // groups if heads else 1  # matrices that a program reads
        if matrices != (self.tiles.count(heads) if heads else 1):
            raise UnsupportedOperation("a matrix for each of several axes")
        for lead in range(count):
            first = lead // (count // matrices) * groups * terms * columns
            for j in range(wide):
                parts = []
                for i in range(high):
                    at = first + i * (terms // high) * columns + j * (columns // wide)
                    matrix = self._matrix(node, at, terms * columns if groups > 1 else 0, columns, axes)
                    inside = self._inside(names[lead * high + i], axes[0])
                    wide_rows = f"tl.broadcast_to({inside}, (ROWS, BLOCK_{axes[0]}))"
                    parts.append(self.printer.call("product", wide_rows, matrix))
                self._new(node, results[lead * wide + j], " + ".join(parts))

    def _matrix(self, node: TraceNode, at: int, group: int, columns: int, axes: Sequence[str]) -> str:
        """Return the name of a tile of a matrix, which is loaded before the loop or in it."""
        name = f"b_w{node.index}_{str(self.size(at)).replace(' ', '').replace('*', '_').replace('//', 'o')}"
        if name not in self.matrices:
            high, wide = axes
            self.matrices[name] = high, wide
            terms = [f"p_w{node.index}", *([f"({self.size(at)})"] if at else [])]
            terms += [f"i_h * ({self.size(group)})"] if group else []
            place = " + ".join([*terms, f"tl.trans(i_{high}) * ({self.size(columns)})", f"i_{wide}"])
            load = f"{name} = tl.load({place}, mask=tl.trans(there_{high}) & there_{wide}, other=0.0)"
            self.prologue += ["if HELD:", f"    {load}"]
            self.body += ["if not HELD:", f"    {load}"]
        return name

    def _reduce(self, node: TraceNode) -> None:
        (source,), (name, inner, *_) = node.args, node.what
        if name == "cumsum":  # its gradient turns the channels round
            raise UnsupportedOperation(name)
        outer = len(source.shape) - inner
        head, tail = source.shape[:outer], source.shape[outer:]
        if any(kind == "group" for kind, _, _ in self.tiles.split(tail, (0,) * inner)):
            raise UnsupportedOperation(f"{name} over {self.tiles.group}")
        axis = next((kind for kind, _, _ in self.tiles.split(tail, (0,) * inner) if kind != "each"), "")
        _, inner_tiles = self.tiles.counts(source.shape, outer)
        names = self.read(source)
        if source.node.truth:
            names = [self._number(name) for name in names]
        other = {"amax": 'float("-inf")', "amin": 'float("inf")'}.get(name, "0.0")
        for i, tile in enumerate(self.tiles.of(Ref(node, 0, head, contiguous(head)))):
            text = ""
            for value in names[i * inner_tiles : (i + 1) * inner_tiles]:
                if axis:
                    shape = f"(ROWS, BLOCK_{axis})"
                    value = f"tl.broadcast_to({self._inside(value, axis, other)}, {shape})"
                    extreme = {"amax": "largest", "amin": "smallest"}.get(name)
                    summed = f"tl.sum({value}, 1, keep_dims=True)"
                    value = self.printer.call(extreme, value) if extreme else summed
                if text and name in ("amax", "amin"):
                    first, second = f"{node.index}a", f"{node.index}b"
                    self.body += [f"b_{first} = {text}", f"b_{second} = {value}"]
                    sign = ">" if name == "amax" else "<"
                    text = f"tl.where((b_{first} {sign} b_{second}) | (b_{first} != b_{first}), b_{first}, b_{second})"
                else:
                    text = f"{text} + {value}" if text else value
            if name == "mean":
                numbers = " * ".join(f"({self.size(size)})" for size in tail)
                text = f"({text}) / ({numbers})"
            self._new(node, tile, text)

    def _join(self, node: TraceNode) -> None:
        parts = list(node.args)
        first = parts[0][0]
        filled = len(parts) > 1 and first == node.whole
        for at, value in parts:
            tiles, names = self.tiles.of(at), self.read(value)
            if at is not first and filled and any((node, tile) not in self._names for tile in tiles):
                raise UnsupportedOperation("a join that fills a part of the channels")
            for i, tile in enumerate(tiles):
                self._names[node, tile] = names[i % len(names)]

    # --- results

    def _root(self, root: Root) -> None:
        ref = root.ref
        names = self.read(ref)
        if ref.node.truth:
            names = [self._number(name) for name in names]
        tiles = self.tiles.of(Ref(ref.node, 0, ref.shape, contiguous(ref.shape)))
        if root.buffer in ("last", "dstate"):
            self._next = names
        elif root.adds:
            for i, (tile, name) in enumerate(zip(tiles, names, strict=True)):
                total = f"a_{root.buffer}_{i}"
                width = f"BLOCK_{tile.axis}" if tile.axis else "1"
                self.prologue.append(f"{total} = tl.zeros((ROWS, {width}), dtype)")
                self.body.append(f"{total} += tl.where(live, {name}, 0.0)")
                start = " + ".join(f"({self.size(n)})" for n in self._sizes_before(root.buffer))
                total = f"tl.sum({total}, 0, keep_dims=True)"
                self.after.append(self._store("p_sums", tile, "r_sums", [], total, start=start))
        else:
            for tile, name in zip(tiles, names, strict=True):
                self.body.append(self._store(f"p_{root.buffer}", tile, f"r_{root.buffer}", ["live"], name))

    def _sizes_before(self, name: str) -> list[int]:
        names = list(self.sums)
        return [self.sums[other] for other in names[: names.index(name)]]

    def _end(self) -> None:
        """Write the step to the next state, and the values to store."""
        following = getattr(self, "_next", [self._constant(0.0)] * len(self._state))
        for i, name in enumerate(following):
            self.body.append(f"n_{i} = tl.where(live, {name}, s_{i})")
        self.body += [f"s_{i} = n_{i}" for i in range(len(following))]
        stores = []
        if not self.back and not self.y_is_state:
            stores += [self._store("p_kept", tile, "r_kept", ["live"], f"s_{i}") for i, tile in enumerate(self._state)]
        if not self.back:
            starts = self._kept_offsets()
            for node in self.kept:
                for tile in self.tiles.of(node.whole):
                    name = self._names[node, tile]
                    stores.append(self._store("p_kept", tile, "r_kept", ["live"], name, start=starts[node]))
        if stores:
            self.body += ["if KEEP:", *["    " + line for line in stores]]

    # --- the kernel

    def kernel(self) -> str:
        plan, timed = self.plan, [*self.timed, *(["dy"] if self.back else [])]
        letters = sorted(self.tiles.widths)
        pointers = [f"p_{name}" for name in timed] + [f"p_v{node.index}" for node in plan.values]
        pointers += [f"p_w{node.index}" for node in plan.lefts] + ["p_state", "p_kept"]
        pointers += ["p_history", "p_carry", "p_dstate", "p_sums"] if self.back else ["p_last"]
        pointers += [f"p_{name}" for name in self.rows]
        strides = [f"{name}_{way}" for name in timed for way in ("batch", "time")]
        flags = [*plan.traced.axes.traced, *(f"BLOCK_{letter}" for letter in letters)]
        flags += ["ROWS", "HELD", "REVERSE", *([] if self.back else ["KEEP"])]
        constants = ", ".join(f"{flag}: tl.constexpr" for flag in [*flags, "STAGES"])
        lines = ["dtype: tl.constexpr = p_state.dtype.element_ty", "i_unit = tl.program_id(0)"]
        lines += ["i_0 = tl.zeros((1, 1), tl.int64)", "i_rows = i_unit // (blocks * groups)"]
        lines += ["i_h = i_unit // blocks % groups" if self.tiles.group else ""]
        for letter in letters:
            start = f"i_unit % blocks * BLOCK_{letter} + " if len(letters) == 1 else ""
            lines.append(f"i_{letter} = {start}tl.arange(0, BLOCK_{letter})[None, :]")
            lines.append(f"there_{letter} = i_{letter} < {self.size(self.tiles.widths[letter])}")
        lines += [
            "i_n = (i_rows * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)",
            "some = i_n < sequences",
            "i_batch, begin, steps = sequences_of(i_n, p_offsets, length, sequences)",
        ]
        entering = "p_carry" if self.back else "p_state"
        for i, tile in enumerate(self._state):
            lines.append(f"s_{i} = {self._load(entering, tile, f'i_n * ({self._whole()})', ['some'])}")
        if self.sums:
            added = " + ".join(f"({self.size(size)})" for size in self.sums.values())
            lines.append(f"r_sums = i_0 + i_rows * ({added})")
        lines += self.prologue
        loop = ["live = i < steps"]
        turned = ("i", "steps - 1 - i")
        ahead, backwards = turned if not self.back else turned[::-1]
        loop.append(f"i_time = begin + ({backwards} if REVERSE else {ahead})")
        loop.append("i_row = i_batch * length + i_time")
        loop += [f"r_{name} = i_batch * {name}_batch + i_time * {name}_time" for name in timed]
        loop += [f"r_{name} = i_row * ({self.size(numbers)})" for name, numbers in self.rows.items()]
        text = "\n".join(self.body)
        if "r_kept" in text:
            loop.append(f"r_kept = i_row * ({self._numbers_kept()})")
        if "r_history" in text:
            pitch = self._whole() if self.y_is_state else self._numbers_kept()
            loop += ["starts = i == steps - 1", f"r_history = (i_row + (1 if REVERSE else -1)) * ({pitch})"]
        loop += self.body
        leaving = "p_dstate" if self.back else "p_last"
        ends = [
            self._store(leaving, tile, f"i_n * ({self._whole()})", ["some"], f"s_{i}")
            for i, tile in enumerate(self._state)
        ]
        lines += [
            "for i in tl.range(0, tl.max(steps), num_stages=STAGES if HELD else 1):",
            *["    " + line for line in loop],
            *self.after,
            *ends,
        ]
        arguments = ", ".join([*pointers, "p_offsets", *strides, "length", "sequences", "groups", "blocks"])
        unspecialised = [*(f"{name}_batch" for name in timed), "length", "sequences"]
        configs = ", ".join(f'Config({{"STAGES": 3}}, {warps})' for warps in WARPS[bool(plan.lefts)])
        head = [
            "",
            f"@tuned([{configs}], {tuple(flags)!r})",
            f"@triton.jit(do_not_specialize={unspecialised!r})",
            f"def {self.which}({arguments}, {constants}):",
        ]
        return "\n".join([*head, *["    " + line for line in lines if line], ""])


def source(name: str, forward: TritonWriter, backward: TritonWriter) -> str:
    """Return the source of both kernels."""
    text = "\n".join(writer.kernel() for writer in (forward, backward))
    helpers = ", ".join(sorted({"sequences_of"} | forward.printer.helpers | backward.printer.helpers))
    return HEADER.format(name=name, helpers=helpers) + text
