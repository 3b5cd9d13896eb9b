"""`gangline profile RUN`: record a few steps of a running job on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import AsJson, RunId
from gangline.cli.output import Terminal, print_data, print_json
from gangline.context import default_home
from gangline.control.other_users import refuse_of_another
from gangline.control.profile_run import record_steps, write_merged
from gangline.control.supervision import open_run
from gangline.errors import UsageError
from gangline.report.live import terminal_width
from gangline.report.rank_traces import advice, lines, merge, share
from gangline.runs.profile_order import MOST_STEPS
from gangline.units import format_bytes


def command(
    run: RunId,
    steps: Annotated[int, typer.Option("--steps", min=1, max=MOST_STEPS, help="how many steps to record")] = 3,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="file for Perfetto; by default RUN-step-N.trace.json.gz here"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Record the next steps on all ranks with torch's profiler, on one time axis; the run goes on.

    Open the file at https://ui.perfetto.dev, or in chrome://tracing; it holds names of operators, hosts and threads.
    For jobs of gangline train. The steps that are recorded are slower than others.
    """
    refuse_of_another(run, home=default_home())
    if out is not None and not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", seen=f"--out {out}", fix="make it, or name another file")
    if out is not None and out.is_dir():
        raise UsageError(f"{out} is a folder", seen=f"--out {out}", fix=f"name a file: --out {out / 'trace.json.gz'}")
    console = Terminal()
    with open_run(run, home=default_home()) as opened:
        name = opened.layout.run_id
        traces, first = record_steps(opened, steps, progress=console.progress)
    shares = [share(trace) for trace in traces]
    target = out or Path(f"{name}-step-{first}.trace.json.gz")
    size = write_merged(merge(traces), target)
    if as_json:
        errors = [trace.error_ns / 1e9 for trace in traces]
        print_json(
            {
                "run": name,
                "first_step": first,
                "steps": steps,
                "file": str(target),
                "clock_error_s": max(errors),
                "ranks": [each.to_json() for each in shares],
                "advice": advice(shares),
            }
        )
        return
    print_data(lines(traces, shares, width=terminal_width()))
    print_data([f"{target} ({format_bytes(size)}): open it at https://ui.perfetto.dev"])
