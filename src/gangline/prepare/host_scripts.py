"""The changes of `prepare` as a script for each host: to read, to keep, and to run where gangline may not log in.

The script does what the engine does, as far as bash can: it changes nothing that is not as it was read, keeps what was
there, takes a step back that fails, and takes back by itself what nobody confirmed over a new login. It has no journal.
"""

from __future__ import annotations

import base64
import hashlib
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from gangline.prepare.prepare_step import Change, CommandChange, FileChange, HostReading, Scope, StepPlan
from gangline.report.commands import joined, quoted
from gangline.transport.ssh_options import printable

SCOPES: tuple[Scope, ...] = ("user", "root")
MACHINE_ID = "/etc/machine-id"
"""Tells a host from others: a script is for one of them."""
LIBRARY = Path(__file__).with_name("host_script.sh")
HEAD = """#!/bin/bash
# What `gangline prepare` would change on {host}, as a script. Read it, bring it to {host}, and run it there as {user}:
#   bash {name}              make the changes; sudo asks for the password where root is needed
#   bash {name} undo [STEP]  take them back, unless somebody changed the same thing since
#   bash {name} keep         from a new login: keep what would go back by itself
# What was there before lies in /var/lib/gangline/prepare-script, or in ~/.local/state/gangline/prepare-script.
"""


def host_script(host: str, plans: Mapping[str, StepPlan], reading: HostReading) -> str:
    """The script of one host; "" where nothing has to be changed there. reading: with MACHINE_ID, if it has one."""
    parts: list[str] = []
    steps: list[str] = []
    for step, plan in plans.items():
        for scope in SCOPES:
            changes = [change for change in plan.changes if change.scope == scope]
            if changes:
                parts += [*_comments(step, plan), *_functions(step, scope, changes)]
                steps.append(f"{step}:{scope}:{len(changes)}:{plan.revert_s or 0:.0f}")
    if not steps:
        return ""
    machine = reading.files[MACHINE_ID].text.strip() if MACHINE_ID in reading.files else ""
    known = {"host": host, "user": reading.user, "uid": str(reading.uid), "machine": machine}
    return "\n".join(
        (
            HEAD.format(host=host, user=reading.user, name=f"{host}.sh"),
            *(f"{name}={quoted(value)}" for name, value in known.items()),
            f"steps=({joined(steps)})",
            "",
            LIBRARY.read_text(encoding="utf-8"),
            *parts,
            'main "$@"',
            "",
        )
    )


def _comments(step: str, plan: StepPlan) -> list[str]:
    """What the user would be shown."""
    said = [("", f"Step {step}"), ("why: ", plan.reason), ("risk: ", plan.risk)]
    said += [("left: ", row) for row in plan.remains]
    return _commented(f"{name}{text}" for name, text in said if text)


def _commented(lines: Iterable[str]) -> list[str]:
    return [f"# {row}".rstrip() for line in lines for row in printable(line).split("\n")]


def _functions(step: str, scope: Scope, changes: list[Change]) -> list[str]:
    rows = []
    for number, change in enumerate(changes, start=1):
        place = (step, str(number))
        body = _content(change, place) if isinstance(change, FileChange) else _program(change, place)
        rows += [*_commented(change.lines()), f"change_{scope}_{step}_{number}() {{", *body, "}"]
    return [*rows, ""]


def _content(change: FileChange, place: tuple[str, str]) -> list[str]:
    """A file: its new content stands in the script, so that no shell ever reads it."""
    mode = "" if change.mode is None else f"{change.mode:o}"
    digests = (_digest(change.before), _digest(change.content))
    words = joined((*place, change.path, *digests, mode, f"{change.folder_mode:o}"))
    data = base64.b64encode(change.content or b"").decode("ascii")
    return [f"content \"$1\" {words} <<'END'", *textwrap.wrap(data, 100), "END"]


def _digest(content: bytes | None) -> str:
    return "absent" if content is None else hashlib.sha256(content).hexdigest()


def _program(change: CommandChange, place: tuple[str, str]) -> list[str]:
    after = "?" if change.after is None else change.after
    return [
        f"local probe=({joined(change.probe)}) run=({joined(change.argv)}) back=({joined(change.undo)})",
        f'program "$1" {joined((*place, change.before, after))}',
    ]
