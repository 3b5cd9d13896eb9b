"""`gangline run -- CMD`: the user's own script on every host, without gangline in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, follow_to_the_end, print_data


def command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="-- CMD...", help="what every rank runs: train.py --lr 1e-4", show_default=False),
    ],
    cluster: Annotated[
        Path | None,
        typer.Option(
            help="cluster.yaml or a hostfile; by default ./cluster.yaml, else this computer", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="what is copied to every host, and where CMD runs")
    ] = Path(),
    resume_flag: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help="added to CMD by gangline resume, such as --resume", show_default=False),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="return once the run has started")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact commands and start nothing")] = False,
) -> None:
    """Run your own script on every host: torchrun starts the ranks, the run goes on when you leave.

    What holds for it: the start board, logs of every rank, stop without orphans, resume with your own flag.
    """
    order = app.Command(
        home=app.default_home(),
        words=tuple(words),
        folder=folder,
        cluster=app.cluster_file(cluster),
        resume_flag=resume_flag,
    )
    talk = Terminal()
    if dry_run:
        print_data(app.rehearse_command(order, talk=talk))
        return
    layout = app.run(order, talk=talk)
    print_data([layout.run_id])
    if not detach:
        with app.opened(layout.run_id, home=order.home) as opened:
            follow_to_the_end(opened.view())
