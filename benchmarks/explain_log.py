"""How fast `gangline explain FILE` reads logs: MB per second of processor time, and the memory that it takes.

    python -m benchmarks.explain_log [--megabytes 50]
    python -m benchmarks.explain_log --damaged 10000

The logs are made from a seed: lines of healthy steps; one real excerpt of every known failure, over and over, with
other numbers; lines that are all different words; lines that begin as known ones do and go on otherwise, which cost the
most. Each is read by a process of its own. `--damaged`: so many logs of real excerpts that are cut, doubled, mixed and
have bytes that are no text: how many could not be read, and the slowest one.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from gangline.diagnose.corpus import known_failures
from gangline.diagnose.log_search import LogSearch
from gangline.diagnose.signatures import head_of
from gangline.report.log_answer import read_log
from tests.unit.diagnose.excerpts import excerpts
from tests.unit.diagnose.lines import LINES

WORDS = 40_000


def healthy(dice: random.Random) -> Iterator[str]:
    """Steps of a training that goes well."""
    for step in range(1 << 60):
        yield (
            f"2026-11-23 09:{step // 60 % 60:02}:{step % 60:02} INFO trainer.py:{step % 900} step {step}/400000  "
            f"loss {dice.random() * 5:.4f}  grad_norm {dice.random():.3f}  tokens/s {dice.random() * 20_000:.0f}"
        )


def failing(dice: random.Random) -> Iterator[str]:
    """Every line of every excerpt, in any order, with a time before it."""
    lines = [*LINES.values()]
    lines += [
        line for rows in excerpts().values() for row in rows.values() for line in row["seen"].strip().splitlines()
    ]
    while True:
        yield f"{dice.randrange(10**9)} [rank{dice.randrange(64)}]: {dice.choice(lines)}"


def words(dice: random.Random) -> Iterator[str]:
    """Lines of words in any order: no two are alike."""
    known = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=dice.randrange(3, 11))) for _ in range(WORDS)]
    while True:
        yield " ".join(dice.choices(known, k=14))


def nearly(dice: random.Random) -> Iterator[str]:
    """Lines with the beginnings of several known failures, which then go on otherwise."""
    heads = [head_of(pattern) for signature in known_failures().values() for pattern in signature.patterns]
    while True:
        yield " and ".join(dice.choices(heads, k=3)) + f" nothing {dice.randrange(10**9)}"


LOGS = {
    "healthy steps": healthy,
    "a known line in every line": failing,
    "words in any order": words,
    "nearly known words in every line": nearly,
}


def main() -> None:
    """Print the table, or read one log and print its row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--read", type=Path, help="read this log: what each row's process does")
    parser.add_argument("--damaged", type=int, default=0, metavar="N", help="read N damaged logs instead")
    arguments = parser.parse_args()
    if arguments.damaged:
        read_damaged(arguments.damaged)
        return
    if arguments.read is not None:
        read_log(arguments.read.with_name("nothing"))
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        read_log(arguments.read)
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sys.stdout.write(f"{time.process_time() - begun:.2f} s | {most / 1024:.0f} MiB ({(most - before) / 1024:+.0f})")
        return
    sys.stdout.write("| log | size | processor time | memory (by the log) |\n|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "nothing").write_text("nothing\n")
        for name, lines in LOGS.items():
            path = Path(folder) / "train.log"
            write(path, lines(random.Random(0)), int(arguments.megabytes * 1e6))
            command = [sys.executable, "-m", "benchmarks.explain_log", "--read", str(path)]
            told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
            sys.stdout.write(f"| {name} | {path.stat().st_size / 1e6:.0f} MB | {told} |\n")
            sys.stdout.flush()


def damaged(dice: random.Random, texts: list[bytes]) -> bytes:
    """A log of parts of several excerpts, in which bytes were exchanged, taken out or repeated."""
    parts = []
    for text in dice.choices(texts, k=dice.randrange(1, 6)):
        begin = dice.randrange(len(text))
        parts.append(text[begin : begin + dice.randrange(1, len(text) + 1)] * dice.choice((1, 1, 1, 2, 50)))
    log = bytearray(dice.choice((b"\n", b"", b"\r", b" ", b"\x1b[31m")).join(parts))
    for _ in range(dice.randrange(1 + len(log) // 20)):
        log[dice.randrange(len(log))] = dice.randrange(256)
    return bytes(log)


def read_damaged(count: int) -> None:
    """Print how many of so many damaged logs cannot be read, and how long the slowest of them took."""
    dice = random.Random(0)
    texts = [row["seen"].encode() for rows in excerpts().values() for row in rows.values()]
    LogSearch().feed(b"the first one makes the tables\n" * 50)
    failed, slowest = 0, 0.0
    for _ in range(count):
        log, begun = damaged(dice, texts), time.process_time()
        try:
            search = LogSearch()
            search.feed(log)
            search.finish()
        except Exception:  # noqa: BLE001 - any of them is a failure to count
            failed += 1
            sys.stdout.write(f"{traceback.format_exc()}\n{log!r}\n")
        slowest = max(slowest, time.process_time() - begun)
    sys.stdout.write(f"{count:,} damaged logs, {failed} not read; the slowest: {slowest:.2f} s of processor time\n")


def write(path: Path, lines: Iterator[str], size: int) -> None:
    """So many bytes of lines."""
    with path.open("w", encoding="utf-8") as stream:
        while stream.tell() < size:
            stream.write("\n".join(islice(lines, 2000)) + "\n")


if __name__ == "__main__":
    main()
