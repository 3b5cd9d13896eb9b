"""`gangline stop RUN`: end a run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, print_data, raise_failure
from gangline.errors import HostUnreachable

SILENCE_S = 30.0
"""How long the host that keeps the run may give no answer while it is waited for."""
HINT_S = 15.0
"""After this the user is told that it need not be waited for."""


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id, or the beginning of one", show_default=False)],
    now: Annotated[bool, typer.Option("--now", help="end it without saving first")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be ordered, and order nothing")] = False,
) -> None:
    """End a run: its ranks save at the next step boundary and leave. Waits until nothing of it runs."""
    with app.opened(run, home=app.default_home()) as opened:
        if dry_run:
            print_data(app.rehearse_stop(opened, now=now))
            return
        if app.stop(opened, now=now):
            _wait(opened)
        record = opened.record()
    print_data([f"{record.id} {record.phase}"])
    if record.phase == "lost":
        raise_failure(record)


def _wait(run: app.Opened, *, poll_s: float = 0.2) -> None:
    """Ctrl-C ends the waiting, not the order."""
    talk = Terminal()
    begun = time.monotonic()
    silent_since: float | None = None
    while not (record := run.record()).ended:
        now = time.monotonic()
        silent_since = None if record.silent is None else silent_since or now
        if silent_since is not None and now - silent_since > SILENCE_S:
            talk.clear()
            raise HostUnreachable(
                f"{run.layout.run_id} was ordered to end; whether it has is not known",
                seen=str(record.silent),
                fix=f"once it answers: gangline ps, and gangline stop {run.layout.run_id} if it still runs",
            )
        waited = f"waiting for {run.layout.run_id} to save and leave, {now - begun:.0f} s"
        talk.tick(waited if now - begun < HINT_S else f"{waited}; stop --now does not wait")
        time.sleep(poll_s)
    talk.clear()
