"""`gangline init [HOST...]`: write cluster.yaml from names, a hostfile, or answers."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gangline.cli.options import AsJson, argument, option
from gangline.cli.output import Terminal, print_data, print_json
from gangline.errors import UsageError

if TYPE_CHECKING:
    from gangline.init.add import Added
    from gangline.init.describe import InitQuestion


def command(  # noqa: PLR0913  (options of a command line)
    hosts: Annotated[
        list[str] | None, argument("HOST", "a name as for ssh: pc1, alice@192.168.1.10; localhost is this computer")
    ] = None,
    hostfile: Annotated[
        Path | None, option("read hosts from a hostfile of DeepSpeed or MPI, or an inventory of Ansible")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; by default cluster.yaml", show_default=False)
    ] = None,
    name: Annotated[str | None, option("name of the cluster")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="trust new host keys without asking")] = False,
    force: Annotated[bool, typer.Option("--force", help="replace the file; leave out hosts that fail")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the file and write nothing")] = False,
    discover: Annotated[
        bool,
        typer.Option("--discover", help="offer the hosts with sshd on this computer's networks; scans after a yes"),
    ] = False,
    pin: Annotated[Path | None, option("read the host keys of this cluster file again", "CLUSTER")] = None,
    add: Annotated[
        bool, typer.Option("--add", help="put HOST into the file that is there; nothing else in it changes")
    ] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="describe the Slurm cluster of this login host")] = False,
    partition: Annotated[str | None, option("with --slurm: this partition, not the site's default")] = None,
    as_json: AsJson = False,
) -> None:
    """Look at hosts over SSH and write cluster.yaml. Shows host keys before it trusts them; installs nothing.

    With --slurm, ask Slurm what its partitions have, and no host. Exit code 4 if no host answers.
    """
    # the words of a cluster file cost 0.2 s, which --help does not pay
    from gangline.config.load import DEFAULT
    from gangline.context import default_home
    from gangline.init.describe import Described, InitQuestion, init
    from gangline.init.describe_slurm import SlurmDescribed, init_slurm
    from gangline.init.pin import Pinned
    from gangline.init.pin import pin as pin_again

    console = Terminal()
    done: Described | Pinned | Added | SlurmDescribed
    _refuse_hosts_of_slurm(slurm=slurm, partition=partition, given=bool(hosts or hostfile or pin or add or discover))
    _refuse_named_hosts(discover=discover, given=bool(hosts or hostfile or pin or add))
    asked = InitQuestion(
        home=default_home(),
        output=output or Path(DEFAULT),
        names=tuple(hosts or ()),
        hostfile=hostfile,
        name=name,
        yes=yes,
        force=force,
        dry_run=dry_run,
        discover=discover,
    )
    if slurm:
        done = init_slurm(asked, partition=partition, shared=Path.home(), console=console)
    elif pin is not None:
        if hosts or hostfile or output or name or force or add:
            raise UsageError("--pin only updates the host keys of a file", fix=f"gangline init --pin {pin}")
        done = pin_again(pin, home=default_home(), yes=yes, dry_run=dry_run, console=console)
    elif add:
        done = _added(asked, console=console)
    else:
        done = init(_with_list(asked, console=console), console=console)
    console.clear()
    _show(done, as_json=as_json, dry_run=dry_run, after="train job.yaml --cluster" if slurm else "check")


def _added(asked: InitQuestion, *, console: Terminal) -> Added:
    """Put the named hosts into the file that is there."""
    from gangline.init.add import AddQuestion, add

    if asked.hostfile or asked.name or not asked.names:
        raise UsageError("--add puts named hosts into a file", fix="gangline init --add pc4 [-o cluster.yaml]")
    question = AddQuestion(
        path=asked.output,
        home=asked.home,
        names=asked.names,
        yes=asked.yes,
        force=asked.force,
        dry_run=asked.dry_run,
    )
    return add(question, console=console)


def _with_list(asked: InitQuestion, *, console: Terminal) -> InitQuestion:
    """The question with the words of the hostfile, where it is another tool's list.

    What of it does not get there is reported.
    """
    from gangline.convert.host_lists import listed_elsewhere
    from gangline.units import counted

    moved = listed_elsewhere(asked.hostfile) if asked.hostfile else None
    if moved is None:
        return asked
    console.report(f"{asked.hostfile} is a list of {moved.listed.tool}: {counted(len(moved.listed.hosts), 'host')}")
    for row in moved.listed.rows:
        if row.verdict != "same":
            console.report(f"not taken: {row.key}: {row.reason}")
    return dataclasses.replace(asked, listed=moved.text)


def _refuse_named_hosts(*, discover: bool, given: bool) -> None:
    """Raise UsageError where hosts are named besides --discover."""
    if discover and given:
        raise UsageError("--discover finds hosts, so that none are named", fix="gangline init --discover")


def _show(done: Any, *, as_json: bool, dry_run: bool, after: str) -> None:
    """Print what was found, and the verb that comes next."""
    if as_json:
        print_json(done.to_json())
    elif dry_run:
        print_data([done.text.rstrip("\n")])
    if done.path is not None:
        sys.stderr.write(f"Next: gangline {after} {done.path}\n")


def _refuse_hosts_of_slurm(*, slurm: bool, partition: str | None, given: bool) -> None:
    """Raise UsageError for options that belong to one of the two kinds of cluster only."""
    if partition is not None and not slurm:
        raise UsageError("--partition is for --slurm", fix=f"gangline init --slurm --partition {partition}")
    if slurm and given:
        raise UsageError("--slurm takes no hosts: allocations give them", fix="gangline init --slurm")
