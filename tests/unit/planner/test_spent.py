"""Where time went is added up from figures, however damaged, and read again only if it is what was written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.planner.outcome import TimeReport, spent
from tests.unit.planner.outcomes import evaluation, line

RUN = [line(step) for step in range(1, 23)]


def report(records: list[Any], attempt: int = 1) -> TimeReport:
    found = spent(records, run_id="calm-otter-7", attempt=attempt)
    assert found is not None
    return found


def test_every_second_of_a_step_has_its_place() -> None:
    found = report(RUN)
    assert (found.num_steps, found.total_s) == (20, pytest.approx(16.0))
    first, second = found.ranks
    assert (first.host, first.rank, first.compute_s, first.data_s) == ("pc1", 0, 12.0, 0.0)
    assert (first.waits_s, first.network_s, first.rest_s) == (0.0, 2.0, 2.0)
    assert (second.compute_s, second.waits_s, second.network_s, second.rest_s) == (10.0, 2.0, 2.0, 2.0)
    for each in found.ranks:
        parts = (each.compute_s, each.data_s, each.waits_s, each.network_s, each.rest_s)
        assert sum(parts) == pytest.approx(found.total_s)


def test_the_first_two_steps_count_only_where_there_are_few() -> None:
    assert report(RUN[:6]).num_steps == 6
    assert report(RUN[:7]).num_steps == 5


def test_short_and_skipped_steps_count_and_evaluations_do_not() -> None:
    records = [*RUN, evaluation(22), line(23, samples=3), line(24, skipped=True)]
    assert report(records).num_steps == 22


def test_a_line_of_a_round_stands_for_all_its_steps() -> None:
    rounds = [line(step, round_steps=4) for step in range(4, 92, 4)]
    found, plain = report(rounds), report(RUN)
    assert found.total_s == pytest.approx(4 * plain.total_s)
    assert found.ranks[0].compute_s == pytest.approx(4 * plain.ranks[0].compute_s)
    assert spent([line(1, round_steps=0), line(2, round_steps="4")], run_id="calm-otter-7", attempt=1) is None


def test_of_other_attempts_nothing_is_taken() -> None:
    assert spent(RUN, run_id="calm-otter-7", attempt=2) is None
    assert spent([], run_id="calm-otter-7", attempt=1) is None
    assert report([*RUN, *(line(step, attempt=2) for step in range(10, 15))], attempt=2).num_steps == 5


@pytest.mark.parametrize(
    "damage",
    [
        {"ranks": None},
        {"ranks": []},
        {"ranks": [1]},
        {"ranks": {"a": 1}},
        {"step_s": "nan"},
        {"step_s": -1.0},
        {"ranks": [{"rank": 0, "host": 3, "data_s": 0.0, "compute_s": 0.1, "wait_s": 0.1}]},
        {"ranks": [{"rank": 0, "host": "pc1", "data_s": 0.0, "compute_s": 1e300, "wait_s": 0.1}]},
        {"ranks": [{"rank": 7, "host": "pc9", "data_s": 0.0, "compute_s": 0.1, "wait_s": 0.1}]},
    ],
)
def test_damaged_lines_are_passed_over(damage: dict[str, Any]) -> None:
    assert report([RUN[0], {**RUN[1], **damage}, *RUN[1:]]).to_json() == report(RUN).to_json()


def test_it_is_read_as_it_was_written() -> None:
    assert TimeReport.from_json(json.loads(json.dumps(report(RUN).to_json()))) == report(RUN)


@pytest.mark.parametrize(
    "change",
    [{"ranks": []}, {"run": 3}, {"total_s": -1.0}, {"num_steps": "7"}, {"ranks": [{"host": "pc1"}]}, {"more": 1}],
)
def test_anything_else_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises((LookupError, TypeError, ValueError, AttributeError)):
        TimeReport.from_json({**report(RUN).to_json(), **change})
