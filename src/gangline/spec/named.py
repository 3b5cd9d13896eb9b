"""Hosts that are only named so far: on the command line, or in a hostfile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.runs.cluster import Host
from gangline.spec.cluster import resolve_cluster
from gangline.spec.cluster_words import ClusterWords
from gangline.spec.document import Document
from gangline.spec.hostfile import name_of, parse_hostfile
from gangline.spec.load import read_text
from gangline.spec.mistakes import KeyPath, Mistakes, Position, printable
from gangline.spec.validate import check


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedHost:
    """A host of which nobody knows yet what it is."""

    host: Host
    has_slots: bool
    """Whether the user said how many ranks run there."""


def named_hosts(destinations: Sequence[str], *, home: Path) -> tuple[NamedHost, ...]:
    """The hosts that the command line names: `pc1`, `alice@pc1`. Raises SpecError with all mistakes at once."""
    source = "command line"
    document = Document(source=source, named_keys=False, mistakes=Mistakes("the command line"))
    document.mark(("hosts",), Position(source=source))
    hosts: list[dict[str, Any]] = []
    for index, text in enumerate(destinations):
        hosts.append({"name": name_of(text)} if name_of(text) == text else {"name": name_of(text), "ssh": text})
        position = Position(source=f"{source}: {printable(text)}", column=index + 1)
        path: KeyPath = ("hosts", index)
        for place in (path, *((*path, key) for key in hosts[-1])):
            document.mark(place, position)
    document.values = {"hosts": hosts}
    return _resolved(document, folder=Path.cwd(), home=home)


def hostfile_hosts(path: Path, *, home: Path) -> tuple[NamedHost, ...]:
    """The hosts of a hostfile. Raises SpecError with all mistakes at once."""
    document = parse_hostfile(read_text(path, kind="host"), str(path))
    return _resolved(document, folder=path.absolute().parent, home=home)


def _resolved(document: Document, *, folder: Path, home: Path) -> tuple[NamedHost, ...]:
    checked = check(ClusterWords, document)
    cluster = resolve_cluster(checked, folder=folder, home=home.absolute(), default_name="cluster", complete=False)
    return tuple(
        NamedHost(host=host, has_slots=checked.wrote("hosts", index, "slots"))
        for index, host in enumerate(cluster.hosts)
    )
