"""`gangline logs RUN`: what the ranks of a run wrote."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import print_data
from gangline.errors import UsageError
from gangline.runs.cluster import Cluster
from gangline.runs.layout import RunLayout
from gangline.runs.registry import read_record
from gangline.watch.logs import LogFile, log_files
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
    with app.opened(run, home=app.default_home()) as opened:
        state = read_record(opened.layout).state
        number = attempt or (state.attempt if state else 1)
        run_id = opened.layout.run_id
        cluster = Cluster.of_attempt(opened.layout, number)  # an earlier attempt may have run on other hosts
        with app.reach(cluster, app.REAL) as transports:
            files = log_files(run_id, cluster, transports, attempt=number, console=console)
            _show(opened.layout, _chosen(run_id, files, rank), follow=follow)


def _chosen(run_id: str, files: list[LogFile], rank: int | None) -> list[LogFile]:
    chosen = [file for file in files if rank is None or file.rank == rank]
    if chosen:
        return chosen
    raise UsageError(
        f"{run_id} has no rank {rank} there" if files else f"{run_id} has no logs yet",
        seen=f"its files: {', '.join(file.name for file in files) or 'none'}",
        fix="gangline ps says how it is doing",
    )


def _show(layout: RunLayout, files: list[LogFile], *, follow: bool) -> None:
    tails = [(f"{file.name}  " if len(files) > 1 else "", Tail(file.transport, file.path)) for file in files]
    while True:
        ended = read_record(layout).ended
        for prefix, tail in tails:
            print_data(f"{prefix}{clean(line)}" for line in tail.lines())
        if ended or not follow:
            return
        time.sleep(POLL_S)
