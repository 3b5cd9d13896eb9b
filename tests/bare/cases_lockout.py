"""Changes that lock out, made by the engine of `gangline prepare` as if a step wanted them. Run on the desk."""

import os
from pathlib import Path

from gangline.errors import GanglineError
from gangline.prepare import prepare_hosts, step_table
from gangline.prepare.prepare_step import Asks, CommandChange, FileChange, PrepareStep, StepPlan, activated


class Terminal:
    """Somebody who knows the password of sudo."""

    def __init__(self, password: str) -> None:
        self.password = password
        self.lines: list[str] = []

    def secret(self, question: str) -> str:
        return self.password

    def report(self, line: str) -> None:
        self.lines.append(line)

    def show(self, lines) -> None:
        self.lines += lines

    def progress(self, line: str) -> None:
        pass

    def table(self, header, rows) -> None:
        pass

    def ask(self, question: str) -> str:
        return "y"


def changes_of(rows: list[dict]) -> tuple:
    """The changes of a case, as JSON carries them: files with their text before, and commands."""
    made = []
    for row in rows:
        if "path" in row:
            before = None if row["before"] is None else row["before"].encode()
            made.append(FileChange(path=row["path"], before=before, content=row["content"].encode()))
        else:
            made.append(CommandChange(argv=tuple(row["argv"]), undo=tuple(row["undo"])))
    return tuple(made)


def prepare(*, rows: list[dict], reload: list[str], host: str, password: str, revert_s: float) -> dict:
    """Make the changes with a timer that takes them back; what the user is told."""
    changes = changes_of(rows)
    plan = StepPlan(
        changes=activated(changes, tuple(reload)) if reload else changes, reason="a test", revert_s=revert_s
    )
    plans = iter([plan])  # read again, it finds nothing more to change
    step = PrepareStep(name="lockout", summary="", asks=Asks(), plan=lambda view: next(plans, StepPlan()))
    step_table.STEPS = prepare_hosts.STEPS = (step,)
    prepare_hosts.LOGIN_TRIES = 1
    home = Path(os.environ["HOME"])
    asked = prepare_hosts.PrepareQuestion(
        home=home / "gangline", words=("lockout", host), cluster=home / "cluster.yaml", yes=True
    )
    terminal = Terminal(password)
    try:
        found = prepare_hosts.prepare(asked, console=terminal)
    except GanglineError as error:
        return {"failed": str(error), "lines": terminal.lines}
    return {"failed": found.failed, "changed": found.changed, "lines": terminal.lines}
