"""How the process of a tracker reads metrics.jsonl."""

import json
import math
from datetime import datetime, timezone

import pytest

from gangline import exporter_process
from gangline.exporter_process import read_points
from gangline.exporters import named_figures

STEP = {"kind": "step", "time": "2026-11-28T10:00:01.250Z", "step": 3, "loss": "nan", "grad_norm": 2, "mfu": None}


@pytest.fixture
def metrics(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_what_is_not_there_yet_has_no_points(metrics):
    assert read_points(metrics, 7) == ([], 7)


def test_only_whole_lines_are_read_and_the_rest_comes_with_the_next_look(metrics):
    line = json.dumps(STEP)
    metrics.write_text(f"{line}\n{line[:20]}")
    (point,), end = read_points(metrics, 0)
    assert end == len(line) + 1
    assert (point.step, point.time) == (3, datetime(2026, 11, 28, 10, 0, 1, 250000, timezone.utc))
    assert math.isnan(point.values["train/loss"])
    assert point.values["train/grad_norm"] == 2.0
    assert "train/mfu" not in point.values
    metrics.write_text(f"{line}\n{line}\n")
    points, end = read_points(metrics, end)
    assert (len(points), end) == (1, metrics.stat().st_size)


@pytest.mark.parametrize("line", ["{", "7", "null", '{"kind": "step"}', '{"kind": "step", "loss": 1, "time": 3}', ""])
def test_a_line_that_is_none_is_passed_over(metrics, line):
    metrics.write_text(f"{line}\n{json.dumps(STEP)}\n")
    points, end = read_points(metrics, 0)
    assert [point.step for point in points] == [3]
    assert end == metrics.stat().st_size


def test_a_line_longer_than_what_is_read_at_once_is_skipped(metrics, monkeypatch):
    monkeypatch.setattr(exporter_process, "PIECE_BYTES", 200)
    metrics.write_text("x" * 450 + "\n" + json.dumps(STEP) + "\n")
    found, at = [], 0
    while at < metrics.stat().st_size:
        points, at = read_points(metrics, at)
        found += points
    assert [point.step for point in found] == [3]


def test_a_run_without_ranks_in_its_figures_has_those_of_the_step_alone():
    assert named_figures({"kind": "step", "step": 1, "loss": 2}) == {"train/loss": 2.0}
    assert named_figures({"kind": "event", "event": "started"}) == {}
