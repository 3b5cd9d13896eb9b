"""Which checkpoints stay on a host, and how the others go: the record first, so that no half of one is ever valid."""

from __future__ import annotations

import shutil
from pathlib import Path

from gangline.runs import checkpoints as disk
from gangline.runs.files import sync_folder
from gangline.runs.manifest import COMMIT_FILE, Commit

_TRASH = ".trash-"


def prune(checkpoints: Path, *, keep_last: int, keep_best: bool, writing: frozenset[int] = frozenset()) -> list[int]:
    """Remove what is no longer needed on this host; the steps that went, oldest first.

    Kept: the newest `keep_last` committed steps (at least one), the committed one with the lowest evaluation loss if
    `keep_best`, every step that is `writing`, and the newest `keep_last` of those newer than the last commit, which
    may still be committed. Everything else, and what crashes left behind, is removed. Raises OSError.
    """
    if not checkpoints.is_dir():
        return []
    disk.at_point("retention: begin")
    _clear_leftovers(checkpoints, writing)
    steps = disk.saved_steps(checkpoints)
    kept = _kept(checkpoints, steps, keep_last=max(1, keep_last), keep_best=keep_best) | writing
    gone = [step for step in steps if step not in kept]
    for step in gone:
        remove_step(checkpoints, step)
    disk.at_point("retention: end")
    return gone


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


def _kept(checkpoints: Path, steps: list[int], *, keep_last: int, keep_best: bool) -> set[int]:
    commits = {step: commit for step in steps if (commit := disk.read_commit(checkpoints, step))}
    here = [step for step in commits if disk.part_folders(disk.step_folder(checkpoints, step))]
    waiting = [step for step in steps if step > max(commits, default=-1)]
    # A record without a part here (this disk was empty for a while) must not push out a checkpoint with one.
    kept = {*list(commits)[-keep_last:], *here[-keep_last:], *waiting[-keep_last:]}
    best = _best(commits)
    return kept | {best} if keep_best and best is not None else kept


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


def _delete(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        disk.at_point("retention: within removal")
    folder.rmdir()
