"""`gangline explain WHAT`: why a run is where it is, what a finding means, what a log file tells."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from gangline.checks.reference import find_entry
from gangline.cli.options import AsJson
from gangline.cli.output import print_data, print_json
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import CommandRecord
from gangline.errors import UsageError
from gangline.report.explanation import explain_json, explain_lines, log_json, log_lines, read_log
from gangline.report.run_history import read_story

FINDING = re.compile(r"E-[A-Z]+-?[0-9]*", re.IGNORECASE)


def command(
    what: Annotated[
        str,
        typer.Argument(metavar="WHAT", help="a run (id, or its beginning), a finding (E-NET-07), or a log file"),
    ],
    as_json: AsJson = False,
) -> None:
    """Say why a run failed or stopped: first cause, consequences, evidence, next step. Changes nothing.

    For a finding: its meaning and its fix. For a log file: known errors in it, each with its cause and fix.
    """
    if FINDING.fullmatch(what):
        _explain_finding(what, as_json=as_json)
    elif _is_file(what):
        _explain_log(Path(what), as_json=as_json)
    else:
        _explain_run(what, as_json=as_json)


def _is_file(what: str) -> bool:
    """A name with a slash is a file; of a word that may be both, a run of that whole name counts."""
    if "/" in what:
        return True
    return _is_regular(Path(what)) and not (default_home() / "runs" / what).is_dir()


def _is_regular(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have: over 255 characters
        return False


def _explain_finding(name: str, *, as_json: bool) -> None:
    entry = find_entry(name)
    if as_json:
        meaning, fix = "\n".join(entry.meanings), "\n".join(entry.fixes)
        print_json({"id": entry.id, "severity": entry.severity, "meaning": meaning, "fix": fix})
    else:
        print_data(entry.lines())


def _explain_log(path: Path, *, as_json: bool) -> None:
    if not _is_regular(path):
        raise UsageError(
            f"{path} is not a file", seen="expected a log file, a run or a finding", fix="gangline ps lists the runs"
        )
    report = read_log(path)
    if as_json:
        print_json(log_json(report))
    else:
        print_data(log_lines(report))


def _explain_run(prefix: str, *, as_json: bool) -> None:
    with open_run(prefix, home=default_home()) as run:
        own = CommandRecord.of(run.layout)
        story = read_story(run.view(), kept=run.records, keeper=run.keeper)
    can_resume = own is None or own.resume_words is not None
    if as_json:
        print_json(explain_json(story, is_job=own is None, can_resume=can_resume))
    else:
        print_data(explain_lines(story, is_job=own is None, can_resume=can_resume))
