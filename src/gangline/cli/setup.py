"""`gangline setup`: the environment that trains on this computer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.equip import setup_here


def command(
    lock: Annotated[
        Path | None, option("a requirements file with a version for each package; by default gangline's own", "FILE")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="say what would be built, and where; download nothing")
    ] = False,
) -> None:
    """Build the environment that trains on this computer: torch, transformers and the rest, with uv, below gangline's
    home. Installs nothing into any other Python. Prints the path of its Python.
    """
    console = Terminal()
    done = setup_here(lock=lock, dry_run=dry_run, home=default_home(), console=console)
    console.clear()
    gpu = "with a GPU" if done.has_gpu else "without a GPU"
    verb = "would be built" if dry_run else "is ready"
    console.report(f"the environment {verb}: {done.num_packages} packages, torch {done.torch}, for a host {gpu}")
    print_data([done.environment.python])
    if not dry_run:
        console.report("ranks on this computer use it from now on; next: gangline check")
