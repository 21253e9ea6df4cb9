"""The picture of the first page: what a layer carries while it reads, beside the cache of attention."""

from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 460, 330  # of the picture
LEFT, RIGHT, TOP, BOTTOM = 22, 442, 34, 282  # of its axes
WIDE = RIGHT - LEFT
BYTES = 4  # of a number
Rows = Callable[..., Sequence[dict[str, str]]]  # the rows of a file of results that have some values


def picture(rows: Rows) -> str:
    """Return the picture as SVG, drawn from the measured states. rows: reads results."""
    states = {name: rows("beside_attention", part="state", program=name) for name in ("attention", "mamba")}
    cache, state = (bytes_of(states[name][-1]) for name in states)
    length = int(states["attention"][-1]["length"])
    low = BOTTOM - (BOTTOM - TOP) * state / cache
    title = f"Bytes that a layer carries after {length:,} tokens: attention {said(cache)}, mamba {said(state)}"
    ticks = "".join(
        f'<text class="tick" x="{x:g}" y="{BOTTOM + 20}" text-anchor="{side}">{(x - LEFT) / WIDE * length:,.0f}</text>'
        for x, side in ((LEFT, "start"), (LEFT + WIDE / 2, "middle"), (RIGHT, "end"))
    )
    return (
        f'<svg class="home" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{title}</title>"
        f'<path class="cache" d="M{LEFT} {BOTTOM}L{RIGHT} {TOP}V{BOTTOM}Z"/>'
        f'<path class="edge" d="M{LEFT} {BOTTOM}L{RIGHT} {TOP}"/>'
        f'<path class="axis" d="M{LEFT} {BOTTOM}H{RIGHT}"/>'
        f'<path class="state" d="M{LEFT} {low - 1:.2f}H{RIGHT}"/>'
        f'<text class="name" x="{RIGHT - 140}" y="{TOP + 22}" text-anchor="end">attention carries</text>'
        f'<text class="size" x="{RIGHT - 140}" y="{TOP + 54}" text-anchor="end">{said(cache)}</text>'
        f'<text class="name own" x="{RIGHT - 12}" y="{BOTTOM - 48}" text-anchor="end">mamba carries</text>'
        f'<text class="size own" x="{RIGHT - 12}" y="{BOTTOM - 18}" text-anchor="end">{said(state)}, always</text>'
        f'{ticks}<text class="tick" x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}" text-anchor="middle">'
        "tokens that one layer of width 512 has read</text></svg>"
    )


def bytes_of(row: dict[str, str]) -> int:
    """Return the bytes of a state that is counted in numbers of float32."""
    return BYTES * int(row["numbers"])


def said(size: float) -> str:
    """Return a number of bytes in the unit that keeps it short."""
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
