"""`gangline report-bug RUN`: one redacted archive with what shows why a run failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gangline.cli.options import AsJson, RunId
from gangline.cli.output import print_answer
from gangline.context import default_home
from gangline.control.supervision import RunHandle, open_run
from gangline.control.user_command import CommandRecord
from gangline.errors import HostUnreachable, UsageError
from gangline.report.bug_report import ArchivedRun, BugReport, gather, pack
from gangline.report.redaction import secrets_of
from gangline.report.run_history import read_history
from gangline.report.tail import LogFile, log_files
from gangline.runs.files import write_atomic


def command(
    run: RunId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PATH", help="file to write; by default bug-RUN.tar.gz")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="list what the archive would hold; write nothing")] = False,
    as_json: AsJson = False,
) -> None:
    """Write one archive with the records and the logs of a run, to be sent with a report. Sends nothing.

    Secrets are taken out; names and addresses of hosts and people get stand-ins, the same one everywhere. Look through
    it before you send it. gangline explain ARCHIVE says what it says of the run itself.
    """
    with open_run(run, home=default_home()) as opened:
        path = output or Path(f"bug-{opened.layout.run_id}.tar.gz")
        if path.exists() and not force and not dry_run:
            raise UsageError(f"{path} is there already", seen="a file or folder", fix="another one by -o, or --force")
        report = _gathered(opened)
    data = pack(report)
    if not dry_run:
        write_atomic(path, data)
    answer = {
        "archive": None if dry_run else str(path),
        "bytes": len(data),
        "files": {name: len(text) for name, text in report.files.items()},
        "redacted": dict(report.redacted),
        "missing": list(report.missing),
    }
    print_answer(answer, _rows(report, path, len(data), is_written=not dry_run), as_json=as_json)


def _gathered(opened: RunHandle) -> BugReport:
    own = CommandRecord.of(opened.layout)
    history = read_history(opened.view(), records=opened.records, remote=opened.supervisor_host)
    attempt = history.attempts[-1].number if history.attempts else 1
    logs: list[LogFile] = []
    silent: dict[str, HostUnreachable] = {}
    for console in (False, True):
        found, silent = log_files(
            opened.layout.run_id, opened.cluster, opened.transports, attempt=attempt, console=console
        )
        logs += found
    return gather(
        opened.view(),
        ArchivedRun(history=history, is_job=own is None, can_resume=own is None or own.resume_words is not None),
        opened.cluster,
        logs,
        private=secrets_of(os.environ),
        missing=[f"{error.what}: its logs are missing" for error in silent.values()],
    )


def _rows(report: BugReport, path: Path, size: int, *, is_written: bool) -> list[str]:
    gone = ", ".join(f"{count} {kind}{'s' * (count > 1)}" for kind, count in sorted(report.redacted.items()))
    rows = [f"  {len(text):>9,}  {name}" for name, text in report.files.items()]
    rows += [f"missing: {gap}" for gap in report.missing]
    rows.append(f"taken out or replaced: {gone or 'nothing'}")
    said = f"{path}, {size:,} bytes: look through it before you send it" if is_written else "nothing was written"
    return [*rows, said]
