"""Ends of ranks: causes are told from echoes, and what torchrun calls the root cause is not shown as one."""

from __future__ import annotations

import pytest

from gangline.diagnose.rank_ends import ECHOES, LEFT_OUT, ORDERED, is_echo, weight, without_verdict
from tests.unit.diagnose.lines import LINES

CONSOLE = """\
E1121 22:31:07 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0 (pid: 70)
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_22:31:07
  host      : pc1
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 70)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
after it
""".splitlines()


def test_the_verdict_is_taken_out_and_the_rest_stays() -> None:
    kept = without_verdict(CONSOLE)
    assert kept[-2:] == [LEFT_OUT, "after it"]
    assert "train.py FAILED" in kept
    assert not any("exitcode  : 1" in line for line in kept)


def test_a_verdict_that_is_cut_off_is_taken_out_to_the_end() -> None:
    assert without_verdict(CONSOLE[:10])[-1] == LEFT_OUT


def test_other_lines_are_as_they_were() -> None:
    lines = ["=" * 60, "step 1", "=" * 60]
    assert without_verdict(lines) == lines


def failure(*, code: int | None = 1, ordered: bool = False, what: str | None = None) -> dict[str, object]:
    return {"exit": code, "ordered": ordered, "error": None if what is None else {"what": what, "seen": ""}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (failure(what="row 7 is empty"), 0),
        (failure(code=-9), 0),
        (failure(code=3), 1),
        (failure(what=LINES["reset"]), ECHOES),
        (failure(what=LINES["nccl-timeout"]), ECHOES),
        (failure(code=-15), ORDERED),
        (failure(code=None), ORDERED),
        (failure(code=-9, ordered=True), ORDERED),
    ],
)
def test_the_weight_of_a_failure_is_its_distance_from_the_cause(found: dict[str, object], expected: int) -> None:
    assert weight(found) == expected


WATCHDOG = ["step 7", LINES["nccl-timeout"], "Fatal Python error: Aborted"]
LOST = ["Traceback (most recent call last):", '  File "train.py", line 3', f"[rank0]: {LINES['reset']}"]
RAISED = ["Traceback (most recent call last):", '  File "train.py", line 3', "[rank1]: KeyError: 'text'", "bye"]


@pytest.mark.parametrize(
    ("code", "tail", "expected"),
    [
        (1, RAISED, 0),
        (1, LOST, ECHOES),
        (-6, WATCHDOG, ECHOES),
        (-6, ["terminate called after throwing an instance of 'std::bad_alloc'"], 0),
        (-9, ["step 7", LINES["nccl-timeout"]], 0),
        (1, ["step 7"], 1),
        (-15, RAISED, ORDERED),
    ],
)
def test_of_a_program_that_is_not_ours_the_end_of_the_log_tells_causes_from_echoes(
    code: int, tail: list[str], expected: int
) -> None:
    assert weight({**failure(code=code), "log_tail": tail}) == expected


def test_an_echo_may_stand_in_the_evidence() -> None:
    assert is_echo({"what": "RuntimeError", "seen": LINES["waited"]})
    assert not is_echo({"what": "RuntimeError"})
