"""Tokens per second and peak memory of gangline's loop against HF Trainer, on the same model, rows and threads.

    python -m benchmarks.trainer                       both CPU cases, 5 rounds, about 5 minutes on 2 cores
    python -m benchmarks.trainer --suite tiny          the code paths of all cases, in a minute

Every measurement is a process of its own; the sides alternate within a round. Each gives one JSON line in --out, and
a file that has lines already is continued. The last thing printed is a table in Markdown. Exit status: 1 when the
losses of two sides differ (their figures then mean nothing), 2 when the machine is too busy to measure.
On a GPU: `benchmarks.speed_table`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.trainer_cases import CASES, SIDES, SUITES, Case
from benchmarks.trainer_report import LossesDiffer, check_losses, markdown

ROOT = Path(__file__).parents[1]
MAX_OTHERS = 0.1
"""Share of all cores that other programs may take during a measurement that is for the record."""
BUSY = 2
"""Exit status of a run that did not measure because the machine was not quiet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to measure."""

    folder: Path
    out: Path
    threads: int
    loaded: bool


class OtherPrograms:
    """What other programs take of all cores from now on: busy time of the machine less that of our children."""

    def __init__(self) -> None:
        self._start_s, self._busy_s = time.perf_counter(), self._busy()

    def share(self) -> float:
        """Between 0 and 1; 0 where the system does not tell."""
        wall_s = time.perf_counter() - self._start_s
        return max(0.0, (self._busy() - self._busy_s) / wall_s / (os.cpu_count() or 1))

    @staticmethod
    def _busy() -> float:
        # user, nice, system, idle, iowait, irq, softirq, steal: in clock ticks, summed over the cores
        ticks = [int(word) for word in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return busy_s - children.ru_utime - children.ru_stime


def main(argv: list[str] | None = None) -> int:
    """Measure what is missing from --out, and print the table."""
    options = _parser().parse_args(argv)
    loaded = load_per_core() > options.max_load
    if loaded and not options.loaded_ok:
        print(
            f"not measuring: the load of the last minute is {load_per_core():.2f} per core, more than "
            f"{options.max_load}. Wait, or add --loaded-ok, which marks the figures as not for the record."
        )
        return BUSY
    cases = _chosen(options)
    with _workspace(options.work) as folder:
        settings = Settings(folder=folder, out=options.out, threads=options.threads, loaded=loaded)
        try:
            for case in cases:
                _run_case(case, rounds=options.rounds, settings=settings)
        except LossesDiffer as error:
            print(f"invalid: {error}")
            return 1
    lines = _lines_of(options.out, cases, threads=options.threads)
    print("\n" + markdown(lines) if lines else "nothing was measured")
    return 0


def load_per_core() -> float:
    """Load of the last minute over the cores that this process may use."""
    return os.getloadavg()[0] / len(os.sched_getaffinity(0))


def missing(case: Case, side: str) -> str | None:
    """Why a side of a case cannot be measured here, or None."""
    if case.device == "cuda" and not _has_cuda():
        return "no CUDA device on this machine"
    if case.device == "cpu" and side.endswith("liger"):
        return "Liger's kernels need a GPU"
    wanted = {"trl": side.startswith("trl"), "liger_kernel": side.endswith("liger"), "peft": case.method != "full"}
    wanted["bitsandbytes"] = case.method == "qlora"
    absent = [name for name, is_wanted in wanted.items() if is_wanted and find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


def _run_case(case: Case, *, rounds: int, settings: Settings) -> None:
    reasons = {side: missing(case, side) for side in case.sides}
    for side, reason in reasons.items():
        if reason is not None:
            print(f"skipped {case.name} {side}: {reason}")
    sides = [side for side in case.sides if reasons[side] is None]
    done = {(line["side"], line["round"]) for line in _lines_of(settings.out, [case], threads=settings.threads)}
    todo = [(number, side) for number in range(1, rounds + 1) for side in sides if (side, number) not in done]
    if todo:
        _child(case, "prepare", settings)
    for number, side in todo:
        _measure(case, side, round_number=number, settings=settings)
    if measured := _lines_of(settings.out, [case], threads=settings.threads):
        check_losses(measured)


def _measure(case: Case, side: str, *, round_number: int, settings: Settings) -> None:
    load, others = round(load_per_core(), 2), OtherPrograms()
    figures = json.loads(_child(case, side, settings).splitlines()[-1])
    share = others.share()
    line = {
        "case": case.name,
        "side": side,
        "round": round_number,
        "steps": case.steps,
        **figures,
        "load": load,
        "others": round(share, 3),
        "loaded": settings.loaded or share > MAX_OTHERS,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions(),
    }
    with settings.out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(line) + "\n")
    above = (line["peak_bytes"] - line["start_bytes"]) >> 20
    print(f"{case.name} round {round_number} {side}: {line['tokens_per_s']:,.0f} tokens/s, {above:,} MiB above start")


def _child(case: Case, side: str, settings: Settings) -> str:
    """Run one process; what it printed. Its error output is shown when it fails."""
    command = [sys.executable, "-m", "benchmarks.trainer_measure", case.name, str(case.steps), side]
    environment = {"CUDA_VISIBLE_DEVICES": "0"} | os.environ
    environment |= {
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if case.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [*command, str(settings.folder)], check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.stderr.write(done.stderr[-4000:])
        raise SystemExit(f"{case.name} {side} ended with {done.returncode}; lines so far are in {settings.out}")
    return done.stdout


def _lines_of(out: Path, cases: list[Case], *, threads: int) -> list[dict[str, Any]]:
    """Lines of these cases with as many steps and threads."""
    wanted = {(case.name, case.steps) for case in cases}
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    return [line for line in lines if (line["case"], line["steps"]) in wanted and line["threads"] == threads]


def _chosen(options: argparse.Namespace) -> list[Case]:
    cases = [CASES[name] for name in options.cases] if options.cases else list(SUITES[options.suite])
    if options.sides:
        cases = [dataclasses.replace(case, sides=tuple(options.sides)) for case in cases]
    return [dataclasses.replace(case, steps=options.steps) for case in cases] if options.steps else cases


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="cpu")
    parser.add_argument("--cases", nargs="+", choices=CASES, help="these cases instead of a suite")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="these sides instead of the case's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="optimizer steps, the untimed ones included")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("trainer.jsonl"))
    parser.add_argument("--work", type=Path, help="keep models and rows here for the next time")
    parser.add_argument("--max-load", type=float, default=0.6, help="load per core up to which a machine is quiet")
    parser.add_argument("--loaded-ok", action="store_true", help="measure on a busy machine; marks the figures")
    return parser


@contextmanager
def _workspace(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="gangline-bench-") as name:
        yield Path(name)


def _has_cuda() -> bool:
    """Asks the driver's tool, so that this process need not import torch."""
    tool = shutil.which("nvidia-smi")
    return tool is not None and b"GPU" in subprocess.run([tool, "-L"], check=False, capture_output=True).stdout


def versions() -> dict[str, str]:
    """Of what takes part."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", "peft", "trl", "liger_kernel", "triton", "bitsandbytes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    sys.exit(main())
