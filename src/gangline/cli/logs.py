"""`gangline logs RUN`: what the ranks of a run wrote."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import print_data
from gangline.errors import UsageError
from gangline.runs.registry import find_run, read_record
from gangline.watch.tail import Tail
from gangline.watch.text import clean

POLL_S = 0.3


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id, or the beginning of one", show_default=False)],
    rank: Annotated[int | None, typer.Option(help="only this rank", show_default=False)] = None,
    console: Annotated[bool, typer.Option("--console", help="what torchrun wrote, host by host")] = False,
    attempt: Annotated[int | None, typer.Option(help="by default the last one", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="go on as it grows; Ctrl-C leaves")] = False,
) -> None:
    """Print the logs of a run, each line with its host and rank."""
    layout = find_run(app.default_home(), run)
    files = app.logs(layout, attempt=attempt, console=console)
    chosen = [file for file in files if rank is None or file.rank == rank]
    if not chosen:
        raise UsageError(
            f"{layout.run_id} has no rank {rank} there" if files else f"{layout.run_id} has no logs yet",
            seen=f"its files: {', '.join(file.name for file in files) or 'none'}",
            fix="gangline ps says how it is doing",
        )
    tails = [(f"{file.name}  " if len(chosen) > 1 else "", Tail(file.transport, file.path)) for file in chosen]
    while True:
        ended = read_record(layout).ended
        for prefix, tail in tails:
            print_data(f"{prefix}{clean(line)}" for line in tail.lines())
        if ended or not follow:
            return
        time.sleep(POLL_S)
