"""`gangline export RUN`: write the model for transformers and peft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import RunId, option
from gangline.cli.output import Terminal, print_data
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import require_job
from gangline.report.commands import joined, quoted
from gangline.serve.run_model import export_argv, export_model, find_saved


def command(
    run: RunId,
    merged: Annotated[
        bool, typer.Option("--merged", help="merge the adapter into the model and write the whole model")
    ] = False,
    to: Annotated[Path | None, option("new folder to write; by default below the run directory", "DIR")] = None,
    step: Annotated[int | None, option("by default the newest checkpoint")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the exact command and write nothing")] = False,
) -> None:
    """Write the model of a run, load it again and compare its logits. Prints the folder on stdout."""
    console = Terminal()
    with open_run(run, home=default_home()) as opened:
        require_job(opened.layout)
        console.progress("verifying the checkpoint")
        saved = find_saved(opened.layout.run_id, opened.cluster, opened.transports, step=step)
        if dry_run:
            console.clear()
            words = export_argv(saved, to=to, merged=merged)
            print_data([joined(saved.place.host.argv("-m", "gangline.worker", *words))])
            return
        console.report(f"exporting step {saved.step} of {opened.layout.run_id}")
        record = export_model(saved, opened.layout, to=to, merged=merged, on_text=console.progress)
    difference = record["max_logit_difference"]
    compared = (
        "every tensor is what was saved" if difference is None else f"logits differ by {difference:.2g} at the most"
    )
    console.report(f"{'read' if difference is None else 'loaded'} again: {compared}")
    print_data([record["folder"]])
    console.report(f"talk to it: gangline chat {quoted(record['folder'])}")
