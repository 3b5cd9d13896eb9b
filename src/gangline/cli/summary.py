"""`gangline summary RUN`: what was run on what, how it went, and how to repeat it, as one page to send."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import AsJson, RunId
from gangline.cli.output import Terminal, print_json
from gangline.context import default_home
from gangline.control.recorded_run import recorded_run
from gangline.errors import UsageError
from gangline.report.redaction import secrets_of
from gangline.report.run_summary import summary_json, summary_page
from gangline.report.summary_page import markdown, page_html
from gangline.runs.files import write_atomic


def command(
    run: RunId,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="write a page for browsers")] = None,
    to_markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown on stdout, which is the default without --html")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say what was run on which machines, its curves, its speed against the plan, times, faults, and how to repeat it.

    The page is one file that loads nothing. Secrets are taken out; names and paths stay. Changes nothing of the run.
    """
    if as_json and to_markdown:
        raise UsageError("--json and --markdown both write on stdout", fix="leave out one of them")
    records = recorded_run(run, home=default_home(), samples=True)
    page = summary_page(records, secrets=secrets_of(os.environ))
    if html is not None:
        if html.is_dir():
            raise UsageError(f"{html} is a folder", seen="expected the file to write", fix="--html summary.html")
        text = page_html(page).encode()
        write_atomic(html, text)
        Terminal().report(f"{html}, {len(text):,} bytes")
    if as_json:
        print_json(summary_json(records))
    elif to_markdown or html is None:
        sys.stdout.write(markdown(page))
        sys.stdout.flush()
