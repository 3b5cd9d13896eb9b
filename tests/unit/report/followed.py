"""A run that is followed, whose files the test writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gangline.report.follow import View
from gangline.runs.cluster import Host
from gangline.runs.layout import RunLayout
from gangline.runs.state import Phase, ProcessId, RunState
from gangline.transport.local import LocalTransport
from gangline.transport.transport import Transport

HERE = LocalTransport(Host(name="here", workdir="/", python="python"))


def step(number: int, loss: float = 2.5, **more: Any) -> dict[str, Any]:
    """What rank 0 writes of a step."""
    record = {
        "kind": "step",
        "step": number,
        "steps": 100,
        "loss": loss,
        "learning_rate": 1.8e-4,
        "tokens_per_s": 4510.4,
        "step_s": 0.2,
        "ranks": [{"memory_bytes": 100 << 20}, {"memory_bytes": 410 << 20}],
    }
    return {**record, **more}


def evaluation(number: int, loss: float) -> dict[str, Any]:
    """What rank 0 writes of an evaluation."""
    return {"kind": "evaluation", "step": number, "loss": loss, "perplexity": 9.5}


RESTARTING: dict[str, Any] = {
    "kind": "event",
    "source": "supervisor",
    "event": "restarting",
    "attempt": 1,
    "next": 2,
    "what": "pc3 does not answer",
    "hosts": ["pc1", "pc2"],
    "without": ["pc3"],
}
"""What a supervisor writes of the next attempt, but for the steps."""


class Folders:
    """Where the files of a run lie. apart: the supervisor's elsewhere than those of rank 0."""

    def __init__(self, root: Path, *, apart: bool = False, head: Transport = HERE) -> None:
        self.layout = RunLayout(root / "home", "calm-otter-7")
        self.head = RunLayout(root / "head", "calm-otter-7") if apart else self.layout
        for layout in (self.layout, self.head):
            layout.folder.mkdir(parents=True, exist_ok=True)
        self.view = View(layout=self.layout, head=head, head_layout=self.head)


class Run(Folders):
    """A run whose files the test writes."""

    def __init__(self, root: Path, *, apart: bool = False) -> None:
        super().__init__(root, apart=apart)
        self.phase("running")

    def phase(self, phase: Phase, supervisor: ProcessId | None = None, *, attempt: int = 1) -> None:
        """Where the run stands from now on."""
        me = supervisor or ProcessId.current()
        RunState(name="tiny", phase=phase, attempt=attempt, supervisor=me).save(self.layout)

    def metrics(self, *records: dict[str, Any]) -> None:
        """Rank 0 goes on writing."""
        with self.head.metrics.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records)


def board(*, done: bool, sentence: str | None = None) -> dict[str, Any]:
    """How far the start of one rank has come."""
    row = {"host": "pc1", "ranks": 1, "joined": int(done), "stages": {"ssh": 0.1, "joined": 2.0 if done else None}}
    told = {"done": done, "order": ["ssh", "joined"], "seconds": 2.0, "ranks": 1, "joined": int(done)}
    return {**told, "hosts": [row], "sentence": sentence}
