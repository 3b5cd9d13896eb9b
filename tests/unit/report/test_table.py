"""Tables and commands for people."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from gangline.launch.backend import HostRequest, LaunchRequest
from gangline.report.commands import printed
from gangline.report.text_table import age, event_line, table


def test_columns_are_aligned_and_texts_cleaned() -> None:
    lines = table(("run", "phase"), [("calm-otter-7", "run\x1b[31mning"), ("x", "lost")])
    assert lines == ["run           phase", "calm-otter-7  running", "x             lost"]


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("2026-01-01T11:59:30.000Z", "30 s ago"),
        ("2026-01-01T11:57:00.000Z", "3 min ago"),
        ("2026-01-01T07:00:00.000Z", "5 h ago"),
        ("2025-12-30T12:00:00.000Z", "2 d ago"),
        ("2026-01-01T12:00:05.000Z", "0 s ago"),
        ("", ""),
        ("yesterday", ""),
    ],
)
def test_times_are_told_as_ages(time: str, expected: str) -> None:
    assert age(time, now=datetime(2026, 1, 1, 12, tzinfo=timezone.utc)) == expected


def test_an_event_says_what_without_saying_that_it_does() -> None:
    record = {"source": "supervisor", "event": "step-skipped", "step": 3, "what": "rank 0 on pc1 ended", "attempt": 1}
    assert event_line(record) == "step-skipped  step 3  rank 0 on pc1 ended"


def test_shares_that_moved_are_told_in_words_and_not_in_lists() -> None:
    what = "pc1 20 -> 13 micro-batches, pc2 11 -> 15, pc3 9 -> 12; steps get 32 % shorter"
    lists = {"before": [20, 11, 9], "shares": [13, 15, 12], "micro_batch_s": [2.0, 1.8, 2.2]}
    record = {"source": "worker", "event": "shares", "attempt": 1, "step": 53, "cause": "speeds", "what": what, **lists}
    assert event_line(record) == f"shares  step 53  {what}"


def test_a_run_that_prints_no_more_is_one_line_whatever_else_is_known_of_it() -> None:
    details = {"since": "2026-01-01T00:00:00Z", "last": [{"host": "pc1", "rank": 0}], "first": [], "line": "step 1"}
    record = {"source": "supervisor", "event": "quiet", "what": "no rank has printed anything", **details}
    assert event_line(record) == "quiet  no rank has printed anything"


def test_a_straggler_is_a_sentence_that_does_not_say_twice_who_it_is() -> None:
    record = {"source": "worker", "event": "straggler", "attempt": 1, "step": 120, "host": "pc3", "rank": 2}
    record |= {"cause": "compute", "factor": 1.6, "what": "pc3 computes 1.60 x as slowly as before"}
    assert event_line(record) == "slow  step 120  pc3 computes 1.60 x as slowly as before"
    over = {**record, "event": "straggler-over", "what": "pc3 computes as fast as before"}
    assert event_line(over) == "no longer slow  step 120  pc3 computes as fast as before"


def test_printed_commands_keep_secrets_and_quote_everything_else() -> None:
    secrets = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "db_password", "TOKEN"), "canary")
    part = HostRequest(
        host="pc1",
        folder="/f",
        rank_files="/f",
        argv=("python", "a b; rm"),
        env={**secrets, "TOKENIZERS_PARALLELISM": "false", "X": "1 2"},
        agent_argv=(),
    )
    text = "\n".join(printed(LaunchRequest(run_id="r", attempt=1, hosts=(part,))))
    assert "canary" not in text
    assert "TOKENIZERS_PARALLELISM=false" in text
    assert "X='1 2'" in text
    assert text.endswith("python 'a b; rm'")
