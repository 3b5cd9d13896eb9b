"""`gangline attach RUN`: follow a run from where it stands."""

from __future__ import annotations

from typing import Annotated

import typer

from gangline import app
from gangline.cli.output import follow_to_the_end
from gangline.runs.registry import find_run


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="id, or the beginning of one", show_default=False)],
) -> None:
    """Follow a run from where it stands. Ctrl-C leaves; the run goes on."""
    follow_to_the_end(app.view(find_run(app.default_home(), run)), from_start=False)
