"""The attempts of a run, one line each."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from gangline.report.follow import View
from gangline.report.run_history import RunHistory, attempt_rows, attempt_table, read_history
from gangline.runs.cluster import Host
from gangline.runs.layout import RunLayout
from gangline.runs.state import AttemptOutcome, HostOutcome, ProcessId, RunState
from gangline.transport.local import LocalTransport

HERE = LocalTransport(Host(name="here", workdir="/", python="python"))
NOW = datetime(2026, 1, 1, 14, tzinfo=timezone.utc)


class Run:
    """A run of three hosts that lost one, as its records tell it."""

    def __init__(self, root: Path) -> None:
        self.layout = RunLayout(root, "calm-otter-7")
        self.layout.folder.mkdir(parents=True)
        self.state("running", 2)
        self.event(1, "started", "12:00:00", hosts=["pc1", "pc2", "pc3"])
        self.worker(1, "started", step=0)
        self.steps(1, 1241)
        self.event(1, "failing", "12:52:05", what="pc3 does not answer")
        self.outcome(1, "failed", "12:52:10", what="pc3 does not answer")
        going_on = {"next": 2, "hosts": ["pc1", "pc2"], "without": ["pc3"], "step": 1240, "lost_steps": 1}
        self.event(1, "restarting", "12:52:12", what="pc3 does not answer\nfor 31 s", **going_on)
        self.event(2, "started", "12:52:13", hosts=["pc1", "pc2"])
        self.worker(2, "resumed", step=1240)
        self.steps(2, 2900)

    def state(self, phase: str, attempt: int, **more: Any) -> None:
        me = ProcessId.current()
        RunState(name="tiny", phase=phase, attempt=attempt, supervisor=me, **more).save(self.layout)  # type: ignore[arg-type]

    def _write(self, path: Path, record: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def event(self, attempt: int, event: str, clock: str, **details: Any) -> None:
        record = {"kind": "event", "time": f"2026-01-01T{clock}.000Z", "source": "supervisor", "event": event}
        self._write(self.layout.events, {**record, "attempt": attempt, **details})

    def worker(self, attempt: int, event: str, *, step: int) -> None:
        record = {"kind": "event", "source": "worker", "event": event, "attempt": attempt, "step": step}
        self._write(self.layout.events, record)

    def steps(self, attempt: int, last: int) -> None:
        self._write(self.layout.metrics, {"kind": "step", "attempt": attempt, "step": last, "steps": 4000})

    def outcome(self, attempt: int, result: str, clock: str, *, what: str = "") -> None:
        folder = self.layout.attempt(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        hosts = {"pc1": HostOutcome(phase="ended", returncode=1)}
        error = {"kind": "RunFailed", "what": what} if what else None
        ended = f"2026-01-01T{clock}.000Z"
        AttemptOutcome(result=result, hosts=hosts, error=error, ended=ended).save(folder / "outcome.json")  # type: ignore[arg-type]

    def story(self) -> RunHistory:
        view = View(layout=self.layout, head=HERE, head_layout=self.layout)
        return read_history(view, records=self.layout, remote=None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_every_attempt_is_a_line(run: Run) -> None:
    assert attempt_table(run.story(), now=NOW) == [
        "attempt  began    took         hosts    from   to     end",
        "1        2 h ago  52 min 10 s  pc[1-3]  0      1,241  pc3 does not answer",
        "2        1 h ago  -            pc[1-2]  1,240  2,900  running",
    ]


def test_the_end_of_the_last_attempt_is_that_of_the_run(run: Run) -> None:
    run.outcome(2, "failed", "13:00:00", what="rank 0 on pc1: row 7\nis empty")
    run.state("failed", 2, error={"kind": "DataError", "what": "rank 0 on pc1: row 7"})
    assert attempt_table(run.story(), now=NOW)[-1].endswith("failed: rank 0 on pc1: row 7")


@pytest.mark.parametrize(("phase", "end"), [("restarting", "restarting"), ("stopping", "stopping")])
def test_an_attempt_that_has_not_ended_is_as_its_run(run: Run, phase: str, end: str) -> None:
    run.state(phase, 2)
    assert attempt_table(run.story(), now=NOW)[-1].endswith(f"2,900  {end}")


def test_an_attempt_of_which_nobody_wrote_the_end_says_so(run: Run) -> None:
    run.event(3, "started", "13:30:00", hosts=["pc1", "pc2"])
    run.state("running", 3)
    lines = attempt_table(run.story(), now=NOW)
    assert lines[2].endswith("2,900  nobody wrote down how")
    assert lines[3].endswith("pc[1-2]  -      -      running")


def test_a_stop_and_a_resume_are_no_cause(run: Run) -> None:
    run.outcome(2, "stopped", "13:00:00")
    run.event(3, "started", "13:30:00", hosts=["pc1", "pc2"])
    run.state("running", 3)
    assert attempt_table(run.story(), now=NOW)[2].endswith("2,900  stopped")


def test_programs_get_the_same_as_data(run: Run) -> None:
    first, second = attempt_rows(run.story())
    assert first == {
        "attempt": 1,
        "began": "2026-01-01T12:00:00.000Z",
        "ended": "2026-01-01T12:52:10.000Z",
        "hosts": ["pc1", "pc2", "pc3"],
        "from_step": 0,
        "to_step": 1241,
        "result": "failed",
        "what": "pc3 does not answer",
        "next": True,
    }
    assert (second["result"], second["what"], second["next"]) == ("running", "", False)


def test_what_a_host_says_cannot_steer_the_terminal(run: Run) -> None:
    run.event(2, "restarting", "13:00:00", next=3, what="\x1b[2Jgone", hosts=["pc1\x1b[31m"])
    run.state("running", 3)
    assert all(line.isprintable() for line in attempt_table(run.story(), now=NOW))
