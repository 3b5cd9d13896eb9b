"""Commit checkpoints: once every host of the attempt has its part, place the record on every host."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from gangline.errors import CheckpointError
from gangline.remote.transport import Transport
from gangline.runs.checkpoints import part_folder, step_folder
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.manifest import COMMIT_FILE, PART_FILE, Commit, commit_record

STEP = re.compile(r"step-(\d{8,})")


class Committer:
    """Commits what one attempt saves.

    The record is placed by files and not by a collective among ranks, which may be dying.
    """

    def __init__(
        self,
        cluster: Cluster,
        transports: Mapping[str, Transport],
        *,
        run_id: str,
        hosts: Sequence[str],
        attempt: int,
    ) -> None:
        self._folders: dict[str, Path] = {
            host.name: RunLayout(Path(host.workdir), run_id).checkpoints for host in cluster.hosts if host.name in hosts
        }
        self._transports = transports
        self._attempt = attempt
        self._done: set[bytes] = set()
        """Records that are on every host. A step whose record retention has removed is not committed again."""

    def sweep(self) -> list[Commit]:
        """Commit every step that is complete now; returns what is newly committed, oldest first."""
        return [commit for step in self._candidates() if (commit := self._commit(step)) is not None]

    def _candidates(self) -> list[int]:
        """Steps that have a folder on every host."""
        names = [set(self._transports[host].names(folder)) for host, folder in self._folders.items()]
        return sorted(int(found[1]) for name in set.intersection(*names) if (found := STEP.fullmatch(name)))

    def _commit(self, step: int) -> Commit | None:
        record = self._record(step)
        if record is None or record in self._done:
            return None
        commit = Commit.from_bytes(record)
        if commit.attempt != self._attempt or commit.step != step:
            return None
        fresh = [self._place(host, step, record) for host in self._folders]
        self._done.add(record)
        return commit if any(fresh) else None

    def _record(self, step: int) -> bytes | None:
        parts: dict[str, bytes] = {}
        for host, folder in self._folders.items():
            part = self._read(host, part_folder(folder, step, host) / PART_FILE)
            if part is None:
                return None
            parts[host] = part
        try:
            return commit_record(parts)
        except CheckpointError:  # parts of different attempts: some host has not written its new one yet
            return None

    def _place(self, host: str, step: int, record: bytes) -> bool:
        path = step_folder(self._folders[host], step) / COMMIT_FILE
        if self._read(host, path) == record:
            return False
        self._transports[host].write(path, record)
        return True

    def _read(self, host: str, path: PurePath) -> bytes | None:
        try:
            return self._transports[host].read(path)
        except FileNotFoundError:
            return None
