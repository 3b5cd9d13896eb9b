"""Which checkpoints stay on a host, and how the others go: the record first, so that no half of one is ever valid.

On a host, before a run goes on from STEP: `python -m gangline.runs.retention aside FOLDER STEP`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gangline.runs import checkpoints as disk
from gangline.runs.files import sync_folder
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, Commit, Part, verify_part

MIN_WAITING = 2
"""Hosts save in step with each other but for one save: what the slowest has whole, every other one must still have."""

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
    disk.at_point("retention: begin")
    _clear_leftovers(checkpoints, writing)
    steps = disk.saved_steps(checkpoints)
    commits = {step: commit for step in steps if (commit := disk.read_commit(checkpoints, step))}
    kept = _kept(checkpoints, commits, keep_last=max(1, keep_last), writing=writing) | writing
    kept |= _waiting(checkpoints, steps, commits, keep_last=keep_last)
    if keep_best and (best := _best(commits)) is not None:
        kept.add(best)
    gone = [step for step in steps if step not in kept]
    for step in gone:
        remove_step(checkpoints, step)
    _clear_aside(checkpoints, commits)
    disk.at_point("retention: end")
    return gone


def set_aside(checkpoints: Path, after: int) -> list[int]:
    """Move all steps newer than `after` out of the way of a run that goes on from there; which ones, oldest first.

    Left in place they would count as the newest, and push out the only one that is whole. They are removed once a
    step newer than `after` is committed here. Raises OSError.
    """
    newer = [step for step in disk.saved_steps(checkpoints) if step > after]
    for step in newer:
        folder = disk.step_folder(checkpoints, step)
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
    folder = disk.step_folder(checkpoints, step)
    remove_record(folder)
    trash = checkpoints / f"{_TRASH}{folder.name}"
    folder.rename(trash)
    sync_folder(checkpoints)
    disk.at_point("retention: step renamed")
    _delete(trash)


def remove_record(folder: Path) -> None:
    """From here on the step counts as not committed on this host."""
    (folder / COMMIT_FILE).unlink(missing_ok=True)
    sync_folder(folder)
    disk.at_point("retention: record removed")


def _kept(checkpoints: Path, commits: Mapping[int, Commit], *, keep_last: int, writing: Iterable[int]) -> set[int]:
    """The newest committed steps; those with a part here, and those before the step that is written, on their own."""
    order = sorted(commits, key=lambda step: (commits[step].attempt, step))
    # A record without a whole part here (this disk was empty for a while) must not push out a checkpoint with one.
    here = [step for step in order if _has_part(disk.step_folder(checkpoints, step))]
    # A run that writes step 133 went on from one before it: records of later steps are of a past it could not use.
    first = min(writing, default=None)
    before = [step for step in here if first is None or step < first]
    return {step for ranked in (order, here, before) for step in ranked[-keep_last:]}


def _has_part(folder: Path) -> bool:
    # Sizes only: hashing every kept byte again at every save would cost as much as the save.
    return any(not verify_part(part, hashes=False) for part in disk.part_folders(folder))


def _waiting(checkpoints: Path, steps: Iterable[int], commits: Mapping[int, Commit], *, keep_last: int) -> set[int]:
    """The newest steps that may still be committed, or adopted by a resume."""
    last = max(((commit.attempt, step) for step, commit in commits.items()), default=(0, 0))
    found = sorted(
        (attempt, step)
        for step in steps
        if step not in commits and (attempt := _attempt(disk.step_folder(checkpoints, step))) is not None
    )
    return {step for attempt, step in found[-max(MIN_WAITING, keep_last) :] if (attempt, step) > last}


def _attempt(folder: Path) -> int | None:
    """The newest attempt that has a part in a step's folder."""
    attempts = []
    for part in disk.part_folders(folder):
        try:
            attempts.append(Part.from_bytes((part / PART_FILE).read_bytes()).attempt)
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
    for step in set(disk.saved_steps(checkpoints)) - writing:
        for leftover in disk.step_folder(checkpoints, step).glob("*.tmp"):
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
        disk.at_point("retention: within removal")
    folder.rmdir()


def main(argv: Sequence[str]) -> int:
    """`aside FOLDER STEP`: the steps that were moved, as one line of JSON on stdout."""
    if len(argv) != 3 or argv[0] != "aside" or not argv[2].isdecimal():
        sys.stderr.write("usage: python -m gangline.runs.retention aside FOLDER STEP\n")
        return 2
    sys.stdout.write(json.dumps(set_aside(Path(argv[1]), int(argv[2]))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
