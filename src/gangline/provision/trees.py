"""Files and folders by content: what lies where, and whether it is the same; and the files of a run on every host."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from gangline.errors import HostUnreachable, RunFailed
from gangline.provision.ask import TIMEOUT_S, ask_agent
from gangline.provision.console import SILENT, Console, shown
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import json_object
from gangline.runs.gang import Gang
from gangline.runs.layout import RunLayout, new_id
from gangline.runs.record_versions import encode_record, write_record
from gangline.runs.registry import run_ids
from gangline.transport.fanout import in_parallel
from gangline.transport.local import LocalTransport
from gangline.transport.transport import Transport
from gangline.units import format_bytes

NAMES_LIMIT = 500_000
"""A folder with more files is none of ours."""

Mark = tuple[int, str]
"""Bytes of a file, and the mark of its content; see `gangline.agent.provision.digests`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """What a file or folder holds."""

    kind: Literal["file", "folder"] | None
    """None: there is nothing."""
    hash: str | None
    """One hash over all names and marks; None: there is nothing."""
    files: Mapping[str, Mark]
    """A file itself has the name ""."""
    odd: Mapping[str, str]
    """What has no content that can be said, and why."""
    free_bytes: int | None = None
    """Room on the disk where it is, or would be; None: nobody can say."""

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(size for size, _ in self.files.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """A path on a host, and the way to the host."""

    host: Host
    transport: Transport
    path: PurePath

    @property
    def is_here(self) -> bool:
        """Whether it is a path of this computer."""
        return self.host.transport == "local"

    @property
    def cache(self) -> str | None:
        """Where hashes are remembered on that host."""
        return str(PurePath(self.host.workdir) / "data" / "hashes.json") if self.host.workdir else None


def here(path: Path, *, home: Path | None = None) -> Spot:
    """A path of this computer; hashes are remembered in `home`."""
    host = Host(name="this computer", workdir=str(home or ""), python=sys.executable)
    return Spot(host=host, transport=LocalTransport(host), path=path)


def spot_on(host: Host, transports: Mapping[str, Transport], path: PurePath | str) -> Spot:
    """A path on a host of a cluster."""
    return Spot(host=host, transport=transports[host.name], path=PurePath(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to look."""

    exact: bool = False
    """Links count as themselves and programs as programs; else only content counts."""
    remember: bool = False
    """Files that have not changed since the last look are not read again."""
    skip: tuple[str, ...] = ()
    """Names of files and folders that are passed over."""
    names: tuple[str, ...] | None = None
    """Only these files count."""
    what: str = ""
    """What it is called while it is hashed; "": its own name."""
    timeout_s: float = TIMEOUT_S

    def request(self, spot: Spot) -> dict[str, Any]:
        """What the agent is asked."""
        return {
            "folders": [str(spot.path)],
            "exact": self.exact,
            "skip": list(self.skip),
            "names": None if self.names is None else list(self.names),
            "cache": spot.cache if self.remember else None,
        }


CONTENT = How()
REMEMBERED = How(remember=True)


def look(spot: Spot, how: How = CONTENT, *, console: Console = SILENT) -> Tree:
    """What lies at a spot, hashed there."""
    files: dict[str, Mark] = {}

    def on_progress(record: dict[str, Any]) -> None:
        if record.get("kind") == "files":
            files.update({name: (int(mark[0]), str(mark[1])) for name, mark in record["files"].items()})
        elif total := record.get("total_bytes"):
            percent = 100 * record["done_bytes"] // total
            console.progress(
                f"hashing {how.what or spot.path.name} on {spot.host.name}: {percent} % of {format_bytes(total)}"
            )
        if len(files) > NAMES_LIMIT:
            raise ValueError(f"more than {NAMES_LIMIT} files")

    try:
        request = how.request(spot)
        answer = ask_agent(spot.transport, "digests", request, timeout_s=how.timeout_s, on_progress=on_progress)
        found = answer["folders"][str(spot.path)]
        return Tree(
            kind=found["is"], hash=found["tree"], files=files, odd=found["odd"], free_bytes=found.get("free_bytes")
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunFailed(
            f"{spot.host.name}: what lies at {spot.path} cannot be made out",
            seen=f"{type(error).__name__}: {shown(str(error))}",
            fix="look at that folder; is it the one that was meant?",
        ) from error


def look_everywhere(spots: Sequence[Spot], how: How = CONTENT, *, console: Console = SILENT) -> list[Tree]:
    """What lies at each spot, all at the same time."""
    return in_parallel(lambda spot: look(spot, how, console=console), spots)


def tree_of(marks: Mapping[str, Mark], *, kind: Literal["file", "folder"] = "folder") -> Tree:
    """A tree from its files; its hash is the one that the agent finds for them."""
    rows = sorted([name, mark] for name, (_, mark) in marks.items())
    text = json.dumps(rows, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=32).hexdigest()
    return Tree(kind=kind, hash=digest, files=dict(marks), odd={})


def differing(expected: Mapping[str, Mark], found: Mapping[str, Mark], *, extra: bool = True) -> list[str]:
    """What is not as it should be: names of files that differ or are missing, and (`extra`) of those too many."""
    wrong = [name for name, mark in expected.items() if name not in found or found[name][1] != mark[1]]
    more = [name for name in found if name not in expected] if extra else []
    return sorted([*wrong, *more])


def place(target: Spot, tree: Tree, **how: object) -> list[str] | None:
    """Have the agent put what was brought in the target's place if it is the tree; None, or the files that differ."""
    found: dict[str, Mark] = {}

    def on_progress(record: dict[str, Any]) -> None:
        found.update(record.get("files", {}))

    request = {"target": str(target.path), "tree": tree.hash, **how}
    answer = ask_agent(target.transport, "place", request, on_progress=on_progress)
    return None if answer["placed"] else differing(tree.files, found)


def name_from(folder: Path, *, otherwise: str) -> str:
    """The name of a folder on hosts, by its name here: letters, digits and a few signs."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name).strip("-.") or otherwise


def same_place(one: Spot, other: Spot) -> bool:
    """Whether two spots are the same path of the same machine, as far as the cluster file tells."""
    if one.path != other.path:
        return False
    machines = {
        None if spot.is_here else (spot.host.ssh or spot.host.name, spot.host.ssh_port) for spot in (one, other)
    }
    return len(machines) == 1


def host_layout(host: Host, run_id: str) -> RunLayout:
    """Where a run lies on a host."""
    return RunLayout(Path(host.workdir), run_id)


def create_folder(home: Path) -> RunLayout:
    """Make the directory of a new run, with an id that no other has: two starts at once get two."""
    (home / "runs").mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        layout = RunLayout(home, new_id(run_ids(home)))
        try:
            layout.folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return layout


def write_documents(layout: RunLayout, documents: Mapping[str, Any]) -> None:
    """Write JSON documents into the run directory on the controller, by name ("job" -> job.json)."""
    for name, value in documents.items():
        write_record(layout.folder / f"{name}.json", value)


def place_documents(
    cluster: Cluster, transports: Mapping[str, Transport], run_id: str, documents: Mapping[str, Any]
) -> None:
    """Write the same JSON documents into the run directory on every host."""
    for host in cluster.hosts:
        folder = host_layout(host, run_id).folder
        for name, value in documents.items():
            path = folder / f"{name}.json"
            transports[host.name].write(path, encode_record(value, path))


def place_gang(cluster: Cluster, transports: Mapping[str, Transport], gang: Gang) -> None:
    """Write gang.json into the attempt's folder on every host."""
    for host in cluster.hosts:
        path = host_layout(host, gang.run_id).gang(gang.attempt)
        transports[host.name].write(path, encode_record(gang.to_json(), path))


def is_shared(path: PurePath | str, shared: Sequence[str]) -> bool:
    """Whether a path lies in a folder that is one and the same on all hosts."""
    return any(PurePath(folder) in PurePath(path).parents for folder in shared)


def carry_history(before: Spot, now: Spot, run_id: str) -> bool:
    """Bring what rank 0 wrote from an old head to a new one, so that the run keeps one history. False: the old head
    does not answer, and what only it has is missing from now on.

    before, now: the work folders. Only what is missing there is added: the new head may have been one before, and where
    its work folder is the controller's home, the supervisor's events lie in the same file.
    """
    if same_place(before, now):
        return True
    old, new = host_layout(before.host, run_id), host_layout(now.host, run_id)
    there = set(now.transport.names(new.tensorboard))
    with tempfile.TemporaryDirectory(prefix="gangline-pass-") as folder:
        try:
            lines = {old.metrics: new.metrics, old.events: new.events}
            written = {target: _read_all(source, before.transport) for source, target in lines.items()}
            curves = [name for name in before.transport.names(old.tensorboard) if name not in there]
            for name in curves:
                before.transport.pull(old.tensorboard / name, Path(folder) / name)
        except HostUnreachable:
            return False
        for target, data in written.items():
            _add_lines(_lines_of_ranks(data), target, now.transport)
        for name in curves:
            now.transport.push(Path(folder) / name, new.tensorboard / name)
    return True


def add_kept_history(head: Spot, kept: PurePath, run_id: str) -> bool:
    """Add lines of metrics that a host has kept of other heads to those that it has as the head; False: it has none."""
    data = _read_all(kept, head.transport)
    _add_lines(list(dict.fromkeys(data.splitlines())), host_layout(head.host, run_id).metrics, head.transport)
    return bool(data)


def _lines_of_ranks(data: bytes) -> list[bytes]:
    """Whole lines but those of the supervisor, whose events stay on the controller."""
    whole, _, _torn = data.rpartition(b"\n")
    return [line for line in whole.splitlines() if not _is_supervisors(line)]


def _is_supervisors(line: bytes) -> bool:
    return (json_object(line) or {}).get("source") == "supervisor"


def _add_lines(lines: list[bytes], target: Path, transport: Transport) -> None:
    there = _read_all(target, transport)
    known = set(there.splitlines())
    missing = [line for line in lines if line not in known]
    if not missing:
        return
    joint = b"\n" if there and not there.endswith(b"\n") else b""  # a crash tore its last line
    transport.write(target, there + joint + b"\n".join(missing) + b"\n")


def _read_all(path: PurePath, transport: Transport) -> bytes:
    pieces: list[bytes] = []
    try:
        while piece := transport.read(path, offset=sum(map(len, pieces))):
            pieces.append(piece)
    except FileNotFoundError:
        pass
    return b"".join(pieces)
