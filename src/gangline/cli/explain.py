"""`gangline explain WHAT`: the cause of a failure or of a symptom, the meaning of a finding, known failures in logs."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from gangline.checks.reference import find_entry
from gangline.cli.options import CLUSTER_HELP, AsJson, argument, option
from gangline.cli.output import Terminal, is_live, print_answer
from gangline.context import cluster_file, default_home
from gangline.control.supervision import open_run
from gangline.control.user_command import CommandRecord
from gangline.diagnose.corpus import known_failures
from gangline.errors import UsageError
from gangline.report.bug_report import is_archive, read_archive
from gangline.report.explanation import explain_json, explain_lines
from gangline.report.log_answer import STDIN, answer_json, answer_lines, entry_json, entry_lines, read_logs
from gangline.report.run_history import read_history

FINDING = re.compile(r"E-[A-Z]+-?[0-9]*", re.IGNORECASE)


def command(
    what: Annotated[
        list[str] | None,
        argument(
            "WHAT",
            "a run (id, or its beginning), a finding (E-NET-07), a known failure (by its id); or logs: files, "
            "folders, - for standard input; with --ask: a symptom, and the run that shows it",
        ),
    ] = None,
    ask: Annotated[
        bool,
        typer.Option(
            "--ask",
            help="a symptom without a line in a log: one-gpu-slower, slow-network, gpu-not-used, hangs-at-start, "
            "starts-slowly, loss-diverges, loss-stuck",
        ),
    ] = False,
    cluster: Annotated[Path | None, option("--ask without a run: " + CLUSTER_HELP)] = None,
    as_json: AsJson = False,
) -> None:
    """Say why a run failed or stopped: first cause, consequences, evidence, next step. Changes nothing.

    For a finding or a known failure: its meaning and its fix. For logs of any program: the known failures in them, the
    likeliest cause first. --ask reads the figures of the run, looks at its hosts, and says which cause is left.
    """
    if ask:
        _ask(what or [], cluster, as_json=as_json)
        return
    if cluster is not None:
        raise UsageError("--cluster names hosts to ask", seen="no --ask", fix=f"gangline explain --ask {EXAMPLE}")
    if not what:
        raise UsageError(
            "explain needs something to explain",
            seen="expected a run, a finding or a log",
            fix=f"gangline ps lists the runs; of a symptom without a line: gangline explain --ask {EXAMPLE}",
        )
    (first, *more) = what
    if not more and is_archive(Path(first)) and _is_there(Path(first)):
        _explain_archive(Path(first), as_json=as_json)
    elif more or _is_log(first):
        _explain_logs(what, as_json=as_json)
    elif FINDING.fullmatch(first):
        _explain_finding(first, as_json=as_json)
    elif first in known_failures() and not _is_run(first):
        entry = known_failures()[first]
        print_answer(entry_json(first, entry), entry_lines(first, entry), as_json=as_json)
    else:
        _explain_run(first, as_json=as_json)


EXAMPLE = "slow-network RUN"


def _ask(words: list[str], cluster: Path | None, *, as_json: bool) -> None:
    """A symptom and a run from the words, or from the user where there is a terminal."""
    # what looks at hosts takes time to import, which runs and logs do not pay
    from gangline.control.asked_symptom import put_questions
    from gangline.report.symptoms import inquiry_json, inquiry_lines, symptom_of

    console = Terminal()
    if len(words) > 2 or (len(words) == 2 and cluster is not None):
        raise UsageError(
            "--ask takes a symptom, and the run that shows it or --cluster",
            seen=" ".join(words),
            fix=f"gangline explain --ask {EXAMPLE}",
        )
    named, *others = words or _chosen(console, asks_run=cluster is None)
    symptom, run = symptom_of(named), next(iter(others), None)
    inquiry = put_questions(symptom, run, cluster_file(cluster), home=default_home(), console=console)
    console.clear()
    print_answer(inquiry_json(inquiry), inquiry_lines(inquiry), as_json=as_json)


def _chosen(console: Terminal, *, asks_run: bool) -> list[str]:
    """A symptom and a run, as the user names them on the terminal."""
    from gangline.report.symptoms import SYMPTOMS, symptom_menu, symptom_of

    lines, number = symptom_menu(), None
    if is_live():
        for line in lines:
            console.report(line)
        number = console.ask("which of these? Its number or name:")
    if not number:
        raise UsageError(
            "--ask needs a symptom", seen="one of:\n" + "\n".join(lines), fix=f"gangline explain --ask {EXAMPLE}"
        )
    names = list(SYMPTOMS)
    symptom = names[int(number) - 1] if number.isdecimal() and 1 <= int(number) <= len(names) else symptom_of(number)
    asked = "a run that shows it (its id, or nothing to ask the hosts alone):"
    run = console.ask(asked) if asks_run else None
    return [symptom, run] if run else [symptom]


def _is_log(what: str) -> bool:
    """A name with a slash is a log; of a word that may be both, a run of that whole name counts."""
    return what == STDIN or "/" in what or (_is_there(Path(what)) and not _is_run(what))


def _is_run(what: str) -> bool:
    try:
        return (default_home() / "runs" / what).is_dir()
    except OSError:
        return False


def _is_there(path: Path) -> bool:
    try:
        return path.is_file() or path.is_dir()
    except OSError:  # a name that no file can have: over 255 characters
        return False


def _explain_finding(name: str, *, as_json: bool) -> None:
    entry = find_entry(name)
    meaning, fix = "\n".join(entry.meanings), "\n".join(entry.fixes)
    answer = {"id": entry.id, "severity": entry.severity, "meaning": meaning, "fix": fix}
    print_answer(answer, entry.lines(), as_json=as_json)


def _explain_archive(path: Path, *, as_json: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = read_archive(path, Path(folder))
    answer = explain_json(run.history, is_job=run.is_job, can_resume=run.can_resume)
    lines = explain_lines(run.history, is_job=run.is_job, can_resume=run.can_resume)
    print_answer(answer, lines, as_json=as_json)


def _explain_logs(names: list[str], *, as_json: bool) -> None:
    for name in names:
        if name != STDIN and not _is_there(Path(name)):
            raise UsageError(
                f"{name} is neither a file nor a folder",
                seen="expected logs, or one run, finding or known failure",
                fix="gangline ps lists the runs",
            )
    reports = read_logs(names, stdin=sys.stdin.buffer)
    print_answer(answer_json(reports), answer_lines(reports), as_json=as_json)


def _explain_run(prefix: str, *, as_json: bool) -> None:
    with open_run(prefix, home=default_home()) as run:
        own = CommandRecord.of(run.layout)
        history = read_history(run.view(), records=run.records, remote=run.supervisor_host)
    is_job, can_resume = own is None, own is None or own.resume_words is not None
    answer = explain_json(history, is_job=is_job, can_resume=can_resume)
    print_answer(answer, explain_lines(history, is_job=is_job, can_resume=can_resume), as_json=as_json)
