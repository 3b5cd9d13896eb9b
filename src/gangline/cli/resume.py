"""`gangline resume RUN`: go on from the newest valid checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gangline import app
from gangline.cli.options import Detach, DryRun, Force, RunId, option
from gangline.cli.output import Terminal, print_data, print_started
from gangline.context import default_home


def command(
    run: RunId,
    cluster: Annotated[Path | None, option("continue on these hosts and shares; the batch stays the same")] = None,
    detach: Detach = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Continue a run from its newest valid checkpoint on any host. Data and model must be unchanged."""
    home, console = default_home(), Terminal()
    if dry_run:
        print_data(app.rehearse_resume(run, home=home, cluster_path=cluster, force=force, console=console))
        return
    layout = app.resume(run, home=home, cluster_path=cluster, force=force, console=console)
    print_started(layout, follow=not detach, from_start=False)
