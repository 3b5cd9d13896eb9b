"""All hosts of a run lose power at once, and come back with their disks: `gangline resume` goes on (promises 2 and 3).

    python -m benchmarks.all_lost --out all_lost.jsonl                        # 50 times; as root, for the lab
    python -m benchmarks.all_lost --out all_lost.jsonl --minutes 20           # go on another time

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a small model on the processor, a
checkpoint every 20 steps, written in the background (that is once in a second: at many instants a save is under way).
At a random instant the first processes of all hosts get SIGKILL, and with them everything on them ends. Then the hosts
are booted anew: other processes, an empty /tmp and /run, the same host key, address and home folder. One thing is not
as after a loss of power: a lab host's disk is memory, so what was written and not flushed is still there.

    head        the supervisor lives on one of these hosts, and is gone with it; `gangline resume`
    desk        it lives on the user's computer, and is killed with them; `gangline resume`
    stays       the same, and it is not killed: the run has to go on by itself once the hosts answer

Per case: the last step that had been done, as the kept disks say; the newest step of which they have a whole part (a
survey of our own, before anything is resumed); whether the run goes on from exactly that one; whether the steps that
are done again have the losses of before; and how many these are: at most one interval, and, where the newest save was
not done, the steps of the few seconds since it was due. One JSON line per case; a file that has lines already
is continued. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.faults_world import MOMENT_S, NotBack
from benchmarks.lab_runs import OwnWorld
from benchmarks.plan_time import read
from benchmarks.scaling import commit
from gangline.runs import checkpoints as disk
from tests.lab.hosts import LabHost
from tests.lab.namespaces import LabFailed
from tests.lab.network import port
from tests.lab.user import make_model

KINDS = ("head", "desk", "head", "stays", "desk")
"""In this order again and again."""
EVERY = 20
"""Steps between two checkpoints (faults_world.JOB)."""
KEYS = ("ssh_host_ed25519_key", "ssh_host_ed25519_key.pub")
SAVE_S = 3.0
"""A save of this small model takes less, also where three hosts share two processors."""
SAME = 1e-4
"""Losses of steps done again, in fp32: shares may have moved, and then sums are rounded otherwise."""
Line = dict[str, Any]


class Kept:
    """The disk of a host that has lost power: it lives as long as it is held."""

    def __init__(self, host: LabHost) -> None:
        self.descriptor = os.open(inside(host, host.home), os.O_RDONLY | os.O_DIRECTORY)
        self._keys = os.open(inside(host, Path("/etc/ssh")), os.O_RDONLY | os.O_DIRECTORY)

    @property
    def home(self) -> Path:
        """The home folder on it."""
        return Path(f"/proc/self/fd/{self.descriptor}")

    def keys(self) -> dict[str, bytes]:
        """The host key."""
        return {name: Path(f"/proc/self/fd/{self._keys}", name).read_bytes() for name in KEYS}

    def close(self) -> None:
        """Let go of it."""
        os.close(self.descriptor)
        os.close(self._keys)


def inside(host: LabHost, path: Path) -> Path:
    """A path of a host, as this process reaches it."""
    return Path("/proc", str(host.pid), "root", path.relative_to("/"))


class MemoryFit(OwnWorld):
    """A run on three hosts whose power can fail."""

    def power_fails(self) -> dict[str, Kept]:
        """All hosts are gone at once; their disks."""
        kept = {host.name: Kept(host) for host in self.lab.hosts}
        for host in self.lab.hosts:
            host.space.kill()
        for host in self.lab.hosts:
            host.close()
        return kept

    def power_comes_back(self, kept: dict[str, Kept]) -> None:
        """All hosts boot, with what was on their disks."""
        self.lab.hosts[:] = [self._boot(host) for host in self.lab.hosts]
        for host in self.lab.hosts:
            found = kept[host.name]
            own = [str(path) for path in found.home.iterdir() if not self._is_shown(host, host.home / path.name)]
            argv = ["cp", "-a", *own, str(inside(host, host.home))]
            subprocess.run(argv, check=True, pass_fds=[found.descriptor])
            for name, data in found.keys().items():
                host.write(f"/etc/ssh/{name}", data, 0o600)
            host.check(["pkill", "-HUP", "-f", "sshd: /usr/sbin/ss[h]d .listener."], as_root=True)
            found.close()
        for machine in (self.lab.user, *self.lab.hosts):  # a machine that boots has the card of before
            machine.check(["ip", "neigh", "flush", "dev", "eth0"], as_root=True)

    def _is_shown(self, host: LabHost, path: Path) -> bool:
        """Whether a folder of this computer is shown there, or below."""
        return any(path in {bind, *bind.parents} for bind in map(Path, self.lab._kinds[host.name].binds))

    def _boot(self, host: LabHost) -> LabHost:
        """A new machine in the place of one that is off; what is in its home folder is brought afterwards."""
        lab = self.lab
        with suppress(LabFailed):  # the kernel takes cables away by and by
            lab._network.run(["ip", "link", "del", port(host.number, 0)])
        settings = lab._site.host(lab.hosts.index(host), lab._kinds[host.name], accepts=[])
        (booted,) = lab._boot([(host.number, settings)])
        return booted


def survey(kept: dict[str, Kept], folder: str) -> dict[str, list[dict[str, Any]]]:
    """What the disks have of checkpoints; every file is hashed."""
    return {name: disk.survey(each.home / folder / "checkpoints") for name, each in kept.items()}


def done_steps(kept: dict[str, Kept], folder: str) -> dict[int, Line]:
    """Step -> what metrics.jsonl says of it, of the last attempt that did it, as the disks say."""
    found: dict[int, Line] = {}
    for each in kept.values():
        with suppress(FileNotFoundError):
            for line in (each.home / folder / "metrics.jsonl").read_text(errors="replace").splitlines():
                with suppress(ValueError):
                    record = json.loads(line)
                    if record["kind"] == "step" and record["attempt"] >= found.get(record["step"], record)["attempt"]:
                        found[record["step"]] = record
    return found


class Loss:
    """One loss of power, and what becomes of the run."""

    def __init__(self, world: MemoryFit, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.wrong: list[str] = []

    def play(self) -> Line:
        """Let it fail, look at the disks, let it come back, go on."""
        world = self.world
        start = world.seen().step
        world.until(lambda seen: seen.step > start + EVERY, "it trains")
        time.sleep(world.chance.uniform(0.0, MOMENT_S))
        attempt, supervisor = world.state()["attempt"], world.state()["supervisor"]["pid"]
        if self.kind == "desk":
            world.lab.user.check(["kill", "-9", str(supervisor)])
        kept = world.power_fails()
        line, before = self._on_disk(kept)
        off_s = world.chance.uniform(0.0, 3.0) if self.kind == "stays" else 0.0
        time.sleep(off_s)
        world.power_comes_back(kept)
        begun = time.monotonic()
        line["by"] = self._go_on(attempt)
        world.until(lambda seen: seen.attempt > attempt, "another attempt begins")
        from_step = self._from()
        world.until(lambda seen: seen.step > max(line["last"], from_step) + 3, "it goes beyond where it stood")
        line["back_s"] = round(time.monotonic() - begun, 1)
        if from_step != line["whole"]:
            self.wrong.append(f"it went on from {from_step}, and step {line['whole']} was whole")
        self._compare(before, from_step)
        self._require_one_gang()
        return {"off_s": round(off_s, 1), **line, "from": from_step, "wrong": self.wrong}

    def _on_disk(self, kept: dict[str, Kept]) -> tuple[Line, dict[int, Line]]:
        folder = self.world.folder(self.world.lab.hosts[0])
        choice, before = disk.choose(survey(kept, folder)), done_steps(kept, folder)
        whole = max(choice.adoptable, default=choice.step or 0)
        last = max(before)
        due = max(whole, last // EVERY * EVERY)  # the newest save that had been begun, or was about to
        saving_s = sum(before[step]["step_s"] for step in range(due + 1, last + 1)) if due > whole else 0.0
        if due - whole > EVERY or saving_s > SAVE_S:
            self.wrong.append(f"{last - whole} steps are lost: {last} were done, {whole} was whole, {due} was due")
        words = {"last": last, "whole": whole, "committed": choice.step, "due": due}
        return {**words, "lost": last - whole, "saving_s": round(saving_s, 2)}, before

    def _go_on(self, attempt: int) -> str:
        world = self.world
        if self.kind == "stays":
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                state = world.state()
                if state["attempt"] > attempt:
                    return "by itself"
                if state["phase"] in {"failed", "stopped"}:
                    break
                time.sleep(0.2)
            self.wrong.append(f"it does not go on by itself: {world.state()['phase']}: {world.state()['error']}")
        done = world.user.types("resume", world.run_id, "--detach", code=None)
        if done.returncode:
            raise NotBack(f"resume ended with {done.returncode}: {done.stderr[-1500:]}")
        return "resume"

    def _from(self) -> int:
        """The step that the attempt that runs went on from."""
        world = self.world
        gang = world.record(world.keeper, f"attempts/{world.state()['attempt']}/gang.json")
        return int(gang["resume_step"] or 0)

    def _compare(self, before: dict[int, Line], from_step: int) -> None:
        """Steps that are done again have to come to what they came to before."""
        attempt = self.world.state()["attempt"]
        again = {record["step"]: record["loss"] for record in self.world.steps() if record["attempt"] == attempt}
        if missing := set(range(from_step + 1, max(before) + 1)) - set(again):
            self.wrong.append(f"steps {sorted(missing)} were not done again")
        for step in sorted(set(before) & set(again)):
            if abs(again[step] / before[step]["loss"] - 1) > SAME:
                self.wrong.append(f"step {step} had loss {before[step]['loss']} and has {again[step]}")
                break

    def _require_one_gang(self) -> None:
        world = self.world
        if len(found := world.supervisors()) != 1:
            self.wrong.append(f"supervisors: {found}")
        gang = world.gang()
        for name, pid in gang.ranks.items():
            if pid not in gang.processes[name]:
                self.wrong.append(f"the rank on {name}, {pid}, does not run")


def measure(numbers: Sequence[int], arguments: argparse.Namespace, *, model: Path, deadline: float) -> None:
    """Cases by number, those on the head first, as many as can be in one world."""
    queue = sorted(numbers, key=lambda number: (kind_of(number) != "head", number))
    while queue and time.monotonic() < deadline:
        keep = keep_of(queue[0])
        with MemoryFit(model, keep=keep, seed=f"{arguments.seed} {queue[0]}") as world:
            begun = time.monotonic()
            while queue and keep_of(queue[0]) == keep and time.monotonic() < min(deadline, begun + 2700):
                number = queue.pop(0)
                line = {"number": number, "seed": arguments.seed, "kind": kind_of(number), "commit": commit()}
                line |= _play(world, kind_of(number))
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                shown = {name: line.get(name) for name in ("last", "whole", "lost", "by", "back_s")}
                print(number, line["kind"], shown, line["wrong"], flush=True)
                if line["wrong"]:
                    _keep_evidence(world, arguments.out.with_suffix("") / str(number))
                    break  # the next one shall not suffer from it


def _play(world: MemoryFit, kind: str) -> Line:
    try:
        return Loss(world, kind).play()
    except (NotBack, AssertionError, LabFailed, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return {"wrong": [f"{type(error).__name__}: {error}"]}


def _keep_evidence(world: MemoryFit, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError, LabFailed, subprocess.SubprocessError):
        world.save_evidence(folder)


def kind_of(number: int) -> str:
    """What is done in a case."""
    return KINDS[number % len(KINDS)]


def keep_of(number: int) -> str:
    """Where its supervisor lives."""
    return "head" if kind_of(number) == "head" else "desk"


def report(lines: Sequence[Line]) -> int:
    """A table; 1 if anything is wrong."""
    print(
        "\n| supervisor | times | goes on | from the newest whole step | steps done again, median (worst) "
        "| newest save not done | seconds until beyond, median (worst) |\n|" + "---|" * 7
    )
    for kind in dict.fromkeys(KINDS):
        mine = [line for line in lines if line["kind"] == kind]
        back = [line["back_s"] for line in mine if "back_s" in line] or [0.0]
        lost = [line["lost"] for line in mine if "lost" in line] or [0]
        exact = sum(line.get("from") is not None and line["from"] == line["whole"] for line in mine)
        saving = sum(line.get("due", 0) > line.get("whole", 0) for line in mine)
        words = [kind, len(mine), sum("back_s" in line for line in mine), exact]
        words += [f"{statistics.median(lost):g} ({max(lost)})", saving]
        words += [f"{statistics.median(back):.1f} ({max(back):.1f})"]
        print(f"| {' | '.join(map(str, words))} |")
    bad = [line for line in lines if line["wrong"]]
    for line in bad:
        print(json.dumps(line))
    print(f"\n{len(lines)} times all hosts lost, {len(bad)} with something wrong")
    return 1 if bad else 0


def main() -> int:
    """Do what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--only", nargs="*", choices=sorted(set(KINDS)), default=sorted(set(KINDS)))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    done = {(line["number"], line["seed"]) for line in read(arguments.out)}
    mine = [number for number in range(arguments.cases) if kind_of(number) in arguments.only]
    wanted = [number for number in mine if (number, arguments.seed) not in done]
    deadline = time.monotonic() + arguments.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        measure(wanted, arguments, model=make_model(Path(folder) / "model"), deadline=deadline)
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
