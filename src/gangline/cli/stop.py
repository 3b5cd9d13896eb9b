"""`gangline stop RUN`: end a run."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, print_data
from gangline.runs.layout import RunLayout
from gangline.runs.registry import find_run, read_record


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id, or the beginning of one", show_default=False)],
    now: Annotated[bool, typer.Option("--now", help="end it without saving first")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be ordered, and order nothing")] = False,
) -> None:
    """End a run: its ranks save at the next step boundary and leave. Waits until nothing of it runs."""
    home = app.default_home()
    if dry_run:
        print_data(app.rehearse_stop(find_run(home, run), now=now))
        return
    layout, alive = app.stop(run, home=home, now=now)
    if alive:
        _wait(layout)
    print_data([f"{layout.run_id} {read_record(layout).phase}"])


def _wait(layout: RunLayout, *, poll_s: float = 0.2) -> None:
    """Ctrl-C ends the waiting, not the order."""
    talk = Terminal()
    begun = time.monotonic()
    while not read_record(layout).ended:
        talk.tick(f"waiting for {layout.run_id} to save and leave, {time.monotonic() - begun:.0f} s")
        time.sleep(poll_s)
    talk.clear()
