"""How fast `gangline explain FILE` reads logs: MB of CPU time per second, one row per kind of log.

    python -m benchmarks.explain_log

The logs are made from a seed: lines of healthy steps; one real line of every known failure, over and over; lines that
begin as known ones do and go on otherwise, which cost the most.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from gangline.report.explanation import read_log
from tests.unit.diagnose.lines import LINES

ROUNDS = 3


def logs() -> dict[str, str]:
    """The text of each kind of log."""
    dice = random.Random(0)
    steps = (
        f"2026-11-23 09:00:12 INFO trainer.py:{row % 900} step {row}/400000  loss {dice.random() * 5:.4f}"
        f"  grad_norm {dice.random():.3f}  tokens/s {dice.random() * 20_000:.0f}"
        for row in range(40_000)
    )
    near = "step 1/400  loss 6.25  connectFullMesh failed remote  getaddrinfo  Killed by nobody\n"
    return {
        "healthy steps": "\n".join(steps),
        "a known line in every line": "\n".join(dice.choice(list(LINES.values())) for _ in range(20_000)),
        "nearly known words in every line": near * 20_000,
        "one line of nearly known words": "connectFullMesh failed " * 60_000,
    }


def main() -> None:
    """Print the table."""
    print("| log | size | CPU time (best of 3) | speed |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.log"
        for name, text in logs().items():
            path.write_text(text)
            times = []
            for _ in range(ROUNDS):
                before = time.process_time()
                read_log(path)
                times.append(time.process_time() - before)
            size = path.stat().st_size / 1e6
            print(f"| {name} | {size:.1f} MB | {min(times):.2f} s | {size / min(times):.1f} MB/s |")


if __name__ == "__main__":
    main()
