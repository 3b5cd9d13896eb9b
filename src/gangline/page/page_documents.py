"""What the page is told, as plain data: lists of runs, one run, its figures. Text of runs and hosts is cleaned here."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from gangline.control.listing import RunListing
from gangline.errors import RecordError
from gangline.page.live_run import LiveRun, planned_memory
from gangline.page.series import SeenBefore
from gangline.report.host_samples import seconds_of
from gangline.report.text_table import clean
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there
from gangline.runs.registry import RunRecord
from gangline.runs.state import RunState

STOPPABLE = {"running", "restarting", "queued", "lost"}
RESUMABLE = {"stopped", "failed"}


def list_document(listed: list[RunListing], *, home: Path) -> dict[str, Any]:
    """All runs, the newest first; see the columns of `gangline ps`."""
    return {"now": time.time(), "runs": [_listed(each, _hosts(home, each.record.id)) for each in listed]}


def _hosts(home: Path, run_id: str) -> list[str]:
    try:
        cluster = load_if_there(RunLayout(home, run_id).cluster, Cluster)
    except (RecordError, OSError):
        return []  # the list says that it is damaged
    return [host.name for host in cluster.hosts] if cluster is not None else []


def _listed(each: RunListing, hosts: list[str]) -> dict[str, Any]:
    last = each.last or {}
    heard = each.heard or last.get("time")
    return {
        **_state(each.record),
        "damage": clean(f"{each.damage.what}: {each.damage.seen}") if each.damage is not None else None,
        "waits": each.waits,
        "slurm_job": each.slurm_job,
        "hosts": hosts,
        "step": _integer(last.get("step")),
        "steps": _integer(last.get("steps")),
        "loss": _figure(last.get("loss")),
        "tokens_per_s": _figure(last.get("tokens_per_s")),
        "heard": seconds_of(heard) if heard else None,
    }


def _state(record: RunRecord) -> dict[str, Any]:
    state = record.state
    return {
        "id": record.id,
        "name": clean(state.name) if state else "",
        "phase": record.phase,
        "silent": clean(record.silent) if record.silent else None,
        "attempt": state.attempt if state else None,
        "created": seconds_of(state.created) if state else None,
        "updated": seconds_of(state.updated) if state else None,
        "error": _error(state),
        "can_stop": record.phase in STOPPABLE,
        "can_resume": record.phase in RESUMABLE,
    }


def _error(state: RunState | None) -> dict[str, str] | None:
    if state is None or not state.error:
        return None
    return {key: clean(str(state.error.get(key, "")), keep_newlines=True)[:4000] for key in ("what", "seen", "fix")}


def run_document(live: LiveRun) -> dict[str, Any]:
    """Where one run stands, and its events."""
    with live.lock:
        last = live.series.last()
        return {
            **_state(live.record),
            "now": time.time(),
            "last": last,
            "remaining_s": _remaining_s(live),
            "reading": live.is_behind,
            "trouble": live.trouble or None,
            "hosts": [host.name for host in live.run.cluster.hosts],
            "plan": _plan(live),
            "events": live.told()[-400:],
        }


def _remaining_s(live: LiveRun) -> float | None:
    series = live.series
    times = [value for value in series.columns["step_s"][-20:] if value == value]  # noqa: PLR0124  (not a number)
    if live.record.phase != "running" or not times or series.total_steps is None:
        return None
    return (series.total_steps - series.steps[-1]) * sum(times) / len(times)


def _plan(live: LiveRun) -> dict[str, Any] | None:
    if live.plan is None:
        return None
    forecast = live.plan.forecast
    return {
        "strategy": live.plan.strategy,
        "method": live.plan.method,
        "precision": live.plan.precision,
        "batch": live.plan.batch,
        "reason": clean(live.plan.reason),
        "step_s": forecast.step_s if forecast else None,
    }


def series_document(
    live: LiveRun,
    *,
    first: int | None = None,
    last: int | None = None,
    before: SeenBefore | None = None,
    rank: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """The figures of a run between two steps; see `RunSeries.buckets` and `RankSeries.document`."""
    planned = planned_memory(live)
    with live.lock:
        ranks = live.series.ranks.document(first=first, last=last, rank=rank)
        found = live.series.buckets(first=first, last=last, before=before)
    ranks["planned_bytes"] = [planned.get((each["rank"], each["host"])) for each in ranks["ranks"]]
    return {**found, "reading": live.is_behind, "ranks": ranks}


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _integer(value: object) -> int | None:
    return value if type(value) is int else None
