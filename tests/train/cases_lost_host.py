"""What ranks do in test_lost_host: train as ever, and note what they read for which step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from gangline.worker import loop
from tests.train import cases_broken


def train(folder: str, *, notes: str, attempt: int, rank: int, world_size: int, port: int, slowdown: float):
    """Be one rank of an attempt. notes: the file for what it reads."""
    _listen(Path(notes), attempt)
    cases_broken.train(folder, attempt=attempt, rank=rank, world_size=world_size, port=port, slowdown=slowdown)


def _listen(notes: Path, attempt: int) -> None:
    pick, accumulate, steps = loop.pick, loop.Synchronous.accumulate, [0]

    def noted_accumulate(self, step):
        steps.append(step)
        return accumulate(self, step)

    def noted_pick(samples, source):
        # before it counts: of what a killed rank has given to the others, nothing is missing here
        record = {"attempt": attempt, "step": steps[-1] + 1, "samples": [int(each) for each in samples]}
        descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(descriptor, (json.dumps(record) + "\n").encode())
        os.close(descriptor)
        return pick(samples, source)

    loop.pick, loop.Synchronous.accumulate = noted_pick, noted_accumulate
