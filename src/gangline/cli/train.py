"""`gangline train JOB`: check, plan, tokenise, start, follow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from gangline import __version__, app
from gangline.cli.options import ClusterFile, Detach, DryRun, Force, JobFile, Overrides
from gangline.cli.output import Terminal, print_data, print_started
from gangline.context import StartOptions, cluster_file, default_home
from gangline.runs.typed_command import TypedCommand


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
    layout = app.train(dataclasses.replace(start, typed=_typed(start)), console=console)
    print_started(layout, follow=not detach)


def _typed(start: StartOptions) -> TypedCommand | None:
    """The command line, with every default that a file in this folder decided; None: the job file cannot be read, and
    the start says so.
    """
    assert isinstance(start.job, Path), "typed by its name"
    try:
        text = start.job.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    options = [*(["--cluster", str(start.cluster)] if start.cluster else []), *(["--force"] if start.force else [])]
    return TypedCommand(
        words=("gangline", "train", str(start.job), *start.overrides, *options),
        folder=str(Path.cwd()),
        job_file=start.job.name,
        job_text=text,
        gangline=__version__,
    )
