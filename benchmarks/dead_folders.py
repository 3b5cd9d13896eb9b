"""A full disk, a full /dev/shm and a file server that is dead: after how many seconds does a run name them?

    python -m benchmarks.dead_folders --out folders.jsonl            # as root, for mounts of its own; needs sshfs

Each case is a `gangline run` of a script on two hosts that are this computer. Once both ranks print, the folder is
filled, or its file server (sshfs, whose sshd is stopped by a signal) answers no more. The seconds are from then to the
line that names it; then the cause is taken away, which has to be told, too. All mounts are in a namespace of their own.
One JSON line per case; cases that the file has already are passed over. Exit status 1 if one took more than 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.busy_starts import Console
from tests.lab.hosts import ROOT
from tests.process.transport.sshd import Sshd
from tests.train.story import make_user

BAR_S = 10.0
WAIT_S = 60.0
SCRIPT = """\
import sys, time
import torch.distributed as dist
dist.init_process_group("gloo")
for step in range(600):
    print("step", step, flush=True)
    time.sleep(0.5)
"""
CASES = {
    "disk": "the disk at {folder} is full",
    "shm": "/dev/shm is full",
    "server": "the file server of {folder} (nobody:{served}) does not answer",
}


def main() -> int:
    """Try every case that the file does not have."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    out: Path = parser.parse_args().out
    if os.environ.get("OWN_MOUNTS") is None:
        words = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "benchmarks.dead_folders"]
        return subprocess.run([*words, "--out", out], env={**os.environ, "OWN_MOUNTS": "1"}, check=False).returncode
    done = {json.loads(line)["case"] for line in out.read_text().splitlines()} if out.exists() else set()
    for case in CASES:
        if case not in done:
            line = {"case": case, **tried(case), "load": os.getloadavg()[0]}
            print(line, flush=True)
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    return 0 if all(line["named_s"] is not None and line["named_s"] <= BAR_S for line in lines) else 1


def tried(case: str) -> dict[str, object]:
    """One case."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        home, folder, served = Path(name), Path(name, "folder"), Path(name, "served")
        folder.mkdir()
        served.mkdir()
        (home / "train.py").write_text(SCRIPT)
        hosts = [{"name": each, "transport": "local"} for each in ("pc1", "pc2")]
        if case == "disk":
            hosts[0]["workdir"] = str(folder / "work")
        (home / "cluster.yaml").write_text(json.dumps({"hosts": hosts}))
        words = CASES[case].format(folder=folder, served=served)
        with FOLDERS[case](folder, served) as (breaks, mends):
            return _watched(home, folder, words, breaks, mends)


def _watched(
    home: Path, folder: Path, words: str, breaks: Callable[[], None], mends: Callable[[], None]
) -> dict[str, object]:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "GANGLINE_HOME": str(home / "home"),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        str(Path(sys.executable).with_name("gangline")),
        "run",
        "--dir",
        str(home),
        "--",
        "train.py",
        str(folder),
    ]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, cwd=home, env=environment, text=True, **pipes)
    console = Console(process)
    try:
        if console.until(lambda line: line.startswith("step 3"), WAIT_S * 3) is None:
            raise RuntimeError(f"the run does not print:\n{console.text()}")
        begun = time.monotonic()
        breaks()
        line = console.until(lambda line: words in line, WAIT_S)
        named_s = round(time.monotonic() - begun, 1) if line else None
        mends()
        over = console.until(lambda line: line.startswith("trouble over"), WAIT_S) if line else None
        return {"named_s": named_s, "line": line, "over": over, "said": console.text()[-3000:] if line is None else ""}
    finally:
        user = make_user(home)
        for row in user.runs():
            user.gangline("stop", "--now", row["id"], code=None)
        process.wait(60)


Fault = tuple[Callable[[], None], Callable[[], None]]
"""What breaks the folder, and what mends it."""


@contextmanager
def filled(folder: Path, size: str) -> Iterator[Fault]:
    """A file system in memory of that size, which can be filled."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=True)
    large = folder / "large"

    def fill() -> None:
        with suppress(OSError), large.open("wb", buffering=0) as stream:
            while stream.write(bytes(1 << 16)):
                pass

    try:
        yield fill, large.unlink
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextmanager
def from_server(folder: Path, served: Path) -> Iterator[Fault]:
    """A folder that a real sshd serves through sshfs; it can be made to answer no more."""
    keys = served.with_name("keys")
    keys.mkdir()
    sshd = Sshd(keys)
    sshd.answer_with("Subsystem=sftp internal-sftp")
    known = keys / "known_hosts"
    known.write_text(f"nobody {sshd.host_key}\n")
    ssh = f"ssh -F {sshd.config} -o UserKnownHostsFile={known}"
    words = ["sshfs", "-f", "-o", f"ssh_command={ssh}", f"nobody:{served}", str(folder)]
    process = subprocess.Popen(words, start_new_session=True)
    try:
        deadline = time.monotonic() + WAIT_S
        while not os.path.ismount(folder):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError("sshfs does not mount")
            time.sleep(0.1)
        yield lambda: _signal(process.pid, signal.SIGSTOP), lambda: _signal(process.pid, signal.SIGCONT)
    finally:
        with suppress(ProcessLookupError, RuntimeError):
            _signal(process.pid, signal.SIGCONT)
        subprocess.run(["umount", "--lazy", folder], check=False)
        process.terminate()
        process.wait(10)


def _signal(session: int, number: signal.Signals) -> None:
    """Send it to the servers (sshd) that programs of a session have started."""
    words = ["ps", "-e", "-o", "pid=,ppid=,sess=,comm="]
    rows = [
        line.split() for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    below = {row[0] for row in rows if row[2] == str(session)}
    for _ in range(8):
        below |= {row[0] for row in rows if row[1] in below}
    servers = [int(row[0]) for row in rows if row[0] in below and row[3] == "sshd"]
    if not servers:
        raise RuntimeError("no sshd is found")
    for pid in servers:
        os.kill(pid, number)


FOLDERS = {
    "disk": lambda folder, _: filled(folder, "256m"),
    "shm": lambda _folder, _served: filled(Path("/dev/shm"), "32m"),
    "server": from_server,
}

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
