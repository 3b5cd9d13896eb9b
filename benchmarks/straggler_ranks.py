"""A rank of stragglers.py: one run after the other in gangline's own loop, with computation emulated (see emulated.py).

    python -m benchmarks.straggler_ranks '<json>'      # with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set

Rank 0 says on stdout when a run may begin, and at the step from which a link is to be slow, and waits for a line on
stdin each time; at the end of a run it says what was told of stragglers.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.emulated import FACTORS, Rows, Setup, Shape, build
from gangline.worker.loop import Loop
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO

Case = dict[str, Any]


class Notes:
    """A recorder that keeps what is told of stragglers, and when steps ended. waits_at: after that step it asks."""

    def __init__(self, waits_at: int | None) -> None:
        self.ends_s: list[float] = []
        self.told: list[Case] = []
        self._waits_at = waits_at

    def step(self, _report: Any, *, step: int, **_: Any) -> None:
        """The end of a step."""
        if step == self._waits_at:
            ask("slow")
        self.ends_s.append(time.perf_counter())

    def event(self, event: str, **details: Any) -> None:
        """Anything else."""
        if event.startswith("straggler"):
            self.told.append({"event": event, **details})


def main() -> int:
    """All runs of the order."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=order["limit_s"]))
    for case in order["cases"]:
        if dist.get_rank() == 0:
            ask("begin", case=case["name"])
        found = run(case, dist.get_rank())
        if dist.get_rank() == 0:
            say("end", case=case["name"], **found)
    os._exit(0)  # a gloo group that is torn down may hang: see gangline.worker.process_group.leave


def run(case: Case, rank: int) -> Case:
    """One run; where this rank is the straggler, it computes or reads slowly from step `begin` (from 0) on."""
    is_slow, begin = rank == case.get("rank"), case.get("begin", 0)
    speed = FACTORS[rank] if case["unlike"] else 1.0
    setup = Setup(
        micro_batch_s=case["micro_batch_s"],
        batch=case["batch"],
        steps=case["steps"],
        moving=case["moving"],
        shape=Shape(**case["shape"]),
    )
    longer = case.get("part", 0.0) if is_slow else 0.0
    read_s = longer * case["micro_batch_s"] * speed if case["cause"] == "data" else 0.0
    slower = longer if case["cause"] == "compute" else 0.0
    rows = Rows(setup.batch * setup.steps, read_s=lambda _: read_s if clock.step >= begin else 0.0)
    session, _, clock = build(
        setup, rank, factor=lambda step: speed * (1 + slower if step >= begin else 1.0), rows=rows
    )
    notes = Notes(begin if case["cause"] == "network" else None)
    outlets = RunIO(recorder=notes if rank == 0 else None, saver=None, stop=StopFlag())  # type: ignore[arg-type]
    Loop(session, outlets, TrainingProgress()).run()
    steps_s = [after - before for before, after in zip(notes.ends_s, notes.ends_s[1:], strict=False)]
    return {"told": notes.told, "steps_s": [round(each, 4) for each in steps_s]}


def say(what: str, **details: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps({"what": what, **details}) + "\n")
    sys.stdout.flush()


def ask(what: str, **details: Any) -> None:
    """One line, and wait for the answer."""
    say(what, **details)
    sys.stdin.readline()


if __name__ == "__main__":
    raise SystemExit(main())
