"""Progress of bytes on their way to several hosts, in one line."""

from __future__ import annotations

import pytest

from gangline.provision.console import Meter, shown
from tests.unit.provision.hosts import Lines

GIB = 1 << 30


@pytest.fixture
def meter_and_lines() -> tuple[Meter, Lines, list[float]]:
    lines, now = Lines(), [0.0]
    meter = Meter(lines, "model", clock=lambda: now[0])
    meter.expect("pc1", GIB)
    meter.expect("pc2", GIB)
    return meter, lines, now


def test_the_line_says_where_to_how_much_and_how_long(meter_and_lines) -> None:
    meter, lines, now = meter_and_lines
    now[0] = 10.0
    meter.at("pc1", GIB // 2)
    assert lines.ticked[-1] == "model to pc1 pc2: 25 % of 2 GiB, 30.0 s left"
    now[0] = 20.0
    meter.whole("pc1")
    assert lines.ticked[-1] == "model to pc2: 50 % of 2 GiB, 20.0 s left"
    meter.whole("pc2")
    assert lines.ticked[-1] == "model to pc1 pc2: 100 % of 2 GiB"


def test_the_first_seconds_promise_nothing(meter_and_lines) -> None:
    meter, lines, now = meter_and_lines
    now[0] = 1.0
    meter.at("pc1", GIB // 2)
    assert lines.ticked[-1] == "model to pc1 pc2: 25 % of 2 GiB"


def test_it_is_not_told_for_every_piece(meter_and_lines) -> None:
    meter, lines, now = meter_and_lines
    for step in range(1000):
        now[0] = 3.0 + step / 1000
        meter.at("pc1", step)
    assert len(lines.ticked) == 4


def test_more_than_was_expected_is_no_more_than_everything(meter_and_lines) -> None:
    meter, lines, _now = meter_and_lines
    meter.at("pc1", 5 * GIB)
    assert "50 %" in lines.ticked[-1]


def test_text_of_others_is_shown_without_what_moves_a_terminal() -> None:
    assert shown("a\x1b[2Jb\nc") == "a?[2Jb?c"
    assert len(shown("x" * 1000)) == 300
