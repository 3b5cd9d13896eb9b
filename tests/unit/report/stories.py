"""Runs that went wrong, as their files tell of them; for the screens of `gangline explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.launch.backend import HostRequest, HostStatus, LaunchRequest
from gangline.runs.cluster import Host
from gangline.runs.state import AttemptOutcome, HostOutcome, Phase, ProcessId, RunState, iso
from gangline.supervise.cause import first_cause, gather_failures
from gangline.transport.local import LocalTransport
from tests.unit.report.followed import Folders

HERE = LocalTransport(Host(name="pc1", workdir="/", python="python"))
RESET = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [10.77.0.12]:46787: Connection reset by peer."
BEGUN = 1_795_000_000.0


def failure(rank: int, *, code: int | None = 1, what: str | None = None, **more: Any) -> dict[str, Any]:
    """How one rank ended, as its host agent says."""
    error = (
        None if what is None else {"kind": "RunFailed", "what": what, "seen": "", "fix": "see its log", "exit_code": 5}
    )
    fresh = {"rank": rank, "pid": 4000 + rank, "time": 0.0, "ordered": False, "error": error, "exit": code}
    return {**fresh, "log": f"/srv/attempts/1/rank-{rank}.log", "log_tail": [f"the last of rank {rank}"], **more}


def ended(host: str, *failures: dict[str, Any], **more: Any) -> HostStatus:
    """A host whose ranks have ended."""
    return HostStatus(
        **{"host": host, "phase": "ended", "returncode": 1, "reason": "finished", "failures": failures, **more}
    )


class Past(Folders):
    """The files of a run."""

    def __init__(self, root: Path, *, apart: bool = False) -> None:
        super().__init__(root, apart=apart, head=HERE)
        self._now = BEGUN

    def state(self, phase: Phase, *, attempt: int = 1, **more: Any) -> None:
        """Where it stands; its supervisor is this process, which lives."""
        more = {"supervisor": ProcessId.current(), **more}
        RunState(name="tiny", phase=phase, attempt=attempt, **more).save(self.layout)

    def event(self, name: str, *, attempt: int = 1, source: str = "supervisor", **details: Any) -> None:
        """One event, a second after the one before."""
        layout = self.layout if source == "supervisor" else self.head
        record = {
            "kind": "event",
            "time": iso(self._now),
            "source": source,
            "event": name,
            "attempt": attempt,
            **details,
        }
        self._now += 1
        self.line(layout.events, record)

    def steps(self, first: int, last: int, *, attempt: int = 1) -> None:
        """The figures of some steps."""
        for step in range(first, last + 1):
            self.line(self.head.metrics, {"kind": "step", "attempt": attempt, "step": step, "steps": 400, "loss": 2.5})

    @staticmethod
    def line(path: Path, record: dict[str, Any]) -> None:
        """One line of a file of records."""
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(record) + "\n")

    def ends(
        self,
        *statuses: HostStatus,
        attempt: int = 1,
        error: dict[str, Any] | None = None,
        result: Any = "failed",
        **more: Any,
    ) -> None:
        """How an attempt ended; without an error what the supervisor finds in the statuses."""
        parts = [
            HostRequest(host=each.host, folder=f"/srv/{each.host}", rank_files="/srv", argv=(), env={})
            for each in statuses
        ]
        request = LaunchRequest(run_id="calm-otter-7", attempt=attempt, hosts=tuple(parts))
        cause = (error or first_cause(request, statuses)) if result == "failed" else None
        outcome = AttemptOutcome(
            result=result,
            hosts={each.host: HostOutcome(phase=each.phase, returncode=each.returncode) for each in statuses},
            error=cause,
            failures=tuple(gather_failures(statuses)),
            **more,
        )
        folder = self.layout.attempt(attempt)
        folder.mkdir(parents=True, exist_ok=True)
        outcome.save(folder / "outcome.json")
        if cause:
            self.event("failing", attempt=attempt, what=cause["what"])


def killed_rank(past: Past) -> None:
    """One of three ranks was killed; the two others lost it, and the job does not let the run go on."""
    past.event("started", hosts=["pc1", "pc2", "pc3"])
    past.event("joined", seconds=8.4)
    past.event("started", source="worker", step=0, steps=400)
    past.steps(1, 130)
    past.event("committed", step=60, hosts=["pc1", "pc2", "pc3"])
    past.event("committed", step=120, hosts=["pc1", "pc2", "pc3"])
    past.ends(
        # its clock is an hour behind: that makes an echo no cause
        ended("pc1", failure(0, what=RESET, time=-3600.0)),
        ended("pc2", failure(1, code=-15, time=1.0)),
        ended("pc3", failure(2, code=-9, log_tail=["step 129 done", "step 130 done"])),
    )
    past.event(
        "failed", what="rank 2 on pc3 was killed by SIGKILL", why="the job ends the run at the first failure (failures)"
    )
    past.state("failed")


def lost_host(past: Past) -> None:
    """A host lost its power; the run went on without it."""
    past.event("started", hosts=["pc1", "pc2", "pc3"])
    past.event("started", source="worker", step=0, steps=400)
    past.steps(1, 130)
    past.event("committed", step=120, hosts=["pc1", "pc2", "pc3"])
    past.event("unreachable", host="pc3", why="no answer for 6 s")
    past.ends(
        ended("pc1", failure(0, what=RESET, ordered=True)),
        ended("pc2", failure(1, code=-9, ordered=True)),
        HostStatus(host="pc3", phase="unreachable", why="pc3: no answer for 12 s", since=BEGUN + 3),
        unverified=("pc3",),
    )
    past.event(
        "restarting",
        next=2,
        what="pc3 does not answer, and the ranks on other hosts have failed",
        hosts=["pc1", "pc2"],
        without=["pc3"],
        step=130,
        lost_steps=1,
    )
    past.event("started", attempt=2, hosts=["pc1", "pc2"])
    past.event("started", attempt=2, source="worker", step=130, steps=400)
    past.event("returned", attempt=2, seconds=34.2)
    past.steps(131, 200, attempt=2)
    past.state("running", attempt=2)


def hang(past: Past) -> None:
    """A rank was stopped, and the others waited for it."""
    what = "rank 2 on pc3 is stopped (SIGSTOP) in `compute` of step 57 since 41.0 s; ranks 0, 1 wait"
    stacks = [
        {
            "host": "pc1",
            "rank": 0,
            "phase": "exchange",
            "step": 57,
            "stack": ["all_reduce (distributed.py:2800)", "step (synchronous.py:120)"],
        },
        {
            "host": "pc2",
            "rank": 1,
            "phase": "exchange",
            "step": 57,
            "stack": ["all_reduce (distributed.py:2800)", "step (synchronous.py:120)"],
        },
        {"host": "pc3", "rank": 2, "phase": "compute", "step": 57, "stack": []},
    ]
    seen = [
        "expected a step within 30.0 s (3 x the slowest of the last 20, at least 30 s)",
        "rank 2 on pc3 is stopped (SIGSTOP) in `compute` of step 57 since 41.0 s",
        "rank 0 on pc1 stands in `exchange` of step 57 since 41.0 s, at all_reduce (distributed.py:2800)",
    ]
    past.event("started", hosts=["pc1", "pc2", "pc3"])
    past.event("started", source="worker", step=0, steps=400)
    past.steps(1, 56)
    past.event("hanging", what=what, host="pc3", rank=2, phase="compute", step=57, seconds=41.0)
    past.ends(
        *(ended(host, failure(rank, code=-9, ordered=True)) for rank, host in enumerate(["pc1", "pc2", "pc3"])),
        error={
            "kind": "RunFailed",
            "what": what,
            "seen": "\n".join(seen),
            "fix": "somebody stopped the process; let it continue on pc3: kill -CONT 4711",
            "exit_code": 5,
            "host": "pc3",
            "rank": 2,
            "stacks": stacks,
        },
    )
    past.event("failed", what=what)
    past.state("failed")


CONSOLE = (
    "E1121 22:31:07 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: 1) local_rank: 0 (pid: 70)",
    "============================================================",
    "train.py FAILED",
    "------------------------------------------------------------",
    "Root Cause (first observed failure):",
    "[0]:",
    "  rank      : 0 (local_rank: 0)",
    "  exitcode  : 1 (pid: 70)",
    "============================================================",
)


def own_program(past: Past) -> None:
    """A script of the user's own lacks a package on one host; nothing says how it goes on."""
    past.event("started", hosts=["pc1", "pc2"])
    said = [
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "ModuleNotFoundError: No module named 'trl'",
    ]
    past.ends(
        ended("pc1", returncode=-9, reason="killed"),
        ended("pc2", failure(1, log_tail=[*said, *CONSOLE]), console_tail=CONSOLE),
    )
    past.event("failed", what="rank 1 on pc2: ModuleNotFoundError: No module named 'trl'")
    past.state("failed")


STORIES = {"killed-rank": killed_rank, "lost-host": lost_host, "hang": hang, "own-program": own_program}
