"""`gangline profile`: have all ranks of a running job record a few steps, and bring what they leave here."""

from __future__ import annotations

import gzip
import json
import secrets
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gangline.control.supervision import RunHandle, request_here
from gangline.control.user_command import CommandRecord
from gangline.errors import RunFailed, UsageError
from gangline.launch.backend import LaunchRequest
from gangline.provision.trees import host_layout
from gangline.report.rank_traces import RankTrace
from gangline.runs.profile_order import ProfileOrder, rank_files
from gangline.transport.ssh_options import NONSENSE
from gangline.transport.transport import read_if_there

LOOK_S = 0.5
RECORD_BYTES = 1 << 20


def record_steps(run: RunHandle, steps: int, *, progress: Callable[[str], None]) -> tuple[list[RankTrace], int]:
    """The traces of all ranks by rank, and the first step that they recorded. The run goes on.

    Raises UsageError for a run that does not train or has no own trainer, RunFailed where it ends meanwhile or a rank
    cannot write its trace.
    """
    request = _request(run)
    order = ProfileOrder(id=secrets.token_hex(4), steps=steps)
    view = run.view().at(request.attempt)
    view.head.write(view.head_layout.profile_order(request.attempt), json.dumps(order.to_json()).encode())
    where = {rank: part.host for part in request.hosts for rank in part.ranks}
    records: dict[int, dict[str, Any]] = {}
    while len(records) < len(where):
        progress(f"recording {steps} steps: {len(records)} of {len(where)} ranks are done")
        for rank, host in where.items():
            if rank not in records and (found := _record(run, request.attempt, order, rank, host)) is not None:
                records[rank] = found
        if len(records) < len(where):
            _require_going(run, request.attempt)
            time.sleep(LOOK_S)
    offsets = records[0]["offsets_ns"]
    traces = []
    for rank, host in sorted(where.items()):
        progress(f"bringing the trace of rank {rank} from {host}")
        events = _events(run, request.attempt, order, rank, host)
        offset_ns, error_ns = offsets[rank]
        traces.append(
            RankTrace(
                rank=rank,
                host=host,
                on_card=records[rank]["device"] == "cuda",
                events=events,
                marked_ns=records[rank]["marked_ns"],
                offset_ns=offset_ns,
                error_ns=error_ns,
            )
        )
    return traces, records[0]["first_step"]


def _request(run: RunHandle) -> LaunchRequest:
    name, record = run.layout.run_id, run.record()
    record.require_state()
    if CommandRecord.of(run.layout) is not None:
        raise UsageError(
            f"{name} runs your own command, whose steps gangline cannot record",
            seen="expected a job of gangline's own trainer (gangline train)",
            fix="torch.profiler in your script does the same; gangline top shows what its hosts do",
        )
    if record.phase != "running" or record.state is None or record.silent is not None:
        raise UsageError(
            f"{name} does not train now, so no step can be recorded",
            seen=record.silent or f"it is {record.phase}",
            fix=f"wait until it does: gangline top {name}",
        )
    return request_here(run.layout, record.state.attempt)


def _record(run: RunHandle, attempt: int, order: ProfileOrder, rank: int, host: str) -> dict[str, Any] | None:
    folder = host_layout(run.cluster.host(host), run.layout.run_id).attempt(attempt)
    data = read_if_there(run.transports[host], folder / rank_files(order.id, rank)[1], limit=RECORD_BYTES)
    if data is None:
        return None
    try:
        found: dict[str, Any] = json.loads(data)
        error = found["error"]
    except NONSENSE:
        return None  # half of it
    if error:
        raise RunFailed(
            f"rank {rank} on {host} could not write what it has recorded",
            seen=str(error),
            fix="make room on the disk of that host's work folder and record again; the run goes on",
        )
    return found


def _require_going(run: RunHandle, attempt: int) -> None:
    record = run.record()
    now = record.state.attempt if record.state else attempt
    if record.ended or now != attempt:
        raise RunFailed(
            f"{run.layout.run_id} did not go on until the steps were recorded",
            seen=f"attempt {attempt} is over" if now != attempt else f"it has {record.phase}",
            fix="record again once it trains" if not record.ended else f"gangline explain {run.layout.run_id}",
        )


def _events(run: RunHandle, attempt: int, order: ProfileOrder, rank: int, host: str) -> list[dict[str, Any]]:
    source = host_layout(run.cluster.host(host), run.layout.run_id).attempt(attempt) / rank_files(order.id, rank)[0]
    with tempfile.TemporaryDirectory(prefix="gangline-profile-") as folder:
        target = Path(folder) / "trace.json.gz"
        run.transports[host].pull(source, target)
        try:
            with gzip.open(target) as stream:
                found: list[dict[str, Any]] = json.load(stream)["traceEvents"]
        except (OSError, EOFError, zlib.error, *NONSENSE) as error:
            raise RunFailed(
                f"the trace of rank {rank} on {host} cannot be read",
                seen=f"{type(error).__name__}: {error}",
                fix="record again; the run goes on",
            ) from error
    return found


def write_merged(document: dict[str, Any], target: Path) -> int:
    """Write one trace, packed; its size in bytes. Raises UsageError where it cannot be written."""
    try:
        with gzip.open(target, "wt", encoding="utf-8", compresslevel=5) as stream:
            json.dump(document, stream, separators=(",", ":"))
        return target.stat().st_size
    except OSError as error:
        raise UsageError(f"{target} cannot be written", seen=str(error), fix="name another file: --out FILE") from error
