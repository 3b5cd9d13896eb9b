"""A start in a lab of start_failures.py: what it prints and when, and a fault at the right moment."""

from __future__ import annotations

import subprocess
import threading
import time
from contextlib import suppress

from benchmarks.start_cases import GO, PROJECT, PYTHON, READY, Case, Moment, Stage
from tests.lab.machine import LabHost
from tests.lab.namespaces import end

MOMENT_S = 180.0
"""Until the moment of the fault has come: checks, and imports on a busy machine."""
RUNS = ".local/state/gangline/runs"
JOINING = """\
import pathlib, struct, sys, time
folder = pathlib.Path.home() / "gangline" / "runs"
while not any(len(data := path.read_bytes()) == 32 and struct.unpack("<qqqd", data)[1] >= 1
              for path in folder.glob("*/attempts/1/rank-*.phase")):
    time.sleep(0.05)
"""
"""Ends once a rank of our trainer begins to join."""


class GaveUp(Exception):
    """What was waited for did not come."""


class Console:
    """A command on the user's computer, and what it prints, with the time of every line."""

    def __init__(self, desk: LabHost, argv: list[str]) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
        self.process = desk.popen(argv, cwd=desk.home / PROJECT, **pipes)
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with suppress(ValueError):
            for text in self.process.stdout:
                self.lines.append((time.time(), text.rstrip("\n")))

    @property
    def has_ended(self) -> bool:
        """Whether the command is over and all was read."""
        return self.process.poll() is not None and not self._reader.is_alive()

    def sentences(self) -> list[tuple[float, str, str]]:
        """When, who says it, and what: lines of the board, and the error at the end as one."""
        texts = [text for _, text in self.lines]
        first = next((index for index, text in enumerate(texts) if text.startswith("error: ")), len(texts))
        said = [(when, "board", text) for when, text in self.lines[:first]]
        if first < len(texts):
            said.append((self.lines[-1][0], "error", "\n".join(texts[first:])))
        return said

    def text(self) -> str:
        """All of it."""
        return "\n".join(text for _, text in self.lines)


def plant_late(stage: Stage, case: Case, console: Console) -> float:
    """Wait for the moment, make it go wrong, let the ranks join; from when on the seconds count."""
    if case.moment != "ready":
        let_join(stage)
    until = Until(console)
    for host, pattern in signs_of(case.moment, stage):
        until.exists(host, pattern)
    begun = time.time()
    if case.after:
        case.after(stage)
    if case.moment == "ready":
        let_join(stage)
    elif case.program == "train":
        with suppress(GaveUp):  # it fails before
            until.ends(stage["h0"].popen([PYTHON, "-I", "-c", JOINING]))
            begun = time.time()
    return begun


def let_join(stage: Stage) -> None:
    """Ranks that have imported torch need not wait any more."""
    for host in stage.hosts:
        host.write(GO, "")


def signs_of(moment: Moment, stage: Stage) -> list[tuple[LabHost, str]]:
    """Which files say, and where, that the moment has come."""
    h0, attempt = stage["h0"], "gangline/runs/*/attempts/1"
    return {
        "checked": [(stage.desk, f"{RUNS}/*/findings.json")],
        "handed over": [(h0, f"{attempt}/request.json")],
        "standing": [(host, f"{attempt}/{host.name}/agent.json") for host in stage.hosts],
        "started": [(h0, "gangline/runs/*/events.jsonl")],
        "ready": [(host, READY) for host in stage.hosts],
    }[moment]


class Until:
    """Waits on hosts, as long as the command runs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def exists(self, host: LabHost, pattern: str) -> None:
        """Until a file is there."""
        script = f'until set -- {pattern}; [ -e "$1" ]; do sleep 0.03; done'
        self.ends(host.popen(["sh", "-c", script]))

    def ends(self, process: subprocess.Popen[bytes]) -> None:
        """Until a command there has ended; raises GaveUp."""
        deadline = time.monotonic() + MOMENT_S
        while process.poll() is None:
            if self._console.has_ended or time.monotonic() > deadline:
                end(process)
                raise GaveUp("the command ended before" if self._console.has_ended else "the moment did not come")
            time.sleep(0.02)
