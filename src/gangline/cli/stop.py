"""`gangline stop RUN`: end a run, or have some hosts leave it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from gangline.cli.options import RunId
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.end import rehearse_stop, stop
from gangline.control.other_users import refuse_of_another
from gangline.control.served_endpoints import find_endpoint, stop_endpoint
from gangline.control.slurm_job import cancel_waiting, require_gone
from gangline.control.supervision import RunHandle, open_run
from gangline.errors import HostUnreachable, UsageError
from gangline.report.follow import NO_SUPERVISOR, Patience, raise_failure, read_board
from gangline.report.text_table import in_words
from gangline.runs.layout import EndpointLayout
from gangline.runs.registry import RunRecord, find_run

SILENCE_S = 30.0
"""How long the supervisor's host may be silent during the wait."""
POLL_S = 0.2
HINT_S = 15.0
"""After this time the user sees that waiting is optional."""


def command(
    run: RunId,
    now: Annotated[bool, typer.Option("--now", help="end the run without saving first")] = False,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host", metavar="HOST", help="only this host leaves the run; may be repeated", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the orders and send nothing")] = False,
) -> None:
    """End a run: its ranks save at the next step boundary and exit. Waits until all its processes have ended.

    With --host, the run saves and continues without these hosts; the others share their work. Waits until it does.
    An endpoint of `gangline serve --detach` ends by its name.
    """
    hosts = tuple(dict.fromkeys(host or ()))
    if now and hosts:
        raise UsageError(
            "--now does nothing with --host",
            seen="when a host leaves, the run saves first and continues from that checkpoint",
            fix="leave out one of them",
        )
    if (endpoint := find_endpoint(default_home(), run)) is not None:
        _stop_endpoint(endpoint, plain=not (now or hosts or dry_run))
        return
    refuse_of_another(run, home=default_home())
    layout = find_run(default_home(), run)
    if not (dry_run or hosts) and cancel_waiting(layout):
        require_gone(layout, Terminal())
        print_data([f"{layout.run_id} stopped"])
        return
    with open_run(run, home=default_home()) as opened:
        if dry_run:
            print_data(rehearse_stop(opened, now=now, hosts=hosts))
            return
        if stop(opened, now=now, hosts=hosts):
            if hosts:
                _wait_without(opened, hosts)
            else:
                _wait(
                    opened,
                    "save and leave",
                    hint="gangline stop --now does not wait",
                    until=lambda record: record.ended,
                )
        record = opened.record()
    if record.ended:
        require_gone(layout, Terminal())
    without = f" without {in_words(hosts)}" if hosts and not record.ended else ""
    print_data([f"{record.id} {record.phase}{without}"])
    if record.phase == "lost" or (hosts and record.ended):
        raise_failure(record)


def _stop_endpoint(endpoint: EndpointLayout, *, plain: bool) -> None:
    if not plain:
        raise UsageError(
            "--now, --host and --dry-run are for runs",
            seen=f"{endpoint.endpoint_id} is a model that is served",
            fix=f"gangline stop {endpoint.endpoint_id}",
        )
    print_data([f"{endpoint.endpoint_id} {stop_endpoint(endpoint)}"])


def _wait_without(run: RunHandle, hosts: Sequence[str]) -> None:
    """Wait for an attempt without these hosts. An attempt that begins for another reason gets the order, too."""
    first = run.record().state
    asked = first.attempt if first else 0

    def has_gone_on(record: RunRecord) -> bool:
        nonlocal asked
        board = read_board(run.layout, record.state.attempt) if record.state else None
        if record.ended or board is None or record.state is None or record.phase != "running":
            return record.ended
        present = [host for host in hosts if host in {row["host"] for row in board["hosts"]}]
        if present and record.state.attempt > asked:
            asked = record.state.attempt
            stop(run, hosts=present)
        return not present

    hint = "Ctrl-C leaves; the order stays in force"
    _wait(run, f"save and go on without {in_words(hosts)}", hint=hint, until=has_gone_on)


def _wait(run: RunHandle, doing: str, *, hint: str, until: Callable[[RunRecord], bool]) -> None:
    """Ctrl-C ends the waiting, not the order."""
    console = Terminal()
    begun = time.monotonic()
    patience = Patience(run.view().patience_s, time.monotonic)
    silent_since: float | None = None
    while not until(record := patience.judge(run.record())):
        now = time.monotonic()
        silent_since = None if record.silent in {None, NO_SUPERVISOR} else silent_since or now
        if silent_since is not None and now - silent_since > SILENCE_S:
            console.clear()
            raise HostUnreachable(
                f"{run.layout.run_id} was ordered to {doing}, and it is unknown whether it did",
                seen=str(record.silent),
                fix=f"once it answers: gangline ps {run.layout.run_id}; repeat the order if the run has not changed",
            )
        waited = f"waiting for {run.layout.run_id} to {doing}, {now - begun:.0f} s"
        console.progress(waited if now - begun < HINT_S else f"{waited}; {hint}")
        time.sleep(POLL_S)
    console.clear()
