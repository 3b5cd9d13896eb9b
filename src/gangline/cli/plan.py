"""`gangline plan JOB`: does it fit, who does what, how long does it take, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from gangline import app
from gangline.cli.options import AsJson, ClusterFile, JobFile, Overrides, option
from gangline.cli.output import Terminal, between_words, print_data, print_json
from gangline.context import REAL, Context, StartOptions, cluster_file, default_home
from gangline.decide.what_if import WhatIf, plan_json, plan_lines, predict, refusal, trace
from gangline.errors import GanglineError, UsageError
from gangline.planner.software import STACKS
from gangline.report.live import terminal_width


def command(  # noqa: PLR0913 - typer reads the options off the arguments
    job: JobFile,
    overrides: Overrides = None,
    cluster: ClusterFile = None,
    hosts: Annotated[
        str | None,
        option(
            "plan for these and contact none: [name=][Nx]GPU[:bus=SLOT][:ram=GIB], ... such as "
            "pc1=rtx4090,pc2=2xrtx3090:bus=pcie3-x8",
            "MACHINES",
        ),
    ] = None,
    add_host: Annotated[list[str] | None, option("compare with one more such machine", "GPU")] = None,
    without: Annotated[list[str] | None, option("compare without this host", "HOST")] = None,
    link: Annotated[str | None, option("compare with this network: 10gbit, hdr, ...", "LINK")] = None,
    model: Annotated[str | None, option("compare with this model", "MODEL")] = None,
    stack: Annotated[str, typer.Option(help=f"whose trainer (docs/software.md): {', '.join(STACKS)}")] = "gangline",
    with_trace: Annotated[
        bool, typer.Option("--trace", help="also trace the trainer's memory (needs torch here)")
    ] = False,
    why: Annotated[bool, typer.Option("--why", help="show every strategy and part of the memory")] = False,
    commands: Annotated[
        bool, typer.Option("--commands", help="show the exact commands that train would start")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a job fits, who does what, how long it takes, and why. Starts nothing.

    Exit code 3 if a check would stop the start, 6 if the job does not fit.
    """
    words = (*(overrides or ()), *([f"model={model}"] if model else ()))
    home = default_home()
    start = StartOptions(home=home, job=job, overrides=words, cluster=None if hosts else cluster_file(cluster))
    what_if = WhatIf(hosts=hosts, add=tuple(add_host or ()), without=tuple(without or ()), link=link, stack=stack)
    console = Terminal(quiet=True)
    try:
        if commands and what_if.changes_machines:
            raise UsageError("there are no commands for machines that are not there", fix="leave --commands out")
        prediction = predict(start, what_if, console=console)
        context = Context(transports={}, home=home, console=console, deps=REAL)
        traced = trace(prediction, context) if with_trace else []
    except GanglineError as error:
        if as_json:
            print_json({**plan_json(None, [], error), "commands": None})
        raise
    finally:
        console.clear()
    refused = refusal(prediction)
    if as_json:
        lines = app.rehearse(start, console=console) if commands and prediction.can_start else None
        print_json({**plan_json(prediction, traced, refused), "commands": lines})
    else:
        print_data(between_words(plan_lines(prediction, traced, home=home, why=why, width=terminal_width())))
    if refused is not None:
        raise refused
    if commands and not as_json:
        print_data(app.rehearse(start, console=console))
