"""`gangline export-config KIND -- CMD`: files with which other launchers start the ranks that `run` would start."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.cli.options import ClusterFile, argument
from gangline.cli.output import Terminal, print_data
from gangline.context import cluster_file, default_home
from gangline.control.user_command import draft
from gangline.errors import UsageError
from gangline.launch.config_files import FORMATS
from gangline.runs.files import write_atomic


def command(
    words: Annotated[list[str], argument("KIND -- CMD", f"{', '.join(FORMATS)}; and the command, such as train.py")],
    cluster: ClusterFile = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="DIR", help="folder to write to; by default the screen")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that are there")] = False,
) -> None:
    """Write the hosts, ranks and variables of your cluster as files of other launchers. Starts nothing.

    hostfile: for mpirun and deepspeed. deepspeed: with variables and the command. accelerate, torchrun: a file for each
    host. sbatch: a batch script for as many nodes. ray: a command for each node of Ray, and a program that starts
    torchrun on all of them.
    """
    kind, *program = words
    if kind not in FORMATS:
        raise UsageError(
            f"no such kind of file: {kind!r}",
            seen=f"known: {', '.join(FORMATS)}",
            fix="gangline export-config torchrun -- train.py --option value",
        )
    record = draft(tuple(program or ["train.py"]), folder=Path())
    console = Terminal()
    files = app.export_config(record, kind, home=default_home(), cluster_path=cluster_file(cluster), console=console)
    console.clear()
    if output is None:
        for name, text in files.items():
            print_data([f"# --- {name}"] if len(files) > 1 else [])
            print_data(text.splitlines())
        return
    there = [name for name in files if (output / name).exists()]
    if there and not force:
        raise UsageError(
            f"{output / there[0]} is there already",
            seen=f"files there: {', '.join(there)}",
            fix="--force replaces them",
        )
    output.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomic(output / name, text.encode(), mode=0o700 if text.startswith("#!") else 0o600)
    sys.stderr.write(f"written to {output}: {', '.join(files)}\n")
