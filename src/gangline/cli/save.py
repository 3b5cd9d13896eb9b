"""`gangline save RUN`: have a run save now, and go on."""

from __future__ import annotations

import time

from gangline.cli.options import RunId
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.other_users import refuse_of_another
from gangline.control.save_order import OrderedSave, order_save
from gangline.control.served_endpoints import find_endpoint
from gangline.control.supervision import open_run
from gangline.errors import HostUnreachable, UsageError
from gangline.report.follow import Patience

SILENCE_S = 30.0
"""How long the head may be silent during the wait."""
POLL_S = 0.3


def command(run: RunId) -> None:
    """Have a run save after its next step, and go on. Waits until the checkpoint is whole on every host.

    A script of yours is told through gangline.hooks.save_now(); nobody waits for what it does then. Ctrl-C leaves; the
    order stays in force.
    """
    if find_endpoint(default_home(), run) is not None:
        raise UsageError(
            f"{run} is a model that is served, and has nothing to save",
            seen="expected a run that trains",
            fix="gangline ps lists the runs",
        )
    refuse_of_another(run, home=default_home())
    with open_run(run, home=default_home()) as opened:
        print_data([f"{opened.layout.run_id} {_wait(order_save(opened))}"])


def _wait(order: OrderedSave) -> str:
    """What the run did. Ctrl-C ends the waiting, not the order."""
    console, name = Terminal(), order.run.layout.run_id
    begun = time.monotonic()
    patience = Patience(order.view.patience_s, time.monotonic)
    silent_since: float | None = None
    while True:
        now, silence = time.monotonic(), ""
        try:
            record = patience.judge(order.run.record())
            if (did := order.look(record)) is not None:
                break
        except HostUnreachable as error:
            silence = error.seen or error.what
        silent_since = None if not silence else silent_since or now
        if silent_since is not None and now - silent_since > SILENCE_S:
            console.clear()
            raise HostUnreachable(
                f"{name} was told to save, and it is unknown whether it did",
                seen=silence,
                fix=f"once it answers: gangline ps {name}",
            )
        where = "" if order.step is None else f" step {order.step}"
        console.progress(f"waiting for {name} to save{where}, {now - begun:.0f} s")
        time.sleep(POLL_S)
    console.clear()
    return did
