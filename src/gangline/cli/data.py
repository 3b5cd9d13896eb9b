"""`gangline data JOB`: samples as the model will see them, and what becomes of all rows."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from gangline.cli.options import AsJson, JobFile, Overrides
from gangline.cli.output import print_json
from gangline.context import default_home
from gangline.decide.data_preview import preview
from gangline.report.data_view import marks, preview_lines
from gangline.report.live import speaks_braille


def command(
    job: JobFile,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=0, help="rows to show as text")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show samples as the model will see them: learned words, lengths, what is cut or left out. Starts nothing."""
    # pydantic costs 0.2 s
    from gangline.config.load import load_job

    found = load_job(job, tuple(overrides or ()))
    seen = preview(found, home=default_home(), rows=rows)
    if as_json:
        print_json({key: value for key, value in seen.items() if key != "kind"})
        return
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    around = marks(colour=colour, plain=not speaks_braille(sys.stdout))
    for line in preview_lines(seen, found, around=around):
        sys.stdout.write(line + "\n")
