"""Which runs there are in a home, and which one a prefix means."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gangline.errors import HostKeyRefused, RecordError, UsageError
from gangline.runs.cluster import Cluster
from gangline.runs.files import write_json
from gangline.runs.layout import PATTERN, RunLayout
from gangline.runs.record_versions import load_record, read_regular
from gangline.runs.state import ProcessId, RunState
from gangline.units import listed

IsAlive = Callable[[ProcessId], bool]

NEVER_STARTED = "never started"
"""The phase of a run whose first start was killed before it began anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The state of one run, from its state.json and the process of its supervisor."""

    id: str
    state: RunState | None
    """None where state.json cannot be read."""
    lost: bool = False
    """The state says that it runs, but its supervisor is dead."""
    silent: str | None = None
    """Why this is only the last known state: the error of the supervisor's host, which does not answer."""
    silent_host: str | None = None
    """That host."""
    suspended: str | None = None
    """Its job, which Slurm has suspended: this is the last known state then."""
    damage: RecordError | None = None
    """Why state.json cannot be used, where it is there."""
    refused: HostKeyRefused | None = None
    """The supervisor's host shows another host key."""

    @property
    def phase(self) -> str:
        """The phase of its state, or `lost`, `never started` (its start was killed before), or `unknown`."""
        if self.state is None:
            return "unknown"
        if self.lost and self.state.phase == "preparing" and self.state.attempt == 1:
            return NEVER_STARTED
        return "lost" if self.lost else self.state.phase

    def require_state(self) -> None:
        """Raise RecordError where state.json is there and cannot be used."""
        if self.damage is not None:
            raise self.damage

    @property
    def ended(self) -> bool:
        """Whether it has ended, or cannot continue by itself."""
        return self.phase in {"finished", "stopped", "failed", "lost", "unknown", NEVER_STARTED}

    @property
    def created(self) -> str:
        """ISO time, "" where it is not known."""
        return self.state.created if self.state else ""


def run_ids(home: Path) -> list[str]:
    """Ids of all runs, sorted."""
    folder = home / "runs"
    if not folder.is_dir():
        return []
    return sorted(path.name for path in folder.iterdir() if PATTERN.fullmatch(path.name))


def read_record(layout: RunLayout, *, is_alive: IsAlive = lambda process: process.is_alive) -> RunRecord:
    """Where a run stands now; a run without a readable state.json is `unknown`.

    is_alive: whether a supervisor runs, where it is not on this computer.
    """
    try:
        state = RunState.load(layout)
        if _is_lost(state, is_alive):
            # its supervisor may have written the end and left between our two looks
            state = RunState.load(layout)
    except RecordError as error:
        return RunRecord(id=layout.run_id, state=None, damage=error)
    except FileNotFoundError:
        return RunRecord(id=layout.run_id, state=None)
    return RunRecord(id=layout.run_id, state=state, lost=_is_lost(state, is_alive))


def _is_lost(state: RunState, is_alive: IsAlive) -> bool:
    if state.phase in {"finished", "stopped", "failed"} or state.supervisor is None:
        return False
    return not is_alive(state.supervisor)


def list_runs(home: Path) -> list[RunRecord]:
    """All runs, newest first."""
    records = [read_record(RunLayout(home, run_id)) for run_id in run_ids(home)]
    return sorted(records, key=lambda record: (record.created, record.id), reverse=True)


def find_run(home: Path, prefix: str) -> RunLayout:
    """The run that `prefix` means: a whole id, or the only one that starts so. Raises UsageError otherwise."""
    known = run_ids(home)
    if prefix in known:
        return RunLayout(home, prefix)
    matches = [run_id for run_id in known if prefix and run_id.startswith(prefix)]
    if len(matches) == 1:
        return RunLayout(home, matches[0])
    if matches:
        raise UsageError(
            f"ambiguous prefix {prefix!r}",
            seen=f"it fits {listed(matches)}",
            fix="give more letters of the id",
        )
    raise UsageError(
        f"no such run: {prefix!r}",
        seen=f"in {home}: {listed([record.id for record in list_runs(home)]) or 'no run yet'}",
        fix="gangline ps lists all runs" if known else "start one: gangline train job.yaml",
    )


def renew_keys(home: Path, keys: Mapping[str, str]) -> list[str]:
    """Put new host keys in the place of old ones in this computer's records; the ids of the runs that had them.

    keys: old -> new. A key belongs to one machine, whatever the machine is called in a run.
    """
    renewed = []
    for run_id in run_ids(home):
        layout = RunLayout(home, run_id)
        paths = [layout.cluster, *layout.folder.glob("attempts/*/cluster.json")]
        changed = [path for path in paths if _renew(path, keys)]  # all of them, not the first
        if changed:
            renewed.append(run_id)
    return renewed


def _renew(path: Path, keys: Mapping[str, str]) -> bool:
    """Only the keys change: what a newer gangline wrote besides stays as it is."""
    try:
        load_record(path, Cluster)
        record = json.loads(read_regular(path))
    except (OSError, RecordError):
        return False  # a run that was interrupted before it began, or a damaged one
    machines = [*record["hosts"], *filter(None, [record.get("witness")])]
    old = [host for host in machines if host.get("host_key") in keys]
    for host in old:
        host["host_key"] = keys[host["host_key"]]
    if old:
        write_json(path, record)
    return bool(old)
