"""Failures on three hosts of a lab, planted one by one: is the first cause that `explain` names the right one?

    python -m benchmarks.own_failures_lab --out lab.jsonl                   # as root, for the lab; about 70 minutes
    python -m benchmarks.own_failures_lab --out lab.jsonl --minutes 20      # go on another time
    python -m benchmarks.own_failures_lab --out lab.jsonl --only power trainer_stopped

Three hosts with real sshd, a rank on each, real torchrun and gloo on the processor of one computer. The cases of
own_failures.py (a script of the user's own that fails by itself; `+`: rank 1 fails in place of rank 2), then cases in
which something happens to a host from outside, while that script trains or before it starts, and the same with
gangline's own trainer (`trainer_`). The victim is h2 with rank 2, of every third case from outside h1 or h0. A case is
right if the first cause names that host (and rank, where one failed) and has the words that tell the failure. Blamed is
a rank or host that only waited. One JSON line per case. Exit code 1 if less than 95 of 100 are right, or one is blamed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lab_runs import OwnLab
from benchmarks.own_failures import CASES, ROOT_CAUSE, SCRIPT, STALL_AFTER_S, Expected, Line, judge, line_of, report
from benchmarks.plan_time import read
from tests.lab.hosts import lab_folders
from tests.lab.machine import LabHost
from tests.lab.user import JOB, LOOK, NewUser, make_model

NAMES = ("h0", "h1", "h2")
"""Host of each rank, in this order."""
START_S, END_S = 300.0, 300.0
STEP = re.compile(r"\bstep (\d+)")
TRAINER = "trainer_"
Happens = Callable[["LabWorld", LabHost], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Something that happens to a host. words, is_of_host: as `Expected`; a host, and no rank, is to be named."""

    does: Happens
    words: str
    kind: str = "goes_on"
    """What the script does."""
    is_before: bool = False
    """It happens before the start."""
    victim: int = 2
    is_of_host: bool = False


def _signals(number: str) -> Happens:
    return lambda world, host: host.check(["kill", f"-{number}", str(world.rank_pid(host))])


def _kills(words: str) -> Happens:
    return lambda world, host: host.check(["kill", "-9", *world.pids(host, words)])


def _cut_off(world: LabWorld, host: LabHost) -> None:
    for other in world.lab.hosts:
        if other is not host:
            host.faults.cut(other.address)


def _allows_ssh_only(_: LabWorld, host: LabHost) -> None:
    host.faults.drop(port="1024-65535")


def _brings_rows(world: LabWorld, host: LabHost) -> None:
    for other in world.lab.hosts:
        if other is not host:
            other.write("/data/tokens.bin", b"rows")


SILENT = r"{host} does not answer|{host} (and .* )?(do|does) not reach|not reach {host}|rank \d on {host} .*reach"
OUTSIDE: dict[str, Outside] = {
    "rank_killed": Outside(does=_signals("KILL"), words="SIGKILL"),
    "rank_killed_head": Outside(does=_signals("KILL"), words="SIGKILL", victim=0),
    "rank_stopped": Outside(does=_signals("STOP"), words="stopped", victim=1),
    "rank_terminated": Outside(does=_signals("TERM"), words="SIGTERM"),
    "rank_crashed": Outside(does=_signals("SEGV"), words="SIGSEGV", victim=0),
    "memory": Outside(does=lambda _, host: host.limit(memory_mb=150), words="memory", victim=1),
    "launcher_killed": Outside(
        does=_kills("torch.distributed.run"), words="torchrun on {host} was killed", is_of_host=True
    ),
    "agent_killed": Outside(does=_kills("gangline.agent"), words="agent on {host} died", is_of_host=True, victim=1),
    "power": Outside(does=lambda _, host: host.power_off(), words=SILENT, is_of_host=True),
    "crash": Outside(does=lambda _, host: host.kill(), words=SILENT, is_of_host=True, victim=1),
    "unplugged": Outside(does=lambda _, host: host.faults.unplug(), words=SILENT, is_of_host=True),
    "cut_from_peers": Outside(does=_cut_off, words="{host}", is_of_host=True),
    "disk_full": Outside(
        does=lambda _, host: host.fill_disk(), words="No space left|no room|disk", kind="writes_on", victim=1
    ),
    "shm_full": Outside(does=lambda *_: None, words="No space left|shm", kind="fills_shm"),
    "file_on_others": Outside(does=_brings_rows, words=r"/data/tokens\.bin", kind="no_file", is_before=True, victim=2),
    "firewall": Outside(does=_allows_ssh_only, words="{host}", is_before=True, is_of_host=True),
}
TRAINED: dict[str, Outside] = {
    f"{TRAINER}{name}": outside for name, outside in OUTSIDE.items() if outside.kind == "goes_on"
}
ALL = {**OUTSIDE, **TRAINED}


class LabWorld:
    """A lab with a user who has the script, the tiny model and a cluster of three hosts."""

    def __init__(self, model: Path, *, stall_after_s: int) -> None:
        self.lab = OwnLab(3, meshed=True, ttl_s=3600, binds=lab_folders(), disk="2g", shm="64m")
        self.run = ""
        self._stall_after_s = stall_after_s
        self._model = model

    def __enter__(self) -> LabWorld:
        self.lab.__enter__()
        self.user = NewUser(self.lab.user)
        self.user.brings(self._model, job=JOB.replace("steps: 400", "steps: 100000"))
        self.user.desk.write("project/train.py", SCRIPT.read_bytes())
        self.user.describes(*NAMES)
        return self

    def __exit__(self, *problem: object) -> None:
        self.lab.close()

    def starts(self, case: str, kind: str, rank: int) -> None:
        """Start the script, or the trainer, and come back."""
        options: tuple[str, ...] = (
            "--stall-after",
            f"{self._stall_after_s}s",
            "--on-stall",
            "stop",
            "--dir",
            "project",
        )
        words = ("run", *options, "--detach", "--", "train.py", kind, str(rank))
        if case.startswith(TRAINER):
            words = ("train", "job.yaml", "failures=stop", "--detach")
        done = self._types(*words)
        found = re.findall(r"\b([a-z]+-[a-z]+-\d+)\b", done.stdout + done.stderr)
        if not found:
            raise LookupError((done.stdout + done.stderr)[-2000:])
        self.run = found[-1]

    def trains(self) -> None:
        """Wait until it is at a later step."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            said, row = self._types("logs", self.run, "--rank", "0").stdout, self._row()
            if (row["step"] or 0) > 5 or any(int(number) > 5 for number in STEP.findall(said)):
                return
            time.sleep(1.0)
        raise LookupError(f"it does not train: {self._row()}")

    def ends(self) -> None:
        """Wait until it has ended."""
        deadline = time.monotonic() + END_S + self._stall_after_s
        while self._row()["phase"] not in {"finished", "failed", "stopped"}:
            if time.monotonic() > deadline:
                raise LookupError(f"it does not end: {self._row()}")
            time.sleep(1.0)

    def explained(self) -> Line:
        """What `explain` says of it, for programs."""
        answer: Line = json.loads(self._types("explain", self.run, "--json").stdout)
        return answer

    def _types(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.user.types(*words, code=None, timeout_s=END_S + self._stall_after_s)

    def _row(self) -> Line:
        rows = json.loads(self._types("ps", "--json").stdout)["runs"]
        return next(row for row in rows if row["id"] == self.run)

    def rank_pid(self, host: LabHost) -> int:
        """The process of the rank on a host."""
        name = f"gangline/runs/{self.run}/attempts/1/rank-{NAMES.index(host.name)}.pid"
        return int(json.loads(host.read(name))["pid"])

    def pids(self, host: LabHost, words: str) -> list[str]:
        """Processes of the run on a host whose command has these words."""
        lines = host.check(["/usr/bin/python3", "-c", LOOK]).splitlines()
        found = [line.split()[0] for line in lines if words in line]
        if not found:
            raise LookupError(f"no {words} on {host.name}: {lines}")
        return found

    def torchrun_says(self) -> list[int]:
        """The ranks that torchrun calls the root cause, on any host that answers."""
        found = []
        for host in self.lab.hosts:
            with suppress(OSError):
                said = host.read(f"gangline/runs/{self.run}/attempts/1/{host.name}/console.log")
                found += [int(match[1]) for match in ROOT_CAUSE.finditer(said.decode(errors="replace"))]
        return sorted(found)


def play(world: LabWorld, case: str) -> Line:
    """One failure, and what is said of it."""
    begun = time.monotonic()
    outside = ALL.get(case)
    rank = outside.victim if outside else 1 if case.endswith("+") else 2
    if outside and outside.is_before:
        outside.does(world, world.lab[NAMES[rank]])
    world.starts(case, outside.kind if outside else case.rstrip("+"), rank)
    if outside and not outside.is_before:
        if outside.kind in {"goes_on", "writes_on"}:
            world.trains()
        outside.does(world, world.lab[NAMES[rank]])
    world.ends()
    cause: Mapping[str, Any] = world.explained()["attempts"][-1]["cause"] or {}
    expected = _expected(case, outside)
    line = line_of(case, None if expected.is_of_all else rank, cause, torchrun=world.torchrun_says(), begun=begun)
    line["wrong"] = judge(
        expected, rank, dict(cause), hosts=NAMES, is_of_host=outside is not None and outside.is_of_host
    )
    line["blamed"] = not expected.is_of_all and _is_blamed(cause, rank)
    if line["wrong"]:
        line |= {"run": world.run, "seen": str(cause.get("seen"))[-3000:]}
    return line


def _expected(case: str, outside: Outside | None) -> Expected:
    if outside is None:
        return CASES[case]
    return Expected(words=outside.words.replace("{host}", NAMES[outside.victim]))


def _is_blamed(cause: Mapping[str, Any], rank: int) -> bool:
    return cause.get("rank") not in {None, rank} or cause.get("host") not in {None, NAMES[rank]}


def main() -> int:
    """Play what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted({*CASES, *ALL}))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    parser.add_argument("--stall-after", type=int, default=STALL_AFTER_S, metavar="SECONDS")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    done = {line["case"] for line in read(arguments.out)}
    wanted = [case for case in arguments.only or [*ALL, *CASES] if case not in done]
    with tempfile.TemporaryDirectory() as folder:
        model, world = make_model(Path(folder)), None
        for case in wanted:
            if time.monotonic() > deadline:
                break
            try:
                world = world or LabWorld(model, stall_after_s=arguments.stall_after).__enter__()
                line = play(world, case)
            except (OSError, ValueError, LookupError, AssertionError, subprocess.SubprocessError) as error:
                line = {"case": case, "wrong": [f"{type(error).__name__}: {error}"[:1500]]}
            if world and (case in ALL or line["wrong"]):  # a host is not as it was
                world = world.lab.close()
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(case, line["wrong"], line.get("named"), line.get("what"), line.get("seconds"), flush=True)
        if world:
            world.lab.close()
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
