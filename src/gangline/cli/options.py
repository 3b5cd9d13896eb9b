"""Arguments and options that several verbs have, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def argument(metavar: str, text: str) -> Any:
    """A word of the command line without a name; the help does not show its default."""
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def option(text: str, metavar: str | None = None) -> Any:
    """An option with a value, named after the parameter; the help does not show its default."""
    return typer.Option(metavar=metavar, help=text, show_default=False)


RunId = Annotated[str, argument("RUN", "id of a run, or the beginning of one")]
JobFile = Annotated[Path, argument("JOB", "job.yaml")]
Overrides = Annotated[list[str] | None, argument("KEY=VALUE", "override a key of the job file, such as steps=100")]
CLUSTER_HELP = "cluster.yaml or a hostfile; by default ./cluster.yaml, else this computer"
ClusterFile = Annotated[Path | None, option(CLUSTER_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON document on stdout")]
Detach = Annotated[bool, typer.Option("--detach", help="return once the run has started")]
Force = Annotated[bool, typer.Option("--force", help="start even if the plan calls it too slow")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the exact commands and start nothing")]
