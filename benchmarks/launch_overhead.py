"""What does `gangline run` cost over three ssh commands by hand?

    python -m benchmarks.launch_overhead --out launch.jsonl --rounds 5         # as root, for the lab

Three lab hosts with real sshd. The same script (one all_reduce) is started in turn, from the user's computer:

by hand    `ssh HOST torchrun --node-rank N ... script.py` to all three hosts at the same time, with all addresses and
           ranks typed, the script copied before
gangline   `gangline run -- script.py`, which looks at the hosts, compares the project, and starts host agents and
torchrun

One start of each comes before, uncounted: what is copied once, and the disk's cache, are no part of it. The network
between the hosts is tried by that start, and by later ones only if it was ten minutes ago; with `--anew` by each.
The figures are the seconds from the command to rank 0's first all_reduce, and to the end of the command. Exit code 0 if
the median of the first is within 3 s and 10 % of what it takes by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.start_cases import PROJECT, PYTHON, Stage
from tests.lab.hosts import Lab, lab_folders

BAR_S, BAR_SHARE = 3.0, 0.10
LIMIT_S = 240.0
SCRIPT = """\
import time

print("BEGUN", time.time(), flush=True)
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
print("REDUCED", time.time(), flush=True)
dist.destroy_process_group()
"""
RUNS = ".local/state/gangline/runs"
PAIRS = ".local/state/gangline/clusters/*/pairs.json"
MARKS = (
    ("checks", "the hosts and the network between them were looked at"),
    ("project", "the project was compared, and is there"),
    ("handed over", "the head has the plan of the start"),
    ("supervisor", "the supervisor on the head begins"),
    ("host agents", "host agents stand on all hosts"),
    ("rank", "torchrun has started rank 0"),
    ("begun", "the script begins"),
    ("reduced", "the first all_reduce is done"),
    ("left", "torchrun has left on all hosts"),
    ("outcome", "the supervisor has written how it ended"),
    ("end", "the command is back"),
)
"""Of a start by gangline, in their order: what has happened by then."""

Line = dict[str, Any]


def main() -> int:
    """Alternate the two until the file has as many rounds as asked for."""
    arguments = _arguments()
    done = len(read(arguments.out)) // 2
    if done < arguments.rounds:
        with Lab(3, binds=lab_folders(), meshed=True, ttl_s=3600) as lab:
            stage = prepared(lab)
            for start in (by_hand, by_gangline):
                start(stage)
            for number in range(done, arguments.rounds):
                order = (by_hand, by_gangline) if number % 2 == 0 else (by_gangline, by_hand)
                for start in order:
                    if arguments.anew:
                        stage.desk.check(["sh", "-c", f"rm -f {PAIRS}"])
                    _keep(arguments.out, {"round": number, "load": os.getloadavg()[0], **start(stage)})
    return _report(read(arguments.out))


def prepared(lab: Lab) -> Stage:
    """The project on the user's computer and, for the start by hand, on every host."""
    stage = Stage(lab)
    stage.desk.write(f"{PROJECT}/cluster.yaml", json.dumps(stage.file))
    for machine in (stage.desk, *stage.hosts):
        machine.write(f"{PROJECT}/script.py", SCRIPT)
    return stage


def by_hand(stage: Stage) -> Line:
    """What people do: one terminal per host."""
    begun = time.time()
    commands = [
        stage.desk.popen(["ssh", host.name, _typed(stage, rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank, host in enumerate(stage.hosts)
    ]
    texts = [command.communicate(timeout=LIMIT_S)[0].decode() for command in commands]
    end = time.time()
    codes = [command.returncode for command in commands]
    if any(codes):
        raise SystemExit(f"by hand: {codes}\n" + "\n".join(texts))
    marks = {name: when - begun for name, when in _printed(texts[0]).items()}
    return {"how": "by hand", "marks": {**marks, "end": end - begun}}


def _typed(stage: Stage, rank: int) -> str:
    words = [
        *("--nnodes", "3", "--nproc-per-node", "1", "--node-rank", str(rank)),
        *("--master-addr", stage.hosts[0].address, "--master-port", "29400", "script.py"),
    ]
    environment = "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=eth0"
    return f"cd {PROJECT} && {environment} {PYTHON} -m torch.distributed.run {' '.join(words)}"


def by_gangline(stage: Stage) -> Line:
    """What we offer."""
    begun = time.time()
    done = stage.desk.run(["gangline", "run", "--", "script.py"], cwd=stage.desk.home / PROJECT, timeout_s=LIMIT_S)
    end = time.time()
    if done.returncode:
        raise SystemExit(f"gangline run: {done.returncode}\n{done.stdout}{done.stderr}")
    marks = {name: when - begun for name, when in seen(stage, done.stdout.split()[0]).items()}
    return {"how": "gangline", "marks": {**marks, "end": end - begun}}


def seen(stage: Stage, run_id: str) -> dict[str, float]:
    """When each step of a start was done: the files that it writes say so."""
    here, attempt = f"{RUNS}/{run_id}", f"gangline/runs/{run_id}/attempts/1"
    h0 = stage.hosts[0]
    return {
        "checks": _changed(stage.desk, f"{here}/findings.json"),
        "project": _changed(stage.desk, f"{here}/command.json"),
        "handed over": _changed(h0, f"{attempt}/cluster.json"),
        "supervisor": _changed(h0, f"{attempt}/supervisor.log"),
        "host agents": max(_changed(host, f"{attempt}/{host.name}/agent.json") for host in stage.hosts),
        "rank": _changed(h0, f"{attempt}/rank-0.pid"),
        **_printed(h0.read(f"{attempt}/rank-0.log").decode()),
        "left": max(_changed(host, f"{attempt}/{host.name}/exit.json") for host in stage.hosts),
        "outcome": _changed(h0, f"{attempt}/outcome.json"),
    }


def _changed(host: Any, path: str) -> float:
    return float(host.check(["find", path, "-maxdepth", "0", "-printf", "%T@"]))


def _printed(text: str) -> dict[str, float]:
    rows = [line.split() for line in text.splitlines()]
    return {row[0].lower(): float(row[1]) for row in rows if len(row) == 2 and row[0] in {"BEGUN", "REDUCED"}}


def read(path: Path) -> list[Line]:
    """The starts that the file has."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            lines.append(json.loads(text))
    return lines


def _keep(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    marks = " ".join(f"{name} {seconds:.2f}" for name, seconds in line["marks"].items())
    print(f"{line['how']:9} {marks}", flush=True)


def _report(lines: list[Line]) -> int:
    hand = [line["marks"] for line in lines if line["how"] == "by hand"]
    ours = [line["marks"] for line in lines if line["how"] == "gangline"]
    print(f"\n{'seconds, median (worst)':26} {'by hand':>15} {'gangline':>15} {'difference':>16}")
    extra_s = share = 0.0
    for name, words in (("end", "to the end"), ("reduced", "to the first all_reduce")):
        alone, with_us = _column(hand, name), _column(ours, name)
        extra_s = statistics.median(with_us) - statistics.median(alone)
        share = extra_s / statistics.median(alone)
        print(f"{words:26} {_figures(alone):>15} {_figures(with_us):>15} {extra_s:>+8.2f} s {share:>+6.0%}")
    print("\nwhere the time of gangline goes, median seconds since the step before")
    last = [0.0] * len(ours)
    for name, words in MARKS:
        now = _column(ours, name)
        step_s = statistics.median(after - before for before, after in zip(last, now, strict=True))
        print(f"  {step_s:6.2f}  {name:12} {words}")
        last = now
    return 0 if extra_s <= BAR_S and share <= BAR_SHARE else 1


def _column(rows: list[Line], name: str) -> list[float]:
    return [marks[name] for marks in rows]


def _figures(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({max(values):.2f})"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--anew", action="store_true", help="the network is tried by every start")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
