"""`gangline ps`: list the runs, or the attempts of one."""

from __future__ import annotations

import dataclasses
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

from gangline.cli.options import AsJson, argument, option
from gangline.cli.output import Terminal, print_data, print_json
from gangline.context import default_home
from gangline.control.listing import RunListing, list_runs
from gangline.control.other_users import leases_here
from gangline.control.served_endpoints import EndpointState, list_endpoints
from gangline.control.supervision import open_run
from gangline.errors import NewerRecord
from gangline.report.run_history import attempt_rows, attempt_table, read_history
from gangline.report.text_table import age, table


def command(
    run: Annotated[str | None, argument("RUN", "list the attempts of this run")] = None,
    cluster: Annotated[
        Path | None, option("first take in runs that other computers began on the hosts of this file", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the runs, newest first, and served models. With RUN, list the attempts (starts) of that run, oldest first.

    A run that another computer began, or resumed, is known here once it was taken in: every verb works with it then.

    Exit code 4 if a host shows another identity than the host that supervises a run.
    """
    if cluster is not None:
        from gangline.control.runs_of_others import take_in_runs  # here, as it loads what starts runs

        take_in_runs(cluster, home=default_home(), console=Terminal())
    if run is None:
        _list_runs(as_json=as_json)
    else:
        _list_attempts(run, as_json=as_json)


def _list_attempts(prefix: str, *, as_json: bool) -> None:
    with open_run(prefix, home=default_home()) as opened:
        history = read_history(opened.view(), records=opened.records, remote=opened.supervisor_host)
    if as_json:
        print_json({"run": history.id, "phase": history.run.phase, "attempts": attempt_rows(history)})
        return
    print_data(attempt_table(history, now=datetime.now(timezone.utc)))
    for gap in (*history.gaps, *([history.run.silent] if history.run.silent else [])):
        Terminal().report(f"missing: {gap}")


def _list_runs(*, as_json: bool) -> None:
    home = default_home()
    listed = list_runs(home)
    rows = [_row(each) for each in listed]
    others = leases_here()
    endpoints = list_endpoints(home)
    if as_json:
        print_json(
            {
                "runs": rows,
                "endpoints": [_endpoint_row(*each) for each in endpoints],
                "other_users": [dataclasses.asdict(lease) for lease in others],
            }
        )
    elif rows:
        more = ("slurm_job",) if any(row["slurm_job"] for row in rows) else ()
        header = ("run", *_COLUMNS[1:], *("slurm job" for _ in more))
        now = datetime.now(timezone.utc)
        print_data(table(header, [[_text(name, row, now) for name in (*_COLUMNS, *more)] for row in rows]))
    elif not endpoints:
        print_data([f"no runs in {home}; start one: gangline train job.yaml"])
    if endpoints and not as_json:
        _print_endpoints(endpoints)
    for each in listed:
        if each.damage is not None and not as_json:
            Terminal().report(f"{each.record.id}: {each.damage.what}: {each.damage.seen}")
    for text in (
        () if as_json else dict.fromkeys(f"this computer: {each.what} is in use by {each.words}" for each in others)
    ):
        Terminal().report(text)
    for each in listed:
        if each.record.refused is not None:
            raise each.record.refused


def _print_endpoints(endpoints: list[tuple[str, EndpointState]]) -> None:
    now = datetime.now(timezone.utc)
    rows = [
        [name, state.shown, state.url or "-", ", ".join(state.models) or "-", age(state.created, now=now)]
        for name, state in endpoints
    ]
    print_data(table(("endpoint", "phase", "address", "models", "created"), rows))
    for name, state in endpoints:
        if state.cause is not None:
            Terminal().report(f"{name}: {state.cause.what}: {state.cause.seen}")


def _endpoint_row(name: str, state: EndpointState) -> dict[str, Any]:
    keys = {"phase": state.shown, "error": state.cause.to_json() if state.cause else None}
    return {
        "id": name,
        "target": state.target,
        "url": state.url,
        "models": state.models,
        "created": state.created,
        **keys,
    }


_COLUMNS = ("id", "job", "phase", "attempt", "step", "loss", "created", "updated")


def _row(run: RunListing) -> dict[str, Any]:
    record, last = run.record, run.last or {}
    state = record.state
    return {
        "id": record.id,
        "job": state.name if state else "",
        "phase": _phase(run),
        "damage": run.damage.to_json() if run.damage is not None else None,
        "silent": record.silent,
        "suspended": record.suspended,
        "heard": run.heard,
        "waits": run.waits,
        "slurm_job": run.slurm_job,
        "finished_early": record.phase == "finished" and last.get("step", 0) < (last.get("steps") or 0),
        "quiet_since": state.quiet_since if state and record.phase == "running" else None,
        "attempt": state.attempt if state else None,
        "step": last.get("step"),
        "steps": last.get("steps"),
        "loss": last.get("loss"),
        "created": record.created,
        "updated": state.updated if state else "",
        "error": state.error if state else None,
    }


def _phase(run: RunListing) -> str:
    """The phase, or the reason why it cannot be read."""
    if run.damage is None:
        return run.record.phase
    return "newer gangline" if isinstance(run.damage, NewerRecord) else "damaged"


def _text(name: str, row: dict[str, Any], now: datetime) -> str:
    value = row[name]
    if value is None:
        return "-"
    if name == "phase":
        return _phase_text(str(value), row, now)
    if name == "step":
        return f"{value}/{row['steps']}"
    if name in {"created", "updated"}:
        return age(str(value), now=now)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _phase_text(phase: str, row: dict[str, Any], now: datetime) -> str:
    """The phase, and what makes it doubtful or other than usual."""
    if row["suspended"]:
        return f"suspended (Slurm's job {row['suspended']})"
    if row["silent"]:
        heard = f"; last heard {age(str(row['heard']), now=now)}" if row["heard"] else ""
        return f"{phase}? ({row['silent']}{heard})"
    if row["waits"]:
        return f"{phase} ({row['waits']})"
    if row["quiet_since"] is not None:
        return f"{phase} (quiet for {age(str(row['quiet_since']), now=now).removesuffix(' ago')})"
    return "finished early" if row["finished_early"] else phase
