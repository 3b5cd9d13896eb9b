"""Hosts for the tests of sync: reached "over ssh", while their files lie on this computer, each in a folder of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

from gangline.runs.cluster import Cluster, Host
from gangline.transport.local import LocalTransport
from gangline.transport.transport import CommandResult


class HostTransport(LocalTransport):
    """A host whose files lie on this computer; keeps what it was asked to do."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.pushed: list[PurePath] = []
        self.ran: list[tuple[str, ...]] = []

    def push(self, source: Path, target: PurePath, **options: object) -> None:
        self.pushed.append(target)
        super().push(source, target, **options)

    def run(self, argv: Sequence[str], **options: object) -> CommandResult:
        self.ran.append(tuple(argv))
        return super().run(argv, **options)


class Lines:
    """What was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.ticked: list[str] = []

    def report(self, line: str) -> None:
        self.said.append(line)

    def progress(self, line: str) -> None:
        self.ticked.append(line)


def make_host(tmp_path: Path, name: str, **options: object) -> Host:
    """A host over ssh, with a work folder of its own."""
    return Host(**{"name": name, "workdir": str(tmp_path / name), "python": "", "transport": "ssh", **options})


def kennel(tmp_path: Path, *names: str, **options: object) -> tuple[Cluster, dict[str, HostTransport]]:
    """A cluster, and the ways to its hosts."""
    hosts = tuple(make_host(tmp_path, name, **options) for name in names)
    return Cluster(name="kennel", hosts=hosts), {host.name: HostTransport(host) for host in hosts}


def answered(
    transport: HostTransport, argv: Sequence[str], on_line: Callable[[str], None] | None, answer: Mapping[str, object]
) -> CommandResult:
    """A result that a test has laid down, as the agent would say it."""
    assert on_line
    on_line(json.dumps({"kind": "result", **answer}))
    return CommandResult(host=transport.host, argv=tuple(argv), returncode=0, stdout="", stderr="")
