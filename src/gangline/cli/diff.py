"""`gangline diff RUN1 RUN2`: what differs between two runs."""

from __future__ import annotations

from typing import Annotated

from gangline.cli.options import AsJson, argument
from gangline.cli.output import print_answer
from gangline.context import default_home
from gangline.control.recorded_run import recorded_run
from gangline.report.run_diff import compare_runs, diff_json, diff_lines


def command(
    first: Annotated[str, argument("RUN1", "id of a run, or the beginning of one")],
    second: Annotated[str, argument("RUN2", "another one")],
    as_json: AsJson = False,
) -> None:
    """Say what differs between two runs: job, data, versions, machines, shares, and the step at which losses part."""
    home = default_home()
    compared = compare_runs(recorded_run(first, home=home), recorded_run(second, home=home))
    print_answer(diff_json(compared), diff_lines(compared), as_json=as_json)
