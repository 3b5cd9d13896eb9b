"""`gangline train JOB`: check, plan, tokenise, start, follow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, follow_to_the_end, print_data


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB", help="job.yaml", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="override a key of the job file, such as steps=100", show_default=False
        ),
    ] = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="cluster.yaml or a hostfile; by default ./cluster.yaml, else this computer", show_default=False
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="return once the run has started")] = False,
    force: Annotated[bool, typer.Option("--force", help="start even if the plan calls it too slow")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact commands and start nothing")] = False,
) -> None:
    """Check, plan, tokenise, start and follow. Prints the run's id on stdout; the run continues when you leave."""
    words, cluster = tuple(overrides or ()), app.cluster_file(cluster)
    start = app.StartOptions(home=app.default_home(), job=job, overrides=words, cluster=cluster, force=force)
    console = Terminal()
    if dry_run:
        print_data(app.rehearse(start, console=console))
        return
    layout = app.train(start, console=console)
    print_data([layout.run_id])
    if not detach:
        with app.opened(layout.run_id, home=start.home) as opened:
            follow_to_the_end(opened.view())
