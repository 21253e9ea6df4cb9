"""The figures of docs/equation_to_kernel.md, as SVG: a picture for each stage of the scan.

They are files, so that they show outside the site too. Their grays and colors are legible on white and on black.
"""

import math

STYLE = (
    'text{fill:#777777;font:13px "DejaVu Serif",Georgia,serif;text-anchor:middle}'
    "text.role{font:10px sans-serif}"
    "rect{fill:#77777726;stroke:#777777}rect.state,path.state{stroke:#2f80d0;stroke-width:1.5}rect.state{fill:#2f80d030}"
    "path{fill:none;stroke:#777777;stroke-width:1.2}path.head{fill:#777777;stroke:none}path.bad{stroke:#d05040;stroke-width:1.5}"
    "path.dotted{stroke-dasharray:3 3}"
)
SIZE, GAP = 34, 20  # of a box, and between two boxes
STEPS = 8  # drawn


def figures() -> dict[str, str]:
    """Return each figure by the name of its file."""
    drawn = {"loop": loop, "products": products, "tree": tree, "chunks": chunks, "fused": fused, "gpu": gpu}
    return {f"stage_{name}.svg": draw() for name, draw in drawn.items()}


def loop() -> str:
    """Each state needs the one before it."""
    parts = []
    for t in range(STEPS):
        x = _left(t)
        parts += [_box(x, 10, "state", f"h{_low(t + 1)}"), _box(x, 80, "", f"x{_low(t + 1)}")]
        parts.append(_arrow(x + SIZE / 2, 80, x + SIZE / 2, 10 + SIZE))
        if t:
            parts.append(_arrow(x - GAP, 10 + SIZE / 2, x, 10 + SIZE / 2))
            parts.append(_text(x - GAP / 2, 20, f"a{_low(t + 1)}"))
    return _svg(_left(STEPS), 124, "The loop: each state needs the state before it and an input", parts)


def products(decay: float = 0.9, steps: int = 1200) -> str:
    """The product of decays, and an input of 1 divided by it, in the range of float32, on a logarithmic scale."""
    left, top, wide, high = 70, 14, 330, 170
    limits = (math.log10(2.0**-126), math.log10((2 - 2.0**-23) * 2.0**127))

    def place(t: float, power: float) -> str:
        return f"{left + wide * t / steps:.1f} {top + high * (60 - power) / 120:.1f}"

    end = steps * math.log10(decay)
    parts = [f'<rect x="{left}" y="{top}" width="{wide}" height="{high}"/>']
    for power, name in zip(limits, ("smallest", "largest"), strict=True):
        parts.append(f'<path class="dotted" d="M{place(0, power)} L{place(steps, power)}"/>')
        parts.append(_text(left - 34, float(place(0, power).split()[1]) + 4, f"10{_high(math.floor(power))}"))
        parts.append(_text(left + 60, float(place(0, power).split()[1]) - 5, f"{name} float32", role=True))
    parts.append(f'<path class="state" d="M{place(0, 0)} L{place(steps, end)}"/>')
    parts.append(f'<path class="bad" d="M{place(0, 0)} L{place(steps, -end)}"/>')
    parts.append(_text(left + 0.35 * wide, top + high * 0.72, f"p{_low('t')}"))
    parts.append(_text(left + 0.35 * wide, top + high * 0.31, f"x{_low('t')} / p{_low('t')}"))
    parts += [_text(left + wide * at, top + high + 16, f"{at * steps:.0f}", role=True) for at in (0, 0.5, 1)]
    parts.append(_text(left + wide * 0.75, top + high + 16, "steps", role=True))
    return _svg(left + wide + 20, top + high + 24, "The product of the decays leaves the range of float32", parts)


def tree() -> str:
    """The rounds of joining: in each, a state joins what is `reach` before it."""
    down = 64
    parts, reach, row = [], 1, 0
    while True:
        for t in range(STEPS):
            complete = t < reach
            parts.append(
                _box(_left(t) + 70, 10 + row * down, "state" if complete else "", _span(max(0, t - reach + 1), t))
            )
        if reach >= STEPS:
            break
        for t in range(STEPS):
            x, y = _left(t) + 70 + SIZE / 2, 10 + row * down + SIZE
            parts.append(_arrow(x, y, x, y + down - SIZE))
            if t >= reach:
                parts.append(_arrow(_left(t - reach) + 70 + SIZE / 2, y, x - 5, y + down - SIZE))
        parts.append(_text(34, 10 + row * down + SIZE + 18, f"reach {reach}", role=True))
        reach, row = 2 * reach, row + 1
    return _svg(
        _left(STEPS) + 70, 14 + row * down + SIZE, "The tree: in each round a step joins what is reach before it", parts
    )


def chunks(count: int = 4, size: int = 4) -> str:
    """The lower triangle in chunks: products of matrices on the diagonal, and a state from chunk to chunk."""
    cell, parts = 13, []
    wide = cell * size
    for n in range(count):
        x, y = 60 + n * wide, 10 + n * wide
        for i in range(size):
            parts += [
                f'<rect x="{x + cell * j}" y="{y + cell * i}" width="{cell}" height="{cell}"/>' for j in range(i + 1)
            ]
        parts.append(_text(26, y + wide / 2 + 4, f"chunk {n + 1}", role=True))
        if n:
            parts.append(f'<rect class="state" x="60" y="{y}" width="{n * wide}" height="{wide}"/>')
            parts.append(_text(60 + n * wide / 2, y + wide / 2 + 4, "one state"))
    side = count * wide
    parts.append(_text(60 + side / 2, side + 28, "inputs x, step by step", role=True))
    return _svg(80 + side, side + 36, "The matrix from inputs to states in chunks", parts)


def fused() -> str:
    """Rows in memory, and the row that was written last, in the cache."""
    parts, wide = [], 150
    for place, (name, shown) in enumerate((("a", 4), ("x", 4), ("h", 2))):
        left = 10 + place * (wide + 16)
        parts.append(_text(left + wide / 2, 16, f"{name}, in memory", role=True))
        for row in range(shown):
            here, before = row == 2, name == "h" and row == 1
            kind = "state" if here or before else ""
            parts.append(f'<rect class="{kind}" x="{left}" y="{24 + row * 22}" width="{wide}" height="16"/>')
            if here or before:
                parts.append(_text(left + wide / 2, 36 + row * 22, f"{name}{_low('t' if here else 't-1')}"))
    left = 10 + 2 * (wide + 16)
    parts.append(f'<rect class="state" x="{left}" y="68" width="{wide}" height="16"/>')
    parts.append(_text(left + wide / 2, 80, f"h{_low('t')} = a{_low('t')} h{_low('t-1')} + x{_low('t')}"))
    parts.append(_text(10 + wide + 8, 132, "read once", role=True))
    parts.append(_text(left + wide / 2, 104, "written once; the row before it is in the cache", role=True))
    return _svg(left + wide + 46, 140, "The fused loop: one pass over memory", parts)


def gpu(programs: int = 3, tiles: int = 4) -> str:
    """Programs for blocks of channels, tile after tile."""
    parts, wide, high = [], 84, 40
    for p in range(programs):
        y = 24 + p * (high + 14)
        parts.append(_text(44, y + high / 2 + 4, f"program {p + 1}", role=True))
        for tile in range(tiles):
            x = 88 + tile * (wide + GAP)
            parts.append(
                f'<rect class="{"state" if tile == 1 else ""}" x="{x}" y="{y}" width="{wide}" height="{high}"/>'
            )
            parts.append(
                _text(x + wide / 2, y + high / 2 + 4, ("done", "tree", "loading", "loading")[min(tile, 3)], role=True)
            )
            if tile:
                parts.append(_arrow(x - GAP, y + high / 2, x, y + high / 2))
    end = 24 + programs * (high + 14)
    parts.append(
        _text(
            88 + tiles * (wide + GAP) / 2, 14, "time, by tiles; one row of the state goes from tile to tile", role=True
        )
    )
    parts.append(
        _text(88 + tiles * (wide + GAP) / 2, end + 8, "each program has a block of channels of one sequence", role=True)
    )
    return _svg(88 + tiles * (wide + GAP), end + 16, "Programs on a GPU go along time by tiles", parts)


def _left(t: int) -> float:
    return 10 + t * (SIZE + GAP)


def _low(text: object) -> str:
    return str(text).translate(str.maketrans("0123456789t-", "₀₁₂₃₄₅₆₇₈₉ₜ₋"))


def _high(number: int) -> str:
    return str(number).translate(str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻"))


def _span(first: int, last: int) -> str:
    return f"{last + 1}" if first == last else f"{first + 1}–{last + 1}"


def _box(x: float, y: float, kind: str, text: str) -> str:
    rect = f'<rect class="{kind}" x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" rx="5"/>'
    return rect + _text(x + SIZE / 2, y + SIZE / 2 + 4, text)


def _text(x: float, y: float, text: str, role: bool = False) -> str:
    kind = ' class="role"' if role else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}">{text}</text>'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """Return a line with a head at its end."""
    length = math.hypot(to_x - x, to_y - y)
    dx, dy = (to_x - x) / length, (to_y - y) / length
    base_x, base_y = to_x - 7 * dx, to_y - 7 * dy
    corners = [(to_x, to_y), (base_x - 3.5 * dy, base_y + 3.5 * dx), (base_x + 3.5 * dy, base_y - 3.5 * dx)]
    head = " ".join(f"{corner_x:.1f},{corner_y:.1f}" for corner_x, corner_y in corners)
    return f'<path d="M{x:.1f} {y:.1f} L{base_x:.1f} {base_y:.1f}"/><path class="head" d="M{head} z"/>'


def _svg(width: float, height: float, title: str, parts: list[str]) -> str:
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n{body}\n</svg>\n"
    )
