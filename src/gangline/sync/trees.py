"""Files and folders by content: what lies where, and whether it is the same."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal

from gangline.errors import RunFailed
from gangline.remote.local import LocalTransport
from gangline.remote.transport import Transport
from gangline.runs.cluster import Host
from gangline.sync.ask import ask_agent
from gangline.sync.tell import SILENT, Tell, shown
from gangline.units import format_bytes

NAMES_LIMIT = 500_000
"""A folder with more files is none of ours."""

Mark = tuple[int, str]
"""Bytes of a file, and the mark of its content; see `gangline.agent.digests`."""


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


def look(spot: Spot, how: How = CONTENT, *, tell: Tell = SILENT) -> Tree:
    """What lies at a spot, hashed there."""
    files: dict[str, Mark] = {}

    def on_progress(record: dict[str, Any]) -> None:
        if record.get("kind") == "files":
            files.update({name: (int(mark[0]), str(mark[1])) for name, mark in record["files"].items()})
        elif total := record.get("total_bytes"):
            percent = 100 * record["done_bytes"] // total
            tell.tick(f"hashing {how.what or spot.path.name} on {spot.host.name}: {percent} % of {format_bytes(total)}")
        if len(files) > NAMES_LIMIT:
            raise ValueError(f"more than {NAMES_LIMIT} files")

    try:
        answer = ask_agent(spot.transport, "digests", how.request(spot), on_progress=on_progress)
        found = answer["folders"][str(spot.path)]
        return Tree(
            kind=found["is"], hash=found["tree"], files=files, odd=found["odd"], free_bytes=found.get("free_bytes")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunFailed(
            f"{spot.host.name}: what lies at {spot.path} cannot be made out",
            seen=f"{type(error).__name__}: {shown(str(error))}",
            fix="look at that folder; is it the one that was meant?",
        ) from error


def look_everywhere(spots: Sequence[Spot], how: How = CONTENT, *, tell: Tell = SILENT) -> list[Tree]:
    """What lies at each spot, all at the same time."""
    if not spots:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(spots))) as pool:
        return list(pool.map(lambda spot: look(spot, how, tell=tell), spots))


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


def same_place(one: Spot, other: Spot) -> bool:
    """Whether two spots are the same path of the same machine, as far as the cluster file tells."""
    if one.path != other.path:
        return False
    if one.is_here or other.is_here:
        return one.is_here and other.is_here
    return (one.host.ssh or one.host.name, one.host.ssh_port) == (
        other.host.ssh or other.host.name,
        other.host.ssh_port,
    )
