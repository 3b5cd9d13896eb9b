"""A run's own files: made on the controller, then placed on every host."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangline.errors import HostUnreachable
from gangline.remote.transport import Transport
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang
from gangline.runs.ids import new_id
from gangline.runs.layout import RunLayout
from gangline.runs.registry import run_ids
from gangline.runs.versions import encode_record, write_record
from gangline.sync.trees import Spot, same_place


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


def _lines_of_ranks(data: bytes) -> list[bytes]:
    """Whole lines but those of the supervisor, whose events stay on the controller."""
    whole, _, _torn = data.rpartition(b"\n")
    return [line for line in whole.splitlines() if not _is_supervisors(line)]


def _is_supervisors(line: bytes) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and record.get("source") == "supervisor"


def _add_lines(lines: list[bytes], target: Path, transport: Transport) -> None:
    there = _read_all(target, transport)
    known = set(there.splitlines())
    missing = [line for line in lines if line not in known]
    if not missing:
        return
    joint = b"\n" if there and not there.endswith(b"\n") else b""  # a crash tore its last line
    transport.write(target, there + joint + b"\n".join(missing) + b"\n")


def _read_all(path: Path, transport: Transport) -> bytes:
    pieces: list[bytes] = []
    try:
        while piece := transport.read(path, offset=sum(map(len, pieces))):
            pieces.append(piece)
    except FileNotFoundError:
        pass
    return b"".join(pieces)
