"""What a user has and does: a folder with files of theirs, a home for gangline, and its commands."""

import contextlib
import functools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

WORDS = "the rope joins every dog of a sled team to the sled and they pull it over snow and ice until night falls"
JOB = {
    "model": "./model",
    "data": {"train": "corpus.jsonl", "eval": 0.1, "sequence_length": 32},
    "batch": 12,
    "micro_batch": 1,
    "steps": 60,
    "optimizer": {"learning_rate": 3e-4},
    "schedule": "constant",
    "checkpoint": {"every_steps": 5, "keep_last": 3},
}
PATIENCE_S = 120.0
"""A gang of three takes ten seconds to come up when nothing else runs on two cores, and much longer else."""
ENDED = {"finished", "stopped", "failed"}


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a command left on the terminal."""

    code: int
    out: str
    err: str

    @property
    def parts(self) -> list[str]:
        """The parts of the error on stderr: what and where; what was seen; what to do."""
        _, _, text = self.err.partition("error: ")
        return text.strip().splitlines()


@dataclass(frozen=True, kw_only=True)
class User:
    """Somebody in a folder, with a home of their own."""

    folder: Path
    home: Path
    uid: int | None = None
    """Another user than the one that runs the tests."""
    env: Mapping[str, str] = field(default_factory=dict)
    python: Path | None = None
    """Of the hosts in the cluster files that they write, with a `gangline` beside it (forked_python.py); None: ours."""

    def gangline(self, *words: str | Path, code: int | None = 0) -> Said:
        """Type a command and wait for its end; `code` is the exit code that it must have (None: any)."""
        process = self.start("gangline", *words)
        out, err = process.communicate(timeout=PATIENCE_S)
        if code is not None and process.returncode != code:
            raise AssertionError(f"gangline {words} ended with {process.returncode}, not {code}\n{out}\n{err}")
        return Said(code=process.returncode, out=out, err=err)

    def start(self, program: str, *words: str | Path) -> subprocess.Popen[str]:
        """A command that goes on."""
        environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "GANGLINE_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            **self.env,
        }
        return subprocess.Popen(
            [str((self.python or Path(sys.executable)).with_name(program)), *map(str, words)],
            cwd=self.folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            user=self.uid,
            group=self.uid,
            extra_groups=None if self.uid is None else [],
        )

    def runs(self) -> list[dict]:
        """`gangline ps --json`"""
        return json.loads(self.gangline("ps", "--json").out)["runs"]

    def wait_for_step(self, run: str, step: int) -> None:
        """Until the run has done so many steps."""
        self._wait(run, lambda row: row["step"] >= step)

    def wait_for_end(self, run: str) -> str:
        """Until nothing of the run goes on; the phase it ended in."""
        return self._wait(run, lambda row: row["phase"] in ENDED)["phase"]

    def wait_until(self, is_so: Callable[[], object]) -> None:
        """Until it is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, f"it never came to that: {self.runs()}"
            time.sleep(0.05)

    def _wait(self, run: str, is_so: Callable[[dict], bool]) -> dict:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(row := self._on_disk(run)):
            if row["phase"] in ENDED or time.monotonic() > deadline:
                raise AssertionError(f"it never came to that: {self.runs()}")
            time.sleep(0.02)
        return row

    def _on_disk(self, run: str) -> dict:
        """Step and phase of a run, as its newest files say."""
        steps = self._newest(run, "metrics.jsonl").splitlines(keepends=True)
        whole = [json.loads(line) for line in steps if line.endswith("\n")]
        state = json.loads(self._newest(run, "state.json") or '{"phase": "preparing"}')
        return {
            "step": next((line["step"] for line in reversed(whole) if line["kind"] == "step"), 0),
            "phase": state["phase"],
        }

    def _newest(self, run: str, name: str) -> str:
        """The file of that name that was written last, here or on any host that has no work folder of its own."""
        found = [root / "runs" / run / name for root in (self.home, *(self.home / "hosts").glob("*"))]
        there = [path for path in found if path.exists()]
        return max(there, key=lambda path: path.stat().st_mtime_ns).read_text() if there else ""

    def recorded(self) -> list[str]:
        """The runs that have a record here; without a process, where `ps` takes half a second of a core."""
        return sorted(folder.name for folder in (self.home / "runs").glob("*"))

    def end_runs(self) -> list[str]:
        """End whatever still runs; what that was."""
        left = [run for run in self.recorded() if self._on_disk(run)["phase"] not in ENDED]
        for run in left:
            self.gangline("stop", "--now", run, code=None)
        return left

    def at_host(self, host: str, run: str) -> Path:
        """The run's directory on a host."""
        return self.home / "hosts" / host / "runs" / run

    def metrics(self, host: str, run: str) -> list[dict]:
        """The steps that metrics.jsonl tells of, in its order."""
        lines = (self.at_host(host, run) / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == "step"]

    def processes(self) -> list[str]:
        """Whatever runs in this home now: command lines of processes that name it, or have it in their environment."""
        return [line for pid in _pids() if (line := _told_by(pid, str(self.home).encode()))]

    def wait_until_quiet(self, *, timeout_s: float = 20.0) -> list[str]:
        """What still runs in this home, once nothing does or the time is up."""
        deadline = time.monotonic() + timeout_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def _pids() -> list[int]:
    names = [entry.name for entry in Path("/proc").iterdir()]
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def _told_by(pid: int, word: bytes) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        found = word in command or word in Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
    return f"{pid} {command.replace(bytes(1), b' ').decode()}" if found else ""


def make_user(folder: Path, **more) -> User:
    """A user with a folder and an empty home."""
    folder.mkdir(parents=True, exist_ok=True)
    return User(folder=folder, home=folder / "home", **more)


def write_corpus(folder: Path) -> None:
    """corpus.jsonl: 200 rows of words."""
    shuffled, words = random.Random(1), WORDS.split()
    rows = [{"text": " ".join(shuffled.choice(words) for _ in range(40))} for _ in range(200)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_world(folder: str) -> None:
    """A corpus, and below model/ a tokenizer and a tiny Llama with weights.

    The folder is made by `python -m gangline.worker scratch`, as users make theirs, in a process that has imported
    torch already: `zygote.fork(story.make_world, folder=...)`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gangline.worker.__main__ import main

    corpus, model = Path(folder, "corpus.jsonl"), Path(folder, "model")
    write_corpus(Path(folder))
    size = ("--vocabulary", "400", "--hidden", "32", "--layers", "2", "--heads", "2", "--context", "64")
    assert main(["scratch", str(corpus), "--to", str(model), *size]) == 0
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)


def copy_world(source: Path, user: User) -> None:
    """The corpus and the model of another folder."""
    shutil.copytree(source / "model", user.folder / "model")
    shutil.copy(source / "corpus.jsonl", user.folder)


def write_job(user: User, name: str = "job", **changes) -> str:
    """A job file (JSON is YAML); its name."""
    (user.folder / f"{name}.yaml").write_text(json.dumps(JOB | changes))
    return f"{name}.yaml"


def write_cluster(user: User, name: str, **hosts: Mapping) -> str:
    """A cluster file of hosts that are all this computer; its name.

    A rank computes in one thread: where other tests have the cores, threads of OpenMP that wait for each other make a
    step take a hundred times as long.
    """
    python = {} if user.python is None else {"python": str(user.python)}
    listed = [
        {"name": host, "transport": "local", **python, **words, "env": {"OMP_NUM_THREADS": 1, **words.get("env", {})}}
        for host, words in hosts.items()
    ]
    (user.folder / f"{name}.yaml").write_text(json.dumps({"hosts": listed, "ports": own_ports()}))
    return f"{name}.yaml"


@functools.cache
def own_ports() -> str:
    """Ports that no other process of tests on this machine uses: users of tests do not see each other's claims.

    The last of them is kept busy until this process ends. The first fifty that gangline takes are left to who has no
    cluster file, which only one file of tests may do (test_story.py).
    """
    for low in range(29550, 31000, 50):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", low + 49))
            sock.detach()
            return f"{low}-{low + 49}"
    raise AssertionError("all ports of tests are in use")


def flip_byte(path: Path) -> None:
    """Change one byte in the middle of a file; again: change it back."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
