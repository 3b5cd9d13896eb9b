"""`gangline logs RUN`: what the ranks of a run wrote."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, print_data
from gangline.errors import HostKeyRefused, HostUnreachable, UsageError
from gangline.runs.cluster import Cluster
from gangline.serve.tensorboard import show_tensorboard
from gangline.steps.command import require_job
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
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="show its figures in a browser on this computer; Ctrl-C ends it")
    ] = False,
) -> None:
    """Print the logs of a run, each line with its host and rank."""
    with app.opened(run, home=app.default_home()) as opened:
        if tensorboard:
            _show_figures(opened)
            return
        state = opened.record().state
        number = attempt or (state.attempt if state else 1)
        run_id = opened.layout.run_id
        cluster = Cluster.of_attempt(opened.layout, number)  # an earlier attempt may have run on other hosts
        with app.reach(cluster, app.REAL) as transports:
            files, silent = log_files(run_id, cluster, transports, attempt=number, console=console)
            for error in silent:
                _say_missing(error)
            _show(opened, _chosen(run_id, files, rank), follow=follow)


def _show_figures(run: app.Opened) -> None:
    require_job(run.layout)
    view = run.view()
    talk = Terminal()
    talk.tick("starting TensorBoard")
    show_tensorboard(
        run.cluster.head, view.head, view.head_layout.tensorboard, on_ready=lambda url: print_data([url]), wait=_forever
    )


def _forever() -> None:
    while True:
        time.sleep(3600)


def _chosen(run_id: str, files: list[LogFile], rank: int | None) -> list[LogFile]:
    chosen = [file for file in files if rank is None or file.rank == rank]
    if chosen:
        return chosen
    raise UsageError(
        f"{run_id} has no rank {rank} there" if files else f"{run_id} has no logs yet",
        seen=f"its files: {', '.join(file.name for file in files) or 'none'}",
        fix="gangline ps says how it is doing",
    )


def _say_missing(error: HostUnreachable) -> None:
    Terminal().say(f"{error.what}: its lines are missing")


def _last_shown(line: str) -> str:
    """What a terminal would show in the end of a line that was written over, such as a progress bar."""
    return line.rstrip("\r").rpartition("\r")[2]


def _show(run: app.Opened, files: list[LogFile], *, follow: bool) -> None:
    tails = [(f"{file.name}  " if len(files) > 1 else "", Tail(file.transport, file.path)) for file in files]
    while True:
        ended = run.record().ended
        for prefix, tail in list(tails):
            try:
                print_data(f"{prefix}{clean(_last_shown(line))}" for line in tail.stream())
            except HostKeyRefused:
                raise
            except HostUnreachable as error:  # waiting for it would keep the others' lines back
                tails.remove((prefix, tail))
                _say_missing(error)
        if ended or not follow:
            return
        time.sleep(POLL_S)
