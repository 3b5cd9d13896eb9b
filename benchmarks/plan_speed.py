"""How long does it take to weigh every way to run a job?

    python -m benchmarks.plan_speed [--rounds 5]

Eight unlike machines, two and eight with eight cards each, of one kind and of several, and eight without room for the
job; all strategies; micro-batches and recomputation are left open; no trace. Processor seconds of the decision alone
(with what would make the job fit, where it does not), each round in a new process, and of the whole command `gangline
plan --json`, Python's start included. Exit code 1 if a decision takes longer in the median than its bar: a second for
eight hosts, two for eight with eight cards each; the search for what would make a job fit is shown, and has no bar.
"""

from __future__ import annotations

import argparse
import itertools
import math
import resource
import statistics
import subprocess
import sys
from pathlib import Path

EIGHT = "rtx4090,rtx4080,rtx3090,rtx3080,rtx4070,rtx4060,rtx3060,rtx5090"
THREE = "a100-80gb,rtx4090,rtx3090"


def cards(kinds: str) -> str:
    """Eight hosts with eight cards each, of these kinds in turn."""
    return ",".join(f"8x{kind}" for kind in itertools.islice(itertools.cycle(kinds.split(",")), 8))


CASES = {
    "8 unlike hosts, Llama-3.1-8B LoRA": (EIGHT, "meta-llama/Llama-3.1-8B", "lora"),
    "8 unlike hosts, Llama-3.2-1B full": (EIGHT, "meta-llama/Llama-3.2-1B", "full"),
    "8 x 8 A100, Llama-3.1-8B LoRA": (cards("a100-80gb"), "meta-llama/Llama-3.1-8B", "lora"),
    "8 x 8 RTX 4090, Llama-2-70B QLoRA": (cards("rtx4090"), "meta-llama/Llama-2-70b-hf", "qlora"),
    "8 x 8 A100 and RTX 4090, GLM-4.5-Air LoRA": (cards("a100-80gb,rtx4090"), "zai-org/GLM-4.5-Air", "lora"),
    "8 x 8 of three kinds, Llama-3.1-8B full": (cards(THREE), "meta-llama/Llama-3.1-8B", "full"),
    "8 x 8 of eight kinds, Llama-2-70B LoRA": (cards(EIGHT), "meta-llama/Llama-2-70b-hf", "lora"),
    "8 x 8 of three kinds, Llama-2-70B full (no room)": (
        cards("rtx4090,rtx3060,rtx3090"),
        "meta-llama/Llama-2-70b-hf",
        "full",
    ),
    "2 x 8 A100, GLM-4.5-Air LoRA": ("8xa100-80gb,8xa100-80gb", "zai-org/GLM-4.5-Air", "lora"),
}
LIMITS_S = {"8 unlike": 1.0, "8 x 8": 2.0}
"""The bar, by how the name of a case begins."""
NO_ROOM = "no room"
DECIDE = """
import sys, time
from pathlib import Path
from tests.unit.planner.worlds import query, world
import dataclasses
from gangline.planner.decision import decide
from gangline.planner.ways_out import ways_out
from gangline.decide.hosts import SpeedTable
hosts, model, method = sys.argv[1:]
job = query(model, method=method, batch=240, targets=("all-linear",) if method == "full" else ("q_proj", "v_proj"))
job = dataclasses.replace(job, compute=SpeedTable(architecture=job.architecture, home=Path("nowhere")).of)
begun = time.process_time()
machines = world(hosts, wire="10gbit")
choice = decide(job, machines)
ways = ways_out(job, machines) if choice.best is None else []
print(time.process_time() - begun, "torch" in sys.modules)
"""
JOB = Path(__file__).parent.parent / "examples" / "home_lan" / "job.yaml"


def main() -> int:
    """Measure and print; the exit code says whether the bar is held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    late = False
    print("| case | decision, median (worst) | whole command |\n|---|---|---|")
    for name, (hosts, model, method) in CASES.items():
        decisions = [_decision_s(hosts, model, method) for _ in range(rounds)]
        commands = [_command_s(hosts, model, method) for _ in range(rounds)]
        median = statistics.median(decisions)
        limit_s = next((limit_s for begin, limit_s in LIMITS_S.items() if name.startswith(begin)), math.inf)
        late = late or (NO_ROOM not in name and median >= limit_s)
        print(f"| {name} | {median:.2f} ({max(decisions):.2f}) s | {statistics.median(commands):.2f} s |")
    return int(late)


def _decision_s(hosts: str, model: str, method: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", DECIDE, hosts, model, method], capture_output=True, text=True, check=True
    )
    seconds, with_torch = done.stdout.split()
    assert with_torch == "False", "planning imported torch"
    return float(seconds)


def _command_s(hosts: str, model: str, method: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["plan", str(JOB), f"method.kind={method}", "batch=240", "--model", model, "--hosts", hosts, "--json"]
    if method == "full":
        words = ["plan", str(JOB), "method=full", "batch=240", "--model", model, "--hosts", hosts, "--json"]
    done = subprocess.run([sys.executable, "-m", "gangline.cli.main", *words], capture_output=True, check=False)
    assert done.returncode in {0, 6}, done.stderr.decode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
