"""`gangline top [RUN | CLUSTER]`: what every machine and every rank does now."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli import signals
from gangline.cli.options import AsJson, argument
from gangline.cli.output import Terminal, print_data, print_json
from gangline.context import REAL, cluster_file, default_home, load_cluster, reached
from gangline.control.end import stop
from gangline.control.other_users import refuse_of_another
from gangline.control.save_order import order_save
from gangline.control.supervision import open_run
from gangline.control.watching import ClusterWatch, RunWatch
from gangline.errors import UsageError
from gangline.report.dashboard import Look, WatchedState, screen, screen_json, text_of
from gangline.report.live import speaks_braille, terminal_width
from gangline.runs.registry import list_runs

INTERVAL_S = 2.0
"""As often as hosts are sampled."""
PLAIN_EVERY_S = 10.0
"""Without a terminal: time between two screens."""
RATES_S = 1.0
"""A cluster is looked at twice before the first screen: rates are those since the look before."""
LEAVE_S = 5.0
"""For the screen to end once its terminal is closed."""
ENDINGS = {".yaml", ".yml", ".json", ".txt"}


def command(
    what: Annotated[
        str | None,
        argument("RUN | CLUSTER", "id of a run, or a cluster file; by default the run that runs, else ./cluster.yaml"),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="print one screen and end")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what every machine and rank does: load, memory, cards, rates, phases, waits, losses, events.

    Changes nothing, but for the keys w, a save, and x, a stop, which asks first. Without a terminal it prints a screen
    every 10 s until the run has ended. The terminal needs gangline[top].
    """
    is_plain = once or as_json or not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    if not is_plain:
        _require_textual()
    target: str | None = what
    while True:
        with _watch(target) as (watch, is_cluster):
            if is_cluster:
                watch.look()
                time.sleep(RATES_S)
            if as_json:
                print_json(screen_json(watch.look()))
            elif is_plain:
                _print_screens(watch.look, once=once)
            else:
                target = _show(watch)
                if target is not None:
                    continue
        return


@contextmanager
def _watch(what: str | None) -> Iterator[tuple[RunWatch | ClusterWatch, bool]]:
    """What to look at, and whether it is a cluster."""
    home = default_home()
    run = what if what is not None else _running(home)
    if what is not None and (Path(what).suffix in ENDINGS or Path(what).is_file()):
        run = None
    if run is not None:
        with open_run(run, home=home) as opened:
            watch = RunWatch(opened)
            try:
                yield watch, False
            finally:
                watch.close()
        return
    cluster = load_cluster(cluster_file(None if what is None else Path(what)), home)
    with reached(cluster, home=home, console=Terminal(), deps=REAL) as (located, context):
        hosts = ClusterWatch(located, context.transports)
        try:
            yield hosts, True
        finally:
            hosts.close()


def _running(home: Path) -> str | None:
    """The newest run that has not ended."""
    return next(
        (record.id for record in list_runs(home) if record.phase in {"preparing", "running", "restarting"}), None
    )


def _print_screens(look: Callable[[], WatchedState], *, once: bool) -> None:
    """Screens as plain lines, until the run has ended."""
    shown = Look(width=terminal_width(), plain=not speaks_braille())
    while True:
        seen = look()
        print_data(map(text_of, screen(seen, shown)))
        if once or (seen.run is not None and seen.run.record.ended):
            return
        print_data([""])
        time.sleep(PLAIN_EVERY_S)


def _require_textual() -> None:
    try:
        import textual  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "gangline top needs textual to draw on the terminal",
            seen=str(error),
            fix="pip install 'gangline[top]'; without it: gangline top --once",
        ) from error


def _show(watch: RunWatch | ClusterWatch) -> str | None:
    """Draw until the user leaves; the run to show next, if one was chosen."""
    from gangline.report.dashboard_app import DashboardActions, DashboardApp

    actions = None
    if isinstance(watch, RunWatch):
        actions = DashboardActions(
            log=watch.log, stack=watch.stack, save=lambda: _save(watch), stop=lambda: _stop(watch), runs=_runs
        )
    app = DashboardApp(watch.look(), watch.look, actions=actions, interval_s=INTERVAL_S, plain=not speaks_braille())
    with signals.leaving_within(LEAVE_S):
        chosen: str | None = app.run()
    if app.failure is not None:
        raise app.failure
    return chosen


def _runs() -> list[str]:
    return [record.id for record in list_runs(default_home())]


def _save(watch: RunWatch) -> str:
    run_id = watch.run.layout.run_id
    refuse_of_another(run_id, home=default_home())
    is_script = order_save(watch.run).is_script
    return f"the script of {run_id} is told to save" if is_script else f"{run_id} saves after its next step"


def _stop(watch: RunWatch) -> str:
    run_id = watch.run.layout.run_id
    refuse_of_another(run_id, home=default_home())
    return f"{run_id} saves and ends" if stop(watch.run) else f"{run_id} has ended already"
