"""Start a gang below a launcher on three hosts, end it in some way at a random moment, and look at what is left.

    python -m benchmarks.launcher_cycles --backend mpiexec.hydra --out cycles.jsonl --cycles 50
    python -m benchmarks.launcher_cycles --backend mpiexec.hydra --out cycles.jsonl --cycles 50 --minutes 20   # go on

Hosts are namespaces with real sshd (tests/lab), the launcher is real; ranks are tests/lab/fake_gang.py. What is done:

    stop, kill      nothing: it is ordered to end
    launcher        kill -9 of the launcher on the head
    daemon          kill -9 of the launcher's daemon on one host; of pdsh: of the sshd of its connection; of Ray: raylet
    shell           kill -9 of every ssh that runs on the head; of Ray: of the gcs_server on the head
    agent           kill -9 of the host agent on one host
    supervisor      kill -9 of the supervisor on the user's computer, then of the launcher
    early           kill -9 of the launcher while the ranks look for each other

Afterwards no process, no port and no lease may be left on any host, the launcher's daemons included. One JSON line per
cycle; a file that has lines already is continued. Exit status 1 if anything was left or did not end.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from tests.lab.gang import Gang, left_on
from tests.lab.hosts import ROOT, Lab, lab_folders

KINDS = ("stop", "launcher", "daemon", "agent", "kill", "shell", "supervisor", "early")
ORDERED = {"stop", "kill"}
DAEMONS = {"mpirun": "orted", "mpiexec.hydra": "hydra_pmi_proxy", "ray": "raylet"}
RAY_PYTHON = ROOT / ".ray" / "bin" / "python"
"""`make ray` makes it."""
BACKENDS = (*DAEMONS, "pdsh")
LAB_S = 3600
END_S = 120.0
LEAVES_S = 60.0


class Cycle:
    """One gang from its start to its end."""

    def __init__(self, lab: Lab, backend: str, number: int, seed: int) -> None:
        self.lab, self.backend = lab, backend
        self.kind = KINDS[number % len(KINDS)]
        self.chance = random.Random(f"{seed} {number}")
        self.gang = Gang(lab, run_id=f"cycle-{number}")
        self.victim = self.chance.choice(lab.hosts[1:])

    def run(self) -> dict[str, Any]:
        """Start, end, look."""
        began = time.monotonic()
        self.gang.begin(backend=self.backend, python=str(RAY_PYTHON) if self.backend == "ray" else "python3")
        if self.kind != "early":
            self.gang.joined()
            time.sleep(self.chance.uniform(0.0, 3.0))
        getattr(self, f"_{self.kind}", self._launcher)()
        result = None
        if self.kind != "supervisor":
            result = self.gang.outcome(timeout_s=END_S)["result"]
        left = {host.name: left_on(host, folder=self.gang.folder, within_s=LEAVES_S) for host in self.lab.hosts}
        return {
            "kind": self.kind,
            "result": result,
            "left": {name: words for name, words in left.items() if words},
            "seconds": round(time.monotonic() - began, 1),
        }

    def is_good(self, row: dict[str, Any]) -> bool:
        """Whether it ended as its kind should."""
        expected = None if self.kind == "supervisor" else "stopped" if self.kind in ORDERED else "failed"
        return not row["left"] and row["result"] == expected

    def _stop(self) -> None:
        self.gang.order("stop")

    def _kill(self) -> None:
        self.gang.order("kill")

    def _launcher(self) -> None:
        record = self.gang.record(self.lab.hosts[0], f"{self.backend}/launcher.json")
        self.lab.hosts[0].run(["kill", "-9", str(record["pid"])])

    def _daemon(self) -> None:
        if self.backend in DAEMONS:
            self.victim.run(["pkill", "-9", "-x", DAEMONS[self.backend]])
            return
        below = self.victim.check(["pgrep", "-f", "foreground below"]).split()[0]
        parent = self.victim.check(["ps", "-o", "ppid=", "-p", below]).strip()
        self.victim.run(["kill", "-9", parent])

    def _shell(self) -> None:
        name = "gcs_server" if self.backend == "ray" else "ssh"
        if self.lab.hosts[0].run(["pkill", "-9", "-x", name]).returncode:  # OpenMPI's have ended after the start
            self._launcher()

    def _agent(self) -> None:
        record = self.gang.record(self.victim, f"{self.victim.name}/agent.json")
        self.victim.run(["kill", "-9", str(record["pid"])])

    def _supervisor(self) -> None:
        self.lab.user.call("tests.lab.cases_launch:kill_supervisor", run_id=self.gang.run_id)
        self._launcher()


def _lab(backend: str) -> Lab:
    return Lab(3, meshed=True, ttl_s=LAB_S, binds=lab_folders() if backend == "ray" else ())


def main() -> int:
    """Go on where the file ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=sorted(BACKENDS), required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; continued")
    parser.add_argument("--cycles", type=int, default=50, help="how many the file is to have")
    parser.add_argument("--minutes", type=float, default=600, help="begin none after so long")
    parser.add_argument("--seed", type=int, default=24)
    asked = parser.parse_args()
    lines = asked.out.read_text(encoding="utf-8").splitlines() if asked.out.exists() else []
    until = time.monotonic() + asked.minutes * 60
    with asked.out.open("a", encoding="utf-8") as out, _lab(asked.backend) as lab:
        for number in range(len(lines), asked.cycles):
            if time.monotonic() > until:
                break
            cycle = Cycle(lab, asked.backend, number, asked.seed)
            row = cycle.run()
            line = json.dumps({"number": number, **row, "good": cycle.is_good(row)})
            out.write(f"{line}\n")
            out.flush()
            lines.append(line)
            if row["left"]:  # the next one shall not suffer from it
                break
    rows = [json.loads(line) for line in lines]
    spoilt = [row["number"] for row in rows if not row["good"]]
    print(f"{len(rows)} cycles, {len(spoilt)} left something or ended otherwise: {spoilt}")
    return 1 if spoilt else 0


if __name__ == "__main__":
    sys.exit(main())
