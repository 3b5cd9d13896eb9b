"""`gangline prepare` from the first question to the last record: read, plan, show, ask, change, prove, write down."""

from __future__ import annotations

import datetime as dt
import getpass
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from gangline.context import REAL, Dependencies, load_cluster, reached
from gangline.errors import GanglineError, HostUnreachable, UsageError
from gangline.init.dependencies import InitConsole, says_yes
from gangline.prepare.change_view import plan_json, plan_lines, undo_lines
from gangline.prepare.host_side import HostSide, Passwords, Undoable, new_txn
from gangline.prepare.prepare_step import Asks, HostReading, PrepareStep, Scope, StepPlan, StepView
from gangline.prepare.step_table import STEPS, chosen
from gangline.runs.cluster import Cluster, Host
from gangline.transport.fanout import in_parallel
from gangline.transport.transport import Transport

SCOPES: tuple[Scope, ...] = ("user", "root")
ROOT_JOURNAL = PurePosixPath("/var/lib/gangline/prepare")
"""As the host half has it (`agent.prepare.change_journal`)."""
LOGIN_TRIES = 3
LOGIN_PAUSE_S = 1.0


class PrepareConsole(InitConsole, Protocol):
    """The user's terminal."""

    def secret(self, question: str) -> str | None:
        """What the user types without being shown it; None where nobody is there to answer."""
        ...

    def show(self, lines: Sequence[str]) -> None:
        """Data, for the reader of stdout."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareQuestion:
    """What the user typed."""

    home: Path
    words: tuple[str, ...] = ()
    cluster: Path | None = None
    yes: bool = False
    dry_run: bool = False


@dataclass(slots=True, kw_only=True)
class Prepared:
    """What was planned, and what became of it."""

    plans: dict[str, dict[str, StepPlan]] = field(default_factory=dict)
    """Host -> step -> its plan."""
    failed: dict[str, str] = field(default_factory=dict)
    """Host -> why nothing, or not everything, was changed there."""
    changed: dict[str, list[str]] = field(default_factory=dict)
    """Host -> steps whose changes stand."""
    dry_run: bool = False

    @property
    def num_changes(self) -> int:
        """Of all steps on all hosts."""
        return sum(len(plan.changes) for plans in self.plans.values() for plan in plans.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "dry_run": self.dry_run,
            "hosts": {
                host: {step: plan_json(plan) for step, plan in plans.items()} for host, plans in self.plans.items()
            },
            "changed": self.changed,
            "failed": self.failed,
        }


# Prepare.


def prepare(asked: PrepareQuestion, *, console: PrepareConsole, deps: Dependencies = REAL) -> Prepared:
    """Show what the steps would change, and change it after a yes.

    Raises UsageError for words that nobody knows and for a no, HostUnreachable where no host answers, GanglineError
    where a change failed: then nothing of that step stands on that host.
    """
    cluster = _cluster(asked)
    steps, hosts = chosen(asked.words, cluster)
    with reached(cluster, home=asked.home, console=console, deps=deps) as (_, context):
        passwords = Passwords(console.secret)
        sides = {host.name: _side(host, context.transports[host.name], passwords) for host in cluster.hosts}
        found = Prepared(dry_run=asked.dry_run)
        readings = _read(sides, steps, found)
        for name in hosts:
            if name in readings:
                found.plans[name] = _plans(cluster, cluster.host(name), steps, readings)
        _show(found, console)
        if found.num_changes and _may_change(asked, found, console):
            for name in found.plans:
                _change(cluster, sides[name], steps, readings, found, console=console, asked=asked, deps=deps)
    return found


def _cluster(asked: PrepareQuestion) -> Cluster:
    cluster = load_cluster(asked.cluster, asked.home)
    if cluster.slurm is not None:
        raise UsageError(
            "the hosts of a Slurm cluster are not ours to change",
            seen="`slurm` in the cluster file",
            fix="ask the site's administrators; gangline check says what is wrong there",
        )
    return cluster


def _side(host: Host, transport: Transport, passwords: Passwords) -> HostSide:
    user = host.ssh.partition("@")[0] if host.ssh and "@" in host.ssh else getpass.getuser()
    return HostSide(host.name, transport, user=user, passwords=passwords)


def _read(sides: dict[str, HostSide], steps: Sequence[PrepareStep], found: Prepared) -> dict[str, HostReading]:
    """What the steps want to know of every host that answers."""

    def read(name: str) -> HostReading | GanglineError:
        try:
            return sides[name].read_for(steps)
        except GanglineError as error:
            return error
        except (OSError, TimeoutError) as error:
            return GanglineError(f"{name}: it cannot be asked", seen=str(error))

    answers = dict(zip(sides, in_parallel(read, sides), strict=True))
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, GanglineError)}
    found.failed |= {name: "; ".join(filter(None, (error.what, error.seen))) for name, error in errors.items()}
    if len(errors) == len(answers):
        raise next(iter(errors.values()))
    return {name: answer for name, answer in answers.items() if isinstance(answer, HostReading)}


def _plans(
    cluster: Cluster, host: Host, steps: Sequence[PrepareStep], readings: dict[str, HostReading]
) -> dict[str, StepPlan]:
    view = StepView(host=host, cluster=cluster, reading=readings[host.name], readings=readings)
    return {step.name: step.plan(view) for step in steps}


def _show(found: Prepared, console: PrepareConsole) -> None:
    lines = [
        line
        for host, plans in found.plans.items()
        for step, plan in plans.items()
        if plan.changes or plan.remains
        for line in plan_lines(host, step, plan)
    ]
    console.show(lines)
    for host, why in found.failed.items():
        console.report(f"{host}: left as it is: {why}")
    if not found.num_changes:
        console.report("nothing has to be changed")


def _may_change(asked: PrepareQuestion, found: Prepared, console: PrepareConsole) -> bool:
    """Whether the user wants it; a dry run without a terminal."""
    if asked.yes and not asked.dry_run:
        return True
    question = f"make {_counted(found.num_changes, 'change')} on {_counted(len(found.plans), 'host')}? [y/N]"
    answer = None if asked.dry_run else console.ask(question)
    if answer is None:
        found.dry_run = True
        console.report("nothing was changed; --yes makes these changes without a question")
        return False
    if not says_yes(answer):
        raise UsageError("nothing was changed", seen=f"the answer was {answer!r}, not yes", fix="answer y to go on")
    return True


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _change(  # noqa: PLR0913  (the seams of one host)
    cluster: Cluster,
    side: HostSide,
    steps: Sequence[PrepareStep],
    readings: dict[str, HostReading],
    found: Prepared,
    *,
    console: PrepareConsole,
    asked: PrepareQuestion,
    deps: Dependencies,
) -> None:
    """Every step on one host; the first that fails ends the host's turn."""
    host = cluster.host(side.name)
    for step in steps:
        plan = found.plans[side.name][step.name]
        if not plan.changes:
            continue
        try:
            for scope in SCOPES:
                if any(change.scope == scope for change in plan.changes):
                    console.progress(f"{side.name}: {step.name}")
                    _make(host, side, step.name, scope, plan, deps=deps, home=asked.home)
            _prove(cluster, host, side, step, readings)
        except GanglineError as error:
            found.failed[side.name] = f"{step.name}: {error.what}; {error.seen}".rstrip("; ")
            console.report(str(error))
            return
        found.changed.setdefault(side.name, []).append(step.name)
        console.report(f"{side.name}: {step.name} is done; back: gangline prepare --undo {step.name} {side.name}")


def _make(  # noqa: PLR0913  (one transaction, and where it is written down)
    host: Host, side: HostSide, step: str, scope: Scope, plan: StepPlan, *, deps: Dependencies, home: Path
) -> None:
    txn, by = new_txn(), f"{getpass.getuser()}@{platform.node()}"
    record = {"host": host.name, "step": step, "scope": scope, "txn": txn, "by": by}
    _write_down(home, {**record, "kind": "begin", "changes": [change.to_json() for change in plan.changes]})
    side.apply(step, scope, plan, txn=txn, by=by)
    if plan.revert_s is not None:
        _confirm(host, side, scope, txn, deps)
    _write_down(home, {**record, "kind": "done"})


def _confirm(host: Host, side: HostSide, scope: Scope, txn: str, deps: Dependencies) -> None:
    """Keep a change that could lock out, from a new login: the old one proves nothing. Raises GanglineError."""
    for left in reversed(range(LOGIN_TRIES)):
        fresh = deps.connect(Cluster(name="login", hosts=(host,)))[host.name]
        try:
            side.by(fresh).confirm(scope, txn)
            return
        except HostUnreachable as error:
            if not left:
                raise HostUnreachable(
                    f"{host.name}: a new login does not work any more; the host takes the change back by itself",
                    seen="; ".join(filter(None, (error.what, error.seen))),
                    fix="wait a minute, then look again: gangline prepare --status",
                    reason=error.reason,
                ) from None
            time.sleep(LOGIN_PAUSE_S)
        finally:
            fresh.close()


def _prove(cluster: Cluster, host: Host, side: HostSide, step: PrepareStep, readings: dict[str, HostReading]) -> None:
    """Read again: the step has to find nothing more to change. Raises GanglineError."""
    readings[host.name] = readings[host.name].with_all_of(side.read_for([step]))
    left = _plans(cluster, host, [step], readings)[step.name]
    if left.changes:
        lines = [line for change in left.changes for line in change.lines()]
        raise GanglineError(
            f"{host.name}: {step.name} was done, but did not bring what it should",
            seen=f"it would still change: {' / '.join(lines)[:600]}",
            fix=f"take it back: gangline prepare --undo {step.name} {host.name}",
        )


def _write_down(home: Path, record: dict[str, Any]) -> None:
    """A line of this computer's own journal; it is on the disk when this returns."""
    folder = home / "prepare"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    when = dt.datetime.now(dt.timezone.utc).isoformat(timespec="seconds")
    descriptor = os.open(folder / f"{record['host']}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, json.dumps({"when": when, **record}).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# Undo, and what stands.


def undo(asked: PrepareQuestion, *, console: PrepareConsole, deps: Dependencies = REAL) -> Prepared:
    """Take changes back, the last one first, after they were shown.

    Raises UsageError without the name of a step or `all`, GanglineError where somebody changed a thing since.
    """
    cluster = _cluster(asked)
    words = tuple(word for word in asked.words if word != "all")
    steps, hosts = chosen(words, cluster)
    is_named = any(step.name in words for step in STEPS)
    if not is_named and "all" not in asked.words:
        raise UsageError("nothing is named to be undone", fix="gangline prepare --undo STEP, or --undo all")
    names = [step.name for step in steps] if is_named else None
    found = Prepared(dry_run=asked.dry_run)
    with reached(cluster, home=asked.home, console=console, deps=deps) as (_, context):
        passwords = Passwords(console.secret)
        for name in hosts:
            side = _side(cluster.host(name), context.transports[name], passwords)
            _undo_host(side, names, found, asked=asked, console=console)
    return found


def _undo_host(
    side: HostSide, names: list[str] | None, found: Prepared, *, asked: PrepareQuestion, console: PrepareConsole
) -> None:
    """One host. The user's own files come last: among them is what lets us log in."""
    for scope in _scopes(side):
        try:
            shown = side.undoable(scope, names)
            console.show(undo_lines(side.name, shown))
            if shown.refused:
                found.failed[side.name] = "; ".join(f"somebody changed {each['what']} since" for each in shown.refused)
            if shown.rows and _may_undo(side.name, shown, asked, console, found):
                side.undo(scope, names, shown)
                steps = list(dict.fromkeys(str(row["step"]) for row in shown.rows))
                found.changed.setdefault(side.name, []).extend(steps)
                _write_down(asked.home, {"host": side.name, "kind": "undone", "scope": scope, "steps": steps})
                console.report(f"{side.name}: undone: {', '.join(steps)}")
        except GanglineError as error:
            found.failed[side.name] = "; ".join(filter(None, (error.what, error.seen)))
            console.report(str(error))


def _scopes(side: HostSide) -> tuple[Scope, ...]:
    """Whose changes there may be on a host: root's only where root has a journal, for sudo costs a password."""
    reading = side.read(Asks(folders=(ROOT_JOURNAL.parent.parent.as_posix(),)))
    names = reading.folders[ROOT_JOURNAL.parent.parent.as_posix()] or ()
    return ("root", "user") if ROOT_JOURNAL.parent.name in names else ("user",)


def _may_undo(host: str, shown: Undoable, asked: PrepareQuestion, console: PrepareConsole, found: Prepared) -> bool:
    if asked.yes and not asked.dry_run:
        return True
    answer = None if asked.dry_run else console.ask(f"undo {_counted(len(shown.rows), 'change')} on {host}? [y/N]")
    found.dry_run = found.dry_run or answer is None
    if answer is None:
        console.report("nothing was undone; --yes does it without a question")
    return answer is not None and says_yes(answer)


def status(asked: PrepareQuestion, *, console: PrepareConsole, deps: Dependencies = REAL) -> dict[str, Any]:
    """Every change that stands on the hosts, by host."""
    cluster = _cluster(asked)
    _, hosts = chosen(asked.words, cluster)
    found: dict[str, Any] = {}
    with reached(cluster, home=asked.home, console=console, deps=deps) as (_, context):
        passwords = Passwords(console.secret)
        for name in hosts:
            side = _side(cluster.host(name), context.transports[name], passwords)
            found[name] = [each for scope in _scopes(side) for each in side.status(scope)]
    return found
