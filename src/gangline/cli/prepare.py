"""`gangline prepare [STEP | HOST ...]`: change hosts, after every change was shown; undo it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gangline.cli.options import AsJson, ClusterFile, argument, option
from gangline.cli.output import Terminal, print_answer, print_data
from gangline.context import cluster_file, default_home
from gangline.errors import GanglineError, UsageError

if TYPE_CHECKING:
    from gangline.prepare.prepare_hosts import Prepared


class _PrepareTerminal(Terminal):
    """The terminal; with --json, stdout is for the document alone."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def show(self, lines: Sequence[str]) -> None:
        """Changes, on stdout."""
        if not self._as_json:
            print_data(lines)


def command(  # noqa: PLR0913  (options of a command line)
    words: Annotated[
        list[str] | None,
        argument(
            "STEP | HOST",
            "steps (access, between, user, address, nic, names, clock, sleep, limits, python, driver, container, "
            "firewall, share, sshd) and hosts; by default all hosts, and the steps that findings of `gangline check` "
            "name",
        ),
    ] = None,
    cluster: ClusterFile = None,
    between_hosts: Annotated[
        bool, typer.Option("--between-hosts", help="step between: a host supervises while this computer is off")
    ] = False,
    power_limit: Annotated[
        int | None, option("with step driver: what each GPU may draw, now and at each start", "WATTS")
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="make the changes that are shown, without a question")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the changes and make none")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="take back the changes of STEP, or --undo all")] = False,
    status: Annotated[bool, typer.Option("--status", help="list the changes that stand on the hosts")] = False,
    commands: Annotated[
        Path | None,
        option("write the changes as a shell script per host into this new folder (-: stdout), and make none", "DIR"),
    ] = None,
    ansible: Annotated[
        Path | None,
        option(
            "write the changes as an inventory and a playbook of Ansible into this new folder, and make none", "DIR"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change hosts so that they can train together. Shows every file and command first, and asks; each change is
    recorded on its host and can be undone. Without a terminal it only shows, unless --yes is given.

    sudo's password is asked once per host and kept nowhere. Exit code 1 if a change failed or was refused.
    """
    # what reads the cluster file costs 0.2 s, which --help does not pay
    from gangline.prepare import prepare_hosts
    from gangline.prepare.change_view import status_lines

    _require_one_thing(undo=undo, status=status, writes=bool(commands or ansible), yes=yes)
    _require_driver(words, power_limit=power_limit)
    console = _PrepareTerminal(as_json=as_json)
    asked = prepare_hosts.PrepareQuestion(
        home=default_home(),
        words=(*(words or ()), *(("between",) if between_hosts else ())),
        cluster=cluster_file(cluster),
        yes=yes,
        dry_run=dry_run or commands is not None or ansible is not None,
        power_limit_w=power_limit,
        commands=commands,
        ansible=ansible,
    )
    if status:
        standing = prepare_hosts.status(asked, console=console)
        console.clear()
        print_answer({"hosts": standing}, status_lines(standing), as_json=as_json)
        return
    done = (prepare_hosts.undo if undo else prepare_hosts.prepare)(asked, console=console)
    console.clear()
    print_answer(done.to_json(), [], as_json=as_json)
    _require_all_done(done)


def _require_all_done(done: Prepared) -> None:
    """Raises GanglineError that names what failed or was refused."""
    if done.failed:
        raise GanglineError(
            f"not everything was done on {', '.join(done.failed)}",
            seen="; ".join(f"{host}: {why}" for host, why in done.failed.items()),
            fix="gangline prepare --status lists what stands",
        )


def _require_driver(words: Sequence[str] | None, *, power_limit: int | None) -> None:
    """Raises UsageError for a power limit without the step that sets it."""
    if power_limit is not None and "driver" not in (words or ()):
        raise UsageError(
            "--power-limit belongs to the step driver", fix=f"gangline prepare driver --power-limit {power_limit}"
        )


def _require_one_thing(*, undo: bool, status: bool, writes: bool, yes: bool) -> None:
    """Raises UsageError for options that contradict each other."""
    if undo and status:
        raise UsageError("--undo and --status are two things", fix="gangline prepare --status")
    if writes and (undo or status or yes):
        raise UsageError("--commands and --ansible write files and change no host", fix="leave out the other option")
