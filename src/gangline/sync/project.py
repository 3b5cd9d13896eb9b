"""The user's own folder on every host, for `gangline run -- CMD`: the same bytes everywhere, and a record of them.

What is brought lies in `projects/NAME-HASH` and stays as it is; every run works in a copy of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from gangline.errors import CheckFailed
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.decode import build
from gangline.sync.archive import Archive, place_archive, scratch_folder, write_archive
from gangline.sync.ask import ask_agent
from gangline.sync.parallel import in_parallel
from gangline.sync.place import host_layout
from gangline.sync.selection import LIMIT_BYTES, Selection, git_state, select
from gangline.sync.tell import SILENT, Tell, shown
from gangline.sync.trees import How, Spot, differing, look_everywhere, spot_on, tree_of

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """What was brought: enough to know it again."""

    name: str
    tree: str
    """One hash over all names and content."""
    num_files: int
    num_bytes: int
    commit: str | None = None
    """None: no git tree, or nothing committed yet."""
    dirty: tuple[str, ...] = ()
    """What differs from the commit, or is new."""
    diff: str | None = None
    """One hash over the content of what is dirty; None: nothing is."""
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    """What stayed behind, and why."""
    marks: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name -> mark of its content, by which a changed file is known."""

    def folder(self, host: Host) -> PurePath:
        """Where it lies on a host."""
        return PurePath(host.workdir) / "projects" / f"{self.name}-{self.tree[:16]}"

    def to_json(self) -> dict[str, Any]:
        """Plain data for project.json."""
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Project:
        """The project that `to_json` wrote."""
        return build(Project, data)


def place_project(
    folder: Path,
    cluster: Cluster,
    transports: Mapping[str, Transport],
    *,
    tell: Tell = SILENT,
    limit_bytes: int = LIMIT_BYTES,
) -> Project:
    """Bring a folder to every host that lacks it, and verify it there; says what is copied and what stays behind.

    Raises UsageError for a folder that is too large, CheckFailed where a host has it with other content.
    """
    with _packed(folder, limit_bytes) as (project, archive, chosen):
        _say(project, chosen, tell)
        absent = _verified(project, _spots(project, cluster, transports))
        lacking = [spot for spot in absent if spot.path.name not in spot.transport.names(spot.path.parent)]
        if lacking:
            tell.tick(f"bringing {project.name} to {' '.join(spot.host.name for spot in lacking)}")
            place_archive(archive, lacking)
        if absent:
            bare = dataclasses.replace(cluster, hosts=tuple(spot.host for spot in absent))
            verify_project(project, bare, transports)
    return project


def foresee_project(folder: Path, *, tell: Tell = SILENT, limit_bytes: int = LIMIT_BYTES) -> Project:
    """What `place_project` would bring; says the same and changes nothing."""
    with _packed(folder, limit_bytes) as (project, _archive, chosen):
        _say(project, chosen, tell)
    return project


def verify_project(project: Project, cluster: Cluster, transports: Mapping[str, Transport]) -> None:
    """Raise CheckFailed unless every host has the project byte for byte, naming host and file.

    What a program wrote beside the source since then does not count.
    """
    if absent := _verified(project, _spots(project, cluster, transports)):
        raise _other(absent[0], project, sorted(project.marks))


def _verified(project: Project, spots: Sequence[Spot]) -> list[Spot]:
    """Where it is not at all; raises CheckFailed where it is other than it was brought."""
    expected = {name: (0, mark) for name, mark in project.marks.items()}
    trees = look_everywhere(spots, How(exact=True, names=tuple(project.marks)))
    for spot, tree in zip(spots, trees, strict=True):
        if tree.kind is not None and (wrong := differing(expected, tree.files)):
            raise _other(spot, project, wrong)
    return [spot for spot, tree in zip(spots, trees, strict=True) if tree.kind is None]


def _other(spot: Spot, project: Project, wrong: Sequence[str]) -> CheckFailed:
    return CheckFailed(
        f"{spot.host.name}: {', '.join(map(shown, wrong[:5]))} is not what was brought there",
        seen=f"{len(wrong)} of {len(project.marks)} files of {spot.path} differ by hash or are missing",
        fix=f"see what changed them, and on that host: rm -r {spot.path}; it is brought again",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """What was done to the working folder of a run that was there already."""

    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    """No more of the project."""
    kept: tuple[str, ...] = ()
    """No more of the project, but rewritten by the run's program."""

    def lines(self, attempt: int) -> list[str]:
        """What is other than in that attempt, for people."""
        said = {"changed": self.changed, "gone": self.removed, "gone here, and kept as the run left it": self.kept}
        return [
            f"project    {', '.join(map(shown, names[:5]))}{_and_more(names[5:])} {word} since attempt {attempt}"
            for word, names in said.items()
            if names
        ]


def lay_out(project: Project, run_id: str, cluster: Cluster, transports: Mapping[str, Transport]) -> Laid:
    """Fill the working folder of a run on every host from the project that was brought there.

    Where it is there already, what has changed since is laid over it, and what the run's program wrote stays.
    """
    request = {"marks": project.marks}

    def lay(host: Host) -> dict[str, Any]:
        places = {"source": str(project.folder(host)), "target": str(host_layout(host, run_id).project)}
        return ask_agent(transports[host.name], "lay", request | places)

    once = {_folder_of(host, cluster): host for host in reversed(cluster.hosts)}
    answers = [answer for answer in in_parallel(lay, list(once.values())) if not answer["fresh"]]
    changed, removed, kept = (
        tuple(sorted({name for answer in answers for name in answer[key]})) for key in ("laid", "removed", "kept")
    )
    return Laid(changed=changed, removed=removed, kept=kept)


def _folder_of(host: Host, cluster: Cluster) -> tuple[str, str]:
    """The same for hosts with one work folder in a shared one."""
    common = any(PurePath(folder) in PurePath(host.workdir).parents for folder in cluster.shared)
    return ("" if common else host.name, host.workdir)


def _and_more(names: tuple[str, ...]) -> str:
    return f" and {len(names)} more" if names else ""


@contextlib.contextmanager
def _packed(folder: Path, limit_bytes: int) -> Iterator[tuple[Project, Archive, Selection]]:
    chosen = select(folder, limit_bytes=limit_bytes)
    with scratch_folder() as scratch:
        archive = write_archive(Path(scratch) / "project.tar", chosen.files, chosen.links)
        yield _described(chosen, archive), archive, chosen


def _described(chosen: Selection, archive: Archive) -> Project:
    commit, changes = git_state(chosen.folder)
    files = dict(archive.tree.files)
    dirty = [name for name in changes if name in files or not os.path.lexists(chosen.folder / name)]
    changed = {name: files.get(name, (0, "gone")) for name in dirty}
    assert archive.tree.hash is not None
    return Project(
        name=_NOT_IN_NAMES.sub("-", chosen.folder.name).strip("-.") or "project",
        tree=archive.tree.hash,
        num_files=len(files),
        num_bytes=archive.tree.num_bytes,
        commit=commit,
        dirty=tuple(dirty),
        diff=tree_of(changed).hash if changed else None,
        left_out=dict(chosen.left_out),
        marks={name: mark for name, (_, mark) in files.items()},
    )


def _say(project: Project, chosen: Selection, tell: Tell) -> None:
    state = ""
    if project.commit:
        state = f", commit {project.commit[:12]}" + (
            f" and {len(project.dirty)} changed files" if project.dirty else ""
        )
    for line in chosen.lines(f"project    {project.name}{state}"):
        tell.say(line)


def _spots(project: Project, cluster: Cluster, transports: Mapping[str, Transport]) -> list[Spot]:
    return [spot_on(host, transports, project.folder(host)) for host in cluster.hosts]
