"""`gangline ps`: list the runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gangline import app
from gangline.cli.output import print_data, print_json
from gangline.runs.layout import RunLayout
from gangline.runs.registry import RunRecord, list_runs
from gangline.watch.table import table


def command(
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """List the runs, newest first."""
    home = app.default_home()
    rows = [_row(record, app.progress(RunLayout(home, record.id))) for record in list_runs(home)]
    if as_json:
        print_json({"runs": rows})
    elif rows:
        header = ("run", "job", "phase", "attempt", "step", "loss", "created", "updated")
        print_data(table(header, [[_text(row[name]) for name in _COLUMNS] for row in rows]))
    else:
        print_data([f"no run yet in {home}; start one: gangline train job.yaml"])


_COLUMNS = ("id", "job", "phase", "attempt", "progress", "loss", "created", "updated")


def _row(record: RunRecord, last: dict[str, Any] | None) -> dict[str, Any]:
    state, last = record.state, last or {}
    return {
        "id": record.id,
        "job": state.name if state else "",
        "phase": record.phase,
        "attempt": state.attempt if state else None,
        "step": last.get("step"),
        "steps": last.get("steps"),
        "progress": f"{last['step']}/{last['steps']}" if last else None,
        "loss": last.get("loss"),
        "created": record.created,
        "updated": state.updated if state else "",
        "error": state.error if state else None,
    }


def _text(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
