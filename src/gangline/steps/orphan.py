"""`gangline attach`: a run that goes on though its supervisor is gone gets another one."""

from __future__ import annotations

from gangline.errors import RunFailed
from gangline.steps.keep import Opened
from gangline.steps.seams import Means, Seams, Talk


def look_after(run: Opened, *, talk: Talk, seams: Seams) -> bool:
    """Start a supervisor for a run that this computer keeps and nobody looks after; whether one was started.

    It takes the attempt over as it runs, and starts nothing of it again. A run of which nothing runs any more is left
    as it is: to go on with it is for `resume`. Where the head keeps the run, a guard there starts another one. Raises
    RunFailed where none comes up.
    """
    record = run.record()
    record.require_state()
    if run.keeper is not None or not record.lost or record.state is None or not seams.is_alive(run.layout, None):
        return False
    means = Means(transports=dict(run.transports), home=run.layout.root, talk=talk, seams=seams)
    try:
        seams.spawn(run.layout.folder, record.state.attempt, secrets=means.secrets)
    except RunFailed:
        if run.record().lost:
            raise
        return False  # somebody else's came first
    talk.say(f"{run.layout.run_id} had no supervisor any more: another one looks after it now")
    return True
