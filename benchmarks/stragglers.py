"""Are stragglers named, for the right cause and soon, and is nobody named in a healthy run?

    python -m benchmarks.stragglers --out stragglers.jsonl            # as root, for the lab; about 15 minutes

Three lab hosts (network namespaces, links shaped to 1 Gbit by tc), ranks of gangline's own loop over gloo. Ranks,
sockets, exchanges, adapters and their gradients are real; COMPUTATION IS EMULATED by sleeping to absolute deadlines
(see emulated.py). In 12 runs one host becomes slow after 20 steps: it computes 15 % to twice as slowly, its samples
take 15 % to 50 % of a micro-batch, or its link is shaped to less, so that steps take at least 15 % longer. 30 runs are
healthy, of unlike and of like machines, with shares that move and that do not.

One JSON line per run in --out; what is there is not measured again. Exit code 0 if all twelve are named with host and
cause within 20 steps, and nobody else ever is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plan_time import PYTHON, ROOT, read
from benchmarks.scaling import commit, quiet
from tests.lab.hosts import Lab, lab_folders

RATE, LIMIT_S, AT_ONCE = "1gbit", 300, 12
BEGIN, WITHIN, LONGER = 20, 20, 1.15
SHAPE = {"layers": 8, "hidden": 2048}
"""4.2 MB of gradients."""
UNLIKE = {"unlike": True, "moving": True, "micro_batch_s": 0.03, "batch": 20}
"""Speeds as 1 : 0.55 : 0.45; about 0.3 s per step."""
LIKE = {"unlike": False, "moving": False, "micro_batch_s": 0.05, "batch": 15}
COMPUTE = ((0, 0.15), (1, 0.3), (2, 1.0), (2, 0.15))
DATA = ((0, 0.15), (1, 0.3), (2, 0.5), (1, 0.15))
"""Rank, and the part of a micro-batch that it becomes longer by."""
NETWORK = ((0, "250mbit"), (1, "200mbit"), (2, "150mbit"), (1, "400mbit"))
Line = dict[str, Any]


def cases() -> list[Line]:
    """All runs."""
    slow: Line = {**UNLIKE, "steps": BEGIN + WITHIN + 2, "begin": BEGIN, "shape": SHAPE}
    found = [{**slow, "cause": "compute", "rank": rank, "part": part} for rank, part in COMPUTE]
    found += [{**slow, "cause": "data", "rank": rank, "part": part} for rank, part in DATA]
    found += [{**slow, "cause": "network", "rank": rank, "rate": rate} for rank, rate in NETWORK]
    for case in found:
        case["name"] = f"{case['cause']}, pc{case['rank'] + 1}, {case.get('rate') or format(case['part'], '.0%')}"
    kinds = [UNLIKE, LIKE, {**UNLIKE, "moving": False, "batch": 9}]
    healthy = [{**kinds[run % 3], "steps": 50, "shape": SHAPE, "cause": "none"} for run in range(30)]
    return found + [{**case, "name": f"healthy {run + 1}"} for run, case in enumerate(healthy)]


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", nargs="*", help="names of some", default=[case["name"] for case in cases()])
    arguments = parser.parse_args()
    wanted = [case for case in cases() if case["name"] in arguments.cases]
    while missing := [case for case in wanted if case["name"] not in {line["name"] for line in read(arguments.out)}]:
        quiet()
        for line in measured(missing[:AT_ONCE]):
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return report(read(arguments.out))


def measured(wanted: Sequence[Line]) -> Iterator[Line]:
    """These runs, one after the other in the same processes."""
    with Lab(3, binds=lab_folders(), rate=RATE, ttl_s=2 * LIMIT_S) as lab:
        processes = start(lab, {"cases": wanted, "limit_s": LIMIT_S})
        head = processes[0]
        assert head.stdin is not None
        assert head.stdout is not None
        for case in wanted:
            while (said := json.loads(head.stdout.readline() or "{}")).get("what") in {"begin", "slow"}:
                if said["what"] == "slow":
                    lab.hosts[case["rank"]].faults.rate(case["rate"])
                head.stdin.write("go\n")
                head.stdin.flush()
            if said.get("what") != "end":
                lab.close()  # until then, whoever has not failed writes on
                raise SystemExit("\n".join(process.communicate()[1][-1500:] for process in processes))
            if case["cause"] == "network":
                lab.hosts[case["rank"]].faults.rate(RATE)
            found = {name: said[name] for name in ("told", "steps_s")}
            yield {**case, **found, "load": os.getloadavg()[0], "commit": commit()}
        for process in processes:
            process.communicate(timeout=LIMIT_S)


def start(lab: Lab, order: Line) -> list[subprocess.Popen[str]]:
    """The ranks, each on a host of its own."""
    common = {"WORLD_SIZE": str(len(lab.hosts)), "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29500"}
    common |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    argv = ["nice", "-n", "-10", PYTHON, "-W", "ignore", "-m", "benchmarks.straggler_ranks", json.dumps(order)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [
        host.popen(argv, env={**common, "RANK": str(rank)}, cwd=ROOT, **pipes) for rank, host in enumerate(lab.hosts)
    ]


def report(lines: Sequence[Line]) -> int:
    """A table of the stragglers, what was said in healthy runs, and whether all is as it must be."""
    print(f"computation EMULATED, network real at {RATE}; slow from step {BEGIN} on, 0.3 s per step\n")
    print("| straggler | named as | after steps | factor | steps before | after |\n|" + "---|" * 6)
    bad = []
    for line in lines:
        if line["cause"] != "none":
            cells, problem = judged(line)
            print("| " + " | ".join([line["name"], *cells]) + " |")
            bad += [f"{line['name']}: {problem}"] if problem else []
    healthy = [line for line in lines if line["cause"] == "none"]
    alarms = [f"{line['name']}: {event['what']}" for line in healthy for event in line["told"]]
    print(f"\n{len(healthy)} healthy runs, {sum(len(line['steps_s']) + 1 for line in healthy)} steps: ", end="")
    print(f"{len(alarms)} false alarms")
    bad += alarms
    missing = [case["name"] for case in cases() if case["name"] not in {line["name"] for line in lines}]
    bad += [f"{len(missing)} runs are not measured, {missing[0]} the first"] if missing else []
    print("\n" + ("\n".join(f"NOT REACHED {words}" for words in bad) or "all are named, and nobody else"))
    return 1 if bad else 0


def judged(line: Line) -> tuple[list[str], str]:
    """Cells of a row, and what is wrong."""
    before = statistics.median(line["steps_s"][5 : BEGIN - 1])
    after = statistics.median(line["steps_s"][BEGIN + 1 : BEGIN + 8])
    times = [f"{before:.3f} s", f"{after:.3f} s"]
    told = [event for event in line["told"] if event["event"] == "straggler"]
    if not told:
        return ["nobody", "-", "-", *times], "not named"
    first, delay = told[0], told[0]["step"] - BEGIN
    problem = ""
    if any((event["cause"], event.get("host")) != (line["cause"], f"pc{line['rank'] + 1}") for event in told):
        problem = "; ".join(event["what"] for event in told)
    elif not 0 < delay <= WITHIN:
        problem = f"named after {delay} steps"
    elif line["cause"] == "network" and after < LONGER * before:
        problem = f"steps became {after / before - 1:.0%} longer: no straggler"
    who = f"{first['cause']}, {first.get('host', 'all')}"
    return [who, str(delay), f"{first['factor']:.2f}", *times], problem


if __name__ == "__main__":
    sys.exit(main())
