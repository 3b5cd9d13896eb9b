"""Recipes: whole job files for common models, methods and machines, to copy and change.

A recipe is one file of this folder. Its first comment says what it trains and on what; two more lines are for programs:

    # machines: pc1=rtx4090,pc2=rtx3090        what it is planned for (`gangline plan --hosts`)
    # link: 1gbit                              the network between them; absent on one machine
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from gangline.errors import UsageError

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One job file."""

    name: str
    text: str

    @property
    def title(self) -> str:
        """What it trains, and on what, in a sentence."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def machines(self) -> str:
        """What it is planned for, as `plan --hosts` takes it."""
        return self._line("machines") or ""

    @property
    def link(self) -> str | None:
        """The network between them; None for one machine."""
        return self._line("link")

    @property
    def guide(self) -> str | None:
        """The page of docs/guides that explains it, without its ending; None where there is none."""
        return self._line("guide")

    @property
    def plan_words(self) -> tuple[str, ...]:
        """The words after `gangline plan FILE` that plan it for its machines."""
        return ("--hosts", self.machines, *(("--link", self.link) if self.link else ()))

    def copy(self, to: Path) -> Path:
        """Write it to a new file, or into a folder; the file. Raises UsageError where something is there already."""
        target = to / f"{self.name}.yaml" if to.is_dir() else to
        try:
            with target.open("x", encoding="utf-8") as stream:
                stream.write(self.text)
        except FileExistsError:
            raise UsageError(
                f"{target} exists", seen="expected a new file", fix="name another one: --to FILE"
            ) from None
        except OSError as error:
            raise UsageError(
                f"{target} cannot be written", seen=error.strerror or str(error), fix="name another place: --to FILE"
            ) from error
        return target

    def _line(self, key: str) -> str | None:
        found = re.search(rf"^# {key}: (.+)$", self.text, re.MULTILINE)
        return found[1].strip() if found else None


def recipe_names() -> list[str]:
    """All names, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def find_recipe(name: str) -> Recipe:
    """The recipe of that name; raises UsageError with the nearest ones."""
    names = recipe_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
        raise UsageError(
            f"no such recipe: {name!r}",
            seen=f"the nearest: {', '.join(near)}" if near else f"there are {len(names)}",
            fix="gangline recipes lists all",
        )
    return Recipe(name=name, text=(FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
