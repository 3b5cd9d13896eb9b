"""Checkpoints on disk: where they lie, what a host has of them, and which one a run starts from.

    checkpoints/step-00000100/COMMITTED             the record: host -> digest of its part.json
    checkpoints/step-00000100/part-<host>/          DCP's files, state.json, part.json
    checkpoints/step-00000100/part-<host>.tmp/      being written, or left by a crash
    checkpoints/.trash-step-00000100/               being removed, or left by a crash
    checkpoints/aside-00000090-step-00000100/       skipped when the run resumed from step 90

A checkpoint is valid if a commit record is found anywhere, and of the parts that it lists one whole replica, or all
shards, each on any host. The latest checkpoint follows from that, never from names of folders.

On a host: `python -m gangline.runs.checkpoints survey FOLDER [--verify | --verify-newest]`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.errors import CheckpointError
from gangline.runs.files import sync_folder
from gangline.runs.gang import Gang, held_by
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, CheckpointPart, Commit, commit_record, digest_of, verify_part

at_point: Callable[[str], None] = lambda _point: None  # noqa: E731  (a hook that tests replace)
"""Called at each named point of the code that saves: crash tests and benchmarks/kill_saves.py end the process there."""

_STEP = re.compile(r"step-(\d{8,})")

Surveys = Mapping[str, Sequence[Mapping[str, Any]]]
"""Host -> its `survey`."""


def step_folder(checkpoints: Path, step: int) -> Path:
    """The folder of one saved step."""
    return checkpoints / f"step-{step:08d}"


def part_folder(checkpoints: Path, step: int, host: str) -> Path:
    """The folder of one host's part of a step."""
    return step_folder(checkpoints, step) / f"part-{host}"


def saved_steps(checkpoints: Path) -> list[int]:
    """Steps that have a folder here, whatever is in it, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted(int(found[1]) for path in checkpoints.iterdir() if (found := _STEP.fullmatch(path.name)))


def part_folders(folder: Path) -> list[Path]:
    """The parts in a step's folder, without those that are still being written."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.name.startswith("part-") and path.suffix != ".tmp")


def read_commit(checkpoints: Path, step: int) -> Commit | None:
    """The commit record of a step on this host; None where there is none, or none that can be used."""
    try:
        commit = Commit.from_bytes((step_folder(checkpoints, step) / COMMIT_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    return commit if commit.step == step else None


def find_parts(checkpoints: Path, step: int, *, host: str) -> list[tuple[Path, str]]:
    """The parts that lie here, and the digest that the part.json of each must have.

    Its own first if it is listed in the commit record. Of replicas one, for it is all there is. Raises CheckpointError
    when there is none; `load_parts` verifies the content, and that shards are enough.
    """
    commit = read_commit(checkpoints, step)
    if commit is None:
        raise CheckpointError(
            f"step {step} on {host} has no commit record that can be used",
            seen=f"expected {step_folder(checkpoints, step) / COMMIT_FILE}",
            fix="resume from the newest valid checkpoint: gangline resume looks for it on every host",
        )
    own = part_folder(checkpoints, step, host)
    found: list[tuple[Path, str]] = []
    for folder in sorted(part_folders(step_folder(checkpoints, step)), key=lambda path: path != own):
        digest = commit.parts.get(folder.name.removeprefix("part-"))
        text = (folder / PART_FILE).read_bytes() if (folder / PART_FILE).is_file() else b""
        if digest and digest_of(text) == digest:
            found.append((folder, digest))
            if CheckpointPart.from_bytes(text).kind == "replica":
                return found[-1:]
    if found:
        return found
    raise CheckpointError(
        f"step {step} on {host}: no part here is the one that was committed",
        seen=f"expected a part of one of {', '.join(commit.parts)} in {step_folder(checkpoints, step)}",
        fix="gangline resume brings a whole part from another host, or takes the checkpoint before",
    )


def survey(checkpoints: Path, *, verify: bool = True, newest_only: bool = False) -> list[dict[str, Any]]:
    """All checkpoints of this host, step by step, as JSON data; `verify` hashes every file, with `newest_only` those of
    the newest step.

    [{"step", "record": text or null, "parts": [{"host", "text": of part.json or null, "problems": [...]}]}]
    """
    steps = saved_steps(checkpoints)
    return [_survey_step(checkpoints, step, verify=verify and (not newest_only or step == steps[-1])) for step in steps]


def _survey_step(checkpoints: Path, step: int, *, verify: bool) -> dict[str, Any]:
    folder = step_folder(checkpoints, step)
    parts = [
        {
            "host": part.name.removeprefix("part-"),
            "text": _text(part / PART_FILE),
            "problems": verify_part(part, hashes=verify),
        }
        for part in part_folders(folder)
    ]
    return {"step": step, "record": _text(folder / COMMIT_FILE), "parts": parts}


def _text(path: Path) -> str | None:
    # A flipped byte may not be UTF-8 any more: replaced, it still differs from its digest.
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A checkpoint, or a copy of one, that is not used, with the reason."""

    step: int
    host: str
    reason: str
    in_parts: bool = False
    """It is sharded, and one of its shards is whole on no host."""

    def __str__(self) -> str:
        return f"step {self.step} on {self.host}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSource:
    """A whole part of the chosen step: `host` has it, in `part_folder(.., step, part)`."""

    host: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointChoice:
    """The checkpoint to start from, and the ones that were rejected."""

    step: int | None = None
    """None: nothing valid was found."""
    record: bytes | None = None
    """The commit record of `step`, for hosts that lack it."""
    sources: tuple[PartSource, ...] = ()
    """Every whole part of `step`, for hosts that lack one."""
    held: dict[str, str] = dataclasses.field(default_factory=dict)
    """Of a sharded step: host -> what its shard holds; {}: any part is the whole state."""
    needs: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Of a sharded step: host -> the shards that its ranks read, where that is not all of them."""
    rejected: tuple[Rejection, ...] = ()
    """Newer checkpoints, and damaged copies of the chosen one, newest first."""
    adoptable: dict[int, bytes] = dataclasses.field(default_factory=dict)
    """Newer steps that are complete but were never committed -> the missing commit record."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of `step` that a host needs, by the hosts that wrote them: any one replica, or all shards."""
        return tuple(self.held) or tuple(dict.fromkeys(source.part for source in self.sources[:1]))

    def for_ranks_of(self, gang: Gang) -> CheckpointChoice:
        """The same for a gang: a host whose ranks hold the same shard as when it was saved needs only that one."""
        part_of = {words: host for host, words in self.held.items()}
        needs: dict[str, tuple[str, ...]] = {
            host: (host if self.held.get(host) == words else part_of[words],)  # of several such its own
            for host, words in held_by(gang).items()
            if words in part_of
        }
        return dataclasses.replace(self, needs=needs)

    def lacks(self, host: str) -> tuple[str, ...]:
        """The parts that a host needs and does not have whole."""
        own = {source.part for source in self.sources if source.host == host}
        if not self.held:
            return () if own else self.parts
        return tuple(part for part in self.needs.get(host, self.parts) if part not in own)


def choose(surveys: Surveys) -> CheckpointChoice:
    """The newest valid checkpoint in the surveys of all hosts."""
    rejected: list[Rejection] = []
    adoptable: dict[int, bytes] = {}
    steps = {entry["step"] for entries in surveys.values() for entry in entries}
    for step in sorted(steps, reverse=True):
        found = {host: entry for host, entries in surveys.items() for entry in entries if entry["step"] == step}
        if not any(entry["record"] is not None or entry["parts"] for entry in found.values()):
            continue  # a save that finished on no host: no checkpoint
        commits, notes = _commits(step, found)
        for commit in commits:
            sources, held, damaged = _match(commit, found)
            notes += damaged
            if sources:
                return CheckpointChoice(
                    step=step,
                    record=commit.to_bytes(),
                    sources=sources,
                    held=held,
                    rejected=(*rejected, *notes),
                    adoptable=adoptable,
                )
        record, reasons = _adopt(step, found, after_attempt=max((commit.attempt for commit in commits), default=0))
        if record:
            adoptable[step] = record
        rejected += dict.fromkeys([*notes, *reasons])
    return CheckpointChoice(rejected=tuple(rejected), adoptable=adoptable)


def with_record(surveys: Surveys, step: int, record: bytes) -> Surveys:
    """The same surveys with the record of a step on every host that has a part of it."""
    text = record.decode()
    return {
        host: [{**entry, "record": text} if entry["step"] == step else entry for entry in entries]
        for host, entries in surveys.items()
    }


def _commits(step: int, found: Mapping[str, Mapping[str, Any]]) -> tuple[list[Commit], list[Rejection]]:
    """The different commit records of a step, of the newest attempt first."""
    commits: dict[bytes, Commit] = {}
    rejected = []
    for host, entry in found.items():
        if entry["record"] is None:
            continue
        data = entry["record"].encode()
        try:
            commit = Commit.from_bytes(data)
            if commit.step != step:
                raise ValueError(f"it is the record of step {commit.step}")
            commits[data] = commit
        except ValueError as error:
            rejected.append(Rejection(step=step, host=host, reason=f"{COMMIT_FILE} cannot be used: {error}"))
    return sorted(commits.values(), key=lambda commit: -commit.attempt), rejected


def _match(
    commit: Commit, found: Mapping[str, Mapping[str, Any]]
) -> tuple[tuple[PartSource, ...], dict[str, str], list[Rejection]]:
    """The whole parts that the record lists, if they are enough; what each holds, if sharded; and the problems of the
    others. Of shards that hold the same, as those of two pipelines may, one is enough.
    """
    sources: list[PartSource] = []
    held: dict[str, str] = {}
    rejected: list[Rejection] = []
    for host, part in _parts(found):
        name = part["host"]
        problems = list(part["problems"])
        if part["text"] is not None and digest_of(part["text"].encode()) != commit.parts.get(name):
            problems.append(f"{PART_FILE} is not the one of the commit record (attempt {commit.attempt})")
        if not problems:
            sources.append(PartSource(host=host, part=name))
            held = CheckpointPart.from_bytes(part["text"].encode()).held
        rejected += [_part_rejection(commit.step, host, name, problem) for problem in problems]
    whole = {source.part for source in sources}
    there = {host: words for host, words in held.items() if host in whole}
    have = {part["host"] for _, part in _parts(found)}
    for host in commit.parts:
        state = "was not found on any host" if host not in have else "is whole on no host"
        if host in held and held[host] not in there.values():
            reason = f"part-{host} {state}; it held {held[host]}"
            rejected.append(Rejection(step=commit.step, host=host, reason=reason, in_parts=True))
        elif host not in have:
            rejected.append(Rejection(step=commit.step, host=host, reason=f"part-{host} {state}"))
    return () if set(held.values()) - set(there.values()) else tuple(sources), there, rejected


def _adopt(
    step: int, found: Mapping[str, Mapping[str, Any]], *, after_attempt: int
) -> tuple[bytes | None, list[Rejection]]:
    """The missing commit record of a step whose parts are complete, or the reasons why there is none."""
    whole: dict[int, dict[str, bytes]] = {}
    rejected = []
    for host, part in _parts(found):
        rejected += [_part_rejection(step, host, part["host"], problem) for problem in part["problems"]]
        if not part["problems"]:
            data = part["text"].encode()
            whole.setdefault(CheckpointPart.from_bytes(data).attempt, {})[part["host"]] = data
    newest = max(whole, default=0)
    if newest <= after_attempt:
        if after_attempt == 0:
            hosts = ", ".join(found)
            rejected.append(Rejection(step=step, host=hosts, reason="it was not committed, and no part is whole"))
        return None, rejected
    try:
        record = commit_record(whole[newest], of_some=True)
        if Commit.from_bytes(record).step == step:
            return record, rejected
        reason = "its parts were written for another step"
    except CheckpointError as error:
        reason = f"it was not committed: {error.seen}"
    held = CheckpointPart.from_bytes(next(iter(whole[newest].values()))).held
    named = [host for host in held if host not in whole[newest]] or list(whole[newest])
    return None, [*rejected, Rejection(step=step, host=", ".join(named), reason=reason, in_parts=bool(held))]


def _parts(found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((host, part) for host, entry in found.items() for part in entry["parts"])


def _part_rejection(step: int, host: str, part: str, problem: str) -> Rejection:
    return Rejection(step=step, host=host, reason=f"part-{part}/{problem}")


# Retention: the checkpoints that a host keeps. A removal begins with the record, so that no half of one is ever valid.


MIN_WAITING = 2
"""Hosts differ by one save at most: the other hosts must keep the newest step that the slowest one has whole."""

_TRASH = ".trash-"
_ASIDE = re.compile(r"aside-(\d{8,})-step-\d{8,}")


def prune(checkpoints: Path, *, keep_last: int, keep_best: bool, writing: frozenset[int] = frozenset()) -> list[int]:
    """Remove what is no longer needed on this host; the steps that went, oldest first.

    Kept: the newest `keep_last` committed steps (at least one), the committed one with the lowest evaluation loss if
    `keep_best`, every step that is `writing`, and the newest `keep_last` (at least two) of those newer than the last
    commit, which may still be committed. A later attempt is newer, whatever its steps. Everything else, and what
    crashes left behind, is removed. Raises OSError.
    """
    if not checkpoints.is_dir():
        return []
    at_point("retention: begin")
    _clear_leftovers(checkpoints, writing)
    steps = saved_steps(checkpoints)
    commits = {step: commit for step in steps if (commit := read_commit(checkpoints, step))}
    kept = _kept(checkpoints, commits, keep_last=max(1, keep_last), writing=writing) | writing
    kept |= _waiting(checkpoints, steps, commits, keep_last=keep_last)
    if keep_best and (best := _best(commits)) is not None:
        kept.add(best)
    gone = [step for step in steps if step not in kept]
    for step in gone:
        remove_step(checkpoints, step)
    _clear_aside(checkpoints, commits)
    at_point("retention: end")
    return gone


def set_aside(checkpoints: Path, after: int) -> list[int]:
    """Move all steps newer than `after` aside for a run that resumes from there; which ones, oldest first.

    Left in place they would count as the newest, and retention would remove the only valid one. They are removed once a
    step newer than `after` is committed here. Raises OSError.
    """
    newer = [step for step in saved_steps(checkpoints) if step > after]
    for step in newer:
        folder = step_folder(checkpoints, step)
        remove_record(folder)
        aside = checkpoints / f"aside-{after:08d}-{folder.name}"
        if aside.exists():
            shutil.rmtree(aside)
        folder.rename(aside)
    if newer:
        sync_folder(checkpoints)
    return newer


def remove_step(checkpoints: Path, step: int) -> None:
    """Remove one step from this host so that a crash at any moment leaves a valid checkpoint or none."""
    folder = step_folder(checkpoints, step)
    remove_record(folder)
    trash = checkpoints / f"{_TRASH}{folder.name}"
    folder.rename(trash)
    sync_folder(checkpoints)
    at_point("retention: step renamed")
    _delete(trash)


def remove_record(folder: Path) -> None:
    """Remove the record: the step is no longer committed on this host."""
    (folder / COMMIT_FILE).unlink(missing_ok=True)
    sync_folder(folder)
    at_point("retention: record removed")


def _kept(checkpoints: Path, commits: Mapping[int, Commit], *, keep_last: int, writing: Iterable[int]) -> set[int]:
    """The newest committed steps, the newest with a part here, and the newest before the step in writing."""
    order = sorted(commits, key=lambda step: (commits[step].attempt, step))
    # A record without a whole part here (this disk was empty for a while) must not push out a checkpoint with one.
    here = [step for step in order if _has_part(step_folder(checkpoints, step))]
    # A run that writes step 133 resumed from an earlier one: records of later steps are of no use to it.
    first = min(writing, default=None)
    before = [step for step in here if first is None or step < first]
    return {step for ranked in (order, here, before) for step in ranked[-keep_last:]}


def _has_part(folder: Path) -> bool:
    # Sizes only: hashing every kept byte again at every save would cost as much as the save.
    return any(not verify_part(part, hashes=False) for part in part_folders(folder))


def _waiting(checkpoints: Path, steps: Iterable[int], commits: Mapping[int, Commit], *, keep_last: int) -> set[int]:
    """The newest steps that may still be committed, or adopted by a resume."""
    last = max(((commit.attempt, step) for step, commit in commits.items()), default=(0, 0))
    found = sorted(
        (attempt, step)
        for step in steps
        if step not in commits and (attempt := _attempt(step_folder(checkpoints, step))) is not None
    )
    return {step for attempt, step in found[-max(MIN_WAITING, keep_last) :] if (attempt, step) > last}


def _attempt(folder: Path) -> int | None:
    """The newest attempt that has a part in a step's folder."""
    attempts = []
    for part in part_folders(folder):
        try:
            attempts.append(CheckpointPart.from_bytes((part / PART_FILE).read_bytes()).attempt)
        except (OSError, ValueError):
            continue
    return max(attempts, default=None)


def _best(commits: dict[int, Commit]) -> int | None:
    """The step with the lowest evaluation loss; the newer one of two equal ones."""
    losses = {step: commit.evaluation_loss for step, commit in commits.items() if commit.evaluation_loss is not None}
    return min(losses, key=lambda step: (losses[step], -step), default=None)


def _clear_leftovers(checkpoints: Path, writing: frozenset[int]) -> None:
    for trash in checkpoints.glob(f"{_TRASH}*"):
        _delete(trash)
    for step in set(saved_steps(checkpoints)) - writing:
        for leftover in step_folder(checkpoints, step).glob("*.tmp"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink(missing_ok=True)


def _clear_aside(checkpoints: Path, commits: Iterable[int]) -> None:
    last = max(commits, default=-1)
    for path in list(checkpoints.iterdir()):
        if (found := _ASIDE.fullmatch(path.name)) and int(found[1]) < last:
            shutil.rmtree(path)


def _delete(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        at_point("retention: within removal")
    folder.rmdir()


# The interval between automatic saves, from the cost of a save. Pure.


LOSSES_S = 24 * 3600.0
"""Mean time between failures; assumed."""
LEAST_MIN, MOST_MIN = 1.0, 30.0
BUSY = 0.05
"""The part of the time in which disks may write checkpoints, which also limits their wear."""
FIRST_MIN = 2.0
"""The time to the first save, whose cost is unknown."""


def minutes_between(hold_s: float, write_s: float) -> float:
    """Minutes from one save to the next (Young's formula). hold_s: pause of training for the last save; write_s: time
    until it was on the disk.
    """
    young_s = math.sqrt(2 * max(0.0, hold_s) * LOSSES_S)
    return min(MOST_MIN, max(LEAST_MIN, young_s / 60, write_s / BUSY / 60))


USAGE = """usage: python -m gangline.runs.checkpoints survey FOLDER [--verify | --verify-newest]
       python -m gangline.runs.checkpoints aside FOLDER STEP
"""


def main(argv: Sequence[str]) -> int:
    """The survey of this host, or the steps that were set aside, as one line of JSON on stdout."""
    options = {"--verify", "--verify-newest"} & set(argv)
    words = [word for word in argv if word not in options]
    found: object
    if len(words) == 2 and words[0] == "survey":
        found = survey(Path(words[1]), verify=bool(options), newest_only="--verify" not in options)
    elif len(argv) == 3 and argv[0] == "aside" and argv[2].isdecimal():
        found = set_aside(Path(argv[1]), int(argv[2]))
    else:
        sys.stderr.write(USAGE)
        return 2
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
