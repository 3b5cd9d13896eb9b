"""What processes do in test_inputs: prepare what a job reads, and be killed at it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from gangline.runs.job import Job
from gangline.worker.data import prepare as inputs_module
from gangline.worker.data import tokens as writer
from gangline.worker.data.prepare import prepare_inputs


def prepare(job: str, root: str, *, death: str = "never") -> str:
    """Whether the training set was made or found. death: where this process kills itself."""
    inputs_module.PROGRESS_INTERVAL_S = 0

    def progress(done_bytes, total_bytes, rows):
        if death == "tokenise" and rows:
            die()

    if death == "index":
        writer.pack = die
    if death == "manifest":
        writer.write_json = die
    inputs = prepare_inputs(Job.load(Path(job)), Path(root), progress=progress)
    return "reused" if inputs.counts["train"]["reused"] else "made"


def die(*_arguments: object) -> None:
    """As in a power cut."""
    os.kill(os.getpid(), signal.SIGKILL)


def growth(job: str, root: str) -> int:
    """By how many bytes of memory this process grew at the most while it made the training set."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before_kib = memory_kib("VmRSS")
    assert prepare(job, root) == "made"
    return (memory_kib("VmHWM") - before_kib) * 1024


def memory_kib(name: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
