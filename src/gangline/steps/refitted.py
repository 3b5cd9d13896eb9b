"""Measured speeds, corrected by the runs that have ended since: each attempt of a run counts once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from gangline.inventory.profiles import load_profiles, save_profile
from gangline.planning.outcome import Comparison, fold
from gangline.remote.said import NONSENSE
from gangline.runs.layout import RunLayout
from gangline.runs.registry import run_ids
from gangline.runs.versions import load_record
from gangline.steps.seams import Talk

FOLDED_FILE = "folded"
"""In the folder of an attempt: what it taught is in the profiles."""


def refit_profiles(home: Path, talk: Talk) -> None:
    """Correct the profiles that are kept by what runs have taken, and say so. Where there is none, nothing is read."""
    before = {profile.name: profile for profile in load_profiles(home)}
    fresh = [comparison for comparison in _unfolded(home, set(before)) if _claim(home, comparison)]
    folded = fold(before.values(), fresh)
    for name, profile in folded.profiles.items():
        if profile != before[name]:
            save_profile(home, profile)
    for line in folded.lines:
        talk.say(f"refitted   {line}")


def _unfolded(home: Path, known: set[str]) -> Iterator[Comparison]:
    """Comparisons that say something of a known profile, and have not been taken account of."""
    for layout in (RunLayout(home, run_id) for run_id in (run_ids(home) if known else ())):
        try:
            comparison = load_record(layout.comparison, Comparison)
        except (OSError, *NONSENSE):
            continue
        if comparison.run != layout.run_id or not known & {rank.profile for rank in comparison.ranks}:
            continue
        if not (layout.attempt(comparison.attempt) / FOLDED_FILE).exists():
            yield comparison


def _claim(home: Path, comparison: Comparison) -> bool:
    """Whether it is for us to fold it: another command may do so right now. What is lost if we die then is one run."""
    path = RunLayout(home, comparison.run).attempt(comparison.attempt) / FOLDED_FILE
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600))
    except OSError:
        return False
    return True
