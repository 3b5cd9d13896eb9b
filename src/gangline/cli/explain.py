"""`gangline explain WHAT`: the cause of a failure, the meaning of a finding, the known errors in a log file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from gangline.checks.reference import find_entry
from gangline.cli.options import AsJson
from gangline.cli.output import print_answer
from gangline.context import default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import CommandRecord
from gangline.errors import UsageError
from gangline.report.explanation import explain_json, explain_lines, log_json, log_lines, read_log
from gangline.report.run_history import read_history

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
    meaning, fix = "\n".join(entry.meanings), "\n".join(entry.fixes)
    answer = {"id": entry.id, "severity": entry.severity, "meaning": meaning, "fix": fix}
    print_answer(answer, entry.lines(), as_json=as_json)


def _explain_log(path: Path, *, as_json: bool) -> None:
    if not _is_regular(path):
        raise UsageError(
            f"{path} is not a file", seen="expected a log file, a run or a finding", fix="gangline ps lists the runs"
        )
    report = read_log(path)
    print_answer(log_json(report), log_lines(report), as_json=as_json)


def _explain_run(prefix: str, *, as_json: bool) -> None:
    with open_run(prefix, home=default_home()) as run:
        own = CommandRecord.of(run.layout)
        history = read_history(run.view(), records=run.records, remote=run.supervisor_host)
    is_job, can_resume = own is None, own is None or own.resume_words is not None
    answer = explain_json(history, is_job=is_job, can_resume=can_resume)
    print_answer(answer, explain_lines(history, is_job=is_job, can_resume=can_resume), as_json=as_json)
