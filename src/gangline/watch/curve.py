"""A loss curve in the terminal: braille dots where the terminal knows them, else plain characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Point = tuple[float, float]

# bit of a braille cell by (row, column) of its 4 x 2 dots, Unicode block 2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve(
    points: Sequence[Point],
    *,
    marks: Sequence[Point] = (),
    width: int = 72,
    height: int = 10,
    plain: bool = False,
) -> list[str]:
    """Lines of a chart of (step, loss) points with axes, at most `width` columns.

    `marks` (evaluations) are drawn as "o" over the curve. Points that are not finite are left out. [] where there
    is nothing to draw.
    """
    points = [point for point in points if math.isfinite(point[1])]
    marks = [mark for mark in marks if math.isfinite(mark[1])]
    if not points:
        return []
    canvas = _Canvas(points, marks, columns=max(10, width - 10), rows=max(3, height))
    cells = canvas.plain() if plain else canvas.braille()
    for column, row in canvas.mark_cells():
        cells[row][column] = "o"
    return [*_with_labels(cells, canvas, plain=plain), _footer(canvas)]


class _Canvas:
    """Where points fall: `columns` x `rows` character cells over the range of all values."""

    def __init__(self, points: Sequence[Point], marks: Sequence[Point], *, columns: int, rows: int) -> None:
        both = [*points, *marks]
        self.columns, self.rows = columns, rows
        self.points, self.marks = points, marks
        self.left, self.right = min(x for x, _ in both), max(x for x, _ in both)
        self.low, self.high = min(y for _, y in both), max(y for _, y in both)

    def position(self, point: Point, columns: int, rows: int) -> tuple[int, int]:
        """(column, row from the top) of a point on a grid of this size."""
        x, y = point
        across = (x - self.left) / (self.right - self.left) if self.right > self.left else 0.0
        down = (self.high - y) / (self.high - self.low) if self.high > self.low else 0.5
        return round(across * (columns - 1)), round(down * (rows - 1))

    def _dots(self, columns: int, rows: int) -> list[tuple[int, int]]:
        """One dot per grid column that has points: their mean, and a line to the next one."""
        groups: dict[int, list[float]] = {}
        for point in self.points:
            groups.setdefault(self.position(point, columns, rows)[0], []).append(point[1])
        ends = [
            (column, self.position((self.left, sum(values) / len(values)), columns, rows)[1])
            for column, values in sorted(groups.items())
        ]
        dots = ends[:1]
        for start, end in itertools.pairwise(ends):
            dots += _line(start, end)
        return dots

    def braille(self) -> list[list[str]]:
        """Cells of 2 x 4 dots each."""
        bits = [[0] * self.columns for _ in range(self.rows)]
        for column, row in self._dots(2 * self.columns, 4 * self.rows):
            bits[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
        return [[chr(0x2800 + value) if value else " " for value in line] for line in bits]

    def plain(self) -> list[list[str]]:
        """Cells with an asterisk where the curve passes."""
        cells = [[" "] * self.columns for _ in range(self.rows)]
        for column, row in self._dots(self.columns, self.rows):
            cells[row][column] = "*"
        return cells

    def mark_cells(self) -> list[tuple[int, int]]:
        """Cells of the marks."""
        return [self.position(mark, self.columns, self.rows) for mark in self.marks]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Grid points from `start` (left out) to `end`, close enough to look joined."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (
            round(start[0] + (end[0] - start[0]) * index / steps),
            round(start[1] + (end[1] - start[1]) * index / steps),
        )
        for index in range(1, steps + 1)
    ]


def _with_labels(cells: list[list[str]], canvas: _Canvas, *, plain: bool) -> list[str]:
    labels = {0: canvas.high, canvas.rows // 2: (canvas.high + canvas.low) / 2, canvas.rows - 1: canvas.low}
    bar = "|" if plain else "│"
    return [
        f"{f'{labels[row]:.4g}' if row in labels else '':>8} {bar}{''.join(line)}".rstrip()
        for row, line in enumerate(cells)
    ]


def _footer(canvas: _Canvas) -> str:
    left, right = f"{canvas.left:g}", f"step {canvas.right:g}"
    gap = " " * max(1, canvas.columns - len(left) - len(right))
    return f"{'':>10}{left}{gap}{right}"
