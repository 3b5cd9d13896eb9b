"""`gangline prepare` from the first question to the last record: read, plan, show, ask, change, prove, write down."""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from gangline.checks.judge import FAMILIES
from gangline.config.document import name_of
from gangline.config.load import DEFAULT
from gangline.context import REAL, Context, Dependencies, load_cluster, located, reached
from gangline.control.supervision import choose_supervisor_host
from gangline.decide.inspect import InspectOptions, inspect
from gangline.decide.told_before import is_acknowledged
from gangline.errors import GanglineError, HostUnreachable, RunFailed, UsageError
from gangline.init.dependencies import REAL as REAL_INIT
from gangline.init.dependencies import InitConsole, Scan, says_yes, scan, scan_all, trust
from gangline.init.dependencies import show as show_keys
from gangline.prepare.ansible_playbook import playbook_files
from gangline.prepare.change_view import plan_json, plan_lines, undo_lines
from gangline.prepare.export_folder import STDOUT, require_new_folder, write_files
from gangline.prepare.host_restart import restart
from gangline.prepare.host_scripts import MACHINE_ID, host_script
from gangline.prepare.host_side import HostSide, Passwords, Undoable, new_txn
from gangline.prepare.keys_between import BETWEEN
from gangline.prepare.prepare_step import Asks, HostReading, PrepareStep, Scope, StepPlan, StepView
from gangline.prepare.ssh_access import ACCESS, HERE_ASKS, KEY, plan_here
from gangline.prepare.step_table import STEPS, chosen, machines_for
from gangline.provision.code import place_code
from gangline.runs.cluster import Cluster, Host
from gangline.transport.fanout import in_parallel
from gangline.transport.hostkeys import own_key
from gangline.transport.local import LocalTransport
from gangline.transport.password import PasswordTransport
from gangline.transport.transport import Transport
from gangline.units import counted

SCOPES: tuple[Scope, ...] = ("user", "root")
ROOT_JOURNAL = PurePosixPath("/var/lib/gangline/prepare")
"""As the host half has it (`agent.prepare.change_journal`)."""
USER_JOURNAL = Path("~/.local/state/gangline/prepare/journal.jsonl")
HERE = "this-computer"
"""Stands for a host where the user's own files here are meant."""
LOGIN_TRIES = 3
LOGIN_PAUSE_S = 1.0
SETTLE_S = 2.0
"""Between a change and the new logins that prove it; two of them have to work."""


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
    power_limit_w: int | None = None
    """What each GPU may draw, for the step `driver`; None: as it is."""
    commands: Path | None = None
    """A folder for a script per host, instead of any change; `-` for stdout."""
    ansible: Path | None = None
    """A folder for an inventory and a playbook, instead of any change."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Logins:
    """What a first login touches; tests put other things here."""

    own_key: Callable[[str, int | None], tuple[str, str]] = own_key
    by_password: Callable[[Host, str], Transport] = PasswordTransport
    scan: Callable[[Host], Scan] = scan
    here: Callable[[], Transport] = lambda: LocalTransport(Host(name=HERE, workdir="", python=""))


LOGINS = Logins()
"""Real hosts, and the user's own keys."""


# Prepare.


def prepare(
    asked: PrepareQuestion, *, console: PrepareConsole, deps: Dependencies = REAL, logins: Logins = LOGINS
) -> Prepared:
    """Show what the steps would change, and change it after a yes.

    Raises UsageError for words that nobody knows and for a no, HostUnreachable where no host answers, GanglineError
    where a change failed: then nothing of that step stands on that host.
    """
    for folder in filter(None, (asked.commands, asked.ansible)):
        require_new_folder(folder)
    cluster, scans = _cluster_or_new_hosts(asked, console, logins)
    words = [name_of(word) for word in asked.words]
    machines = machines_for(words, cluster)
    steps, hosts = chosen(words, machines)
    with contextlib.ExitStack() as stack:
        _, context = stack.enter_context(reached(cluster, home=asked.home, console=console, deps=deps))
        if not any(step.name in asked.words for step in steps):
            steps = _found_by_check(cluster, steps, context)
        passwords = Passwords(console.secret)
        session = _Session(
            asked=asked,
            cluster=cluster,
            steps=steps,
            hosts=hosts,
            sides={host.name: _side(host, context.transports[host.name], passwords) for host in machines},
            passwords=passwords,
            console=console,
            deps=deps,
            logins=logins,
            stack=stack,
            found=Prepared(dry_run=asked.dry_run),
        )
        session.read()
        session.plan()
        if asked.commands or asked.ansible:
            _export(asked, session, console)
            return session.found
        _show(session.found, console)
        if session.found.num_changes and _may_change(session.found, asked, console):
            for name in session.found.plans:
                session.change(name)
        session.restart()
        if not session.found.dry_run:
            session.report_supervisor(context)
    if scans and _may_describe(asked, session.found, console):
        _describe(asked, scans, console)
    return session.found


def _found_by_check(cluster: Cluster, steps: tuple[PrepareStep, ...], context: Context) -> tuple[PrepareStep, ...]:
    """The steps that findings of a check name, and those that none ever names.

    All of them where a host does not answer: what lies between the hosts cannot be seen then.
    """
    inspection = inspect(cluster, InspectOptions(), context, silent=True)
    if len(inspection.inventory.hosts) < len(cluster.hosts):
        return steps
    named: dict[str, list[str]] = {}
    for finding in inspection.findings:
        if finding.step and not is_acknowledged(finding, cluster):
            named.setdefault(finding.step, []).append(finding.id)
    of_checks = {rule.step for family in FAMILIES.built_in.values() for rule in family}
    for step in steps:
        if ids := named.get(step.name):
            context.console.report(f"check found {', '.join(dict.fromkeys(ids))}: {step.name}")
    return tuple(step for step in steps if step.name in named or step.name not in of_checks)


def _cluster_or_new_hosts(
    asked: PrepareQuestion, console: PrepareConsole, logins: Logins
) -> tuple[Cluster, tuple[Scan, ...]]:
    """The cluster of the file; for `access`, hosts that are in none yet, with what they showed when they were asked."""
    if ACCESS.name in asked.words:
        known = {host.name for host in load_cluster(asked.cluster, asked.home).hosts} if asked.cluster else set()
        steps = {step.name for step in STEPS}
        new = [word for word in asked.words if word not in steps and name_of(word) not in known]
        if new:
            return _new_hosts(new, asked, console, logins)
    return _cluster(asked), ()


def _cluster(asked: PrepareQuestion) -> Cluster:
    """The cluster of the file. Raises UsageError for one of Slurm."""
    cluster = load_cluster(asked.cluster, asked.home)
    if cluster.slurm is not None:
        raise UsageError(
            "the hosts of a Slurm cluster are not ours to change",
            seen="`slurm` in the cluster file",
            fix="ask the site's administrators; gangline check says what is wrong there",
        )
    return cluster


def _may_describe(asked: PrepareQuestion, found: Prepared, console: PrepareConsole) -> bool:
    """Whether new hosts get a cluster file now: there is none, all of them let the user in, and he wants it."""
    if asked.cluster is not None or found.dry_run or found.failed or asked.commands or asked.ansible:
        return False
    if asked.yes:
        return True
    answer = console.ask(f"write {DEFAULT} with {counted(len(found.plans), 'host')}? [Y/n]")
    return answer is not None and (not answer.strip() or says_yes(answer))


def _describe(asked: PrepareQuestion, scans: Sequence[Scan], console: PrepareConsole) -> None:
    """Write the cluster file, as `gangline init` does, with the keys that the user has just trusted."""
    from gangline.init.describe import InitQuestion, init

    shown = {each.host.name: each for each in scans}
    deps = replace(REAL_INIT, scan=lambda host: replace(shown[host.name], host=host))
    names = tuple(each.host.ssh or each.host.name for each in scans)
    init(InitQuestion(home=asked.home, output=Path(DEFAULT), names=names, yes=True), console=console, deps=deps)
    console.report("next: gangline prepare does what gangline check finds")


def _side(host: Host, transport: Transport, passwords: Passwords) -> HostSide:
    user = host.ssh.partition("@")[0] if host.ssh and "@" in host.ssh else getpass.getuser()
    return HostSide(host.name, transport, user=user, passwords=passwords)


def _new_hosts(
    words: list[str], asked: PrepareQuestion, console: PrepareConsole, logins: Logins
) -> tuple[Cluster, tuple[Scan, ...]]:
    """Hosts that no file has, each with the key that the user trusts. Raises UsageError, HostKeyRefused."""
    from gangline.config.load import named_hosts

    hosts = [each.host for each in named_hosts(words, home=asked.home)]
    scans = scan_all(hosts, logins.scan)
    if failed := next((each for each in scans if each.problem), None):
        raise HostUnreachable(
            f"{failed.host.name} shows no host key", seen=failed.problem, fix="is it on, and does its sshd run?"
        )
    show_keys(scans, console)
    trust(scans, yes=asked.yes, console=console)
    keys = {each.host.name: each.key for each in scans}
    cluster = Cluster(name="new", hosts=tuple(replace(host, host_key=keys[host.name]) for host in hosts))
    return cluster, tuple(scans)


@dataclass(slots=True, kw_only=True)
class _Session:
    """One call of prepare: the hosts that it asks, what they answered, and what became of each."""

    asked: PrepareQuestion
    cluster: Cluster
    steps: Sequence[PrepareStep]
    hosts: Sequence[str]
    """Those that are named, or all."""
    sides: dict[str, HostSide]
    passwords: Passwords
    console: PrepareConsole
    deps: Dependencies
    logins: Logins
    stack: contextlib.ExitStack
    """Closes connections that were made on the way."""
    readings: dict[str, HostReading] = field(default_factory=dict)
    public_keys: dict[str, str] = field(default_factory=dict)
    """By host that took a password only."""
    found: Prepared = field(default_factory=Prepared)

    def read(self) -> None:
        """Ask every host of the cluster; those that want a password, by password. Raises where none answers."""
        answers = dict(zip(self.sides, in_parallel(self._answer, self.sides), strict=True))
        self.readings |= {name: answer for name, answer in answers.items() if isinstance(answer, HostReading)}
        errors = []
        for name, error in answers.items():
            if isinstance(error, HostReading):
                continue
            wants_password = name in self.hosts and ACCESS in self.steps and getattr(error, "reason", "") == "denied"
            left = self._first_login(self.cluster.host(name)) if wants_password else error
            if left is not None:
                errors.append(left)
                self.found.failed[name] = "; ".join(filter(None, (left.what, left.seen)))
        if not self.readings:
            raise errors[0]

    def _answer(self, name: str) -> HostReading | GanglineError:
        try:
            return self.sides[name].read_for(self.steps)
        except GanglineError as error:
            return error
        except (OSError, TimeoutError) as error:
            return GanglineError(f"{name}: it cannot be asked", seen=str(error))

    def _first_login(self, host: Host) -> GanglineError | None:
        """Read a host by password, once there is a key to bring to it."""
        try:
            key = self._public_key(host)
            password = self.passwords.ask(host.name, self.sides[host.name].user, purpose="ssh")
        except GanglineError as error:
            return error
        transport = self.logins.by_password(host, password)
        self.stack.callback(transport.close)
        self.sides[host.name].go_over_to(transport)
        answer = self._answer(host.name)
        if isinstance(answer, GanglineError):
            return answer
        self.readings[host.name], self.public_keys[host.name] = answer, key
        return None

    def _public_key(self, host: Host) -> str:
        """The user's public key; one is made where there is none and the user wants it. Raises GanglineError."""
        key, why = self.logins.own_key(host.ssh or host.name, host.ssh_port)
        if key or why:
            if not key:
                raise UsageError(f"{host.name}: no key of yours can be used", seen=why, fix="then try again")
            return key
        here = HostSide(HERE, self.logins.here(), user=getpass.getuser(), passwords=self.passwords)
        wanted = [each for each in self.cluster.reached if each.transport == "ssh"]
        plan = plan_here(here.read(HERE_ASKS), wanted)
        asking = Prepared(plans={HERE: {ACCESS.name: plan}})
        _show(asking, self.console)
        if plan.changes and not _may_change(asking, self.asked, self.console):
            raise UsageError("you have no ssh key", seen="none was made", fix="ssh-keygen -t ed25519, or --yes here")
        if plan.changes:
            self._make(Host(name=HERE, workdir="", python=""), here, ACCESS.name, "user", plan)
            self.console.report(f"made a key: {KEY}")
        key = here.read(HERE_ASKS).files[f"{KEY}.pub"].text.strip()
        if not key:
            raise GanglineError("there is no public key beside the new one", seen=f"{KEY}.pub is empty or not there")
        return key

    def steps_of(self, name: str) -> list[PrepareStep]:
        """The steps that are planned on a host."""
        return [step for step in self.steps if name in self.hosts or step.on_every_host]

    def plans(self, host: Host, steps: Sequence[PrepareStep], *, first: bool = False) -> dict[str, StepPlan]:
        """What steps would change on a host. first: only what is made before the rest is planned."""
        is_all = {each.name for each in self.cluster.hosts} <= set(self.hosts)
        view = StepView(
            host=host,
            cluster=self.cluster,
            reading=self.readings[host.name],
            readings=self.readings,
            public_key=self.public_keys.get(host.name, ""),
            named=() if is_all else tuple(self.hosts),
            power_limit_w=self.asked.power_limit_w,
        )
        if first:
            return {step.name: step.plan_first(view) for step in steps if step.plan_first}
        return {step.name: step.plan(view) for step in steps}

    def plan(self) -> None:
        """What is to be changed on each host, after what has to be made first is there."""
        if not (self.asked.commands or self.asked.ansible):
            self.make_first()
        for name in self.readings:
            if steps := self.steps_of(name):
                self.found.plans[name] = self.plans(self.cluster.host(name), steps)

    def make_first(self) -> None:
        """What the changes of other hosts follow from. It is shown, asked for and made by itself."""
        if self.asked.dry_run:
            return
        planned = {name: self.plans(self.cluster.host(name), self.steps_of(name), first=True) for name in self.readings}
        asking = Prepared(
            plans={name: plans for name, plans in planned.items() if any(plan.changes for plan in plans.values())}
        )
        if not asking.plans:
            return
        _show(asking, self.console)
        if _may_change(asking, self.asked, self.console):
            for name, plans in asking.plans.items():
                self.change(name, plans)

    def restart(self) -> None:
        """Restart the hosts whose changes count only then, if the user wants it, and say how they are afterwards."""
        wanted = {
            name: [step for step in self.steps if step.name in plans and self._waits(name, step.name, plans[step.name])]
            for name, plans in self.found.plans.items()
        }
        hosts = [name for name, steps in wanted.items() if steps and self.cluster.host(name).transport != "local"]
        if not hosts or self.asked.yes or self.asked.dry_run:
            return
        names = ", ".join(hosts)
        answer = self.console.ask(f"restart {names} now, and wait? It ends all that runs there [y/N]")
        if answer is None or not says_yes(answer):
            return
        for name in hosts:
            try:
                self._restart(name, wanted[name])
            except GanglineError as error:
                self.found.failed[name] = f"restart: {error.what}; {error.seen}".rstrip("; ")
                self.console.report(str(error))

    def _waits(self, name: str, step: str, plan: StepPlan) -> bool:
        """Whether a step waits for the restart of a host: its changes were made, or stood before."""
        return plan.restart and (not plan.changes or step in self.found.changed.get(name, ()))

    def _restart(self, name: str, steps: Sequence[PrepareStep]) -> None:
        host, side = self.cluster.host(name), self.sides[name]
        self.console.progress(f"{name}: restarting")
        transport, seconds = restart(side, lambda: self._fresh(host))
        side.go_over_to(transport)
        self.console.report(f"{name} is back after {seconds:.0f} s")
        self.readings[name] = self.readings[name].with_all_of(side.read_for(steps))
        for step, plan in self.plans(host, steps).items():
            more = (f"more can be done now: gangline prepare {step} {name}",) if plan.changes else ()
            for line in (*plan.remains, *more) or (f"{step} is in force",):
                self.console.report(f"{name}: {line}")

    def report_supervisor(self, context: Context) -> None:
        """Whether the head can look after runs now: it tries to reach the others, with the code that would do it."""
        head = self.cluster.head
        if BETWEEN not in self.steps or head.transport == "local" or head.name not in self.readings:
            return
        cluster = located(self.cluster, context.transports)
        able = cluster.hosts if cluster.takeover == "votes" else cluster.hosts[:1]
        placed = place_code(replace(cluster, hosts=able), context.transports, console=self.console).hosts
        try:
            supervisor = choose_supervisor_host(
                replace(cluster, hosts=(*placed, *cluster.hosts[len(placed) :])), context
            )
        except RunFailed as error:
            if cluster.takeover != "votes":
                raise
            self.console.report(str(error))  # as far as these hosts are prepared
            return
        if supervisor.candidates:
            others = " or ".join(supervisor.candidates)
            self.console.report(f"if {supervisor.host} is lost, {others} can take a run over")
        if supervisor.why_not:
            self.console.report(f"this computer has to look after runs: {'; '.join(supervisor.why_not)}")
        else:
            self.console.report(f"{supervisor.host} can look after runs; this computer may be off meanwhile")

    def change(self, name: str, plans: Mapping[str, StepPlan] | None = None) -> None:
        """Every step on one host; the first that fails ends the host's turn. plans: only what is made first."""
        host, side = self.cluster.host(name), self.sides[name]
        wanted = self.found.plans[name] if plans is None else plans
        for step in self.steps:
            plan = wanted.get(step.name, StepPlan())
            if not plan.changes:
                continue
            try:
                for scope in SCOPES:
                    if any(change.scope == scope for change in plan.changes):
                        self.console.progress(f"{name}: {step.name}")
                        self._make(host, side, step.name, scope, plan)
                self._prove(host, side, step, first=plans is not None)
            except GanglineError as error:
                self.found.failed[name] = f"{step.name}: {error.what}; {error.seen}".rstrip("; ")
                self.console.report(str(error))
                return
            self.found.changed.setdefault(name, []).append(step.name)
            self.console.report(f"{name}: {step.name} is done; back: gangline prepare --undo {step.name} {name}")

    def _make(self, host: Host, side: HostSide, step: str, scope: Scope, plan: StepPlan) -> None:
        """One transaction, written down on this computer before and after. Raises GanglineError."""
        txn, by = new_txn(), f"{getpass.getuser()}@{platform.node()}"
        record = {"host": host.name, "step": step, "scope": scope, "txn": txn, "by": by}
        changes = [change.to_json() for change in plan.changes if change.scope == scope]
        _write_down(self.asked.home, {**record, "kind": "begin", "changes": changes})
        side.apply(step, scope, plan, txn=txn, by=by)
        if plan.revert_s is not None:
            self._confirm(host, side, scope, txn)
        _write_down(self.asked.home, {**record, "kind": "done"})

    def _confirm(self, host: Host, side: HostSide, scope: Scope, txn: str) -> None:
        """Keep a change that could lock out, from a new login: the old one proves nothing. Raises GanglineError."""
        time.sleep(SETTLE_S)  # an sshd that has just been told to read its files answers as before for a moment
        for left in reversed(range(LOGIN_TRIES)):
            try:
                side.by(self._fresh(host)).read(Asks())
                time.sleep(SETTLE_S)
                side.by(self._fresh(host)).confirm(scope, txn)
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

    def _fresh(self, host: Host) -> Transport:
        """A new connection."""
        transport = self.deps.connect(Cluster(name="login", hosts=(host,)))[host.name]
        self.stack.callback(transport.close)
        return transport

    def _prove(self, host: Host, side: HostSide, step: PrepareStep, *, first: bool) -> None:
        """Read again: the step has to find nothing more to change. Raises GanglineError."""
        if step is ACCESS:  # the key has to open a second login, by which all that follows goes
            side.go_over_to(self._fresh(host))
            self.public_keys.pop(host.name, None)
        self.readings[host.name] = self.readings[host.name].with_all_of(side.read_for([step]))
        left = self.plans(host, [step], first=first)[step.name]
        if left.changes:
            lines = [line for change in left.changes for line in change.lines()]
            raise GanglineError(
                f"{host.name}: {step.name} was done, but did not bring what it should",
                seen=f"it would still change: {' / '.join(lines)[:600]}",
                fix=f"take it back: gangline prepare --undo {step.name} {host.name}",
            )


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


def _export(asked: PrepareQuestion, session: _Session, console: PrepareConsole) -> None:
    """The changes as files, instead of making them."""
    found = session.found
    found.dry_run = True
    for host, why in found.failed.items():
        console.report(f"{host}: left out: {why}")
    if not found.num_changes:
        console.report("nothing has to be changed")
        return
    readings = {
        host: session.readings[host].with_all_of(session.sides[host].read(Asks(files=(MACHINE_ID,))))
        for host in found.plans
    }
    if asked.commands is not None:
        scripts = {f"{host}.sh": host_script(host, plans, readings[host]) for host, plans in found.plans.items()}
        scripts = {name: text for name, text in scripts.items() if text}
        if asked.commands == STDOUT:
            console.show([line for text in scripts.values() for line in text.splitlines()])
        else:
            write_files(asked.commands, scripts)
            said = f"wrote {counted(len(scripts), 'script')} into {asked.commands}"
            console.report(f"{said}; each begins with how to run it")
    if asked.ansible is not None:
        write_files(asked.ansible, playbook_files(found.plans, session.cluster.hosts, readings))
        run = "ansible-playbook -i inventory.yml playbook.yml"
        console.report(f"wrote {asked.ansible}; there: {run} (-K: asks for sudo's password)")


def _may_change(found: Prepared, asked: PrepareQuestion, console: PrepareConsole) -> bool:
    """Whether the user wants it; a dry run without a terminal."""
    if asked.yes and not asked.dry_run:
        return True
    num_hosts = sum(any(plan.changes for plan in plans.values()) for plans in found.plans.values())
    question = f"make {counted(found.num_changes, 'change')} on {counted(num_hosts, 'host')}? [y/N]"
    answer = None if asked.dry_run else console.ask(question)
    if answer is None:
        found.dry_run = True
        console.report("nothing was changed; --yes makes these changes without a question")
        return False
    if not says_yes(answer):
        raise UsageError("nothing was changed", seen=f"the answer was {answer!r}, not yes", fix="answer y to go on")
    return True


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
    words = tuple(word for word in asked.words if word not in {"all", HERE})
    steps, hosts = chosen(words, cluster.reached)
    is_named = any(step.name in words for step in STEPS)
    if not is_named and "all" not in asked.words:
        raise UsageError("nothing is named to be undone", fix="gangline prepare --undo STEP, or --undo all")
    names = [step.name for step in steps] if is_named else None
    found = Prepared(dry_run=asked.dry_run)
    with reached(cluster, home=asked.home, console=console, deps=deps) as (_, context):
        for side in _standing_sides(asked, cluster, hosts, context.transports, Passwords(console.secret)):
            _undo_host(side, names, found, asked=asked, console=console)
    return found


def _standing_sides(
    asked: PrepareQuestion,
    cluster: Cluster,
    hosts: Sequence[str],
    transports: Mapping[str, Transport],
    passwords: Passwords,
) -> Iterator[HostSide]:
    """The hosts, and this computer where the user's own files here were changed: last, for its key opens the others."""
    named_hosts_only = any(word in hosts for word in asked.words)
    if not (HERE in asked.words and not named_hosts_only):
        for name in hosts:
            yield _side(cluster.host(name), transports[name], passwords)
    if HERE in asked.words or (not named_hosts_only and USER_JOURNAL.expanduser().exists()):
        yield HostSide(HERE, LOGINS.here(), user=getpass.getuser(), passwords=passwords)


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
    answer = None if asked.dry_run else console.ask(f"undo {counted(len(shown.rows), 'change')} on {host}? [y/N]")
    found.dry_run = found.dry_run or answer is None
    if answer is None:
        console.report("nothing was undone; --yes does it without a question")
    return answer is not None and says_yes(answer)


def status(asked: PrepareQuestion, *, console: PrepareConsole, deps: Dependencies = REAL) -> dict[str, Any]:
    """Every change that stands on the hosts, by host."""
    cluster = _cluster(asked)
    _, hosts = chosen([word for word in asked.words if word != HERE], cluster.reached)
    found: dict[str, Any] = {}
    with reached(cluster, home=asked.home, console=console, deps=deps) as (_, context):
        for side in _standing_sides(asked, cluster, hosts, context.transports, Passwords(console.secret)):
            found[side.name] = [each for scope in _scopes(side) for each in side.status(scope)]
    return found
