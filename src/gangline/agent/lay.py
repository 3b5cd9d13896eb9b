"""`lay`: the working folder of one run, filled from a project that was brought to this host. JSON on stdin and stdout.

Request: {"source": PATH, "target": PATH, "marks": NAME -> mark}
Answer:  {"kind": "result", "fresh": bool, "laid": [NAME, ...], "removed": [NAME, ...], "kept": [NAME, ...]}

A target that is not there yet becomes a copy of the source. In one that is there only what is another file since the
last time is laid over what is there, so that all that the run's program wrote stays. What was last laid there is
remembered beside it, in TARGET.json. removed: files that are of the project no more, and are as they were laid. kept:
such that the program has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path, PurePosixPath
from typing import Dict, Iterable, List, Sequence, Tuple

from gangline.agent.digests import Cache, Meter, mark_of, say, write_whole


class Refused(Exception):
    """What is not laid, and why."""


def main(_argv: Sequence[str]) -> int:
    """The verb."""
    request = json.load(sys.stdin)
    source, target = Path(request["source"]), Path(request["target"])
    marks: Dict[str, str] = request["marks"]
    try:
        for name in marks:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                raise Refused("the name {!r} leads out of the folder".format(name))
        answer = lay(source, target, marks)
    except (Refused, OSError) as error:
        say({"kind": "error", "what": "{}: {}".format(target, error)})
        return 1
    say({"kind": "result", **answer})
    return 0


def lay(source: Path, target: Path, marks: Dict[str, str]) -> Dict[str, object]:
    """Fill the target; the answer."""
    note = target.with_name(target.name + ".json")
    fresh = not target.exists()
    laid = sorted(marks)
    removed: List[str] = []
    kept: List[str] = []
    if fresh:
        _copy_whole(source, target, marks)
    else:
        before = _read_note(note)
        laid = sorted(name for name, mark in marks.items() if before.get(name) != mark)
        for name in laid:
            _copy(source, target, name, marks[name])
        removed, kept = _take_away(target, {name: mark for name, mark in before.items() if name not in marks})
    write_whole(note, json.dumps(marks).encode())  # last: who is interrupted does all of it again
    return {"fresh": fresh, "laid": laid, "removed": removed, "kept": kept}


def _copy_whole(source: Path, target: Path, marks: Dict[str, str]) -> None:
    fresh = target.with_name(".{}.{}.new".format(target.name, os.getpid()))
    fresh.mkdir(mode=0o700, parents=True)
    try:
        for name, mark in marks.items():
            _copy(source, fresh, name, mark)
        fresh.rename(target)
    finally:
        shutil.rmtree(str(fresh), ignore_errors=True)


def _copy(source: Path, target: Path, name: str, mark: str) -> None:
    """One file or link, whole or not at all."""
    path = target / name
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(".{}.{}.new".format(path.name, os.getpid()))
    try:
        if (source / name).is_symlink():
            fresh.symlink_to(os.readlink(str(source / name)))  # noqa: PTH115  (Path.readlink came with 3.9)
        else:
            shutil.copyfile(str(source / name), str(fresh))
            fresh.chmod(0o700 if (source / name).stat().st_mode & 0o100 else 0o600)
        if _mark(fresh) != mark:
            raise Refused("{} is not what was brought".format(source / name))
        fresh.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()


def _take_away(target: Path, gone: Dict[str, str]) -> Tuple[List[str], List[str]]:
    """Remove what is as it was laid; names that were removed, and those that were not."""
    there: Iterable[str] = [name for name in sorted(gone) if os.path.lexists(str(target / name))]
    removed = [name for name in there if _mark(target / name) == gone[name]]
    for name in removed:
        (target / name).unlink()
    return removed, [name for name in there if name not in removed]


def _mark(path: Path) -> str:
    """See `gangline.agent.digests`; "" for what is neither file nor link."""
    if path.is_dir() and not path.is_symlink():
        return ""
    return mark_of(path, exact=True, cache=Cache(None), meter=Meter())[1]


def _read_note(note: Path) -> Dict[str, str]:
    try:
        found = json.loads(note.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
