"""What is said of a run that goes on by itself."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.report.text_table import event_line, in_words
from tests.unit.report.followed import RESTARTING

LOST = {**RESTARTING, "step": 1240, "lost_steps": 0}


def test_smaller_micro_batches_are_told():
    assert "going on from step 1,240 with micro_batch 1" in event_line({**LOST, "micro_batch": 1})


def test_what_one_rank_does_otherwise_is_told():
    words = "rank 1 on pc2 takes micro-batches of 4 in place of 8; the others keep theirs"
    assert event_line({**LOST, "settings": words}).endswith(f"going on from step 1,240; {words}")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({}, "attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 1,240"),
        ({"lost_steps": 1}, "attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 1,240 (1 step again)"),
        (
            {"lost_steps": 12},
            "attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 1,240 (12 steps again)",
        ),
        ({"lost_steps": None}, "attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 1,240"),
        ({"step": None}, "attempt 2 on pc1 and pc2: pc3 does not answer; going on from the beginning"),
        (
            {"what": "rank 1 on pc2 was killed by SIGKILL"},
            "attempt 2 on pc1 and pc2, without pc3: rank 1 on pc2 was killed by SIGKILL; going on from step 1,240",
        ),
        (
            {"what": "pc30 does not answer"},
            "attempt 2 on pc1 and pc2, without pc3: pc30 does not answer; going on from step 1,240",
        ),
        (
            {"hosts": [f"pc{number}" for number in range(1, 9)], "without": [], "what": "row 7\nempty"},
            "attempt 2 on pc[1-8]: row 7; going on from step 1,240",
        ),
        (
            {"missing": "figures that only pc3 had"},
            "attempt 2 on pc1 and pc2: pc3 does not answer; going on from step 1,240; missing: figures that only pc3 had",
        ),
        ({"what": "pc3\x1b[2J is gone"}, "attempt 2 on pc1 and pc2: pc3 is gone; going on from step 1,240"),
    ],
)
def test_the_next_attempt_is_one_line_with_its_hosts_the_cause_and_the_step(change: dict[str, Any], line: str) -> None:
    assert event_line({**LOST, **change}) == line


@pytest.mark.parametrize("value", [7, "pc1", None, {"a": 1}, [], [None]])
def test_nonsense_from_a_host_is_a_line_all_the_same(value: object) -> None:
    for key in LOST:
        if key not in {"kind", "source", "event"}:
            assert event_line({**LOST, key: value})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ((), ""),
        (("pc1",), "pc1"),
        (("pc1", "pc2"), "pc1 and pc2"),
        (("nas", "pc1", "pc2"), "nas, pc1 and pc2"),
        (("nas", "pc1", "pc2", "pc3"), "nas, pc[1-3]"),
    ],
)
def test_hosts_in_words(names: tuple[str, ...], words: str) -> None:
    assert in_words(names) == words


@pytest.mark.parametrize(
    ("event", "details", "line"),
    [
        (
            "hanging",
            {"what": "rank 2 on pc3 stands in `data` of step 57 since 41 s", "host": "pc3", "rank": 2, "step": 57},
            "stands still  rank 2 on pc3 stands in `data` of step 57 since 41 s",
        ),
        ("going on", {"what": "rank 2 on pc3 gets on again", "host": "pc3"}, "going on  rank 2 on pc3 gets on again"),
        (
            "unreachable",
            {"host": "pc3", "since": "2026-01-01T11:06:38.000Z", "why": "no answer"},
            "unreachable  host pc3  no answer",
        ),
        ("reachable", {"host": "pc3", "seconds": 7.5}, "reachable  host pc3"),
        ("leaving", {"what": "pc3 leaves, as ordered"}, "pc3 leaves, as ordered"),
        ("returned", {"seconds": 3.42, "stages": {"ended": 1.0}}, "training again  after 3.4 s"),
        ("returned", {"seconds": 3600}, "training again  after 1 h 00 min"),
        ("failed", {"what": "row 7", "why": "it failed twice"}, "no further attempt  it failed twice"),
    ],
)
def test_what_happens_around_a_failure_is_a_line_each(event: str, details: dict[str, Any], line: str) -> None:
    assert event_line({"kind": "event", "source": "supervisor", "event": event, "attempt": 1, **details}) == line


def test_a_failure_that_nothing_follows_is_left_to_the_error_that_ends_the_command() -> None:
    assert event_line({"source": "supervisor", "event": "failed", "what": "row 7"}) is None
    assert event_line({"source": "worker", "event": "failed", "what": "row 7", "why": "empty"}) is None
