"""The loss curve: within its width, high losses on top, readable without braille."""

from __future__ import annotations

import math

import pytest

from gangline.report.live import curve

FALLING = [(float(step), 6.0 * math.exp(-step / 40) + 1) for step in range(1, 201)]


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("width", [20, 60, 100])
def test_no_line_is_wider_than_asked(width: int, plain: bool) -> None:
    lines = curve(FALLING, marks=[(100.0, 2.0)], width=width, height=8, plain=plain)
    assert max(map(len, lines)) <= width
    assert len(lines) == 9


def test_a_falling_loss_falls_from_left_to_right() -> None:
    lines = curve(FALLING, width=60, height=8, plain=True)
    first, last = lines[0], lines[7]
    assert first.index("*") < 15
    assert last.rindex("*") > 50


def test_the_axes_say_the_range() -> None:
    lines = curve([(1.0, 4.0), (50.0, 2.0)], width=40, height=5, plain=True)
    assert lines[0].split()[0] == "4"
    assert lines[4].split()[0] == "2"
    assert lines[5].split() == ["1", "step", "50"]


def test_evaluations_are_marked() -> None:
    assert any("o" in line.partition("|")[2] for line in curve(FALLING, marks=[(100.0, 3.0)], plain=True))


def test_plain_means_ascii() -> None:
    assert all(line.isascii() for line in curve(FALLING, marks=[(3.0, 3.0)], plain=True))
    assert any(0x2800 < ord(character) < 0x2900 for line in curve(FALLING) for character in line)


@pytest.mark.parametrize("points", [[], [(1.0, float("nan"))], [(1.0, float("inf"))]])
def test_nothing_to_draw_is_no_chart(points: list[tuple[float, float]]) -> None:
    assert curve(points) == []


@pytest.mark.parametrize("points", [[(1.0, 2.0)], [(1.0, 2.0), (2.0, 2.0)], [(5.0, 1.0), (5.0, 3.0)]])
def test_a_flat_or_single_point_is_drawn(points: list[tuple[float, float]]) -> None:
    assert any("*" in line for line in curve(points, plain=True))


def test_a_loss_that_is_not_finite_leaves_a_gap_and_no_error() -> None:
    with_gap = [*FALLING[:50], (51.0, float("nan")), *FALLING[51:]]
    assert len(curve(with_gap, plain=True)) == 11
