"""What does a run on Slurm cost over sbatch, srun and torchrun by hand, up to the first step?

    python -m benchmarks.slurm_overhead --out slurm_overhead.jsonl --rounds 5         # as root, for the lab

A real Slurm of two nodes on lab hosts. The same script (one all_reduce) is submitted in turn:

by hand    a batch script with `srun torchrun --nnodes 2 --rdzv-backend c10d ...`, as guides have it
gangline   `gangline run --detach -- script.py`, which looks at the nodes, compares the project, starts a supervisor,
           host agents and torchrun

The figure is the seconds from the moment that Slurm has started the job (both wait for the same queue) to rank 0's
first all_reduce; and, as `from submission`, from the command itself. One start of each comes before, uncounted. One
JSON line per start; a file that has lines already is continued. Exit code 0 if the median is within 3 s.

gangline's code is compiled first, as pip does when it installs a package: hosts of the lab write nothing into a source
tree, so that each start would compile it anew.
"""

from __future__ import annotations

import argparse
import compileall
import json
import statistics
import sys
import time
from pathlib import Path

import gangline
from tests.slurm.cluster import SlurmLab
from tests.slurm.user import Account

BAR_S = 3.0
LIMIT_S = 180.0
SCRIPT = """\
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
if dist.get_rank() == 0:
    open("/home/ada/reduced", "w").write(str(time.time()))
dist.destroy_process_group()
"""
BY_HAND = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
head=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export OMP_NUM_THREADS=1
srun {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-id $SLURM_JOB_ID \\
    --rdzv-endpoint $head:29500 /home/ada/project/first.py
"""


def start(account: Account, side: str) -> dict[str, float]:
    """One start; the seconds to the first all_reduce."""
    desk = account.desk
    desk.run(["rm", "-f", "reduced"])
    began = time.time()
    if side == "by hand":
        job = account.lab.submit(BY_HAND.format(python=sys.executable))
    else:
        account.types("run", "--detach", "--dir", "project", "--", "first.py")
        # not `gangline ps`, which would take half a second of the two cores from the run
        run = desk.run(["sh", "-c", "ls -t .gangline/runs | head -n 1"]).stdout.strip()
        job = account.job_of(run)
    while not (said := desk.run(["cat", "reduced"]).stdout):
        if time.time() - began > LIMIT_S:
            raise SystemExit(f"{side}: no all_reduce within {LIMIT_S:g} s")
        time.sleep(0.1)
    reduced = float(said)
    shown = account.lab.shown(job)
    begun = time.mktime(time.strptime(shown["StartTime"], "%Y-%m-%dT%H:%M:%S"))
    account.lab.wait_idle()
    return {"from_start_s": round(reduced - begun, 2), "from_submission_s": round(reduced - began, 2)}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    words = parser.parse_args()
    rows = [json.loads(line) for line in words.out.read_text().splitlines()] if words.out.exists() else []
    sides = ("by hand", "gangline")
    compileall.compile_dir(Path(gangline.__file__).parent, quiet=1)
    with SlurmLab(2, ttl_s=3600) as lab, words.out.open("a") as out:
        account = Account(lab)
        account.desk.write("project/first.py", SCRIPT)
        account.describes()
        for side in sides:
            start(account, side)
        for number in range(len(rows) // 2, words.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                row = {"side": side, "round": number, **start(account, side)}
                rows.append(row)
                out.write(json.dumps(row) + "\n")
                out.flush()
                sys.stdout.write(f"{row}\n")
    medians = {}
    for key in ("from_start_s", "from_submission_s"):
        hand, ours = ([row[key] for row in rows if row["side"] == side] for side in sides)
        more = [our - one for our, one in zip(ours, hand, strict=True)]
        medians[key] = statistics.median(more)
        sys.stdout.write(
            f"{key}: by hand {statistics.median(hand):.1f} s, gangline {statistics.median(ours):.1f} s; "
            f"more: median {medians[key]:.1f}, worst {max(more):.1f} s\n"
        )
    return int(medians["from_submission_s"] > BAR_S)


if __name__ == "__main__":
    sys.exit(main())
