"""A worker on a host: progress while it goes on, its result, or its own error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gangline.errors import DataError, RunFailed
from gangline.provision.ask import ask_worker
from gangline.runs.cluster import Host
from tests.fakes.transport import Call, FakeTransport, Scripted

HOST = Host(name="pc1", workdir="/w", python="/env/python")


def ask(*lines: object, returncode: int = 0, stderr: str = "") -> tuple[dict[str, Any], list[dict[str, Any]], Call]:
    stdout = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    transport = FakeTransport("pc1", answer=lambda _: Scripted(returncode=returncode, stdout=stdout, stderr=stderr))
    seen: list[dict[str, Any]] = []
    result = ask_worker(HOST, transport, ("inputs", "job.json"), on_progress=seen.append)
    return result, seen, transport.calls[0]


def test_progress_is_passed_on_and_the_result_returned() -> None:
    result, seen, call = ask({"kind": "progress", "rows": 1}, "a library says hello", {"kind": "result", "train": "x"})
    assert result == {"kind": "result", "train": "x"}
    assert seen == [{"kind": "progress", "rows": 1}]
    assert call.argv == ("/env/python", "-m", "gangline.worker", "inputs", "job.json")


def test_the_workers_error_is_raised_as_it_was() -> None:
    record = DataError("row 7", seen="empty", fix="fill it").to_json()
    with pytest.raises(DataError, match="row 7") as caught:
        ask({**record, "error_kind": record["kind"], "kind": "error"}, returncode=2)
    assert (caught.value.seen, caught.value.fix) == ("empty", "fill it")


def test_a_worker_that_dies_leaves_its_last_words() -> None:
    with pytest.raises(RunFailed, match="exit code -9") as caught:
        ask(returncode=-9, stderr="Traceback\nMemoryError")
    assert "MemoryError" in caught.value.seen
    assert "/env/python -m gangline.worker inputs job.json" in caught.value.fix


def test_an_end_without_a_result_is_no_success() -> None:
    with pytest.raises(RunFailed):
        ask({"kind": "progress"})
