"""The table of where time went fits any terminal and any number of ranks."""

from __future__ import annotations

from gangline.planner.outcome import RankTime, TimeReport
from gangline.report.text_table import time_table


def rank(number: int, *, host: str = "pc1", **seconds: float) -> RankTime:
    none = dict.fromkeys(("compute_s", "data_s", "waits_s", "network_s", "rest_s"), 0.0)
    return RankTime(host=host, rank=number, **(none | seconds))


def report(*ranks: RankTime) -> TimeReport:
    return TimeReport(run="calm-otter-7", attempt=1, num_steps=398, total_s=723.0, ranks=ranks)


def test_parts_are_of_a_ranks_own_time_in_columns() -> None:
    lines = time_table(
        report(
            rank(0, compute_s=60.0, data_s=5.0, waits_s=25.0, network_s=7.0, rest_s=3.0),
            rank(10, host="workstation", compute_s=10.0),
        )
    )
    assert lines == [
        "time of 398 steps, 12 min 03 s (waits: for slower ranks)",
        "host         rank  computes  data  waits  network  rest",
        "pc1          0         60 %   5 %   25 %      7 %   3 %",
        "workstation  10       100 %   0 %    0 %      0 %   0 %",
    ]


def test_of_many_ranks_some_are_shown() -> None:
    lines = time_table(report(*(rank(number, compute_s=1.0) for number in range(64))))
    assert len(lines) == 2 + 16 + 1
    assert lines[-1] == "and 48 ranks more, see times.json"


def test_names_from_a_host_cannot_steer_the_terminal() -> None:
    assert all(line.isprintable() for line in time_table(report(rank(0, host="pc\x1b[2J1"))))
