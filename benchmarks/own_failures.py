"""Failures of a script of the user's own, planted one by one: does `gangline explain` name the right one first?

    python -m benchmarks.own_failures --out own.jsonl                     # two local hosts; about 40 minutes
    python -m benchmarks.own_failures --out own.jsonl --minutes 15        # go on another time
    python -m benchmarks.own_failures --out own.jsonl --only asleep computes

Three ranks on two hosts of this one computer, real torchrun and gloo on the processor; the script is
own_failing_script.py, which knows nothing of gangline. Its collectives give up after 10 s, and gangline ends it once it
is silent for 25 s. Rank 2, alone on its host, fails (a case that ends in `+` has rank 1, which shares its host with
rank 0). A case is right if the first cause names the rank that failed, and no other, and has the words that tell the
failure, and of a rank that hangs the function in which it stands. Of a failure of all ranks it has the words. Blamed is
a rank that only waited, and is named as the cause. Beside it stands the rank that torchrun calls the root cause. One
JSON line per case. Exit code 1 if less than 95 of 100 are right, or a rank that waited is blamed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plan_time import read
from benchmarks.scaling import commit

SCRIPT = Path(__file__).with_name("own_failing_script.py")
CLUSTER = """\
name: two
hosts:
  - {name: h0, transport: local, slots: 2}
  - {name: h1, transport: local, slots: 1}
"""
HOSTS = ("h0", "h0", "h1")
"""By rank."""
VICTIM, BESIDE = 2, 1
STALL_AFTER_S = 25
PATIENCE_S = 240.0
"""Added to what a run may be silent for."""
RIGHT = 0.95
ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+)", re.DOTALL)
Line = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What is to be told of one failure."""

    words: str = ""
    """A regular expression for the cause and its evidence."""
    place: str = ""
    """The function in which the rank stands, or crashed."""
    is_of_all: bool = False
    """No single rank is to blame."""


def _hangs(*places: str) -> dict[str, Expected]:
    return {name: Expected(place=name) for name in places}


CASES: dict[str, Expected] = {
    **_hangs("asleep", "computes", "locks", "queues", "reads_fifo", "reads_socket", "waits_for_child"),
    **_hangs("waits_for_file_lock", "holds_interpreter", "loader_hangs", "takes_sigterm", "slow_save", "monitored"),
    "stopped": Expected(words="stopped"),
    "barrier_instead": Expected(place="barrier_instead"),
    "evaluates_alone": Expected(place="evaluates_alone"),
    "receives": Expected(place="receives"),
    "skips_one": Expected(place="save"),
    "has_no_more_data": Expected(place="save"),
    "other_size": Expected(words="do not call the same collective", is_of_all=True),
    "raises": Expected(words="ValueError: no such column: text"),
    "raises_key": Expected(words="KeyError: 'text'"),
    "asserts": Expected(words="AssertionError"),
    "raises_in_chain": Expected(words=r"RuntimeError: rows\.jsonl cannot be read"),
    "nan_found": Expected(words="FloatingPointError: loss is nan"),
    "recursion": Expected(words="RecursionError"),
    "exits_3": Expected(words="exit code 3"),
    "exits_with_words": Expected(words="unknown key: lr_rate"),
    "exits_0": Expected(words="(?i)exit code 0|before the others"),
    "leaves_0": Expected(words="(?i)exit code 0|before the others"),
    "leaves_7": Expected(words="exit code 7"),
    "killed": Expected(words="SIGKILL"),
    "crashes": Expected(words="SIGSEGV", place="crashes"),
    "aborts": Expected(words="SIGABRT", place="aborts"),
    "bus_error": Expected(words="SIGBUS", place="bus_error"),
    "terminated": Expected(words="SIGTERM", place="terminated"),
    "interrupted": Expected(words="KeyboardInterrupt|SIGINT"),
    "no_memory": Expected(words="MemoryError|ran out of memory"),
    "no_tensor_memory": Expected(words="can't allocate memory|ran out of memory|not enough memory"),
    "no_descriptors": Expected(words="Too many open files"),
    "disk_full": Expected(words="No space left on device"),
    "no_file": Expected(words=r"FileNotFoundError.*/data/tokens\.bin"),
    "no_permission": Expected(words="Permission denied"),
    "port_taken": Expected(words="Address already in use"),
    "loader_raises": Expected(words="KeyError"),
    "loader_killed": Expected(words="killed by signal: Killed"),
    "no_module": Expected(words="No module named 'flash_attn_9'"),
    "other_version": Expected(words="cannot import name 'all_reduce_of_tomorrow'"),
    "early_no_module": Expected(words="No module named 'flash_attn_9'"),
    "early_raises": Expected(words="ValueError: no such column: text"),
    "early_asleep": Expected(place="asleep"),
    "early_exit": Expected(words="(?i)exit code 0|before the others"),
    "early_wrong_interface": Expected(words="eth77"),
    "early_wrong_address": Expected(words=r"127\.0\.0\.9"),
    "all_arguments": Expected(words="unrecognized arguments", is_of_all=True),
    "all_no_gpu": Expected(words="CUDA", is_of_all=True),
    "all_asleep": Expected(words=r"asleep \(", is_of_all=True),
    "asleep+": Expected(place="asleep"),
    "reads_fifo+": Expected(place="reads_fifo"),
    "takes_sigterm+": Expected(place="takes_sigterm"),
    "stopped+": Expected(words="stopped"),
    "skips_one+": Expected(place="save"),
    "raises+": Expected(words="ValueError: no such column: text"),
    "killed+": Expected(words="SIGKILL"),
    "crashes+": Expected(words="SIGSEGV"),
    "exits_0+": Expected(words="(?i)exit code 0|before the others"),
    "leaves_7+": Expected(words="exit code 7"),
}


class OwnWorld:
    """A home of gangline, a cluster and a project on this computer."""

    def __init__(self, folder: Path, *, stall_after_s: int = STALL_AFTER_S) -> None:
        self._folder = folder
        self._stall_after_s = stall_after_s
        self._env = {**os.environ, "GANGLINE_HOME": str(folder / "home"), "OMP_NUM_THREADS": "1"}
        (folder / "project").mkdir(parents=True)
        (folder / "project" / "train.py").write_bytes(SCRIPT.read_bytes())
        (folder / "cluster.yaml").write_text(CLUSTER)

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`gangline WORDS`, and its end."""
        return subprocess.run(
            [str(Path(sys.executable).with_name("gangline")), *words],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=PATIENCE_S + 2 * self._stall_after_s,
            check=False,
        )

    def fails(self, kind: str, rank: int) -> tuple[str, str]:
        """Run the script and let a rank fail; the run and all that was printed."""
        silent = ("--stall-after", f"{self._stall_after_s}s", "--on-stall", "stop")
        options = ("--cluster", "cluster.yaml", "--dir", "project", *silent)
        done = self.types("run", *options, "--", "train.py", kind, str(rank))
        said = done.stdout + done.stderr
        found = re.search(r"run ([a-z]+-[a-z]+-\d+) started", said) or re.search(r"\b([a-z]+-[a-z]+-\d+)\b", said)
        if found is None:
            raise LookupError(said[-2000:])
        return found[1], said

    def explained(self, run: str) -> Line:
        """What `explain` says of it, for programs."""
        answer: Line = json.loads(self.types("explain", run, "--json").stdout)
        return answer

    def torchrun_says(self) -> list[int]:
        """The ranks that torchrun calls the root cause, on any host."""
        consoles = (self._folder / "home").glob("hosts/*/runs/*/attempts/1/*/console.log")
        newest = sorted(consoles, key=lambda path: path.stat().st_mtime)[-len(set(HOSTS)) :]
        found = [ROOT_CAUSE.search(path.read_text(errors="replace")) for path in newest]
        return sorted(int(match[1]) for match in found if match)


def line_of(case: str, rank: int | None, cause: Mapping[str, Any], *, torchrun: Any, begun: float) -> Line:
    """What was seen of one case. rank: the one to be named; cause: what `explain` says; begun: by monotonic()."""
    return {
        "case": case,
        "rank": rank,
        "named": cause.get("rank"),
        "host": cause.get("host"),
        "what": cause.get("what"),
        "torchrun": torchrun,
        "seconds": round(time.monotonic() - begun, 1),
        "commit": commit(),
    }


def play(world: OwnWorld, case: str) -> Line:
    """One failure, and what is said of it."""
    rank, expected, begun = (BESIDE if case.endswith("+") else VICTIM), CASES[case], time.monotonic()
    run, said = world.fails(case.rstrip("+"), rank)
    answer = world.explained(run)
    cause = answer["attempts"][-1]["cause"] or {}
    line = line_of(case, None if expected.is_of_all else rank, cause, torchrun=world.torchrun_says(), begun=begun)
    line["wrong"] = judge(expected, rank, cause)
    # a rank that failed of itself may be named for a failure of all
    line["blamed"] = not expected.is_of_all and cause.get("rank") not in {None, rank}
    if line["wrong"]:
        line |= {"run": run, "seen": str(cause.get("seen"))[-3000:], "said": said[-1500:]}
    return line


def judge(
    expected: Expected, rank: int, cause: Line, *, hosts: Sequence[str] = HOSTS, is_of_host: bool = False
) -> list[str]:
    """What is wrong with the first cause. hosts: by rank. is_of_host: a host is to be named, and no rank need be."""
    what, seen = str(cause.get("what", "")), str(cause.get("seen", ""))
    wrong = []
    is_named = cause.get("host") == hosts[rank] and (is_of_host or cause.get("rank") == rank)
    if not expected.is_of_all and not is_named:
        wrong.append("rank")
    if expected.words and not re.search(expected.words, f"{what}\n{seen}"):
        wrong.append("words")
    if expected.place and not re.search(rf"\b{expected.place} \(train\.py:\d+\)", what):
        wrong.append("place")
    return wrong


def report(lines: Sequence[Line]) -> int:
    """The sum; 1 if a bar is missed."""
    right = sum(not line["wrong"] for line in lines)
    blamed = [line["case"] for line in lines if line.get("blamed")]
    of_one = [line for line in lines if line.get("rank") is not None]
    theirs = sum(line.get("torchrun") == [line["rank"]] for line in of_one)
    for line in lines:
        if line["wrong"]:
            print(line["case"], line["wrong"], line.get("named"), line.get("what"))
    print(f"\n{right} of {len(lines)} right; a rank that waited was blamed in {len(blamed)}: {' '.join(blamed)}")
    print(f"torchrun's root cause is that rank alone in {theirs} of the {len(of_one)} that one rank brought about")
    return 1 if not lines or blamed or right < RIGHT * len(lines) else 0


def main() -> int:
    """Play what the file does not have yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=sorted(CASES))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    parser.add_argument(
        "--stall-after", type=int, default=STALL_AFTER_S, metavar="SECONDS", help="more on a computer with a high load"
    )
    parser.add_argument("--keep", type=Path, help="a new folder in which all records stay")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    done = {line["case"] for line in read(arguments.out)}
    wanted = [case for case in arguments.only or CASES if case not in done]
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.keep or Path(made)
        world = OwnWorld(folder, stall_after_s=arguments.stall_after)
        for case in wanted:
            if time.monotonic() > deadline:
                break
            try:
                line = play(world, case)
            except (OSError, ValueError, LookupError, subprocess.SubprocessError) as error:
                line = {"case": case, "wrong": [f"{type(error).__name__}: {error}"]}
            with arguments.out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print(case, line["wrong"], line.get("named"), line.get("what"), line.get("seconds"), flush=True)
    return report(read(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
