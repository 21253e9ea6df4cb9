"""The drawing of a layer's recurrence: transition, state and readout, one box each, from its equations."""

import re
from dataclasses import dataclass
from html import escape

from making.equations import spans, split
from scanl.layers import Layer
from scanl.layers.initial_state import rows
from scanl.ops import registry

WIDTH, MARGIN, LINE = 360, 30, 19  # of the drawing, beside its boxes, and from line to line
LETTER = 7.3  # the width of a letter, on average, of text of 13 points
ROOM = WIDTH - 2 * MARGIN - 24  # for the text in a box
ASSIGNED = r" = | <- | \+= "
BEFORE = r"_\{t-1\}|_\{t-1,"
NAME = re.compile(r"(?<![A-Za-z_^{])[A-Za-z]+'?")
GENERIC = "s_t = f(s_{t-1}, x_t)"
KEPT = "s_t = newest of [s_{t-1}; x_t]"  # of a layer that keeps inputs, or what it made of them


@dataclass(frozen=True)
class Roles:
    """The equations of a layer by what they are for.

    transition: those of the state. Where the equations have sums over the past in place of a state, that of the layer's
    op, or the general form.   readout: those that read the state; empty where the state itself is the output.
    """

    transition: list[str]
    readout: list[str]


def roles(cls: type[Layer], keeps: bool = False) -> Roles:
    """Return which equations of a layer are the transition and which the readout. keeps: whether it keeps inputs."""
    lines = split(cls.equation)
    states = {name for line in lines for name in _defined(line) if name != "x" and _carried(name, cls.equation)}
    transition = [line for line in lines if states & _defined(line)]
    others = [line for line in lines if line not in transition and "=" in line]
    if not transition and cls.preset_of is not None:  # S_t of the layer that it is a preset of
        base = [line for line in split(cls.preset_of.equation) if _carried(next(iter(_defined(line)), "?"), line)]
        names = {name for line in base for name in _defined(line)}
        if names and all(any(_now(name, line) for line in others) for name in names):
            transition, states = base, names
    used = {name for line in transition for name in NAME.findall(line.partition("=")[2])}
    readout = [line for line in others if _is_output(line) or _reads(line, states, used)]
    transition = transition or [line for line in others if any(_now(name, line) for name in _defined(line))]  # s = f(s)
    if transition:
        return Roles(transition, readout)
    return Roles([KEPT] if keeps else _of_op(cls) or [GENERIC], readout or others)


def main_equation(cls: type[Layer]) -> str:
    """Return the first equation of a layer's state; that of its output where its equations have no state."""
    found, lines = roles(cls), split(cls.equation)
    return next(line for line in (*found.transition, *filter(_is_output, lines), *lines) if line in lines)


def _of_op(cls: type[Layer]) -> list[str]:
    """Return the equations of the state of a layer's op, in general; empty where it carries none."""
    if cls.op is None:
        return []
    equation = registry.get(cls.op).equation
    lines = [line for line in split(equation) if any(_carried(name, line) for name in _defined(line))]
    return [f"{cls.op}: {line}" for line in lines]


def _reads(line: str, states: set[str], used: set[str]) -> bool:
    """Whether an equation reads a state for the output: what it defines is no function, and not for the transition."""
    left = line.partition(" = ")[0]
    return not left.endswith(")") and not used & set(NAME.findall(left)) and any(_now(name, line) for name in states)


def _defined(line: str) -> set[str]:
    """Return the names on the left of an equation: `h_t`, `s^r_t`, `S_t^l`, `M_t(n)`, `dh/dt`, `h <- `."""
    left = re.split(ASSIGNED, line)[0] if re.search(ASSIGNED, line) else ""
    updated = re.search(r"\b([A-Za-z])('?)\]?$", left)  # `M += ...`, `s' = ...` of s, `[y; m'] = ...` of m
    if updated and (updated[2] or " += " in line):
        return {updated[1]}
    if derivative := re.search(r"\bd([A-Za-z])/d[a-z]$", left):
        return {derivative[1]}
    if " <- " in line:
        return {left.split()[-1]}
    return set(re.findall(r"([A-Za-z]+'?)(?:\^\w)?_(?:t\b|\{t\+1\}|\{t,|t\^)", left))


def _carried(name: str, equation: str) -> bool:
    """Whether an equation has the value of a name a step before."""
    own = rf"(?<![A-Za-z_]){re.escape(name)}"
    if re.search(rf"d{name}/d[a-z]|{own} (?:<-|\+=) |{own}_t = {name} - |{own}'\]? = .*{own}(?![\w'])", equation):
        return True
    return re.search(rf"{own}(?:\^\{{?[\w-]+\}}?)?(?:{BEFORE})", equation) is not None or f"{name}_{{t+1}}" in equation


def _now(name: str, line: str) -> bool:
    """Whether the right side of an equation reads a name, at this step or without one."""
    own = rf"(?<![A-Za-z_]){re.escape(name)}(?:\^\w)?(?:_t|_\{{t,|(?![A-Za-z_'^]))"
    return re.search(own, line.partition(" = ")[2]) is not None


def _is_output(line: str) -> bool:
    return re.match(r"\(?(?:y|o|out)(?:_[ti]|\^\w_t)?(?: =|,)|\[[^\]]*\by\w*", line) is not None


def drawing(cls: type[Layer], bidirectional: bool, keeps: bool = False, layer: Layer | None = None) -> str:
    """Return the drawing of a layer as SVG. keeps: whether it keeps inputs in place of a recurrence."""
    found = roles(cls, keeps)
    if bidirectional:
        whole = [line for line in split(cls.equation) if _is_output(line)] or split(cls.equation)[:1]
        boxes = [("sequence", [piece for line in whole for piece in _wrapped(spans(line))])]
        return _svg(cls, boxes, "x", "y", loop=False)
    state = [] if cls.state is None else list(rows(cls.state, layer=layer))
    names = [_tensor(row) for row in state if "int64" not in row]
    boxes = [
        ("transition", [piece for line in found.transition for piece in _wrapped(spans(line))]),
        ("state", [piece for name in names[:4] for piece in _wrapped([(name, 0)])] or [[("s", 0), ("t", -1)]]),
        ("readout", [piece for line in found.readout for piece in _wrapped(spans(line))]),
    ]
    return _svg(cls, [box for box in boxes if box[1]], "xₜ", "yₜ", loop=True)


def _tensor(row: str) -> str:
    """Return the name of a tensor of the state and its axes, from its line in the documentation."""
    name, _, meaning = row.partition(": ")
    name = re.sub(r"\)(?:, | or ).*", ")", name)
    return name.replace(name.split(" ")[0], meaning, 1) if 0 < len(meaning) < 4 else name


def _wrapped(pieces: list[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Break an equation into lines that fit, before a sign or a word."""
    lines: list[list[tuple[str, int]]] = [[]]
    length = 0.0
    words = [
        (word, level)
        for text, level in pieces
        for word in (re.findall(r"\s?\S+\s?|\s", text) if level == 0 else [text])
    ]
    at = 0
    while at < len(words):
        end = at + 1  # what belongs together: a sign or a name, with what stands below and above it
        while end < len(words) and not (words[end][1] == 0 and " " in (words[end - 1][0][-1], words[end][0][0])):
            end += 1
        long = sum(size(word) for word in words[at:end])
        if length + long > ROOM and lines[-1]:
            lines.append([("\u2003", 0)])
            length = 2 * LETTER
        lines[-1] += words[at:end]
        length += long
        at = end
    return lines


def size(piece: tuple[str, int]) -> float:
    text, level = piece
    return len(text) * LETTER * (0.72 if level else 1)


def _svg(
    cls: type[Layer], boxes: list[tuple[str, list[list[tuple[str, int]]]]], start: str, end: str, loop: bool
) -> str:
    middle, y = WIDTH / 2, 22.0
    out = [f'<text class="name" x="{middle}" y="{y - 6}" text-anchor="middle">{start}</text>']
    edges = []
    for title, lines in boxes:
        height = 26 + LINE * len(lines)
        out.append(_arrow(middle, y, y + 22))
        y += 24
        edges.append((y, height))
        width = WIDTH - 2 * MARGIN
        out.append(f'<rect class="{title}" x="{MARGIN}" y="{y}" width="{width}" height="{height}" rx="7"/>')
        out.append(f'<text class="role" x="{MARGIN + 12}" y="{y + 15}">{title}</text>')
        for i, line in enumerate(lines):
            out.append(f'<text x="{MARGIN + 12}" y="{y + 33 + LINE * i}">{_tspans(line)}</text>')
        y += height
    out.append(_arrow(middle, y, y + 22))
    out.append(f'<text class="name" x="{middle}" y="{y + 40}" text-anchor="middle">{end}</text>')
    if loop:
        (top, first), (low, second) = edges[0], edges[1]
        right, side = WIDTH - MARGIN, WIDTH - 12
        down, up = low + second / 2, top + first / 2
        out.append(f'<path class="line" d="M{right} {down} H{side} V{up} H{right + 7}"/>')
        out.append(f'<path class="head" d="M{right + 1} {up} l8 -4 v8 z"/>')
        place = f"{side + 9} {(up + down) / 2}"
        turned = f'text-anchor="middle" transform="translate({place}) rotate(-90)"'
        out.append(f'<text class="role" {turned}>next step</text>')
    height = y + 50
    body = "".join(out)
    return (
        f'<svg class="recurrence" viewBox="0 0 {WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>The recurrence of {escape(cls.name)}: {', '.join(title for title, _ in boxes)}</title>{body}</svg>"
    )


def _arrow(x: float, y: float, end: float) -> str:
    return f'<path class="line" d="M{x} {y} V{end - 6}"/><path class="head" d="M{x} {end} l-4 -8 h8 z"/>'


def _tspans(line: list[tuple[str, int]]) -> str:
    """Return a line; what stands below or above is smaller, and moved."""
    out, level = [], 0
    for text, at in line:
        shift = (level - at) * 4
        move = f' dy="{shift}"' if shift else ""
        small = ' class="script"' if at else ""
        out.append(f"<tspan{move}{small}>{escape(text)}</tspan>")
        level = at
    return "".join(out)
