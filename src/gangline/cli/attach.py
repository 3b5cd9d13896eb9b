"""`gangline attach RUN`: follow a run from where it stands, and see to it that somebody looks after it."""

from __future__ import annotations

from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import Terminal, follow_to_the_end


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id of a run, or the beginning of one", show_default=False)],
) -> None:
    """Follow a run from now on. Ctrl-C leaves and the run continues. If its supervisor has died, starts a new one."""
    with app.opened(run, home=app.default_home()) as opened:
        app.look_after(opened, console=Terminal())
        follow_to_the_end(opened.view(), from_start=False)
