"""rsync over the connection that is there already: large trees, gone on with where they were broken off."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gangline.errors import GanglineError
from gangline.remote.connection import ssh_environment
from gangline.remote.once import once
from gangline.remote.ssh_options import SAFE_PATH, printable
from gangline.remote.transport import Progress

OPTIONS = (
    "--recursive",
    "--times",  # what is whole already is seen by size and time when a copy is gone on with
    "--copy-links",
    "--safe-links",
    "--perms",
    "--chmod=u+rw,go=,u-s,g-s,o-t,Du+x",
    "--delete",
    "--partial",
    "-s",  # paths go through the protocol, no shell there reads them
    "--timeout=300",
    "--no-human-readable",
    "--info=progress2",
)
PLACE = "gangline"
"""Stands for the host in rsync's words: the way there is the control socket."""
VERSION = re.compile(r"rsync\s+version v?(\d+)\.(\d+)")
LOWEST = (3, 1)
PROGRESS = re.compile(rb"^\s*([\d.,]+)\s+\d+%")
STDERR_BYTES = 1 << 14


def is_new_enough(said: str) -> bool:
    """Whether `rsync --version` names one that has what we need; openrsync has not."""
    found = VERSION.search(said)
    return found is not None and (int(found.group(1)), int(found.group(2))) >= LOWEST


@once
def is_here() -> bool:
    """Whether this computer has an rsync that is new enough."""
    try:
        said = subprocess.run(["rsync", "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    except OSError:
        return False
    return is_new_enough(said.stdout.decode("utf-8", "replace"))


def argv(source: str, target: str, control_path: Path) -> list[str]:
    """The command that copies; one of the two is a `far` place. Pure."""
    return ["rsync", *OPTIONS, "-e", shell_words(control_path), "--", source, target]


def far(path: str) -> str:
    """A path on the host, as rsync takes it."""
    return f"{PLACE}:{path}"


def shell_words(control_path: Path) -> str:
    """The ssh that rsync starts. rsync splits it at blanks: everything in it is ours and has none.

    Without the master it must not connect by itself, to whatever is called like PLACE: hence the proxy that fails.
    """
    if not SAFE_PATH.fullmatch(str(control_path)):
        raise ValueError(f"{control_path} would have to be quoted")
    return f"ssh -F none -o ControlMaster=no -o ControlPath={control_path} -o ProxyCommand=false -o BatchMode=yes"


def copy(command: Sequence[str], total_bytes: int, host: str, on_progress: Progress | None) -> None:
    """Run rsync to its end; raises GanglineError with its last words."""
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env=ssh_environment(),
            start_new_session=True,
        )
        try:
            _follow(process, total_bytes, on_progress)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # it may have left its ssh
            process.wait()
        if process.returncode:
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - STDERR_BYTES))
            raise _failed(host, process.returncode, stderr.read().decode("utf-8", "replace"))


def _follow(process: subprocess.Popen[bytes], total_bytes: int, on_progress: Progress | None) -> None:
    assert process.stdout is not None
    with process.stdout as stream:
        while words := os.read(stream.fileno(), 1 << 12):
            found = PROGRESS.search(words.replace(b"\r", b"\n").rstrip().rpartition(b"\n")[2])
            if on_progress and found:
                done = int(re.sub(rb"\D", b"", found.group(1)))
                on_progress(min(done, total_bytes), total_bytes)
    process.wait()
    if on_progress and process.returncode == 0:
        on_progress(total_bytes, total_bytes)


def _failed(host: str, code: int, stderr: str) -> GanglineError:
    lines = [printable(line) for line in stderr.splitlines() if line.strip()]
    return GanglineError(
        f"{host}: rsync ended with code {code}",
        seen=" / ".join(lines[-4:])[:600],
        fix="what was copied is kept: start again, and it goes on there",
    )
