"""What the user orders or asks of a run counts for the attempt that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.runs.layout import RunLayout
from gangline.runs.state import read_leave, read_order, write_leave, write_order


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    return layout


def test_nothing_was_asked(layout: RunLayout) -> None:
    assert read_leave(layout, attempt=1) == ()
    assert read_order(layout, attempt=1) is None


def test_hosts_that_were_asked_to_leave_one_after_the_other_leave_all(layout: RunLayout) -> None:
    write_leave(layout, ["pc3"], attempt=1)
    write_leave(layout, ["pc2", "pc3"], attempt=1)
    assert read_leave(layout, attempt=1) == ("pc3", "pc2")


def test_what_was_meant_for_an_attempt_does_not_count_for_the_next(layout: RunLayout) -> None:
    write_leave(layout, ["pc3"], attempt=1)
    write_order(layout, "stop", attempt=1)
    assert read_leave(layout, attempt=2) == ()
    assert read_order(layout, attempt=2) is None
    write_leave(layout, ["pc2"], attempt=2)
    assert read_leave(layout, attempt=2) == ("pc2",)
