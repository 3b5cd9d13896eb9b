"""`gangline resume RUN`: go on from the newest valid checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gangline import app
from gangline.cli.options import Detach, DryRun, Force, RunId, option
from gangline.cli.output import Terminal, print_data, print_started
from gangline.context import ResumeOptions, default_home


def command(
    run: RunId,
    cluster: Annotated[Path | None, option("continue on these hosts and shares; the batch stays the same")] = None,
    without: Annotated[
        list[str] | None, option("go on without this host, which is off; repeat it for others", metavar="HOST")
    ] = None,
    detach: Detach = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Continue a run from its newest valid checkpoint on any host. Data and model must be unchanged."""
    home, console = default_home(), Terminal()
    asked = ResumeOptions(cluster=cluster, without=tuple(without or ()), force=force)
    if dry_run:
        print_data(app.rehearse_resume(run, asked, home=home, console=console))
        return
    layout = app.resume(run, asked, home=home, console=console)
    print_started(layout, follow=not detach, from_start=False)
