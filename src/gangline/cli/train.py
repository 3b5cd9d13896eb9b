"""`gangline train JOB`: check, plan, tokenise, start, follow."""

from __future__ import annotations

from gangline import app
from gangline.cli.options import ClusterFile, Detach, DryRun, Force, JobFile, Overrides
from gangline.cli.output import Terminal, print_data, print_started
from gangline.context import StartOptions, cluster_file, default_home


def command(
    job: JobFile,
    overrides: Overrides = None,
    cluster: ClusterFile = None,
    detach: Detach = False,
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Check, plan, tokenise, start and follow. Prints the run's id on stdout; the run continues when you leave."""
    words, cluster = tuple(overrides or ()), cluster_file(cluster)
    start = StartOptions(home=default_home(), job=job, overrides=words, cluster=cluster, force=force)
    console = Terminal()
    if dry_run:
        print_data(app.rehearse(start, console=console))
        return
    layout = app.train(start, console=console)
    print_started(layout, follow=not detach)
