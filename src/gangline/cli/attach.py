"""`gangline attach RUN`: follow a run from where it stands, and see to it that somebody looks after it."""

from __future__ import annotations

from gangline.cli.options import RunId
from gangline.cli.output import Terminal, follow_to_the_end
from gangline.context import default_home
from gangline.control.supervision import look_after, open_run


def command(
    run: RunId,
) -> None:
    """Follow a run from now on. Ctrl-C leaves and the run continues. If its supervisor has died, starts a new one."""
    with open_run(run, home=default_home()) as opened:
        look_after(opened, console=Terminal())
        follow_to_the_end(opened.view(), from_start=False)
