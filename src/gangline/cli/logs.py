"""`gangline logs RUN`: the output of the ranks of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer

from gangline.cli.options import RunId, option
from gangline.cli.output import Terminal, print_data
from gangline.context import REAL, default_home, reach
from gangline.control.served_endpoints import endpoint_log, find_endpoint, read_endpoint
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import require_job
from gangline.errors import HostKeyRefused, HostUnreachable, UsageError
from gangline.report.follow import read_board
from gangline.report.tail import LogFile, Tail, log_files
from gangline.report.text_table import clean, last_shown
from gangline.runs.cluster import Cluster
from gangline.runs.layout import EndpointLayout, RunLayout
from gangline.runs.registry import RunRecord, read_record
from gangline.serve.tensorboard import show_tensorboard
from gangline.supervise.allocation import SlurmRecord, allocation_state, left_here
from gangline.transport.transport import Transport

POLL_S = 0.3
LOOK_S = 2.0
"""Time between two searches for files of new ranks."""


def command(
    run: RunId,
    rank: Annotated[int | None, option("only this rank")] = None,
    console: Annotated[bool, typer.Option("--console", help="the output of torchrun, host by host")] = False,
    attempt: Annotated[int | None, option("by default the last one")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="print new lines as they come; Ctrl-C leaves")] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="serve TensorBoard for this run on this computer; Ctrl-C ends it")
    ] = False,
) -> None:
    """Print the logs of a run, each line with its host and rank. --follow also prints the attempts that come later.

    An endpoint of `gangline serve --detach` has its log under its name.
    """
    if (endpoint := find_endpoint(default_home(), run)) is not None:
        _show_endpoint(endpoint, follow=follow, plain=rank is None and attempt is None and not (console or tensorboard))
        return
    with open_run(run, home=default_home()) as opened:
        if tensorboard:
            _show_figures(opened)
            return
        number = attempt or _attempt(opened.record())
        with _lines(opened.layout, number, rank=rank, console=console) as lines:
            lines.require_some()
            _show(opened, lines, follow=follow, stays=attempt is not None)
        while follow and attempt is None and (later := _attempt(opened.record())) > number:
            number = later
            Terminal().report(f"attempt {number}")
            with _lines(opened.layout, number, rank=rank, console=console) as lines:
                _show(opened, lines, follow=True, stays=False)


def _show_endpoint(endpoint: EndpointLayout, *, follow: bool, plain: bool) -> None:
    if not plain:
        raise UsageError(
            "--rank, --console, --attempt and --tensorboard are for runs",
            seen=f"{endpoint.endpoint_id} is a model that is served",
            fix=f"gangline logs {endpoint.endpoint_id}",
        )
    for line in endpoint_log(endpoint, follow=follow):
        print_data([clean(line)])
    state = read_endpoint(endpoint)
    if state is not None and state.shown == "lost" and state.cause is not None:
        raise state.cause


def _attempt(record: RunRecord) -> int:
    return record.state.attempt if record.state else 1


def _show_figures(run: RunHandle) -> None:
    require_job(run.layout)
    view = run.view()
    console = Terminal()
    console.progress("starting TensorBoard")
    show_tensorboard(
        run.cluster.head, view.head, view.head_layout.tensorboard, on_ready=lambda url: print_data([url]), wait=_forever
    )


def _forever() -> None:
    while True:
        time.sleep(3600)


class _Lines:
    """The output of the ranks of one attempt, on the hosts that answer."""

    def __init__(
        self,
        run_id: str,
        cluster: Cluster,
        transports: Mapping[str, Transport],
        *,
        attempt: int,
        rank: int | None,
        console: bool,
    ) -> None:
        self.attempt = attempt
        self._run_id = run_id
        self._cluster = cluster
        self._transports = transports
        self._rank = rank
        self._console = console
        self._files: dict[str, LogFile] = {}
        self._tails: dict[str, Tail] = {}

    def look(self) -> None:
        """Look for files that are new. Hosts that do not answer are named once, and not asked again."""
        files, silent = log_files(
            self._run_id, self._cluster, self._transports, attempt=self.attempt, console=self._console
        )
        for host, error in silent.items():
            self._give_up(host, error)
        for file in files:
            self._files.setdefault(file.name, file)
            if self._rank is None or file.rank == self._rank:
                self._tails.setdefault(file.name, Tail(file.transport, file.path))

    def require_some(self) -> None:
        """Raise UsageError where there is nothing to show."""
        if self._tails:
            return
        raise UsageError(
            f"{self._run_id} has no rank {self._rank} there" if self._files else f"{self._run_id} has no logs yet",
            seen=f"its files: {', '.join(self._files) or 'none'}",
            fix="gangline ps says how it is doing",
        )

    def print_new(self) -> None:
        """Print the lines that have come."""
        for name, tail in list(self._tails.items()):
            if name not in self._tails:
                continue
            prefix = f"{name}  " if len(self._tails) > 1 else ""
            try:
                print_data(f"{prefix}{clean(last_shown(line))}" for line in tail.stream())
            except HostKeyRefused:
                raise
            except HostUnreachable as error:  # waiting for it would delay the lines of the others
                self._give_up(self._files[name].transport.host, error)

    def _give_up(self, host: str, error: HostUnreachable) -> None:
        if host in {each.name for each in self._cluster.hosts}:
            Terminal().report(f"{error.what}: its lines are missing")
        self._cluster = replace(self._cluster, hosts=tuple(each for each in self._cluster.hosts if each.name != host))
        gone = [name for name, file in self._files.items() if file.transport.host == host]
        self._tails = {name: tail for name, tail in self._tails.items() if name not in gone}


@contextmanager
def _lines(layout: RunLayout, attempt: int, *, rank: int | None, console: bool) -> Iterator[_Lines]:
    cluster = _cluster(layout, attempt)
    with reach(cluster, REAL) as transports:
        lines = _Lines(layout.run_id, cluster, transports, attempt=attempt, rank=rank, console=console)
        lines.look()
        yield lines


def _cluster(layout: RunLayout, attempt: int) -> Cluster:
    """The hosts of an attempt: an earlier one may have run on others, and a later one on fewer."""
    cluster, board = Cluster.of_attempt(layout, attempt), read_board(layout, attempt)
    names = {row["host"] for row in board["hosts"]} if board else set()
    hosts = tuple(host for host in cluster.hosts if host.name in names)
    cluster = replace(cluster, hosts=hosts or cluster.hosts)
    state = read_record(layout).state
    has_ended = state is not None and state.phase in {"finished", "stopped", "failed"}  # its job may be leaving Slurm
    return left_here(cluster, SlurmRecord.of(layout)) if has_ended or allocation_state(cluster) == "over" else cluster


def _show(run: RunHandle, lines: _Lines, *, follow: bool, stays: bool) -> None:
    """follow: until the run has ended, or, unless `stays`, gone on with another attempt."""
    looked_at = time.monotonic()
    while True:
        record = run.record() if follow else None
        is_over = record is None or record.ended or (not stays and _attempt(record) > lines.attempt)
        if follow and (is_over or time.monotonic() - looked_at > LOOK_S):
            looked_at = time.monotonic()
            lines.look()
        lines.print_new()
        if is_over:
            return
        time.sleep(POLL_S)
