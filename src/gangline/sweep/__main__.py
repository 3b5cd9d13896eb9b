"""`python -m gangline.sweep SWEEP_FOLDER`: the supervisor of a sweep; `--detach`: in the background.

`--trial [N]` is the batch step of a trial on Slurm (gangline.sweep.job_array); without N, the trial is the task of the
array around us.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import NoReturn

from gangline.control.slurm_job import LogConsole
from gangline.errors import GanglineError
from gangline.runs.layout import SweepLayout
from gangline.runs.state import ProcessId
from gangline.supervise.own_session import fork_again, write_to
from gangline.sweep.begin import SampledTrials
from gangline.sweep.drive import Driver
from gangline.sweep.records import (
    SweepRecord,
    SweepState,
    read_order,
    save_state,
    sweep_lock,
)
from gangline.sweep.trial_runs import OwnRuns


def main() -> int:
    """Entry point; the exit code is 0 once the sweep has ended, whatever became of its trials."""
    parser = argparse.ArgumentParser(prog="python -m gangline.sweep", description=__doc__)
    parser.add_argument("sweep_folder", type=Path)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--trial", type=int, nargs="?", const=os.environ.get("SLURM_ARRAY_TASK_ID"))
    words = parser.parse_args()
    os.umask(0o077)
    layout = SweepLayout(words.sweep_folder.parent.parent, words.sweep_folder.name)
    if words.detach:
        return _detach(layout)
    if words.trial is not None:
        from gangline.sweep.job_array import run_task

        return run_task(layout, int(words.trial))
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    return drive(layout)


def drive(layout: SweepLayout) -> int:
    """Drive the sweep in this process."""
    request = SweepRecord.load(layout.request)
    runs = OwnRuns(layout.home, force=request.force, metric=request.metric, console=LogConsole())
    try:
        with sweep_lock(layout):
            state = SweepState.load(layout.state)
            save_state(layout, state, phase="running", supervisor=ProcessId.current(), error=None)
            source = None if request.sampler is None else SampledTrials(layout, request)
            Driver(layout, runs, source=source).run()
            phase = "finished" if read_order(layout) is None else "stopped"
            save_state(layout, SweepState.load(layout.state), phase=phase)
    except GanglineError as error:
        logging.getLogger(__name__).error("%s", error)  # noqa: TRY400 - it is told in three parts
        save_state(layout, SweepState.load(layout.state), phase="failed", error=error.to_json())
        return error.exit_code
    return 0


def _detach(layout: SweepLayout) -> int:
    """Go on in a process of its own, twice forked: what ends a command and its descendants must not find it."""
    child = os.fork()
    if child == 0:
        fork_again(lambda: _go_on(layout))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _go_on(layout: SweepLayout) -> NoReturn:
    code = 1
    try:
        write_to(layout.log)
        logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, force=True)
        code = drive(layout)
    except BaseException:
        logging.getLogger(__name__).exception("the supervisor of the sweep failed")
        raise
    finally:
        logging.shutdown()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
