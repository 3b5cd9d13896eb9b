"""Words become points: a grid, or draws of a seed; a slip is named."""

from __future__ import annotations

import pytest

from gangline.errors import UsageError
from gangline.sweep.points import axes_of, draw_points, grid, varying


def test_a_grid_has_every_combination_and_the_last_key_varies_fastest() -> None:
    points = grid(axes_of(["optimizer.learning_rate=1e-5,1e-4", "steps=60", "method.rank=8,16"]))
    assert points == [
        {"optimizer.learning_rate": "1e-5", "steps": "60", "method.rank": "8"},
        {"optimizer.learning_rate": "1e-5", "steps": "60", "method.rank": "16"},
        {"optimizer.learning_rate": "1e-4", "steps": "60", "method.rank": "8"},
        {"optimizer.learning_rate": "1e-4", "steps": "60", "method.rank": "16"},
    ]
    assert varying(points) == ["optimizer.learning_rate", "method.rank"]


def test_commas_in_brackets_and_quotes_belong_to_the_value() -> None:
    (axis,) = axes_of(["method.targets=[q_proj, v_proj],all-linear,'a,b',{x: [1, 2]}"])
    assert axis.values == ("[q_proj, v_proj]", "all-linear", "'a,b'", "{x: [1, 2]}")


def test_a_path_with_two_dots_is_no_range() -> None:
    (axis,) = axes_of(["model=../small,../large"])
    assert axis.values == ("../small", "../large")


def test_draws_lie_in_their_ranges_and_are_those_of_the_seed() -> None:
    axes = axes_of(["optimizer.learning_rate=1e-5..1e-3:log", "method.rank=4..64", "seed=1,2", "dropout=0..0.5"])
    points = draw_points(axes, 200, seed=3)
    assert points == draw_points(axes, 200, seed=3) != draw_points(axes, 200, seed=4)
    rates = sorted(float(point["optimizer.learning_rate"]) for point in points)
    assert 1e-5 <= rates[0] < rates[-1] <= 1e-3
    assert 5e-5 < rates[100] < 2e-4  # the middle of the logarithm, not of the numbers
    assert {int(point["method.rank"]) for point in points} <= set(range(4, 65))
    assert {point["seed"] for point in points} == {"1", "2"}
    assert len({tuple(point.values()) for point in points}) == 200


def test_no_point_is_drawn_twice_and_too_many_are_refused() -> None:
    axes = axes_of(["method.rank=8,16", "seed=1,2"])
    assert len(draw_points(axes, 4, seed=0)) == 4
    with pytest.raises(UsageError, match=r"asks for more points than there are") as caught:
        draw_points(axes, 5, seed=0)
    assert "4 different points" in caught.value.seen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr"], "is no key with values"),
        (["a..b=1,2"], "is no key with values"),
        (["lr=1,,2"], "a value is empty"),
        (["lr=1,1"], "a value is there twice"),
        (["lr=1,2", "lr=3,4"], "is given twice"),
        (["lr=1e-3..1e-5"], "is no range"),
        (["lr=0..1:log"], "is no range"),
        (["lr=1e-5..1e-3"], "a range has no points of its own"),
        (["lr=1e-5"], "needs at least two points"),
        ([f"{key}=" + ",".join(map(str, range(30))) for key in "abc"], "27000 points"),
    ],
)
def test_a_slip_is_named_with_what_to_write(words: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        grid(axes_of(words))
    assert caught.value.seen
    assert caught.value.fix
