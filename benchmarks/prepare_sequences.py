"""Random sequences of `gangline prepare` on real hosts, with kills and changes by others: is anybody ever locked out?

    python -m benchmarks.prepare_sequences --out prepare_sequences.jsonl --cases 200     # as root, for the lab

Each is 3 to 6 random acts (`tests/lab/prepare_sequences.py`) on lab hosts of its own, each with its own /etc and a real
sshd: one host, or every fourth time two. After each act a new login has to work, no line or right of others may be
lost, and the journal has to be true; at the end all is taken back and compared. Some go on side by side: mostly they
wait.

One JSON line per sequence; a file that has lines already is continued. Exit code 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from tests.lab.namespaces import LabFailed
from tests.lab.prepare_sequences import PrepareSequence

ACTS = (3, 6)


def play(number: int) -> dict[str, Any]:
    """One sequence; what was done in it, and what was wrong."""
    begun, wrong, said, counts = time.monotonic(), [], [], {}
    num_hosts, num_acts = 2 if number % 4 == 1 else 1, random.Random(f"acts {number}").randint(*ACTS)
    try:
        with PrepareSequence(number, num_hosts=num_hosts) as sequence:
            said, counts = sequence.said, sequence.counts
            sequence.play(num_acts)
            sequence.end()
    except (AssertionError, LabFailed, OSError, TimeoutExpired, ValueError) as error:
        wrong = [f"{type(error).__name__}: {error}"[:4000]]
    return {
        "case": number,
        "hosts": num_hosts,
        "acts": said,
        "counts": dict(counts),
        "seconds": round(time.monotonic() - begun, 1),
        "load": round(os.getloadavg()[0], 1),
        "wrong": wrong,
    }


def summary(lines: Iterable[dict[str, Any]]) -> str:
    """All sequences so far, in a line."""
    lines = list(lines)
    counts: dict[str, int] = {}
    for line in lines:
        for name, number in line["counts"].items():
            counts[name] = counts.get(name, 0) + number
    acts = sum(len(line["acts"]) for line in lines)
    words = ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
    bad = sum(bool(line["wrong"]) for line in lines)
    return f"{len(lines)} sequences, {acts} acts, {bad} wrong; {words}"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin none after so long")
    asked = parser.parse_args()
    done = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    numbers = [number for number in range(asked.cases) if number not in {line["case"] for line in done}]
    end = time.monotonic() + 60 * asked.minutes
    with ProcessPoolExecutor(max_workers=asked.at_once) as pool:
        waiting = []
        while numbers or waiting:
            while numbers and len(waiting) < asked.at_once and time.monotonic() < end:
                waiting.append(pool.submit(play, numbers.pop(0)))
            if not waiting:
                break
            for each in [each for each in waiting if each.done()]:
                waiting.remove(each)
                done.append(each.result())
                with asked.out.open("a") as out:
                    out.write(json.dumps(done[-1]) + "\n")
            time.sleep(0.2)
    sys.stdout.write(summary(done) + "\n")
    return 1 if any(line["wrong"] for line in done) else 0


if __name__ == "__main__":
    sys.exit(main())
