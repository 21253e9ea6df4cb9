"""Draw dashed paths that do not touch. Compiled, because a picture takes hundreds of trials.

A dash is (row, column, row, column) of its tail and its head, in pixels. Two grids say where no more may be drawn:
`taken` is what lies within half of a dash's thickness and `gap` pixels of a dash, and the border; `near` is what lies
within `gap` of that, and no dash may end there.
"""

import numba
import numpy as np
from numpy.typing import NDArray

RETRIES = 2  # for each dash
ATTEMPTS = 5  # to draw a distracting path


@numba.njit
def _far(dash, row, column):
    """Return the square of the distance of a point to a dash."""
    y, x = dash[2] - dash[0], dash[3] - dash[1]
    square = y * y + x * x
    along = 0.0
    if square > 0:
        along = min(max(((row - dash[0]) * y + (column - dash[1]) * x) / square, 0.0), 1.0)
    return (row - dash[0] - along * y) ** 2 + (column - dash[1] - along * x) ** 2


@numba.njit
def _box(dash, reach, side):
    """Return the first and last row and column of the pixels around a dash, as ends of ranges."""
    first_row, first_column = min(dash[0], dash[2]) - reach, min(dash[1], dash[3]) - reach
    last_row, last_column = max(dash[0], dash[2]) + reach, max(dash[1], dash[3]) + reach
    return (
        max(0, int(first_row)),
        min(side, int(last_row) + 2),
        max(0, int(first_column)),
        min(side, int(last_column) + 2),
    )


@numba.njit
def _free(occupied, dash, beside, reach):
    """Return whether the surroundings of a dash meet no occupied pixel, and not the surroundings of `beside`."""
    first_row, last_row, first_column, last_column = _box(dash, reach, len(occupied))
    for row in range(first_row, last_row):
        for column in range(first_column, last_column):
            both = occupied[row, column] or _far(beside, row, column) <= reach**2
            if both and _far(dash, row, column) <= reach**2:
                return False
    return True


@numba.njit
def _take(occupied, near, dash, reach, gap):
    first_row, last_row, first_column, last_column = _box(dash, reach + gap, len(occupied))
    for row in range(first_row, last_row):
        for column in range(first_column, last_column):
            far = _far(dash, row, column)
            occupied[row, column] |= far <= reach**2
            near[row, column] |= far <= (reach + gap) ** 2


@numba.njit
def _draw(picture, dash, width, brightness):
    """Draw a line with round ends: a pixel is as bright as the part of it that is covered, about."""
    first_row, last_row, first_column, last_column = _box(dash, width, len(picture))
    for row in range(first_row, last_row):
        for column in range(first_column, last_column):
            covered = min(max(width / 2 + 0.5 - np.sqrt(_far(dash, row, column)), 0.0), 1.0, width)
            picture[row, column] = max(picture[row, column], brightness * covered)


@numba.njit
def _border(grid, width):
    side = len(grid)
    for row in range(side):
        for column in range(side):
            grid[row, column] = min(row, column, side - 1 - row, side - 1 - column) < width


@numba.njit
def _copy(source, target):
    for row in range(len(source)):
        for column in range(len(source)):
            target[row, column] = source[row, column]


@numba.njit
def _place(dash, row, column, angle, length):
    dash[0], dash[1], dash[2], dash[3] = row, column, row + length * np.sin(angle), column + length * np.cos(angle)


@numba.njit
def _grow(random, path, angles, at, beside, occupied, near, gap, length, thickness, continuity):
    """Add dash `at` to a path, if one fits; then the surroundings of the previous dash become occupied.

    It turns by δ with a probability proportional to cos²(min(continuity |δ|, π/2)). It begins `gap` pixels from a
    point which the dash before it ends `gap` pixels from.
    """
    side, reach, heading = len(occupied), length + gap, angles[at - 1]
    y, x = path[at - 1, 2] + gap * np.sin(heading), path[at - 1, 3] + gap * np.cos(heading)
    count = int(2 * np.pi * reach)  # heads about a pixel apart
    sums, total = np.zeros(count), 0.0
    for i in range(count):
        angle = 2 * np.pi * i / count
        row, column = y + reach * np.sin(angle), x + reach * np.cos(angle)
        if min(row, column) >= 0 and max(row, column) <= side - 1 and not near[round(row), round(column)]:
            turn = abs((angle - heading + np.pi) % (2 * np.pi) - np.pi)
            total += np.cos(min(continuity * turn, np.pi / 2)) ** 2
        sums[i] = total
    if total < 1e-4:
        return False
    for _ in range(1 + RETRIES):
        chosen, at_most = 0, random.random() * total
        while sums[chosen] <= at_most:
            chosen += 1
        angle = 2 * np.pi * chosen / count
        _place(path[at], y + gap * np.sin(angle), x + gap * np.cos(angle), angle, length)
        if _free(occupied, path[at], beside, gap + thickness / 2):
            _take(occupied, near, path[at - 1], gap + thickness / 2, gap)
            angles[at] = angle
            return True
    return False


@numba.njit
def _begin(random, path, angles, row, column, length):
    angles[0] = 2 * np.pi * random.random()
    _place(path[0], row, column, angles[0], length)


@numba.njit
def _long_paths(random, occupied, near, gap, length, thickness, dashes, start, continuity):
    """Return two paths (2, dashes, 4) that grow in turn, from tails that are `start` apart."""
    side = len(occupied)
    paths, angles = np.zeros((2, dashes, 4)), np.zeros((2, dashes))
    border, near_border = np.zeros(occupied.shape, np.bool_), np.zeros(occupied.shape, np.bool_)
    _border(border, 1)
    _border(near_border, 1 + gap)
    complete = False
    while not complete:
        _copy(border, occupied)
        _copy(near_border, near)
        row = 2 * start + (side - 1 - 4 * start) * random.random()
        column = 2 * start + (side - 1 - 4 * start) * random.random()
        between = 2 * np.pi * random.random()
        _begin(random, paths[0], angles[0], row, column, length)
        _begin(random, paths[1], angles[1], row + start * np.sin(between), column + start * np.cos(between), length)
        complete = True
        for at in range(1, dashes):
            for n in range(2):
                if complete:
                    beside = paths[1 - n, at - 1 + n]
                    complete = _grow(
                        random, paths[n], angles[n], at, beside, occupied, near, gap, length, thickness, continuity
                    )
    for n in range(2):
        _take(occupied, near, paths[n, -1], gap + thickness / 2, gap)
    return paths


@numba.njit
def _distracting_path(random, path, angles, occupied, near, gap, length, thickness, continuity):
    """Fill `path` from a random place; return whether it fits."""
    side = len(occupied)
    place = int(random.random() * (near.size - near.sum()))  # among the pixels that are free
    row = column = 0
    for at in range(near.size):
        if not near[at // side, at % side]:
            if place == 0:
                row, column = at // side, at % side
            place -= 1
    if near[row, column]:
        return False
    _begin(random, path, angles, float(row), float(column), length)
    nothing = np.full(4, -1e9)
    inside = min(path[0, 2], path[0, 3]) >= 0 and max(path[0, 2], path[0, 3]) <= side - 1
    if not inside or not _free(occupied, path[0], nothing, gap + thickness / 2):
        return False
    for at in range(1, len(path)):
        if not _grow(random, path, angles, at, nothing, occupied, near, gap, length, thickness, continuity):
            return False
    _take(occupied, near, path[-1], gap + thickness / 2, gap)
    return True


@numba.njit
def draw_paths(
    random: np.random.Generator,
    picture: NDArray[np.float32],
    gap: int,
    length: int,
    thickness: float,
    dashes: int,
    start: int,
    continuity: float,
    others: int,
    brightness: float,
) -> NDArray[np.float64]:
    """Draw two long paths and up to `others` paths of a third of the dashes; return the long ones (2, dashes, 4)."""
    shape = picture.shape
    occupied, near = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    paths = _long_paths(random, occupied, near, gap, length, thickness, dashes, start, continuity)
    for n in range(2):
        for at in range(dashes):
            _draw(picture, paths[n, at], thickness, brightness)
    path, angles = np.zeros((dashes // 3, 4)), np.zeros(dashes // 3)
    old_occupied, old_near = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for _ in range(others):
        for _ in range(ATTEMPTS):
            _copy(occupied, old_occupied)
            _copy(near, old_near)
            if _distracting_path(random, path, angles, occupied, near, gap, length, thickness, continuity):
                for at in range(len(path)):
                    _draw(picture, path[at], thickness, brightness)
                break
            _copy(old_occupied, occupied)
            _copy(old_near, near)
    return paths


@numba.njit
def draw_dot(picture: NDArray[np.float32], row: float, column: float, radius: float) -> None:
    """Draw a dot of brightness 1."""
    _draw(picture, np.array([row, column, row, column]), 2 * radius, 1.0)
