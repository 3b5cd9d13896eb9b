"""`gangline attach RUN`: follow a run from now on, and start a new supervisor if it has lost its own."""

from __future__ import annotations

from gangline.cli.options import RunId
from gangline.cli.output import Terminal, follow_through_queue, follow_to_the_end
from gangline.context import default_home
from gangline.control.supervision import open_run, supervise_again
from gangline.runs.registry import find_run


def command(
    run: RunId,
) -> None:
    """Follow a run from now on. Ctrl-C leaves and the run continues. If its supervisor has died, starts a new one."""
    home = default_home()
    follow_through_queue(find_run(home, run))
    with open_run(run, home=home) as opened:
        supervise_again(opened, console=Terminal())
        follow_to_the_end(opened.view(), from_start=False)
