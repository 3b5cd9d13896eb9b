"""How much of three hosts' time a sweep trains: `python -m benchmarks.sweep_hosts FOLDER [--points 24] [--steps 220]`.

Real: the command, the supervisors, the host agents, the ranks (a tiny Llama on CPUs), saves, evaluations. EMULATED: the
speed; a rank sleeps before each micro-batch (GANGLINE_SIMULATED_SLOWDOWN), and the three hosts are this computer. The
figure is the part of the hosts' time that lies in optimizer steps and evaluations, weighted by the hosts' speeds: of
100 %, a start, a save or an idle host at the end takes some away.

A line per trial goes to FOLDER/sweep_hosts.jsonl. After an interruption the same command continues the sweep.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from gangline import api
from gangline.runs.layout import RunLayout, SweepLayout
from gangline.sweep.records import TrialRecord, load_trials, sweep_ids

SLOWDOWN = {"pc1": 40.0, "pc2": 44.0, "pc3": 50.0}
"""Times of a micro-batch."""
TEXT = "the rope joins every dog of a sled team to the sled and they pull it over snow and ice until night falls"
WORDS = TEXT.split()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--points", type=int, default=24)
    parser.add_argument("--steps", type=int, default=220)
    asked = parser.parse_args()
    folder = asked.folder.absolute()
    home = folder / "home"
    if not sweep_ids(home):
        prepare(folder, steps=asked.steps)
        rates = ",".join(f"{1e-4 * 1.2**number:.3g}" for number in range(asked.points))
        gangline(folder, "sweep", "job.yaml", f"optimizer.learning_rate={rates}", "--cluster", "three.yaml", "--detach")
    layout = SweepLayout(home, sweep_ids(home)[0])
    lines = folder / "sweep_hosts.jsonl"
    told = {json.loads(line)["trial"] for line in lines.read_text().splitlines()} if lines.exists() else set()
    while True:
        trials = load_trials(layout)
        for trial in trials:
            if trial.phase in {"finished", "failed"} and trial.number not in told:
                told.add(trial.number)
                with lines.open("a") as stream:
                    stream.write(json.dumps(measured(home, trial)) + "\n")
        if all(trial.ended for trial in trials):
            break
        if json.loads(layout.state.read_text())["phase"] not in {"running", "stopping"}:
            gangline(folder, "sweep", "resume", layout.sweep_id, "--detach")
        time.sleep(5)
    sys.stdout.write(report([json.loads(line) for line in lines.read_text().splitlines()]) + "\n")
    return 0


def gangline(folder: Path, *words: str) -> None:
    """One command with a home of its own."""
    variables = {**os.environ, "GANGLINE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
    program = Path(sys.executable).with_name("gangline")
    subprocess.run([str(program), *words], cwd=folder, env=variables, check=True)


def prepare(folder: Path, *, steps: int) -> None:
    """A model, rows, a job and a cluster of three hosts."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"text": " ".join(WORDS[(start * 7 + place * 3) % len(WORDS)] for place in range(40))} for start in range(200)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "words.txt").write_text(" ".join(WORDS) * 50)
    api.untrained_model(folder / "model", texts=folder / "words.txt", home=folder / "home")
    job: dict[str, Any] = {
        "model": {"path": "./model", "start": "random"},
        "data": {"train": "rows.jsonl", "eval": 0.1, "sequence_length": 32},
        "batch": 4,
        "micro_batch": 2,
        "steps": steps,
        "checkpoint": {"every_steps": 100},
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    hosts = [
        {
            "name": name,
            "transport": "local",
            "python": sys.executable,
            "env": {"GANGLINE_SIMULATED_SLOWDOWN": factor, "OMP_NUM_THREADS": 1},
        }
        for name, factor in SLOWDOWN.items()
    ]
    (folder / "three.yaml").write_text(json.dumps({"hosts": hosts}))


def measured(home: Path, trial: TrialRecord) -> dict[str, Any]:
    """What one trial took, from its own records."""
    host = trial.hosts[0]
    metrics = RunLayout(home / "hosts" / host, str(trial.run)).metrics
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    busy_s = sum(step["step_s"] for step in steps) + sum(each["duration_s"] for each in evaluations)
    return {
        "trial": trial.number,
        "phase": trial.phase,
        "host": host,
        "run": trial.run,
        "first": records[0]["time"],
        "last": records[-1]["time"],
        "steps": len(steps),
        "busy_s": round(busy_s, 3),
        "step_s": round(statistics.median(step["step_s"] for step in steps), 4),
        "loss": trial.loss,
    }


def report(rows: list[dict[str, Any]]) -> str:
    """The figures of a whole sweep. The time begins with the first step of the first trial."""
    begun = min(_seconds(row["first"]) for row in rows)
    wall_s = max(_seconds(row["last"]) for row in rows) - begun
    by_host = {name: [row for row in rows if row["host"] == name] for name in SLOWDOWN}
    speed = {name: 1 / statistics.mean(row["busy_s"] for row in some) for name, some in by_host.items() if some}
    busy_s = {name: sum(row["busy_s"] for row in some) for name, some in by_host.items() if some}
    part = sum(speed[name] * busy_s[name] for name in speed) / (wall_s * sum(speed.values()))
    counts = ", ".join(
        f"{name} {len(some)} trials of {1 / speed[name]:.0f} s" for name, some in by_host.items() if some
    )
    finished = sum(row["phase"] == "finished" for row in rows)
    return f"{finished} of {len(rows)} finished in {wall_s:.0f} s: {counts}; {100 * part:.1f} % of the sum of speeds"


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


if __name__ == "__main__":
    sys.exit(main())
