"""`gangline resume RUN`: go on from the newest valid checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, follow_to_the_end, print_data


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id of a run, or the beginning of one", show_default=False)],
    cluster: Annotated[
        Path | None,
        typer.Option(help="continue on these hosts and shares; the batch stays the same", show_default=False),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="return once the run has started")] = False,
    force: Annotated[bool, typer.Option("--force", help="start even if the plan calls it too slow")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact commands and start nothing")] = False,
) -> None:
    """Continue a run from its newest valid checkpoint on any host. Data and model must be unchanged."""
    home, console = app.default_home(), Terminal()
    if dry_run:
        print_data(app.rehearse_resume(run, home=home, cluster_path=cluster, force=force, console=console))
        return
    layout = app.resume(run, home=home, cluster_path=cluster, force=force, console=console)
    print_data([layout.run_id])
    if not detach:
        with app.opened(layout.run_id, home=home) as opened:
            follow_to_the_end(opened.view(), from_start=False)
