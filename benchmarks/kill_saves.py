"""Kill -9 at the named points of saving, committing and retention, and look at what is left (promise 2).

    python benchmarks/kill_saves.py --times 59 --out kill_saves.jsonl

Every case: a process that saves, commits and prunes on two hosts (two folders) is ended by SIGKILL at the k-th time
that it comes to one point. Then all checkpoints are surveyed with their hashes, the choice is loaded and compared,
and another process starts from the choice and must save and commit again. One JSON line per case; a file that has
lines already is continued. Exit status 1 if any committed checkpoint was lost or a wrong one was chosen.
The cases of one point share their folders, so that later ones start among the leftovers of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from gangline.runs import checkpoints as disk
from gangline.runs.job import CheckpointJob
from gangline.runs.manifest import PART_FILE, commit_record, digest_of
from gangline.runs.retention import set_aside
from gangline.worker.checkpoint import Saver
from gangline.worker.restore import load_part

HOSTS = ("pc1", "pc2")
KEEP_LAST = 2
INTERVAL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kill."""

    point: str
    number: int
    seed: int

    @property
    def hit(self) -> int:
        """The kill comes at this arrival at the point, counted over both hosts."""
        return self.random().randint(1, 9)

    @property
    def asynchronous(self) -> bool:
        """Whether the saves of both hosts run in background threads, at the same time."""
        return self.number % 2 == 0

    def random(self) -> random.Random:
        """The same numbers for the same case."""
        return random.Random(f"{self.seed} {self.point} {self.number}")


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """The state at a step: every value tells the step."""
    return {
        "model.weight": torch.full((64, 257), float(step)),
        "model.bias": torch.full((257,), step, dtype=torch.bfloat16),
        "optimizer.step": torch.tensor(float(step)),
    }


def loss_of(step: int) -> float:
    """An evaluation loss that goes up and down, so that the best is not the last."""
    return 1.0 + (step * 7919 % 101) / 100


def train(root: Path, *, attempt: int, start: int, num_saves: int, asynchronous: bool) -> None:
    """What ranks and supervisor do with checkpoints, on both hosts; every commit is written down once it is placed."""
    description = {"attempt": attempt, "hosts": HOSTS, "num_ranks": 2, "fingerprints": {"job": "f00d"}}
    job = CheckpointJob(keep_last=KEEP_LAST, keep_best=True, asynchronous=asynchronous)
    for host in HOSTS if start else ():
        set_aside(root / host, start)  # as `gangline resume` has every host do
    savers = {host: Saver(root / host, host=host, job=job, description=description) for host in HOSTS}
    for step in range(start + INTERVAL, start + INTERVAL * num_saves + 1, INTERVAL):
        for saver in savers.values():
            saver.save(step, tensors_of(step), {"step": step, "evaluation_loss": loss_of(step)})
        parts = {}
        for host, saver in savers.items():
            saver.wait()
            if saver.failure:
                raise saver.failure
            parts[host] = (disk.part_folder(root / host, step, host) / PART_FILE).read_bytes()
        record = commit_record(parts)
        for host in HOSTS:
            disk.place_commit(root / host, record)
            journal(root, step)


def journal(root: Path, step: int) -> None:
    """Note that the commit of a step returned on a host."""
    descriptor = os.open(root / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(descriptor, f"{step}\n".encode())
    os.close(descriptor)


def kill_at(point: str, hit: int) -> Callable[[str], None]:
    """A hook that ends this process by SIGKILL at the `hit`-th arrival at `point`."""
    arrivals = 0

    def hook(name: str) -> None:
        nonlocal arrivals
        arrivals += name == point
        if arrivals == hit:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def forked(work: Callable[[], None]) -> int:
    """Run `work` in a child; its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - told, and then the process ends
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def look(root: Path) -> tuple[int, list[str]]:
    """The step a resume would start from, and what is wrong."""
    file = root / "acknowledged"
    acknowledged = sorted({int(line) for line in file.read_text().split()}) if file.exists() else []
    surveys = {host: disk.survey(root / host) for host in HOSTS}
    choice = disk.choose(surveys)
    chosen = choice.step or 0
    wrong = []
    if chosen < max(acknowledged, default=0):
        wrong.append(f"lost: committed {acknowledged[-1]}, chosen {chosen}")
    kept = set(acknowledged[-KEEP_LAST:]) | (
        {min(acknowledged, key=lambda s: (loss_of(s), -s))} if acknowledged else set()
    )
    for step in kept:
        only = {host: [entry for entry in entries if entry["step"] == step] for host, entries in surveys.items()}
        if disk.choose(only).step != step:
            wrong.append(f"lost: step {step} was committed and is not valid any more")
    for source in choice.sources:
        wrong += load_and_compare(root / source.host, chosen, source.part)
    for step, record in choice.adoptable.items():
        source = disk.choose(disk.with_record(surveys, step, record)).sources[0]
        adopt(root, step, record, source)
        wrong += load_and_compare(root / source.host, step, source.part)
        chosen = max(chosen, step)
    return chosen, wrong


def adopt(root: Path, step: int, record: bytes, source: disk.Source) -> None:
    """Give every host the record of a step that nobody lived to commit, and a whole part, as a resume does."""
    part = disk.part_folder(root / source.host, step, source.part)
    for host in HOSTS:
        own = disk.part_folder(root / host, step, host)
        copy = disk.part_folder(root / host, step, source.part)
        if not own.exists() and not copy.exists():
            shutil.copytree(part, copy)
        disk.place_commit(root / host, record)
        journal(root, step)


def load_and_compare(checkpoints: Path, step: int, part: str) -> list[str]:
    """Whether a part loads and holds the state of its step."""
    template = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(step).items()}
    folder = disk.part_folder(checkpoints, step, part)
    commit = disk.read_commit(checkpoints, step)
    # The record may be on the other host only: then the part's own description is what the record listed.
    digest = commit.parts[part] if commit else digest_of((folder / PART_FILE).read_bytes())
    state = load_part(folder, template, digest=digest)
    same = all(torch.equal(template[name], tensor) for name, tensor in tensors_of(step).items())
    return [] if same and state["step"] == step else [f"wrong: step {step} holds another state"]


def run_case(case: Case, root: Path, attempt: int) -> dict[str, object]:
    """Kill, look, go on from what was chosen, look again."""
    began_s = time.perf_counter()
    start, _ = look(root)

    def doomed() -> None:
        disk.at_point = kill_at(case.point, case.hit)
        train(root, attempt=attempt, start=start, num_saves=15, asynchronous=case.asynchronous)

    ended = forked(doomed)
    chosen, wrong = look(root)
    after = forked(lambda: train(root, attempt=attempt + 1, start=chosen, num_saves=1, asynchronous=False))
    resumed, wrong_after = look(root)
    if after != 0 or resumed != chosen + INTERVAL:
        wrong_after.append(f"the next save failed: exit {after}, chosen {resumed}")
    return {
        "point": case.point,
        "number": case.number,
        "seed": case.seed,
        "hit": case.hit,
        "asynchronous": case.asynchronous,
        "killed": ended == -signal.SIGKILL,
        "start": start,
        "chosen": chosen,
        "resumed": resumed,
        "wrong": wrong + wrong_after,
        "duration_s": round(time.perf_counter() - began_s, 3),
    }


def run_point(point: str, cases: list[Case], folder: Path | None, out: Path) -> None:
    """All cases of one point, in folders of their own."""
    root = Path(tempfile.mkdtemp(prefix="kill-saves-", dir=folder))
    try:
        for attempt, case in enumerate(cases):
            line = run_case(case, root, 2 * attempt + 1)
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
    finally:
        shutil.rmtree(root)
    print(f"{point}: {len(cases)} cases", flush=True)


def main() -> int:
    """Run what is not in the results file yet, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=59, help="kills per point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: the temporary folder)")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {(line["point"], line["number"], line["seed"]) for line in lines}
    for point in disk.POINTS:
        numbers = (n for n in range(arguments.times) if (point, n, arguments.seed) not in done)
        if cases := [Case(point=point, number=n, seed=arguments.seed) for n in numbers]:
            run_point(point, cases, arguments.folder, arguments.out)
    return report([json.loads(line) for line in arguments.out.read_text().splitlines()])


def report(lines: list[dict[str, object]]) -> int:
    """Print the sum; 1 if anything was wrong or a kill did not happen."""
    bad = [line for line in lines if line["wrong"] or not line["killed"]]
    for line in bad:
        print(json.dumps(line))
    print(f"{sum(bool(line['killed']) for line in lines)} kills at {len(disk.POINTS)} points: {len(bad)} bad cases")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
