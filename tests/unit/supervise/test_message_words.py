"""The words of messages about a run, and the keys by which a repeat is recognised."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from gangline.supervise.messages import TEXT_CHARS, message_of
from gangline.supervise.sinks import Message


def told(event: str, **details: Any) -> Message | None:
    line = json.dumps({"kind": "event", "source": "supervisor", "event": event, "attempt": 2, **details})
    return message_of(line.encode(), run_id="calm-otter-7", name="tiny")


@pytest.mark.parametrize(
    ("event", "details", "title", "said", "following"),
    [
        ("finished", {}, "has finished", "All steps are done.", "gangline summary calm-otter-7"),
        (
            "failed",
            {"what": "rank 2 on pc3 was killed by SIGKILL\nmore", "why": "the job ends the run at the first failure"},
            "has failed",
            "rank 2 on pc3 was killed by SIGKILL; no attempt follows: the job ends the run at the first failure.",
            "gangline explain calm-otter-7",
        ),
        (
            "unreachable",
            {"host": "pc3", "why": "no answer for 6 s"},
            "lost pc3",
            "pc3 does not answer: no answer for 6 s. The run waits for it or goes on without it.",
            "gangline attach calm-otter-7",
        ),
        (
            "reachable",
            {"host": "pc3", "seconds": 9.0},
            "has back pc3",
            "pc3 answers again.",
            "gangline attach calm-otter-7",
        ),
        ("straggler", {"what": "pc2 is slow"}, "is slowed down", "pc2 is slow.", "gangline attach calm-otter-7"),
        (
            "hanging",
            {"what": "rank 1 on pc2 stands"},
            "stands still",
            "rank 1 on pc2 stands.",
            "gangline explain calm-otter-7",
        ),
    ],
)
def test_a_sentence_with_the_cause_and_the_next_command(
    event: str, details: dict[str, Any], title: str, said: str, following: str
) -> None:
    message = told(event, **details)
    assert message is not None
    assert message.title == f"calm-otter-7 (tiny) {title}"
    assert message.text == f"{said}\nNext: {following}"


@pytest.mark.parametrize(
    "line", [b"", b"{", b"[]", b'{"event": "committed"}', b'{"event": "failed", "source": "worker"}']
)
def test_other_lines_make_none(line: bytes) -> None:
    assert message_of(line, run_id="calm-otter-7", name="tiny") is None


def test_the_key_is_that_of_the_event_and_the_end_of_an_attempt_has_one() -> None:
    def key(*words: str, **details: Any) -> str:
        message = told(*words, **details)
        assert message is not None
        return message.key

    assert (
        key("straggler", step=5, time="a") == key("straggler", step=5, time="a") != key("straggler", step=6, time="a")
    )
    assert key("failed", what="a", time="b") == key("failed", what="c", time="d") == "calm-otter-7-failed-2"


def test_a_repeat_says_so_and_keeps_its_key() -> None:
    message = told("finished")
    assert message is not None
    again = dataclasses.replace(message, is_repeat=True)
    assert (message.to_json()["repeat"], again.to_json()["repeat"]) == (False, True)
    assert again.key == message.key
    assert again.key in again.body


def test_texts_of_hosts_are_short_and_without_control_characters() -> None:
    message = told("straggler", what="a\x1b[31mb" + "c" * 2000, host="pc\r2")
    assert message is not None
    assert "\x1b" not in message.text + str(message.details)
    assert "\r" not in str(message.to_json())
    assert len(message.text) < TEXT_CHARS + 100
