"""`gangline plan JOB`: does it fit, who does what, how long does it take, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.checks.judge import require
from gangline.cli.output import Terminal, print_data, print_json
from gangline.errors import UsageError
from gangline.report.live import terminal_width


def command(  # noqa: PLR0913 - typer reads the options off the arguments
    job: Annotated[Path, typer.Argument(metavar="JOB", help="job.yaml", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="override a key of JOB, such as steps=100", show_default=False),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="cluster.yaml or a hostfile; by default ./cluster.yaml, else this computer", show_default=False
        ),
    ] = None,
    hosts: Annotated[
        str | None,
        typer.Option(
            metavar="MACHINES",
            help="plan for these and contact none: [name=][Nx]GPU, ... such as pc1=rtx4090,pc2=2xrtx3090",
            show_default=False,
        ),
    ] = None,
    add_host: Annotated[
        list[str] | None, typer.Option(metavar="GPU", help="compare with one more such machine", show_default=False)
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="HOST", help="compare without this host", show_default=False)
    ] = None,
    link: Annotated[
        str | None, typer.Option(metavar="LINK", help="compare with this network: 10gbit, hdr, ...", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="compare with this model", show_default=False)
    ] = None,
    stack: Annotated[str, typer.Option(help=f"whose trainer: {', '.join(app.STACKS)}")] = "gangline",
    trace: Annotated[bool, typer.Option("--trace", help="also trace the trainer's memory (needs torch here)")] = False,
    why: Annotated[bool, typer.Option("--why", help="show every strategy and part of the memory")] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="show the exact commands that train would start")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON document on stdout")] = False,
) -> None:
    """Say whether a job fits, who does what, how long it takes, and why. Starts nothing.

    Exit code 3 if a check would stop the start, 6 if the job does not fit.
    """
    words = (*(overrides or ()), *([f"model={model}"] if model else ()))
    home = app.default_home()
    start = app.StartOptions(home=home, job=job, overrides=words, cluster=None if hosts else app.cluster_file(cluster))
    what_if = app.WhatIf(hosts=hosts, add=tuple(add_host or ()), without=tuple(without or ()), link=link, stack=stack)
    if commands and what_if.changes_machines:
        raise UsageError("there are no commands for machines that are not there", fix="leave --commands out")
    console = Terminal(quiet=True)
    try:
        foretold = app.plan(start, what_if, console=console)
        traced = app.trace(foretold, home=home, console=console) if trace else []
    finally:
        console.clear()
    if as_json:
        lines = app.rehearse(start, console=console) if commands and foretold.can_start else None
        print_json({**app.plan_json(foretold, traced), "commands": lines})
    else:
        print_data(app.plan_lines(foretold, traced, home=home, why=why, width=terminal_width()))
    app.require_fit(foretold)
    if foretold.decision is not None:
        require(foretold.decision.findings)
    if commands and not as_json:
        print_data(app.rehearse(start, console=console))
