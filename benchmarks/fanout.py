"""The same question to many hosts of a lab: ours against pdsh and ansible, on the same hosts, in turns.

    python -m benchmarks.fanout [--hosts 50] [--repeats 5] [--out results.jsonl]

hello   who are you? `hostname` on every host, from nothing: no connection is open, nothing of ours is there
facts   what is there? ours sends the agent and asks it; pdsh runs the same agent, which it finds there already, and
        scp+pdsh brings it first, as ours has to; ansible runs its own `setup`
dead    hello, with one host among them whose firewall drops everything
again   ours only: hello once more over the connections that are open

Wall: from the start of the command to its end. CPU: of the command and all that it started on the user's computer,
divided by the hosts. All hosts share the cores of this machine, so the wall holds what they do, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.lab.hosts import Lab

TOOLS = ("ours", "pdsh", "scp+pdsh", "ansible")
CASES = ("hello", "facts", "dead")
TIMEOUT_S = 600
ROOT = Path(__file__).resolve().parents[1]
Run = dict[str, Any]
"""wall_s, cpu_s, answered; again_s and again_cpu_s of ours."""


def measured(lab: Lab, case: str, tool: str, folder: str = "") -> Run | None:
    """One run on the user's computer: wall_s, cpu_s, answered; None where the tool is not there."""
    keys = {host.name: host.host_key for host in lab.hosts}
    argv = [sys.executable, "-m", "tests.lab.call", "benchmarks.fanout_sides:measure"]
    words = json.dumps({"case": case, "tool": tool, "keys": keys, "folder": folder})
    done = lab.user.run(argv, stdin=words, cwd=ROOT, timeout_s=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"{case} {tool}: {done.stderr}")
    found: Run | None = json.loads(done.stdout.splitlines()[-1])
    return found


def run_case(lab: Lab, case: str, options: argparse.Namespace) -> dict[str, list[Run]]:
    """The measures of every tool, in turns."""
    found: dict[str, list[Run]] = {tool: [] for tool in options.tools}
    for turn in range(options.repeats):
        for index in range(len(options.tools)):
            tool = options.tools[(turn + index) % len(options.tools)]
            one = measured(lab, case, tool, options.path)
            if one is not None:
                found[tool].append(one)
                print(f"{case:6} {tool:8} {one['wall_s']:6.2f} s  {one['answered']} answered", flush=True)
    return found


def summary(case: str, tool: str, runs: list[Run], num_hosts: int) -> Run:
    """One line of the results."""
    walls = [run["wall_s"] for run in runs]
    cpus = [run["cpu_s"] / num_hosts for run in runs]
    return {
        "case": case,
        "tool": tool,
        "hosts": num_hosts,
        "repeats": len(runs),
        "wall_median_s": round(statistics.median(walls), 3),
        "wall_worst_s": round(max(walls), 3),
        "cpu_per_host_median_s": round(statistics.median(cpus), 4),
        "cpu_per_host_worst_s": round(max(cpus), 4),
        "answered_fewest": min(run["answered"] for run in runs),
        "load": round(os.getloadavg()[0], 1),
    }


def show(rows: list[Run]) -> None:
    """The results as a table."""
    print(f"\n{'case':8}{'tool':10}{'wall median':>12}{'worst':>8}{'CPU/host median':>17}{'worst':>8}{'answered':>10}")
    for row in rows:
        print(
            f"{row['case']:8}{row['tool']:10}{row['wall_median_s']:10.2f} s{row['wall_worst_s']:6.2f} s"
            f"{row['cpu_per_host_median_s']:15.3f} s{row['cpu_per_host_worst_s']:6.3f} s{row['answered_fewest']:10}"
        )


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--path", default="", metavar="FOLDER", help="where ansible is, if not on PATH")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    with Lab(options.hosts, known=True, ttl_s=3600) as lab:
        measured(lab, "prepare", "ours")
        for case in options.cases:
            if case == "dead":
                lab.hosts[options.hosts // 2].faults.drop()
            for tool, runs in run_case(lab, case, options).items():
                if runs:
                    rows.append(summary(case, tool, runs, options.hosts))
                if tool == "ours" and case == "hello":
                    again = [dict(run, wall_s=run["again_s"], cpu_s=run["again_cpu_s"]) for run in runs]
                    rows.append(summary("again", tool, again, options.hosts))
    show(rows)
    if options.out:
        with options.out.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
