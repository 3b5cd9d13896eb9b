"""What the page is told, as plain data: lists of runs, one run, its figures. Text of runs and hosts is cleaned here."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gangline.control.listing import RunListing
from gangline.errors import RecordError
from gangline.page.live_run import LiveRun, planned_memory
from gangline.page.series import SeenBefore
from gangline.report.dashboard import WatchedHost
from gangline.report.host_samples import HostSamples, others_on, seconds_of
from gangline.report.text_table import clean
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there
from gangline.runs.registry import RunRecord
from gangline.runs.state import RunState
from gangline.units import format_bytes

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


# The hosts of a run.


MOST_SAMPLES = 240
DRAWN = (
    re.compile(r"cpu_percent|memory_percent|pressure/\w+"),
    re.compile(r"net/(?!lo/).*_bytes_per_s|disk/.*_bytes_per_s"),
    re.compile(r"gpu/\d+/(utilization_percent|memory_percent|temperature_c|power_w|clock_mhz|throttled_percent)"),
)
"""Figures that are drawn over the time."""


def hosts_document(live: LiveRun, *, chosen: str | None) -> dict[str, Any]:
    """What every host of a run does, and of one of them what it did over the time."""
    with live.lock:
        hosts = list(live.hosts.hosts.values())
        told = [_host(host) for host in hosts]
        host = next((host for host in hosts if host.name == chosen), hosts[0] if hosts else None)
        drawn = {"host": host.name, **_samples(host.samples)} if host is not None else None
    return {"now": time.time(), "hosts": told, "drawn": drawn}


def _host(host: WatchedHost) -> dict[str, Any]:
    facts, samples = host.facts, host.samples
    return {
        "host": host.name,
        "silent": clean(host.silent) or None,
        "heard": host.heard,
        "cpus": facts.num_cpus if facts else None,
        "memory_total_bytes": facts.memory_total_bytes if facts else None,
        "system": clean(facts.system.os or "") if facts else "",
        "driver": facts.gpu_driver.version if facts else None,
        "gpus": [f"{gpu.name}, {format_bytes(gpu.memory_total_bytes)}" for gpu in facts.gpus] if facts else [],
        "simulated": bool(facts and facts.gpu_driver.simulated) or bool(samples and samples.is_simulated),
        "cards": [_card(card) for card in samples.cards] if samples is not None else [],
        "others": [words for card in samples.cards for words in others_on(samples, card.get("index"))]
        if samples is not None
        else [],
        "figures": {name: _figure(value) for name, value in samples.rows[-1][2].items()}
        if samples is not None and samples.rows
        else {},
    }


def _card(card: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "index": _integer(card.get("index")),
        "name": clean(str(card.get("name")))[:80],
        "simulated": bool(card.get("simulated")),
    }


def _samples(samples: HostSamples | None) -> dict[str, Any]:
    """At most 240 points of each figure that is drawn: the mean of neighbours."""
    rows = samples.rows if samples is not None else []
    each = max(1, math.ceil(len(rows) / MOST_SAMPLES))
    groups = [rows[at : at + each] for at in range(0, len(rows), each)]
    names = dict.fromkeys(name for *_, means, _ in rows[-1:] for name in means)
    return {
        "time": [round(group[0][0], 1) for group in groups],
        "figures": {
            name: [_mean_of(group, name) for group in groups]
            for name in names
            if any(pattern.fullmatch(name) for pattern in DRAWN)
        },
    }


def _mean_of(group: Sequence[tuple[float, int, dict[str, float], dict[str, float]]], name: str) -> float | None:
    told = [(count, means[name]) for _, count, means, _ in group if name in means]
    whole = sum(count for count, _ in told)
    return _figure(float(f"{sum(count * value for count, value in told) / whole:.5g}")) if whole else None
