"""The speed table: gangline's loop beside TRL with Liger's kernels and HF Trainer, in minutes on one GPU.

    python -m benchmarks.speed_table --seconds 170                     as many rows as fit, in the order of worth
    python -m benchmarks.speed_table --rows 1b-lora-2048 --rounds 2    these rows, each side twice
    python -m benchmarks.speed_table --rows 1b-lora-2048 --profile DIR and what our side does on the GPU, as a text file
    python -m benchmarks.speed_table --table tiny                      the code paths of all rows, on processors

Packages are imported once, before anything uses the GPU; each measurement is a process that is forked from there. Each
side draws the same weights on the GPU. Sides take turns within a row; all rows are measured once before any is measured
again. Each measurement is one JSON line in --out, also one that failed, and a file that has lines is continued.

All sides: the same rows, micro-batches, recomputation and fused AdamW. HF Trainer and TRL attend by torch's `sdpa`
with a mask of documents, which is what they have where flash-attn is not installed.

Exit status: 1 where a measurement failed, no time was left for one, or two sides of a row have not the same losses. A
lack of memory of another side than ours is a result.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.trainer import ROOT, load_per_core, missing, versions
from benchmarks.trainer_cases import SIDES, TABLES, Case
from benchmarks.trainer_report import speed_markdown

PACKAGES = (
    *("torch", "transformers", "peft", "transformers.models.llama.modeling_llama", "torch.utils.tensorboard"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe"),
    *("transformers.trainer", "trl.trainer.sft_trainer", "liger_kernel.transformers", "bitsandbytes", "datasets"),
    *("gangline.worker.loop", "gangline.worker.session", "benchmarks.trainer_measure", "benchmarks.trainer_profile"),
)
DRIVER = "/dev/nvidia-uvm"
"""A process has it open once CUDA is in use; then no child can use the GPU."""
LIMIT_FACTOR = 6
"""A measurement is killed that takes so many times as long as is expected, or 120 s."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what --out lacks, and print the table."""
    options = _parser().parse_args(argv)
    until = time.monotonic() + options.seconds
    _quiet()
    cases = [case for case in TABLES[options.table] if not options.rows or case.name in options.rows]
    with tempfile.TemporaryDirectory(prefix="gangline-table-", dir=_memory_folder()) as name:
        children = Children(Path(name), until=until)
        lines, is_whole = Lines(options.out, again=options.again), True
        for number in range(1, options.rounds + 1):
            for case in cases:
                for side in _sides(case, options.sides, number):
                    if not lines.has(case, side, number):
                        is_whole &= _measure(children, lines, (case, side, number))
                if number == 1 and options.profile and children.has_time(case):
                    print(children.profile(case, options.profile), flush=True)
    found = lines.of(cases)
    table = speed_markdown(found) if found else "nothing was measured"
    print("\n" + table)
    return int(not is_whole or "invalid: " in table or any(map(failed, found)))


def failed(line: dict[str, Any]) -> bool:
    """Whether a line shows a failure, and not what a side needs more memory for than there is."""
    return "error" in line and (line["side"].startswith("ours") or "OutOfMemoryError" not in line["error"])


def _sides(case: Case, asked: Sequence[str] | None, number: int) -> Sequence[str]:
    """The sides of a row in the order of a round: the other way round in every second one."""
    chosen = asked or case.sides
    return chosen if number % 2 else chosen[::-1]


def _measure(children: Children, lines: Lines, turn: tuple[Case, str, int]) -> bool:
    """Measure a side of a row in a round; False where that takes more time than is left."""
    case, side, number = turn
    if (reason := missing(case, side)) is not None:
        print(f"skipped  {case.name} {side}: {reason}", flush=True)
        return True
    if not children.has_time(case):
        print(
            f"left     {case.name} {side}: about {case.expected_s:.0f} s; {children.left_s():.0f} s are left",
            flush=True,
        )
        return False
    started, load = time.monotonic(), round(load_per_core(), 2)
    figures = children.call("measure", case, side)
    wall_s = round(time.monotonic() - started, 1)
    lines.add(
        {
            "case": case.name,
            "side": side,
            "round": number,
            "steps": case.steps,
            **figures,
            "wall_s": wall_s,
            "load": load,
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": _commit(),
            "versions": versions(),
        }
    )
    told = figures.get("error") or f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['peak_bytes'] / 2**30:.1f} GiB"
    print(f"{case.name} round {number} {side}: {told}; {wall_s:.0f} s with all preparation", flush=True)
    return True


class Children:
    """Processes that measure, forked from this one, or fresh ones where importing has begun to use the GPU."""

    def __init__(self, folder: Path, *, until: float) -> None:
        """folder: for models' configurations and rows. until: when the last one ends, by the monotonic clock."""
        self._folder, self._until = folder, until
        self._context: Any = None

    def left_s(self) -> float:
        """Seconds up to the deadline."""
        return max(0.0, self._until - time.monotonic())

    def has_time(self, case: Case) -> bool:
        """Whether a side of a row is likely to end before the deadline."""
        return self.left_s() >= case.expected_s

    def profile(self, case: Case, folder: Path) -> str:
        """Profile our side into a file; what to tell about it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"profile-{case.name}.txt"
        return self.call("profile", case, str(path)).get("error") or f"{case.name}: {path}"

    def call(self, kind: str, case: Case, argument: str) -> dict[str, Any]:
        """What a child gives back; `error` in it where it failed, was killed or took too long."""
        if self._context is None:
            self._context = multiprocessing.get_context(prepare_imports())
        receiver, sender = self._context.Pipe(duplex=False)
        child = self._context.Process(target=_child, args=(kind, case, argument, self._folder, sender), daemon=True)
        child.start()
        sender.close()
        limit_s = min(self.left_s(), max(120.0, LIMIT_FACTOR * case.expected_s))
        try:
            if not receiver.poll(limit_s):
                return {"error": f"stopped after {limit_s:.0f} s"}
            found: dict[str, Any] = receiver.recv()
            return found
        except EOFError:
            child.join(5)
            return {"error": f"its process ended with {child.exitcode}"}
        finally:
            child.kill()
            child.join()


def _child(kind: str, case: Case, argument: str, folder: Path, sender: Connection) -> None:
    """Measure or profile, and send what came of it. Ends without tidying up: the GPU's memory goes with the process."""
    code = 0
    try:
        warnings.filterwarnings("ignore")
        measuring = importlib.import_module("benchmarks.trainer_measure")
        measuring.prepare(folder, case)
        if kind == "profile":
            sender.send(importlib.import_module("benchmarks.trainer_profile").profile(case, folder, Path(argument)))
        else:
            sender.send(measuring.measure(case, argument, folder))
    except BaseException as error:  # noqa: BLE001 - one failure must not end the others
        traceback.print_exc()
        text = " ".join(str(error).split())[:300]
        sender.send({"error": f"{type(error).__name__}: {text}"})
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def prepare_imports() -> str:
    """Import all that sides need; `fork`, or `spawn` where that has begun to use the GPU."""
    started, guilty = time.monotonic(), None
    sys.modules.setdefault("deepspeed", None)  # type: ignore[arg-type]  # no side uses it, and HF would import it
    with _capability_by_tool():
        for name in PACKAGES:
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(f"not imported beforehand: {name} ({error})", flush=True)
            if guilty is None and _uses_gpu():
                guilty = name
    seconds = time.monotonic() - started
    print(f"imported in {seconds:.0f} s" + (f"; {guilty} has begun to use the GPU" if guilty else ""), flush=True)
    return "spawn" if guilty else "fork"


def _uses_gpu() -> bool:
    folder = Path("/proc/self/fd")
    for link in folder.iterdir():
        try:
            if link.readlink() == Path(DRIVER):
                return True
        except OSError:  # the folder's own
            continue
    return False


@contextmanager
def _capability_by_tool() -> Iterator[None]:
    """The driver's tool says a GPU's compute capability, not CUDA: bitsandbytes asks for it when it is imported."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    asked = subprocess.run(
        [tool, "--query-gpu=compute_cap", "--format=csv,noheader"], check=False, capture_output=True, text=True
    )
    words = asked.stdout.split()
    import torch

    if not words or words[0].count(".") != 1:
        yield
        return
    major, minor = map(int, words[0].split("."))
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=(major, minor)):
        yield


class Lines:
    """The file of lines."""

    def __init__(self, path: Path, *, again: bool) -> None:
        """again: failures do not count as done."""
        self._path = path
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = [json.loads(text) for text in texts]
        self._lines = [line for line in lines if not (again and failed(line))]

    def has(self, case: Case, side: str, number: int) -> bool:
        """Whether that was measured."""
        return any((line["side"], line["round"]) == (side, number) for line in self.of([case]))

    def of(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Lines of these rows, with as many steps."""
        wanted = {(case.name, case.steps) for case in cases}
        return [line for line in self._lines if (line["case"], line["steps"]) in wanted]

    def add(self, line: dict[str, Any]) -> None:
        """Append one."""
        self._lines.append(line)
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")


def _quiet() -> None:
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else asking whether there is a GPU begins to use it
    defaults = {"CUDA_VISIBLE_DEVICES": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for name, value in {**defaults, "OPENBLAS_NUM_THREADS": "1"}.items():
        os.environ.setdefault(name, value)


def _memory_folder() -> str | None:
    folder = Path("/dev/shm")
    return str(folder) if os.access(folder, os.W_OK) else None


def _commit() -> str:
    asked = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(asked, check=False, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, default="card")
    names = [case.name for table in TABLES.values() for case in table]
    parser.add_argument("--rows", nargs="+", choices=names, metavar="ROW", help="these rows; see trainer_cases.py")
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="these sides instead of each row's own")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=170.0, help="everything ends by then (default 170)")
    parser.add_argument("--out", type=Path, default=Path("speed_table.jsonl"))
    parser.add_argument("--again", action="store_true", help="measure once more what has failed")
    parser.add_argument(
        "--profile", type=Path, metavar="DIR", help="profile our side of each row, too, in its first round"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
