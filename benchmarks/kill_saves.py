"""Kill -9 at the named points of saving, committing, retention and resuming, and look at what is left (promise 2).

    python -m benchmarks.kill_saves --times 29 --out kill_saves.jsonl

Hosts are folders. Three stories, and where in them a process is ended by SIGKILL:

    train        two hosts save, commit and prune; at every point of tests.saved.POINTS
    in parts     the same where each of them holds half of the state, and only both parts are a checkpoint
    last step    one of three hosts is gone; the others save the last step that they have completed, each its own, which
                 nobody commits; one of them is killed at any point of a save
    resume       the same, and they live; who resumes is killed before or after any act on a host: a survey, the record
                 with which that step is adopted, a copy of a part to a host that lacks it

Then all checkpoints are surveyed with their hashes, the choice is loaded and compared, what nobody lived to commit is
adopted, and another process starts from there and must save and commit again. One JSON line per case; a file that has
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.checkpoint_hosts import (
    IN_PARTS,
    checkpoints_of,
    compare,
    pieces_of,
    require_loadable,
    resume,
    tensors_of,
)
from gangline.errors import CheckpointError
from gangline.runs import checkpoints as disk
from gangline.runs.checkpoints import set_aside
from gangline.runs.job import CheckpointJob
from gangline.runs.manifest import PART_FILE, commit_record, digest_of
from gangline.worker.checkpoint import Saver
from tests import saved
from tests.saved import place_commit

STORIES = {"train": ("pc1", "pc2"), "last step": ("pc1", "pc2", "pc3"), "resume": ("pc1", "pc2", "pc3")}
STORIES["in parts"] = IN_PARTS
"""Story -> its hosts."""
SAVE = tuple(point for point in saved.POINTS if point.startswith("save: "))
ACTS = tuple(f"{when} a {what}" for what in ("program", "write", "copy") for when in ("before", "after"))
MOST_HITS = {"program": 4, "write": 4, "copy": 1}
"""So often a resume surely comes there: a survey on each host and a look at the part; the record on each host."""
POINTS = (
    *(("train", point) for point in saved.POINTS),
    *(("in parts", point) for point in saved.POINTS),
    *(("last step", point) for point in (*SAVE, "retention: begin", "retention: end")),
    *(("resume", point) for point in ACTS),
)
KEEP_LAST = 2
INTERVAL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kill."""

    story: str
    point: str
    number: int
    seed: int

    @property
    def hosts(self) -> tuple[str, ...]:
        """Who takes part."""
        return STORIES[self.story]

    @property
    def hit(self) -> int:
        """The kill comes at this arrival at the point; in a training, counted over all hosts."""
        if self.story in ("train", "in parts"):
            return self.random().randint(1, 9)
        what = "save" if self.story == "last step" else self.point.rpartition(" ")[2]
        return self.random().randint(1, 3 if self.point == "save: within tensors" else MOST_HITS.get(what, 1))

    @property
    def asynchronous(self) -> bool:
        """Whether the saves of a training run in background threads, on all hosts at the same time."""
        return self.number % 2 == 0

    def random(self) -> random.Random:
        """The same numbers for the same case."""
        return random.Random(f"{self.seed} {self.point} {self.number}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of the part of a story in which a process is killed."""

    code: int
    """Of the process; minus the number of a signal."""
    at_least: int
    """The step that was whole on a host before."""
    at_most: int | None = None
    """The step that was being written; None: the run went on."""


def loss_of(step: int) -> float:
    """An evaluation loss that goes up and down, so that the best is not the last."""
    return 1.0 + (step * 7919 % 101) / 100


def saver_of(root: Path, host: str, hosts: Sequence[str], *, attempt: int, asynchronous: bool) -> Saver:
    """What the first rank of a host saves with."""
    held = {each: f"the {each} rows" for each in hosts} if tuple(hosts) == IN_PARTS else {}
    description = {"attempt": attempt, "hosts": hosts, "num_ranks": len(hosts), "fingerprints": {"job": "f00d"}}
    description["held"] = held
    job = CheckpointJob(keep_last=KEEP_LAST, keep_best=True, asynchronous=asynchronous)
    return Saver(checkpoints_of(root, host), host=host, job=job, description=description)


def train(
    root: Path, hosts: Sequence[str], *, attempt: int, start: int, num_saves: int, asynchronous: bool = False
) -> None:
    """What ranks and supervisor do with checkpoints on all hosts; every commit is written down once it is placed."""
    for host in hosts if start else ():
        set_aside(checkpoints_of(root, host), start)  # as `gangline resume` has every host do
    savers = {host: saver_of(root, host, hosts, attempt=attempt, asynchronous=asynchronous) for host in hosts}
    for step in range(start + INTERVAL, start + INTERVAL * num_saves + 1, INTERVAL):
        for host, saver in savers.items():
            state = {"step": step, "evaluation_loss": loss_of(step)}
            if tuple(hosts) == IN_PARTS:
                saver.save_shards(step, pieces_of(step, host), state)
            else:
                saver.save(step, tensors_of(step), state)
        parts = {}
        for host, saver in savers.items():
            saver.wait()
            if saver.failure:
                raise saver.failure
            parts[host] = (disk.part_folder(checkpoints_of(root, host), step, host) / PART_FILE).read_bytes()
        record = commit_record(parts)
        for host in hosts:
            place_commit(checkpoints_of(root, host), record)
            journal(root, step)


def save_last(root: Path, host: str, hosts: Sequence[str], *, attempt: int, step: int) -> None:
    """What a rank does that has lost the others: save the step that it has completed, and leave."""
    saver = saver_of(root, host, hosts, attempt=attempt, asynchronous=True)
    saver.save(step, tensors_of(step), {"step": step, "evaluation_loss": loss_of(step)}, wait=True)
    if saver.failure:
        raise saver.failure


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


# --- the stories


def play_train(case: Case, root: Path, *, attempt: int, start: int) -> Ended:
    """A training is killed."""

    def doomed() -> None:
        disk.at_point = kill_at(case.point, case.hit)
        train(root, case.hosts, attempt=attempt, start=start, num_saves=15, asynchronous=case.asynchronous)

    return Ended(code=forked(doomed), at_least=start)


def play_last_step(case: Case, root: Path, *, attempt: int, start: int) -> Ended:
    """A host is gone, and one of the others is killed while it saves the last step."""
    chance, survivors, steps = lose_a_host(case, root, attempt=attempt, start=start)
    victim = chance.choice(survivors)

    def doomed() -> None:
        disk.at_point = kill_at(case.point, case.hit)
        save_last(root, victim, case.hosts, attempt=attempt, step=steps[victim])

    code = 0
    whole = [start + 2 * INTERVAL]
    for host in survivors:
        if host == victim:
            code = forked(doomed)
        elif forked(lambda h=host: save_last(root, h, case.hosts, attempt=attempt, step=steps[h])) == 0:
            whole.append(steps[host])
    return Ended(code=code, at_least=max(whole), at_most=max(steps.values()))


def play_resume(case: Case, root: Path, *, attempt: int, start: int) -> Ended:
    """Who resumes after that is killed."""
    _, survivors, steps = lose_a_host(case, root, attempt=attempt, start=start)
    for host in survivors:
        forked(lambda h=host: save_last(root, h, case.hosts, attempt=attempt, step=steps[h]))
    newest = max(steps.values())
    hook = kill_at(case.point, case.hit)
    code = forked(lambda: _resume(root, case.hosts, at=hook))
    return Ended(code=code, at_least=newest, at_most=newest)


def _resume(root: Path, hosts: Sequence[str], *, at: Callable[[str], None]) -> None:
    resume(root, hosts, at=at)


def lose_a_host(case: Case, root: Path, *, attempt: int, start: int) -> tuple[random.Random, list[str], dict[str, int]]:
    """Train for two checkpoints; chance, who is left after it, and the step that each of them has completed."""
    chance = random.Random(f"{case.seed} {case.story} {case.point} {case.number}")
    code = forked(lambda: train(root, case.hosts, attempt=attempt, start=start, num_saves=2))
    assert code == 0, f"the training before the loss ended with {code}"
    survivors = list(case.hosts)
    survivors.remove(chance.choice(survivors))
    step = start + 2 * INTERVAL + chance.randint(1, INTERVAL - 2)
    return chance, survivors, {host: step + chance.randint(0, 1) for host in survivors}


PLAY = {"train": play_train, "in parts": play_train, "last step": play_last_step, "resume": play_resume}


# --- what is left


def look(root: Path, hosts: Sequence[str]) -> tuple[int, list[str]]:
    """The step that a resume would start from, and what is wrong."""
    file = root / "acknowledged"
    acknowledged = sorted({int(line) for line in file.read_text().split()}) if file.exists() else []
    surveys = {host: disk.survey(checkpoints_of(root, host)) for host in hosts}
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
    if choice.held:
        wrong += load_all(root, choice.sources, chosen)
    for source in choice.sources if not choice.held else ():
        wrong += load_and_compare(checkpoints_of(root, source.host), chosen, source.part)
    for step, record in choice.adoptable.items():
        adopted = disk.choose(disk.with_record(surveys, step, record))
        if adopted.held:
            for host in hosts:
                place_commit(checkpoints_of(root, host), record)
                journal(root, step)
            wrong += load_all(root, adopted.sources, step)
        else:
            source = adopted.sources[0]
            adopt(root, hosts, step, record, source)
            wrong += load_and_compare(checkpoints_of(root, source.host), step, source.part)
        chosen = max(chosen, step)
    return chosen, wrong


def load_all(root: Path, sources: Sequence[disk.PartSource], step: int) -> list[str]:
    """Whether the parts of a step that lies in parts make up its state, once they lie beside each other."""
    with tempfile.TemporaryDirectory(dir=root) as folder:
        parts = []
        for source in sources:
            own = disk.part_folder(checkpoints_of(root, source.host), step, source.part)
            copy = Path(folder) / own.name
            shutil.copytree(own, copy)
            parts.append((copy, digest_of((copy / PART_FILE).read_bytes())))
        return compare(parts, step)


def adopt(root: Path, hosts: Sequence[str], step: int, record: bytes, source: disk.PartSource) -> None:
    """Give every host the record of a step that nobody lived to commit, and a whole part, as a resume does."""
    part = disk.part_folder(checkpoints_of(root, source.host), step, source.part)
    for host in hosts:
        own = disk.part_folder(checkpoints_of(root, host), step, host)
        copy = disk.part_folder(checkpoints_of(root, host), step, source.part)
        if not own.exists() and not copy.exists():
            shutil.copytree(part, copy)
        place_commit(checkpoints_of(root, host), record)
        journal(root, step)


def load_and_compare(checkpoints: Path, step: int, part: str) -> list[str]:
    """Whether a part loads and holds the state of its step."""
    folder = disk.part_folder(checkpoints, step, part)
    commit = disk.read_commit(checkpoints, step)
    # The record may be on the other host only: then the part's own description is what the record listed.
    return compare([(folder, commit.parts[part] if commit else digest_of((folder / PART_FILE).read_bytes()))], step)


def resume_again(case: Case, root: Path, ended: Ended) -> list[str]:
    """Resume once more, after one that was killed; what is wrong."""
    try:
        choice = resume(root, case.hosts)
    except CheckpointError as error:
        return [f"nothing can be resumed: {error}"]
    if choice.step != ended.at_least:
        return [f"resumed from {choice.step} instead of {ended.at_least}"]
    journal(root, ended.at_least)
    return require_loadable(root, case.hosts, ended.at_least)


# --- cases


def run_case(case: Case, root: Path, attempt: int) -> dict[str, object]:
    """Kill, look, go on from what was chosen, look again."""
    began_s = time.perf_counter()
    start, _ = look(root, case.hosts)
    ended = PLAY[case.story](case, root, attempt=attempt, start=start)
    wrong = resume_again(case, root, ended) if case.story == "resume" else []
    chosen, found = look(root, case.hosts)
    wrong += found
    if chosen < ended.at_least or (ended.at_most is not None and chosen > ended.at_most):
        wrong.append(f"lost: step {ended.at_least} was whole, chosen {chosen}")
    after = forked(lambda: train(root, case.hosts, attempt=attempt + 1, start=chosen, num_saves=1))
    resumed, wrong_after = look(root, case.hosts)
    if after != 0 or resumed != chosen + INTERVAL:
        wrong_after.append(f"the next save failed: exit {after}, chosen {resumed}")
    return {
        "story": case.story,
        "point": case.point,
        "number": case.number,
        "seed": case.seed,
        "hit": case.hit,
        "asynchronous": case.asynchronous,
        "killed": ended.code == -signal.SIGKILL,
        "start": start,
        "chosen": chosen,
        "resumed": resumed,
        "wrong": wrong + wrong_after,
        "duration_s": round(time.perf_counter() - began_s, 3),
    }


def run_point(cases: list[Case], folder: Path | None, out: Path, *, deadline: float) -> None:
    """All cases of one point, in folders of their own."""
    root = Path(tempfile.mkdtemp(prefix="kill-saves-", dir=folder))
    num_done = 0
    try:
        for attempt, case in enumerate(cases):
            if time.monotonic() > deadline:
                break
            line = run_case(case, root, 2 * attempt + 1)
            num_done += 1
            with out.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
    finally:
        shutil.rmtree(root)
    print(f"{cases[0].story}, {cases[0].point}: {num_done} cases", flush=True)


def main() -> int:
    """Run what is not in the results file yet, and sum up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=29, help="kills per point")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written (default: the temporary folder)")
    arguments = parser.parse_args()
    done = {(line["story"], line["point"], line["number"], line["seed"]) for line in read(arguments.out)}
    deadline = time.monotonic() + arguments.minutes * 60
    for story, point in POINTS:
        numbers = (n for n in range(arguments.times) if (story, point, n, arguments.seed) not in done)
        if cases := [Case(story=story, point=point, number=n, seed=arguments.seed) for n in numbers]:
            run_point(cases, arguments.folder, arguments.out, deadline=deadline)
    return report(read(arguments.out))


def read(path: Path) -> list[dict[str, object]]:
    """The lines of a file, none where there is none."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def report(lines: list[dict[str, object]]) -> int:
    """Print the sum; 1 if anything was wrong or a kill did not happen."""
    bad = [line for line in lines if line["wrong"] or not line["killed"]]
    print("\n| story | points | kills | lost, or half-written and chosen |\n|---|---|---|---|")
    for story in STORIES:
        mine = [line for line in lines if line["story"] == story]
        num_points, num_killed = len({line["point"] for line in mine}), sum(bool(line["killed"]) for line in mine)
        print(f"| {story} | {num_points} | {num_killed} | {sum(bool(line['wrong']) for line in mine)} |")
    for line in bad:
        print(json.dumps(line))
    print(f"\n{sum(bool(line['killed']) for line in lines)} kills at {len(POINTS)} points: {len(bad)} bad cases")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
