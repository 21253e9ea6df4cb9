"""The small drawing of a layer on its card: the state before and now, what carries it over, and what comes in and out.

It is drawn from what the layer declares of its state and from what is measured of its recurrence. A number that acts on
itself alone is a straight line; numbers that act on one another are lines that cross. A ring is a gate, a curve in a
box a nonlinearity, and small cells at the input are its last values, which a short convolution reads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from scanl.cli.columns import SurveyColumns
from scanl.layers import Layer
from scanl.layers.state import leaves

WIDTH, HEIGHT, MIDDLE = 216, 92, 40  # of the drawing, and the height of the middle of a state
BEFORE, MIDST, NOW = 46, 90, 134  # the middle of the state of the step before, of what is between, and of this step
LINES = (-20, -10, 0, 10, 20)  # of a state that is carried over
LAST = ("conv", "shift", "inputs", "short", "convolution")  # parts of a state that have the last inputs
SAID = {
    "vector": "a vector",
    "modes": "some numbers for each channel",
    "matrix": "a matrix for each head",
    "kept": "the steps that it keeps",
    "whole": "none: it reads the whole sequence",
}


@dataclass(frozen=True)
class Structure:
    """What is drawn of a layer. columns: the numbers of a vector's unit, such as h and c.   taps: its last inputs."""

    state: Literal["vector", "modes", "matrix", "kept", "whole"]
    columns: int = 1
    taps: bool = False
    linear: bool = True
    elementwise: bool = True
    gated: bool = False


def structure(layer: Layer, measured: SurveyColumns | None) -> Structure:
    """Return what is drawn of a layer. measured: the kind of its recurrence, None for one that only keeps inputs."""
    if layer.bidirectional:
        return Structure("whole")
    shapes = {path: leaf.shape[1:] for path, leaf in leaves(layer.init_state(1, device="meta")) if leaf.ndim > 1}
    parts = {path: set(path.split(".")) for path in shapes}
    taps = any(names & {*LAST} for names in parts.values())
    if measured is None and layer.op != "fixed_point":
        return Structure("kept", columns=2 if any("keys" in names for names in parts.values()) else 1)
    # what is carried over, beside the inputs of a short convolution
    own = [shape for path, shape in shapes.items() if not parts[path] & {*LAST}]
    shape = max(own, key=lambda shape: shape.numel())
    few = shape[0] <= 4 and shape[1:].numel() == layer.dim  # vectors, such as c, n, h and m
    kind = "vector" if few or len(shape) == 1 else "matrix" if len(shape) > 2 else "modes"
    columns = shape[0] if len(shape) > 1 else sum(other == shape for other in own)
    carried = SurveyColumns(False, False, False, False) if measured is None else measured
    return Structure(kind, min(columns, 3), taps, carried.linear, carried.elementwise, carried.gated)


def glyph(layer: Layer, measured: SurveyColumns | None) -> str:
    """Return the small drawing of a layer as SVG."""
    drawn = structure(layer, measured)
    inside = _kept(drawn) if drawn.state == "kept" else _whole() if drawn.state == "whole" else _recurrent(drawn)
    return _svg(f"The state of {layer.name}: {SAID[drawn.state]}", inside)


def signs() -> list[tuple[str, str]]:
    """Return each sign of the drawings, as SVG, with its meaning."""
    lines = (6, 13, 20)
    cells = _cells(((x, y) for x in (15, 22, 29) for y in (3, 10, 17)), 7)
    drawn = {
        "each number of the state acts on itself alone": _path("carried", "".join(f"M6 {y}H46" for y in lines)),
        "the numbers act on one another": _path("thin", "".join(f"M6 {a}L46 {b}" for a in lines for b in lines)),
        "a gate, which the input opens": _gate(26, 13),
        "the recurrence is not linear": _curve(26, 13),
        "a vector; side by side, some numbers for each channel": _path("now", cells),
        "a matrix for each head": _path("now", "M20 3v-2.5h21v21h-5") + _path("now", cells),
        "the last inputs, which a short convolution reads": _path("taps", _cells(((x, 9) for x in (9, 18, 27, 36)), 7)),
        "the steps themselves, kept in place of a state": _path("kept", _cells(((x, 9) for x in (6, 22, 38)), 8)),
    }
    start = '<svg class="glyph sign" viewBox="0 0 52 26" aria-hidden="true">'
    return [(f"{start}{svg}</svg>", meaning) for meaning, svg in drawn.items()]


def pattern(names: Sequence[str]) -> str:
    """Return the drawing of a whole model: a box for each layer of its pattern, from the input up to the output."""
    high = min(20, (HEIGHT - 24) / len(names))
    out = []
    for i, name in enumerate(names):
        low = HEIGHT - 12 - high * i
        out.append(
            f'<rect class="now" x="58" y="{low - high:.1f}" width="100" height="{high - 2:.1f}" rx="2"/>'
            f'<text class="layer" font-size="{min(11, high - 2):.1f}" x="108" y="{low - high * 0.32:.1f}">{name}</text>'
        )
    top = HEIGHT - 12 - high * len(names)
    out.append(_path("line", f"M108 {HEIGHT}V{HEIGHT - 6}M108 {top:g}V4"))
    out.append(_path("head", f"M108 {HEIGHT - 13}l-3.5 7h7zM108 0l-3.5 7h7z"))
    return _svg(f"{len(names)} layers, one after another", "".join(out))


def mixer() -> str:
    """Return the drawing of a channel mixer: the channels of one step, more of them, and as many as before."""
    columns = [
        [(x, MIDDLE - 5 * count + 10 * i) for i in range(count)] for x, count in ((BEFORE, 3), (MIDST, 5), (NOW, 3))
    ]
    lines = "".join(
        f"M{x + 5} {y + 5}L{right - 5} {low + 5}"
        for here, there in pairwise(columns)
        for x, y in here
        for right, low in there
    )
    cells = _cells(((x - 5, y) for column in columns for x, y in column), 10)
    flow = _path("line", f"M18 {MIDDLE}H34M139 {MIDDLE}H190") + _head(41, MIDDLE) + _head(194, MIDDLE)
    drawn = _path("thin", lines) + _path("now", cells) + _curve(MIDST) + flow
    return _svg("The channels of a step are mixed", drawn + _letters(203, MIDDLE + 4, 8, MIDDLE + 4))


def _recurrent(drawn: Structure) -> str:
    """Draw the state before, the lines that carry it over, the state now, and what comes in and out."""
    stacked, across = drawn.state == "matrix", {"vector": drawn.columns, "modes": 4, "matrix": 5}[drawn.state]
    half = across * 10 / 2
    start, end = BEFORE + half, NOW - half
    pairs = [(a, b) for a in LINES for b in LINES if a == b or not drawn.elementwise]
    lines = "".join(f"M{start:g} {MIDDLE + a}L{end:g} {MIDDLE + b}" for a, b in pairs)
    out = [_path("carried" if drawn.elementwise else "thin", lines)]
    out += [_state("before", BEFORE - half, across, stacked), _state("now", NOW - half, across, stacked)]
    on_the_way = [_gate] * drawn.gated + [_curve] * (not drawn.linear)
    out += [sign((start + end) / 2 + 18 * i - 9 * (len(on_the_way) - 1), MIDDLE) for i, sign in enumerate(on_the_way)]
    if drawn.taps:
        out.append(_path("taps", _cells(((NOW - 26 + 9 * i, 76) for i in range(4)), 7)))
    right = NOW + half + (8 if stacked else 4)
    out += [
        _path("line", f"M{NOW} {74 if drawn.taps else 84}V70M{right:g} {MIDDLE}H190"),
        _head(194, MIDDLE),
        _up(NOW, 67),
    ]
    return "".join([*out, _letters(203, MIDDLE + 4, NOW + (20 if drawn.taps else 10), 86)])


def _kept(drawn: Structure) -> str:
    """Draw the steps that are kept, keys above values, and the sum over them."""
    high = MIDDLE + 14 - 5 * drawn.columns
    out = [_path("thin", "".join(f"M{25.5 + 14 * i:g} {high}Q{25.5 + 14 * i:g} {high - 12} 158 14" for i in range(9)))]
    for i in range(9):
        cells = _cells(((20 + 14 * i, high + 10 * row) for row in range(drawn.columns)), 10)
        out.append(f'<path class="kept" opacity="{0.25 + 0.094 * i:.2f}" d="{cells}"/>')
    out += [_path("line", "M158 14H192M137.5 84V66"), _head(196, 14), _up(137, 62)]
    return "".join([*out, _letters(203, 18, 149, 86)])


def _whole() -> str:
    """Draw the steps of a sequence, which is read forward and backward."""
    low, high = MIDDLE + 18, MIDDLE - 18
    cells = _cells(((20 + 20 * i, MIDDLE - 7) for i in range(8)), 14)
    lines = _path("line", f"M20 {high}H164M26 {low}H174") + _path("head", f"M18 {low}l8 -4v8z")
    return _path("now", cells) + lines + _head(174, high)


def _svg(title: str, inside: str) -> str:
    return (
        f'<svg class="glyph" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{title}</title>{inside}</svg>"
    )


def _path(kind: str, line: str) -> str:
    return f'<path class="{kind}" d="{line}"/>'


def _cells(places: Iterable[tuple[float, float]], size: int) -> str:
    return "".join(f"M{x:g} {y:g}h{size}v{size}h-{size}z" for x, y in places)


def _state(kind: str, left: float, across: int, stacked: bool) -> str:
    """Draw the numbers of a state as cells, five below one another; of a matrix for each head, another behind it."""
    top = MIDDLE - 25
    behind = _path(kind, f"M{left + 5:g} {top}v-5h{across * 10}v50h-5") if stacked else ""
    return behind + _path(kind, _cells(((left + 10 * i, top + 10 * j) for i in range(across) for j in range(5)), 10))


def _gate(x: float, y: float = MIDDLE) -> str:
    return f'<circle class="sign" cx="{x:g}" cy="{y:g}" r="8"/>' + _path("mark", f"M{x - 4:g} {y - 4:g}l8 8m0 -8l-8 8")


def _curve(x: float, y: float = MIDDLE) -> str:
    box = f'<rect class="sign" x="{x - 8:g}" y="{y - 8:g}" width="16" height="16" rx="3"/>'
    return box + _path("mark", f"M{x - 5:g} {y + 4:g}c6 0 4 -8 10 -8")


def _head(x: float, y: float) -> str:
    return _path("head", f"M{x:g} {y:g}l-7 -3.5v7z")


def _up(x: float, y: float) -> str:
    return _path("head", f"M{x:g} {y:g}l-3.5 7h7z")


def _letters(right: float, y: float, x: float, low: float) -> str:
    return f'<text x="{right:g}" y="{y:g}">y</text><text x="{x:g}" y="{low:g}">x</text>'
