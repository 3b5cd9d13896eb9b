"""Submit a run to a real Slurm on lab hosts, end it in some way at a random moment, and look at what is left.

    python -m benchmarks.slurm_cycles --out slurm_cycles.jsonl --cycles 100
    python -m benchmarks.slurm_cycles --out slurm_cycles.jsonl --cycles 100 --minutes 20     # go on another time

Slurm is real (tests/slurm), the ranks are a script that counts, on two nodes. How a run ends:

    stop            gangline stop
    scancel         scancel of its job
    early           scancel at a random moment of its first 12 s: in the queue, or while it is prepared
    early-stop      gangline stop, as early
    batch           kill -9 of the batch step on the first node
    supervisor      kill -9 of the supervisor's step there, then gangline stop
    srun            kill -9 of every srun that the batch step started, then gangline stop
    rank            kill -9 of one rank
    controller      kill -9 of slurmctld; it comes back, then gangline stop
    end             nothing: the script ends by itself

Afterwards no job, no step, no process and no file of the run may be left on any node. One JSON line per cycle; a file
that has lines already is continued. Exit status 1 if anything was left.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.slurm.cluster import SlurmLab
from tests.slurm.user import TERMINAL, Account

KINDS = (
    "stop",
    "scancel",
    "early",
    "batch",
    "end",
    "supervisor",
    "early-stop",
    "srun",
    "rank",
    "controller",
)
STOPPED = frozenset({"stopped"})
EXPECTED = {"end": {"finished"}, "rank": {"failed"}, "batch": {"failed", "lost", "stopped"}}
"""The phases that a run of a kind ends in; STOPPED for the others."""
RECORDS = (
    "slurm-*.log",
    "slurm.json",
    "state.json",
    "attempts/*/outcome.json",
    "attempts/*/supervisor.log",
    "attempts/*/n*/agent.log",
    "attempts/*/n*/exit.json",
    "attempts/*/srun/*.log",
    "attempts/*/srun/ended.json",
)
RECORDS_BYTES = 20_000
EARLY_S = 12.0
LAB_S = 5400
KILL_WAIT_S = 30
"""As Slurm has it by itself: a busy machine cannot save within the lab's 5 s."""
PATIENCE_S = 120.0
LEAVES_S = 60.0
"""KillWait, and a gangline agent that ends what is left of its run."""


class Cycle:
    """One run from its submission to its end."""

    def __init__(self, account: Account, number: int, seed: int) -> None:
        self.account, self.lab = account, account.lab
        self.kind = KINDS[number % len(KINDS)]
        self.chance = random.Random(f"{seed} {number}")
        self.run_id = self.job = ""

    def run(self) -> dict[str, Any]:
        """Submit, end, look."""
        began = time.monotonic()
        self.run_id = self.account.runs(steps=30 if self.kind == "end" else 100_000)
        self.job = self.account.job_of(self.run_id)
        moment_s = self.chance.uniform(0.0, EARLY_S)
        if self.kind.startswith("early"):
            time.sleep(moment_s)
        else:
            self.account.awaits_output(self.run_id, "step 2", patience_s=PATIENCE_S) if self.kind != "end" else None
        getattr(self, f"_{self.kind.replace('-', '_')}")()
        phase = self._phase_at_end()
        left = self.lab.left(within_s=LEAVES_S)
        return {
            "kind": self.kind,
            "moment_s": round(moment_s, 1) if self.kind.startswith("early") else None,
            "phase": phase,
            "state": self.lab.shown(self.job).get("JobState"),
            "left": left,
            "seconds": round(time.monotonic() - began, 1),
            **({} if phase in EXPECTED.get(self.kind, STOPPED) else {"records": self._records()}),
        }

    def _records(self) -> str:
        """What the run wrote about an end that is not the usual one of its kind."""
        folders = f".gangline/runs/{self.run_id}", f"work/*/runs/{self.run_id}"
        names = " ".join(f"{folder}/{name}" for folder in folders for name in RECORDS)
        return self.account.desk.run(["sh", "-c", f"tail -n 25 {names} 2>/dev/null"]).stdout[-RECORDS_BYTES:]

    def _phase_at_end(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while (phase := str(self.account.row(self.run_id)["phase"])) not in TERMINAL and time.monotonic() < deadline:
            time.sleep(1.0)
        return phase

    def _stop(self) -> None:
        self.account.types("stop", self.run_id, code=None)

    _early_stop = _stop

    def _scancel(self) -> None:
        self.lab.login.run(["scancel", self.job])

    _early = _scancel

    def _end(self) -> None:
        """The script ends."""

    def _kill(self, words: str, *, hosts: int) -> None:
        """SIGKILL for what has these words in its command line, on so many nodes that have such a process."""
        for host in self.lab.nodes:
            if hosts and host.run(["pkill", "-9", "-f", words]).returncode == 0:
                hosts -= 1

    def _batch(self) -> None:
        self._kill("gangline.batch_step", hosts=1)

    def _supervisor(self) -> None:
        self._kill("gangline.supervise", hosts=1)
        time.sleep(self.chance.uniform(0.0, 3.0))
        self._stop()

    def _srun(self) -> None:
        self._kill("srun --jobid", hosts=2)
        time.sleep(self.chance.uniform(0.0, 3.0))
        self._stop()

    def _rank(self) -> None:
        self._kill("python loop.py 100000$", hosts=1)

    def _controller(self) -> None:
        self.lab.kill_controller()
        time.sleep(self.chance.uniform(0.0, 5.0))
        self.lab.start_controller()
        self.lab.wait_for_steps(self.job)
        self._stop()


def main() -> int:
    """Go on where the file ends."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; continued")
    parser.add_argument("--cycles", type=int, default=100, help="how many the file is to have")
    parser.add_argument("--minutes", type=float, default=600, help="begin none after so long")
    parser.add_argument("--seed", type=int, default=22)
    asked = parser.parse_args()
    lines = asked.out.read_text(encoding="utf-8").splitlines() if asked.out.exists() else []
    until = time.monotonic() + asked.minutes * 60
    with (
        SlurmLab(3, ttl_s=LAB_S, settings={"KillWait": KILL_WAIT_S}) as lab,
        asked.out.open("a", encoding="utf-8") as out,
    ):
        account = Account(lab)
        for number in range(len(lines), asked.cycles):
            if time.monotonic() > until:
                break
            line = json.dumps({"number": number, **Cycle(account, number, asked.seed).run()})
            out.write(f"{line}\n")
            out.flush()
            lines.append(line)
            lab.cancel_all()
            if json.loads(line)["left"]:  # the next one shall not suffer from it
                lab.clear()
    rows = [json.loads(line) for line in lines]
    spoilt = [row for row in rows if row["left"] or row["phase"] not in TERMINAL]
    print(f"{len(rows)} cycles, {len(spoilt)} left something or did not end; {dict(Counter(r['phase'] for r in rows))}")
    return 1 if spoilt else 0


if __name__ == "__main__":
    sys.exit(main())
