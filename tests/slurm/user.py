"""Somebody with an account on the Slurm cluster of a lab: files in the shared home, `gangline` on the login host."""

import json
import time
from pathlib import Path

from tests.lab.user import NewUser
from tests.slurm.cluster import SlurmLab

SCRIPT = """
import sys, time
for step in range(int(sys.argv[1])):
    print("step", step, flush=True)
    time.sleep(0.1)
"""
"""A user's own script: ranks that do nothing, so that a test is quick."""
TERMINAL = {"finished", "stopped", "failed", "lost"}
PATIENCE_S = 150.0


class Account(NewUser):
    """Somebody at the login host."""

    def __init__(self, lab: SlurmLab) -> None:
        super().__init__(lab.login)
        self.lab = lab

    def describes(self, **keys: object) -> None:
        """cluster.yaml: what every run asks of Slurm."""
        asked = {"nodes": 2, "save_before": 30, "ask_every": 1, "cpus_per_node": 2, "workdir": "/home/ada/work", **keys}
        shared = {"shared": "/home/ada"} if self.lab.shared else {}
        self.desk.write("cluster.yaml", json.dumps({"slurm": asked, **shared}))

    def trains(self, model: Path, *, job: str, **keys: object) -> str:
        """A training job in the background; the run's id."""
        self.brings(model, job=job)
        self.describes(**keys)
        self.types("train", "job.yaml", "--detach")
        return self.newest()

    def runs(self, steps: int = 100_000, **keys: object) -> str:
        """The user's own script in the background; the run's id."""
        self.desk.write("project/loop.py", SCRIPT)
        self.describes(**keys)
        self.types("run", "--detach", "--dir", "project", "--", "loop.py", str(steps))
        return self.newest()

    def newest(self) -> str:
        """The run that was made last."""
        return max(json.loads(self.types("ps", "--json").stdout)["runs"], key=lambda row: row["created"])["id"]

    def job_of(self, run: str) -> str:
        """The id of the run's job."""
        return json.loads(self.desk.read(f".gangline/runs/{run}/slurm.json"))["job"]

    def log_of(self, run: str) -> str:
        """What the batch step wrote."""
        return self.desk.check(["sh", "-c", f"cat .gangline/runs/{run}/slurm-*.log"])

    def awaits_phase(self, run: str, *phases: str, patience_s: float = PATIENCE_S) -> dict:
        """Look at `ps` until the run has one of these phases."""
        return self.awaits(run, lambda row: row["phase"] in phases, " or ".join(phases), patience_s=patience_s)

    def awaits_output(self, run: str, words: str, *, patience_s: float = PATIENCE_S) -> None:
        """Wait until the ranks have written something."""
        deadline = time.monotonic() + patience_s
        while words not in (said := self.types("logs", run, code=None).stdout):
            assert time.monotonic() < deadline, f"{words!r} is not in {said[-2000:]}\n{self.log_of(run)}"
            time.sleep(0.5)

    def awaits_step(self, run: str, step: int, *, patience_s: float = PATIENCE_S) -> dict:
        """Look at `ps` until the run has taken so many steps."""
        return self.awaits(run, lambda row: (row["step"] or 0) >= step, f"step {step}", patience_s=patience_s)

    def leaves_nothing(self) -> None:
        """No job, step, process or file of a run is left on the cluster."""
        left = self.lab.left()
        assert left == [], left
