"""The main path: what `train` and `resume` do, as a column of named steps.

load     files and key=value        -> Job, Cluster
gather   every host                 -> Inventory
plan     Job, Cluster               -> Plan
judge    Inventory                  -> findings; a failure stops here
create   the run directory
sync     job, inputs, checkpoints   -> every host
render   Plan                       -> Request (a dry run prints it and ends)
start    a detached supervisor; whoever follows it may leave at any time
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gangline.checks.finding import Finding
from gangline.checks.judge import judge, require
from gangline.errors import CheckpointError, GanglineError, RunFailed, UsageError
from gangline.inventory.facts import Inventory
from gangline.inventory.gather import gather
from gangline.launch.backend import Backend, Request
from gangline.launch.local import free_port
from gangline.launch.registry import backend
from gangline.planning.explain import explain, length
from gangline.planning.plan import DataCount, Plan, make_plan
from gangline.remote.connect import connect_all
from gangline.remote.transport import Transport
from gangline.runs.checkpoints import Choice, choose
from gangline.runs.cluster import Cluster
from gangline.runs.files import read_json
from gangline.runs.gang import Gang
from gangline.runs.ids import new_id
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.process import ProcessId
from gangline.runs.registry import find_run, read_record, run_ids
from gangline.runs.state import RunState
from gangline.supervise.detached import is_alive, spawn, stop_run
from gangline.supervise.lock import prepare_lock
from gangline.sync.checkpoints import Place, bring, find_checkpoint, rejected_error, survey_places
from gangline.sync.inputs import Inputs, distribute, prepare_inputs, require_same
from gangline.sync.place import (
    carry_history,
    create_folder,
    host_layout,
    place_documents,
    place_gang,
    write_documents,
)
from gangline.units import format_bytes
from gangline.watch.commands import orders, printed
from gangline.watch.follow import View

Transports = dict[str, Transport]


class Talk(Protocol):
    """Where the path tells what it does."""

    def say(self, line: str) -> None:
        """A line that stays."""
        ...

    def tick(self, line: str) -> None:
        """How a long step is getting on; the next line takes its place."""
        ...


class StopRun(Protocol):
    """See `gangline.supervise.detached.stop_run`."""

    def __call__(self, layout: RunLayout, *, now: bool) -> None:
        """Order a run to end, and return."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What touches the world; tests put fakes here."""

    connect: Callable[[Cluster], Transports] = connect_all
    backend: Callable[[], Backend] = backend
    spawn: Callable[[Path, int], None] = spawn
    is_alive: Callable[[RunLayout], bool] = is_alive
    stop_run: StopRun = stop_run
    free_port: Callable[[], int] = free_port


REAL = Seams()
"""This computer, real processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the user asked to be started."""

    home: Path
    job: Path
    overrides: tuple[str, ...] = ()
    cluster: Path | None = None
    """None: this computer alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A run that exists already, and the ways to its hosts."""

    layout: RunLayout
    cluster: Cluster
    transports: Transports

    def view(self) -> View:
        """Where the run is read, to follow it."""
        head = self.cluster.head
        head_layout = host_layout(head, self.layout.run_id)
        return View(layout=self.layout, head=self.transports[head.name], head_layout=head_layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was asked, seen and decided before anything is changed."""

    job: Job
    cluster: Cluster
    inventory: Inventory
    plan: Plan
    findings: tuple[Finding, ...]

    def documents(self) -> dict[str, Any]:
        """The files of the run directory that say so, but for the hosts: cluster.json is for who starts the gang."""
        return {
            "job": self.job.to_json(),
            "inventory": self.inventory.to_json(),
            "plan": self.plan.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
        }


# --- the verbs that start or end a run


def train(start: Start, *, talk: Talk, seams: Seams = REAL) -> RunLayout:
    """Start a run and return once its gang has been started; raises GanglineError, and then nothing runs."""
    job, cluster = load(start)
    with reach(cluster, seams) as transports:
        decision = decide(job, cluster, transports, talk=talk)
        require(decision.findings)
        layout = create_folder(start.home)
        state = RunState(name=job.name, supervisor=ProcessId.current())
        with told_if_kept(layout, talk), prepare_lock(layout), preparing(layout, state):
            write_documents(layout, {**decision.documents(), "cluster": cluster.to_json()})
            place_documents(cluster, transports, layout.run_id, {"job": job.to_json()})
            inputs = bring_inputs(layout.run_id, cluster, transports, talk=talk)
            plan = settle(layout, decision, inputs, talk=talk)
            place_documents(cluster, transports, layout.run_id, {"inputs": inputs.record})
            start_attempt(layout, cluster, transports, plan.gang(layout.run_id, 1), seams=seams)
    talk.say(f"run {layout.run_id} started")
    return layout


def resume(prefix: str, *, home: Path, cluster_path: Path | None = None, talk: Talk, seams: Seams = REAL) -> RunLayout:
    """Go on with a run from its newest valid checkpoint, on the same hosts or on those of another cluster file.

    Raises UsageError for a run that is alive or finished, CheckpointError where none of its checkpoints can be used,
    DataError or ModelError where what it reads has changed.
    """
    layout = find_run(home, prefix)
    with prepare_lock(layout):
        attempt = _resume(layout, home=home, cluster_path=cluster_path, talk=talk, seams=seams)
    talk.say(f"run {layout.run_id} resumed, attempt {attempt}")
    return layout


def _resume(layout: RunLayout, *, home: Path, cluster_path: Path | None, talk: Talk, seams: Seams) -> int:
    """The attempt that was started; the caller holds the run's `prepare_lock`."""
    ended = _resumable(layout, seams)
    before, job = read_cluster(layout), Job.load(layout.job)
    cluster = before if cluster_path is None else load_cluster(cluster_path, home)
    with reach(cluster, seams) as transports, reach(before, seams) as old_transports:
        decision = decide(job, cluster, transports, talk=talk)
        require(decision.findings)
        attempt = ended.attempt + 1
        state = dataclasses.replace(
            ended, attempt=attempt, phase="preparing", error=None, supervisor=ProcessId.current()
        )
        with preparing(layout, state, before=ended):
            places = _places(before, old_transports, cluster, transports)
            choice = choose_checkpoint(places, layout.run_id, talk=talk)
            carry_history(before.head, cluster.head, transports[cluster.head.name], layout.run_id)
            place_documents(cluster, transports, layout.run_id, {"job": job.to_json()})
            inputs = bring_inputs(layout.run_id, cluster, transports, expected=_inputs_before(layout), talk=talk)
            for label in bring(places, layout.run_id, choice, targets=[host.name for host in cluster.hosts]):
                talk.say(f"step {choice.step} brought to {label}")
            write_documents(layout, decision.documents())
            plan = settle(layout, decision, inputs, talk=talk)
            place_documents(cluster, transports, layout.run_id, {"inputs": inputs.record})
            gang = plan.gang(layout.run_id, attempt, resume_step=choice.step)
            start_attempt(layout, cluster, transports, gang, seams=seams)
    return attempt


def rehearse(start: Start, *, talk: Talk, seams: Seams = REAL) -> list[str]:
    """The exact commands that `train` would start, host by host. Starts nothing and leaves nothing."""
    job, cluster = load(start)
    with reach(cluster, seams) as transports:
        decision = decide(job, cluster, transports, talk=talk)
        require(decision.findings)
    gang = decision.plan.gang(new_id(run_ids(start.home)), 1)
    return printed(seams.backend().render(cluster, gang, port=seams.free_port()))


def rehearse_resume(
    prefix: str, *, home: Path, cluster_path: Path | None = None, talk: Talk, seams: Seams = REAL
) -> list[str]:
    """The exact commands that `resume` would start. Starts nothing and leaves nothing."""
    layout = find_run(home, prefix)
    state = _resumable(layout, seams)
    before, job = read_cluster(layout), Job.load(layout.job)
    cluster = before if cluster_path is None else load_cluster(cluster_path, home)
    with reach(cluster, seams) as transports, reach(before, seams) as old_transports:
        decision = decide(job, cluster, transports, talk=talk)
        require(decision.findings)
        choice = choose(survey_places(_places(before, old_transports, cluster, transports), layout.run_id))
    step = max(choice.adoptable, default=choice.step)
    gang = decision.plan.gang(layout.run_id, state.attempt + 1, resume_step=step)
    talk.say(f"resuming from {'the beginning' if step is None else f'step {step}'}")
    return printed(seams.backend().render(cluster, gang, port=seams.free_port()))


def plan(start: Start, *, talk: Talk, seams: Seams = REAL) -> Decision:
    """What `train` would decide. Changes nothing."""
    job, cluster = load(start)
    with reach(cluster, seams) as transports:
        return decide(job, cluster, transports, talk=talk)


def check(cluster_path: Path | None, *, home: Path, seams: Seams = REAL) -> tuple[Inventory, tuple[Finding, ...]]:
    """Look at every host of a cluster. Changes nothing."""
    cluster = load_cluster(cluster_path, home)
    with reach(cluster, seams) as transports:
        inventory = gather(cluster, transports)
    return inventory, judge(inventory, cluster)


@contextlib.contextmanager
def opened(prefix: str, *, home: Path, seams: Seams = REAL) -> Iterator[Opened]:
    """A run that exists already, by the beginning of its id, with transports to its hosts; raises UsageError."""
    layout = find_run(home, prefix)
    cluster = read_cluster(layout)
    with reach(cluster, seams) as transports:
        yield Opened(layout=layout, cluster=cluster, transports=transports)


def stop(run: Opened, *, now: bool = False, seams: Seams = REAL) -> bool:
    """Order a run to end and return at once; False where it had ended already. `now`: without saving."""
    record = read_record(run.layout)
    if record.phase == "preparing":
        raise UsageError(
            f"{run.layout.run_id} is being prepared",
            seen="nothing of it runs yet but the command that prepares it",
            fix="press Ctrl-C where it was started",
        )
    if not seams.is_alive(run.layout):
        return False
    seams.stop_run(run.layout, now=now)
    return True


def rehearse_stop(run: Opened, *, now: bool, seams: Seams = REAL) -> list[str]:
    """What `stop` would order, host by host. Orders nothing."""
    if not seams.is_alive(run.layout):
        return [f"nothing: {run.layout.run_id} has ended"]
    request = Request.from_json(read_json(run.layout.attempt(RunState.load(run.layout).attempt) / "request.json"))
    return orders(request, now=now)


# --- the steps


def load(start: Start) -> tuple[Job, Cluster]:
    """The user's words as a job and a cluster; raises SpecError with every mistake."""
    # pydantic costs 0.2 s, which only verbs that read the user's files pay
    from gangline.spec.load import load_job

    return load_job(start.job, start.overrides), load_cluster(start.cluster, start.home)


def read_cluster(layout: RunLayout) -> Cluster:
    """The cluster of a run that exists already; raises UsageError where its file is gone or damaged."""
    try:
        return Cluster.from_json(read_json(layout.cluster))
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{layout.run_id} cannot be used",
            seen=f"{layout.cluster}: {error}",
            fix="it was interrupted before it began, or damaged; start a new run: gangline train",
        ) from error


def load_cluster(path: Path | None, home: Path) -> Cluster:
    """The cluster of a file; None: this computer."""
    from gangline.spec.load import load_cluster as from_file

    return from_file(path, home=home)


@contextlib.contextmanager
def reach(cluster: Cluster, seams: Seams) -> Iterator[Transports]:
    """Transports to all hosts, closed at the end."""
    transports = seams.connect(cluster)
    try:
        yield transports
    finally:
        for transport in transports.values():
            transport.close()


def decide(job: Job, cluster: Cluster, transports: Transports, *, talk: Talk) -> Decision:
    """Gather, plan, judge; everything that is found is told. Changes nothing."""
    talk.tick(f"looking at {len(cluster.hosts)} {'host' if len(cluster.hosts) == 1 else 'hosts'}")
    inventory = gather(cluster, transports)
    gpus = {facts.host: [gpu.name for gpu in facts.gpus] for facts in inventory.hosts}
    drafted = make_plan(job, cluster, gpus)
    findings = judge(inventory, cluster)
    for line in (*explain(drafted), *(line for finding in findings for line in finding.lines())):
        talk.say(line)
    return Decision(job=job, cluster=cluster, inventory=inventory, plan=drafted, findings=findings)


@contextlib.contextmanager
def preparing(layout: RunLayout, state: RunState, *, before: RunState | None = None) -> Iterator[None]:
    """Keep state.json true while the run is prepared. What ends that is written down before it is raised; a run that
    only failed to be resumed stays what it was `before`.
    """
    state.save(layout)
    try:
        yield
    except BaseException as error:
        if RunState.load(layout).phase == "preparing":  # else its supervisor has said how it ended
            (before or _unprepared(state, error)).save(layout)
        raise


@contextlib.contextmanager
def told_if_kept(layout: RunLayout, talk: Talk) -> Iterator[None]:
    """Say which run is kept if it could not be started, and how it can be."""
    try:
        yield
    except BaseException:
        if layout.job.exists() and layout.cluster.exists():
            talk.say(
                f"kept as {layout.run_id}, which is {read_record(layout).phase}: gangline resume {layout.run_id} once "
                "the cause is gone; for a mistake in the job, correct it and start anew: gangline train"
            )
        raise


def _unprepared(state: RunState, error: BaseException) -> RunState:
    if isinstance(error, KeyboardInterrupt):
        return dataclasses.replace(state, phase="stopped", supervisor=None)
    known = error if isinstance(error, GanglineError) else GanglineError(f"{type(error).__name__}: {error}")
    return dataclasses.replace(state, phase="failed", supervisor=None, error=known.to_json())


def bring_inputs(
    run_id: str, cluster: Cluster, transports: Transports, *, expected: Inputs | None = None, talk: Talk
) -> Inputs:
    """Tokenise on the head what is not there yet, and bring it to every host; it must be what was `expected`."""
    inputs = prepare_inputs(cluster, transports, run_id, on_progress=lambda record: talk.tick(_tokenising(record)))
    if expected is not None:
        require_same(run_id, expected, inputs)
    for name in distribute(cluster, transports, inputs):
        talk.say(f"data brought to {name}")
    return inputs


def settle(layout: RunLayout, decision: Decision, inputs: Inputs, *, talk: Talk) -> Plan:
    """The plan now that the samples are counted."""
    counts = inputs.record["counts"]["train"]
    settled = decision.plan.with_data(
        decision.job, DataCount(num_samples=counts["samples"], num_tokens=counts.get("tokens"))
    )
    write_documents(layout, {"inputs": inputs.record, "plan": settled.to_json()})
    if counts.get("skipped_rows"):
        talk.say(f"skipped    {counts['skipped_rows']} bad rows, such as {'; '.join(counts['bad_rows'][:3])}")
    talk.say(f"data       {length(settled)}")
    return settled


def start_attempt(layout: RunLayout, cluster: Cluster, transports: Transports, gang: Gang, *, seams: Seams) -> None:
    """Write down exactly what will be started, and have a detached supervisor start it.

    The hosts are written down with the attempt; they become those of the run once the gang has been started.
    """
    attempt = gang.attempt
    place_gang(cluster, transports, gang)
    request = seams.backend().render(cluster, gang, port=seams.free_port())
    layout.attempt(attempt).mkdir(mode=0o700, parents=True, exist_ok=True)
    documents = {"request": request.to_json(), "cluster": cluster.to_json()}
    write_documents(layout, {f"attempts/{attempt}/{name}": value for name, value in documents.items()})
    try:
        seams.spawn(layout.folder, attempt)
    except RunFailed:
        state = RunState.load(layout)
        if state.phase == "failed" and state.error:
            raise GanglineError.from_json(state.error) from None  # its own words say more
        raise


def choose_checkpoint(places: dict[str, Place], run_id: str, *, talk: Talk) -> Choice:
    """The checkpoint to go on from; what was passed over is told with the reason."""
    talk.tick("looking for checkpoints")
    choice = find_checkpoint(places, run_id)
    for rejection in choice.rejected:
        talk.say(f"passed over: {rejection}")
    if choice.step is None and choice.rejected:
        raise rejected_error(run_id, choice)
    start = "from the beginning: no checkpoint was saved" if choice.step is None else f"from step {choice.step}"
    talk.say(f"resuming {run_id} {start}")
    return choice


# --- what the steps need


def _resumable(layout: RunLayout, seams: Seams) -> RunState:
    name = layout.run_id
    try:
        state = RunState.load(layout)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{name} cannot be resumed", seen=f"{layout.state}: {error}", fix="start a new run: gangline train"
        ) from error
    if read_record(layout).phase == "preparing" or seams.is_alive(layout):
        raise UsageError(
            f"{name} is running",
            seen=f"expected a run that has ended, found one that is {state.phase}",
            fix=f"follow it: gangline attach {name}, or end it first: gangline stop {name}",
        )
    if state.phase == "finished":
        raise UsageError(
            f"{name} has finished",
            seen="expected a run that was stopped or has failed",
            fix=f"use it: gangline export {name}, or start a new run: gangline train",
        )
    return state


def _places(before: Cluster, old: Transports, cluster: Cluster, new: Transports) -> dict[str, Place]:
    """Every place where checkpoints may lie; hosts of the new cluster under their own names."""
    places = {host.name: Place(host=host, transport=new[host.name]) for host in cluster.hosts}
    workdirs = {host.workdir for host in cluster.hosts}
    for host in before.hosts:
        if host.workdir not in workdirs:
            label = host.name if host.name not in places else f"{host.name} (before)"
            places[label] = Place(host=host, transport=old[host.name])
    return places


def _inputs_before(layout: RunLayout) -> Inputs | None:
    """What the run has read so far; None where it failed before its data was tokenised."""
    return Inputs.from_json(read_json(layout.inputs)) if layout.inputs.exists() else None


def _tokenising(record: dict[str, Any]) -> str:
    done, total = record.get("done_bytes", 0), record.get("total_bytes", 0)
    if not total:
        return f"tokenising: {record.get('rows', 0)} rows"
    return f"tokenising: {100 * done // total} % of {format_bytes(total)}, {record.get('rows', 0)} rows"


def default_home() -> Path:
    """Where the controller keeps its runs: $GANGLINE_HOME, or the user's state folder."""
    if named := os.environ.get("GANGLINE_HOME"):
        return Path(named).expanduser().absolute()
    # 30 ms that a set variable saves
    import platformdirs

    return platformdirs.user_state_path("gangline")
