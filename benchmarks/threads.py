"""How steady are steps on this computer with one or two OpenMP threads, that spin or sleep while they wait?

    python -m benchmarks.threads --loops 0 --out threads.jsonl      # and with --loops 4, say: other busy programs

Each setting is a process of its own: forward and backward of a small network on the CPU, tiny layers and larger ones,
in turns. Printed: median, 99th percentile and worst step in ms, and worst / median.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.busy_starts import busy

STEP = """
import sys, time, json, torch
hidden, rows, steps = map(int, sys.argv[1:])
net = torch.nn.Sequential(*[m for _ in range(8) for m in (torch.nn.Linear(hidden, hidden), torch.nn.GELU())])
x = torch.randn(rows, hidden)
times = []
for _ in range(steps):
    begun = time.perf_counter()
    net(x).square().mean().backward()
    times.append(1000 * (time.perf_counter() - begun))
print(json.dumps(sorted(times[10:])))
"""
SETTINGS = {
    "1": {},
    "2 spin": {"OMP_WAIT_POLICY": "ACTIVE"},
    "2 default": {},
    "2 sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
}
SIZES = {"tiny": (32, 64, 400), "small": (256, 512, 200), "medium": (1024, 512, 40)}
"""Width, rows, steps."""


def main() -> int:
    """Measure every setting and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=0, metavar="PROCESSES", help="that use up the processors")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    print(f"{'size':8}{'threads':12}{'median':>10}{'p99':>10}{'worst':>10}{'worst/median':>14}  ms")
    with busy(arguments.loops):
        for size, numbers in SIZES.items():
            for setting, variables in SETTINGS.items():
                times = _times(numbers, {"OMP_NUM_THREADS": setting[0], **variables})
                median, p99, worst = times[len(times) // 2], times[int(0.99 * len(times))], times[-1]
                row = {"size": size, "threads": setting, "median_ms": median, "p99_ms": p99, "worst_ms": worst}
                more = {"loops": arguments.loops, "load": os.getloadavg()[0], "time": time.time()}
                with arguments.out.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({**row, **more}) + "\n")
                print(f"{size:8}{setting:12}{median:10.2f}{p99:10.2f}{worst:10.2f}{worst / median:14.1f}", flush=True)
    return 0


def _times(numbers: tuple[int, int, int], variables: dict[str, str]) -> list[float]:
    words = [sys.executable, "-c", STEP, *map(str, numbers)]
    said = subprocess.run(words, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(said.stdout)
    return found


if __name__ == "__main__":
    sys.exit(main())
