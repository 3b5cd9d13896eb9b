"""Pull any plug: faults at random moments of a run, and whether it goes on by itself (issue: nothing lost).

    python -m benchmarks.faults --out faults.jsonl --cases 200                 # as root, for the lab
    python -m benchmarks.faults --out faults.jsonl --cases 200 --minutes 60    # go on another time

Three lab hosts with real sshd, real torchrun and gloo, gangline's own trainer with a small model on the processor. What
is done:

    rank, process, guard, launcher    kill -9 of a rank; of the process it was forked from; of a guard; of torchrun
    crash, power                      a host is gone, with a reset to its peers, or without a word; it stays away
    partition                         a host is cut off for a minute, then back
    one-way                           nothing of its peers reaches a host, for a minute; it can still be asked
    flap                              the cable of a host is out for five seconds
    stopped                           SIGSTOP of a rank
    memory                            a host's processes may use less memory than they do: the kernel kills
    disk                              the disk of a host is full while the next two checkpoints are saved
    supervisor                        kill -9 of the supervisor, where it lives on the head
    ssh                               all ssh connections to a host are cut

One run goes through several faults, until a host is lost for good. Per fault: whether the run does another step by
itself, after how many seconds, how many steps were done again, which cause was named, and what of it is wrong. One JSON
line per fault; a file that has lines already is continued. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults_world import MOMENT_S, NotBack, World
from benchmarks.scaling import commit
from tests.lab.namespaces import LabFailed
from tests.lab.user import make_model

CUT_S = 60.0
EVERY = 20
"""Steps between two checkpoints (faults_world.JOB)."""
KEPT_BY_HEAD = {"supervisor"}
FATAL = {"crash", "power"}
"""The host does not come back; the next fault needs new ones."""
HARMLESS = {"flap", "supervisor", "ssh", "disk"}
"""The ranks go on, and nobody needs another attempt; one that comes all the same is no mistake."""
KINDS = (
    *("rank", "stopped", "launcher", "partition", "process", "disk", "guard", "flap", "one-way", "ssh", "rank"),
    *("memory", "crash", "rank", "supervisor", "supervisor", "guard", "launcher", "process", "power"),
)
"""In this order again and again; the world changes where it has to."""
Line = dict[str, Any]


class Fault:
    """One thing that is done to a run."""

    def __init__(self, world: World, kind: str) -> None:
        self.world = world
        self.kind = kind
        self.victim = world.chance.choice(world.living[1:] if kind in FATAL and world.keep == "head" else world.living)

    def play(self) -> Line:
        """Do it, and see what becomes of the run."""
        world = self.world
        before = world.seen()
        world.until(lambda seen: seen.step > before.step + 3, "it trains")
        num_events = len(world.events())
        time.sleep(world.chance.uniform(0.0, MOMENT_S))
        before = world.seen()
        begun = time.monotonic()
        getattr(self, f"_do_{self.kind.replace('-', '_')}")()
        wrong = []
        healing = threading.Timer(CUT_S, self._heal)
        healing.start()
        try:
            after = world.until(lambda seen: self._is_back(seen, before), "it goes on")
            back_s = time.monotonic() - begun
        except NotBack as error:
            return {"back_s": None, "wrong": [str(error)], "victim": self.victim.name}
        finally:
            healing.cancel()
            healing.join()
            self._heal()
        events = world.events()[num_events:]
        restarts = [event for event in events if event["event"] == "restarting"]
        lost = max((event["lost_steps"] or 0 for event in restarts), default=0)
        if lost > EVERY + 1:
            wrong.append(f"{lost} steps were lost")
        if restarts and self.victim.name not in restarts[0]["what"] and self.kind not in HARMLESS:
            wrong.append(f"{self.victim.name} is not named: {restarts[0]['what']}")
        return {
            "victim": self.victim.name,
            "back_s": round(back_s, 1),
            "attempts": after.attempt - before.attempt,
            "lost_steps": lost,
            "what": [event["what"] for event in restarts],
            "returned": [event.get("stages") for event in events if event["event"] == "returned"],
            "wrong": wrong,
        }

    def _is_back(self, seen: Any, before: Any) -> bool:
        """Beyond where it stood; where another attempt is needed, in that."""
        return seen.step > before.step + 2 and (self.kind in HARMLESS or seen.attempt > before.attempt)

    def _heal(self) -> None:
        """After a minute, or once the run goes on without the host."""
        if self.kind in FATAL:
            return
        self.victim.faults.heal()
        if self.kind == "disk":
            self.victim.run(["rm", "-f", "/var/tmp/full"], as_root=True)

    def _kill(self, pid: int, number: int = 9) -> None:
        self.victim.check(["kill", f"-{number}", str(pid)], as_root=True)

    def _do_rank(self) -> None:
        self._kill(self.world.rank_pid(self.victim))

    def _do_process(self) -> None:
        pid = self.world.rank_pid(self.victim)
        self._kill(int(self.victim.check(["ps", "-o", "ppid=", "-p", str(pid)])))

    def _do_guard(self) -> None:
        self._kill(self.world.guard(self.victim)["pid"])

    def _do_launcher(self) -> None:
        self._kill(self.world.guard(self.victim)["torchrun_pid"])

    def _do_stopped(self) -> None:
        self._kill(self.world.rank_pid(self.victim), 19)

    def _do_crash(self) -> None:
        self.victim.kill()

    def _do_power(self) -> None:
        self.victim.power_off()

    def _do_partition(self) -> None:
        self.victim.faults.unplug()

    def _do_one_way(self) -> None:
        for host in self.world.living:
            if host is not self.victim:
                self.victim.faults.drop(peer=host.address)

    def _do_flap(self) -> None:
        self.victim.faults.unplug()
        time.sleep(5)
        self.victim.faults.heal()

    def _do_ssh(self) -> None:
        self.victim.run(["pkill", "-9", "-f", "sshd: .*[@]notty"], as_root=True)

    def _do_memory(self) -> None:
        self.victim.limit(memory_mb=150)
        time.sleep(2)
        self.victim.limit(memory_mb=8000)

    def _do_disk(self) -> None:
        self.victim.fill_disk()

    def _do_supervisor(self) -> None:
        self.world.keeper.check(["kill", "-9", str(self.world.state()["supervisor"]["pid"])])


def world_of(kind: str) -> str:
    """Who looks after the run for such a fault: any host can be lost if it is the user's computer."""
    return "head" if kind in KEPT_BY_HEAD else "desk"


def measure(numbers: Sequence[int], out: Path, *, seed: int, model: Path, deadline: float) -> None:
    """Faults by number, in as few worlds as can be."""
    queue = list(numbers)
    while queue and time.monotonic() < deadline:
        keep = world_of(KINDS[queue[0] % len(KINDS)])
        with World(model, keep=keep, seed=f"{seed} {queue[0]}") as world:
            begun = time.monotonic()
            while queue and time.monotonic() < min(deadline, begun + 2400):
                kind = KINDS[queue[0] % len(KINDS)]
                if world_of(kind) != keep or len(world.living) < 3:
                    break
                line = _play(world, kind)
                number = queue.pop(0)
                with out.open("a", encoding="utf-8") as stream:
                    stream.write(
                        json.dumps({"number": number, "seed": seed, "kind": kind, "commit": commit(), **line}) + "\n"
                    )
                print(
                    number, kind, line.get("victim"), line.get("back_s"), line["wrong"] or line.get("what"), flush=True
                )
                if line["wrong"]:
                    break  # the next one shall not suffer from it


def _play(world: World, kind: str) -> Line:
    try:
        return Fault(world, kind).play()
    except (AssertionError, LabFailed, OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
        return {"back_s": None, "wrong": [f"{type(error).__name__}: {error}"]}


def report(lines: Sequence[Line]) -> int:
    """A table; 1 if anything is wrong."""
    print(
        "\n| fault | times | back by itself | seconds to the next step, median (worst) | steps done again, worst |\n|"
        + "---|" * 5
    )
    for kind in sorted({line["kind"] for line in lines}):
        mine = [line for line in lines if line["kind"] == kind]
        back = [line["back_s"] for line in mine if line["back_s"] is not None]
        times = f"{statistics.median(back):.1f} ({max(back):.1f})" if back else "-"
        good = sum(not line["wrong"] for line in mine)
        print(f"| {kind} | {len(mine)} | {good} | {times} | {max(line.get('lost_steps', 0) for line in mine)} |")
    bad = [line for line in lines if line["wrong"]]
    for line in bad:
        print(json.dumps(line))
    print(f"\n{len(lines)} faults, {len(bad)} with something wrong")
    return 1 if bad else 0


def main() -> int:
    """Play what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=sorted(set(KINDS)))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    arguments = parser.parse_args()
    lines = read(arguments.out)
    done = {(line["number"], line["seed"]) for line in lines}
    wanted = [number for number in range(arguments.cases) if (number, arguments.seed) not in done]
    if arguments.only:
        wanted = [number for number in wanted if KINDS[number % len(KINDS)] in arguments.only]
    deadline = time.monotonic() + arguments.minutes * 60
    with tempfile.TemporaryDirectory() as folder:
        measure(wanted, arguments.out, seed=arguments.seed, model=make_model(Path(folder) / "model"), deadline=deadline)
    return report(read(arguments.out))


def read(path: Path) -> list[Line]:
    """The lines of a file, none where there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
