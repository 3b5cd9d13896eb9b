"""`gangline run -- CMD`: the user's own script on every host, without gangline in it."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.cli.options import ClusterFile, Detach, DryRun, argument, option
from gangline.cli.output import Terminal, print_data, print_started
from gangline.context import cluster_file, default_home
from gangline.control.user_command import draft, split_words
from gangline.errors import UsageError
from gangline.runs.job import NotifyJob
from gangline.units import parse_duration

SHORTEST_STALL_S = 10.0
"""Host agents look once a second, and hosts may answer slowly."""
LONGEST_STALL_S = 30 * 86400.0
MOST_RESTARTS = 1000


class OnStall(str, enum.Enum):
    """What is done once no rank prints any more."""

    report = "report"
    stop = "stop"


def command(  # noqa: PLR0913  (options of a command line)
    words: Annotated[list[str], argument("-- CMD", "the command of every rank, such as train.py --lr 1e-4")],
    cluster: ClusterFile = None,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="folder to copy to every host; CMD runs there")
    ] = Path(),
    resume_flag: Annotated[
        str | None, option("append this to CMD when it is started again, such as --resume", "WORDS")
    ] = None,
    host_args: Annotated[
        list[str] | None, option("append words to CMD on one host: 'pc2=--batch 4'; once per host", "HOST=WORDS")
    ] = None,
    stall_after: Annotated[
        str, typer.Option(metavar="TIME", help="treat the run as stalled after this long without output: 30m, 2h; none")
    ] = "10m",
    on_stall: Annotated[
        OnStall | None, option("report: say so and continue; the default. stop: end the run as failed")
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0, max=MOST_RESTARTS, metavar="N", help="restart CMD automatically after a failure, at most N times"
        ),
    ] = 0,
    notify: Annotated[
        list[str] | None,
        option("where an address for messages stands: env:NAME or file:PATH; none: no messages", "PLACE"),
    ] = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Run your own script on every host. torchrun starts the ranks; the run continues when you leave.

    You get the start-up table, the logs of every rank, a stop that leaves no process behind, resume with your own flag,
    and a warning when all ranks go silent.
    """
    home, path = default_home(), cluster_file(cluster)
    record = draft(
        tuple(words),
        folder=folder,
        resume_flag=resume_flag,
        stall_after_s=_stall_after_s(stall_after, on_stall),
        on_stall="report" if on_stall is None else on_stall.value,
        restarts=restarts,
        host_words=_host_words(host_args or []),
        notify=_notify(notify or []),
    )
    console = Terminal()
    for number, line in enumerate(record.notes):
        console.report(f"  {line}" if number else line)
    if dry_run:
        print_data(app.rehearse_command(record, home=home, cluster_path=path, console=console))
        return
    layout = app.run(record, home=home, cluster_path=path, console=console)
    print_started(layout, follow=not detach)


def _host_words(options: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for text in options:
        host, has_words, words = text.partition("=")
        if not host or not has_words or host in found:
            raise UsageError(
                f"--host-args {text!r} is not valid",
                seen="expected HOST=WORDS, each host once",
                fix="gangline run --host-args 'pc2=--batch 4' -- train.py",
            )
        found[host] = split_words("--host-args", words)
    return found


def _notify(places: list[str]) -> NotifyJob | None:
    if not places:
        return None
    from gangline.config.load import settings_of  # not for a `run` without messages: pydantic costs 0.2 s

    return settings_of("none" if places == ["none"] else places)


def _stall_after_s(words: str, on_stall: OnStall | None) -> float | None:
    if words == "none":
        if on_stall is not None:
            raise UsageError("--on-stall does nothing with --stall-after none", fix="leave out one of them")
        return None
    try:
        after_s = parse_duration(words)
    except ValueError:
        after_s = -1.0
    if not SHORTEST_STALL_S <= after_s <= LONGEST_STALL_S:
        raise UsageError(
            f"--stall-after {words!r} is not a valid duration",
            seen="expected a number and s, m or h, from 10s to 720h, or none",
            fix="gangline run --stall-after 30m -- CMD",
        )
    return after_s
