"""Configurations that other trainers ship, converted: how many, by verdict, and which keys were lacking.

    python -m benchmarks.convert_examples FOLDER... [--templates FOLDER] [--keys N] [--files] [--show FEATURE]

Each folder is searched for YAML files. A job of preference tuning, of images, or no training at all is counted apart:
gangline refuses these by name. The world size is 4 throughout: it changes the batch and nothing else. Nothing of the
folders is copied or kept.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from gangline.config.foreign import kind_of
from gangline.config.load import read_values
from gangline.convert import features
from gangline.convert.draft import KeyVerdict
from gangline.convert.move import MoveQuestion, move_job
from gangline.errors import GanglineError

APART = {
    "preference": features.PREFERENCE,
    "images": features.IMAGES,
    "no training": features.GENERATION,
}
WORLD_SIZE = 4


@dataclass
class Tally:
    """What was found in the folders."""

    outcomes: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    alone: Counter[str] = field(default_factory=Counter)
    """Features that alone stand in a file's way."""
    features: Counter[str] = field(default_factory=Counter)
    keys: Counter[str] = field(default_factory=Counter)
    files: list[tuple[str, str, list[str]]] = field(default_factory=list)


class _Nobody:
    def ask(self, question: str) -> None:
        """There is no terminal."""


def main() -> None:
    """Convert everything below the folders, and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--keys", type=int, default=40, help="print so many keys that were lacking")
    parser.add_argument("--files", action="store_true", help="print every file with what stands in its way")
    asked = parser.parse_args()
    tally = Tally()
    with TemporaryDirectory() as folder:
        for path in jobs(asked.folders):
            take(tally, path, Path(folder), asked.templates)
    show(tally, num_keys=asked.keys, files=asked.files)


def jobs(folders: list[Path]) -> Iterator[Path]:
    """Files of other trainers that hold a job."""
    for folder in folders:
        for path in sorted([*folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
            try:
                kind = kind_of(read_values(path, kind="foreign"))
            except GanglineError:
                continue
            if kind is not None and kind.holds == "a job":
                yield path


def take(tally: Tally, path: Path, folder: Path, templates: Path | None) -> None:
    """Convert one file."""
    asked = MoveQuestion(files=(path,), world_size=WORLD_SIZE, output=folder / "job.yaml", templates=templates)
    try:
        moved = move_job(asked, console=_Nobody())
    except GanglineError as error:
        tally.outcomes["not read"] += 1
        tally.files.append(("not read", str(path), [error.what, error.seen]))
        return
    told = [each for each in moved.made.verdicts if not each.is_default]
    tally.verdicts.update(each.verdict for each in told)
    lacking = list(dict.fromkeys(feature_of(each) for each in moved.made.refused))
    apart = [name for name, feature in APART.items() if any(each.startswith(feature) for each in lacking)]
    outcome = apart[0] if apart else "refused" if lacking else "converted"
    tally.outcomes[outcome] += 1
    tally.files.append((outcome, str(path), lacking))
    if not apart:
        tally.features.update(lacking)
        tally.keys.update({re.sub(r"\.[0-9]+\.", ".*.", each.key) for each in moved.made.refused})
        if len(lacking) == 1:
            tally.alone[lacking[0]] += 1


def feature_of(each: KeyVerdict) -> str:
    """The missing feature, without the value that asked for it."""
    reason = re.sub(r" \(.*", "", each.outcome.reason)
    if found := re.match(r"not supported yet: ([\w.]+)", reason):
        return f"not supported yet: {found[1]}"
    return reason


def show(tally: Tally, *, num_keys: int, files: bool) -> None:
    """Print the counts."""
    total = sum(tally.outcomes.values())
    print(f"{total} jobs: " + ", ".join(f"{count} {name}" for name, count in tally.outcomes.most_common()))
    keys = sum(tally.verdicts.values())
    print(f"{keys} keys: " + ", ".join(f"{count} {name}" for name, count in tally.verdicts.most_common()))
    print("\nfeatures lacking (files; in how many it alone is in the way)")
    for name, count in tally.features.most_common():
        print(f"{count:5} {tally.alone[name]:4}  {name}")
    print("\nkeys lacking (files)")
    for name, count in tally.keys.most_common(num_keys):
        print(f"{count:5}  {name}")
    if files:
        for outcome, path, lacking in sorted(tally.files):
            print(f"{outcome:12} {path}  {'; '.join(lacking)}")


if __name__ == "__main__":
    main()
