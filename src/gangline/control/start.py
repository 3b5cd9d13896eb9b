"""The start of an attempt: its records are written, then a supervisor is started, which starts the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.context import Context, Dependencies
from gangline.control.equip import Ready, discard
from gangline.control.notify import addresses_on, place_addresses
from gangline.control.supervision import (
    RunHandle,
    SupervisorRecord,
    copy_records,
    hand_over,
    seen_from_anywhere,
    seen_from_head,
)
from gangline.decide.inspect import InspectResult
from gangline.errors import CheckpointError, GanglineError, HostKeyRefused, HostUnreachable, RunFailed, UsageError
from gangline.launch.backend import LaunchRequest
from gangline.launch.program import Again, Program
from gangline.provision.checkpoint_sources import CheckpointHost, find_checkpoint, rejected_error
from gangline.provision.console import Console
from gangline.provision.inputs import Inputs, Reads, bring_reads, distribute, prepare_inputs, require_same
from gangline.provision.trees import carry_history, host_layout, place_documents, place_gang, spot_on, write_documents
from gangline.runs.checkpoints import CheckpointChoice
from gangline.runs.cluster import Cluster, Host
from gangline.runs.files import write_atomic
from gangline.runs.gang import Gang
from gangline.runs.job import Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there
from gangline.runs.registry import read_record
from gangline.runs.state import AttemptOutcome, ProcessId, RunState
from gangline.supervise.lead import Deputies
from gangline.supervise.next_attempt import REST_S
from gangline.units import format_bytes

if TYPE_CHECKING:
    from gangline.decide.decide import Decision
    from gangline.planner.plan import Plan


def render(
    ready: Ready, gang: Gang, context: Context, *, program: Program | None = None, claim: bool = False
) -> LaunchRequest:
    """The request that would be started, with a free port of the head. claim: reserve that port."""
    cluster, deps = ready.cluster, context.deps
    port = deps.free_port(cluster, context.transports[cluster.head.name], claim=claim)
    return deps.backend(cluster.backend).render(cluster, gang, port=port, networks=ready.networks, program=program)


def to_hold(inspection: InspectResult, gang: Gang, context: Context, program: Program) -> LaunchRequest:
    """The request as far as it is known before anything is copied: it says which slots the gang takes."""
    cluster, networks = inspection.cluster, inspection.rank_variables
    return context.deps.backend(cluster.backend).render(cluster, gang, port=0, networks=networks, program=program)


def worker_program(job: Job) -> Program:
    """The program of a job: our worker, with a warm pool where failures are followed by restarts."""
    return Program(rest_s=REST_S if job.failures.restarts else 0.0)


def start_attempt(
    layout: RunLayout,
    ready: Ready,
    gang: Gang,
    context: Context,
    *,
    program: Program | None = None,
    again: Again | None = None,
) -> None:
    """Write the records of the attempt, and have a detached supervisor start it.

    again: the automatic restart of the user's own program; for a job, that is in job.json.
    The hosts are written with the attempt; they become those of the run once the gang has been started.
    """
    cluster, number = ready.cluster, gang.attempt
    gang = replace(gang, token=secrets.token_hex(16))
    place_gang(cluster, context.transports, gang)
    layout.attempt(number).mkdir(mode=0o700, parents=True, exist_ok=True)
    request = render(ready, gang, context, program=program, claim=True)
    documents = {
        "request": request.to_json(),
        "cluster": cluster.to_json(),
        "gang": gang.to_json(),
        "networks": {host: dict(variables) for host, variables in ready.networks.items()},
    }
    if again is not None:
        documents["again"] = again.to_json()
    write_documents(layout, {f"attempts/{number}/{name}": value for name, value in documents.items()})
    supervisor = ready.supervisor()
    if supervisor.why_not:
        context.console.report(
            f"unattended: no, the supervisor runs on this computer, which must stay on: {'; '.join(supervisor.why_not)}"
        )
    why_none = _why_none(layout, supervisor)
    if supervisor.unattended:
        context.console.report(f"unattended: yes, {supervisor.host} supervises the run; you can turn this computer off")
        if cluster.takeover == "votes":
            witness = cluster.witness.name if cluster.witness in cluster.voters and cluster.witness else None
            context.console.report(_if_lost(layout, supervisor, why_none, witness=witness))
    try:
        if supervisor.host is None:
            supervisor.save(layout)
            place_addresses(layout, number, context)
            with _in_doubt(layout):
                context.deps.spawn(layout.folder, number, context.secrets)
        else:
            _spawn_there(layout, cluster, number, supervisor, context, is_followed=not why_none)
    except RunFailed:
        state = RunState.load(layout)
        if state.phase == "failed" and state.error:
            raise GanglineError.from_json(state.error) from None  # the error in the state says more
        raise


def _why_none(layout: RunLayout, supervisor: SupervisorRecord) -> str:
    """Why nobody takes this run over from the host of its supervisor; "": one of the candidates does."""
    job = load_if_there(layout.job, Job)
    if job is None:
        return "`takeover` is not for programs of your own"
    if not supervisor.candidates:
        return "with fewer than three voices nobody is elected; a `witness` gives two hosts a third one"
    if not job.failures.restarts:
        return "the job ends it at the first failure"
    return "" if job.failures.without else "the job never goes on without a host"


def _if_lost(layout: RunLayout, supervisor: SupervisorRecord, why_none: str, *, witness: str | None) -> str:
    """The line that says what becomes of the run if the host of its supervisor is lost."""
    host, name = supervisor.host, layout.run_id
    if not why_none:
        successors = " or ".join(supervisor.candidates)
        voters = "hosts" if witness is None else f"hosts, with {witness} as their witness,"
        return f"if {host} is lost, {successors} takes the run over, as long as most of its {voters} remain"
    return f"if {host} is lost, the run waits for: gangline resume {name} --without {host} ({why_none})"


def _spawn_there(
    layout: RunLayout,
    cluster: Cluster,
    number: int,
    supervisor: SupervisorRecord,
    context: Context,
    *,
    is_followed: bool,
) -> None:
    """Copy the records to the head, with the hosts as seen from there, and start the supervisor there.

    is_followed: a candidate takes over where it is lost; deputies of an attempt before count no more, and may stay.
    """
    head = cluster.head
    remote, there = context.transports[head.name], host_layout(head, layout.run_id)
    seen = seen_from_head(cluster).to_json()
    documents = {layout.cluster: seen, layout.attempt_cluster(number): seen}
    if is_followed:
        able = (head.name, *supervisor.candidates)
        deputies = Deputies(cluster=seen_from_anywhere(cluster), candidates=able, attempt=number)
        documents[layout.deputies] = deputies.to_json()
    # the plan: not of a command of the user's own
    copied = (layout.gang(number), layout.networks(number), layout.again(number), layout.plan)
    documents |= _documents(copied)
    hand_over(layout, there, remote, attempt=number, documents={**_earlier(layout, number), **documents})
    senders = (head, *map(cluster.host, supervisor.candidates if is_followed else ()))
    with addresses_on(layout, number, context, senders), _supervised_by(layout, cluster, supervisor):
        try:
            with _in_doubt(layout):
                context.deps.spawn_there(head, remote, there, number, context.secrets)
        except HostUnreachable:
            raise
        except GanglineError:
            with contextlib.suppress(GanglineError):
                copy_records(layout, there, remote)  # the error in the state says more
            raise
    try:
        copy_records(layout, there, remote)
    except GanglineError:  # it runs, and its records are copied at the next look
        _believe_running(layout)


@contextlib.contextmanager
def _in_doubt(layout: RunLayout) -> Iterator[None]:
    """Around the start of a supervisor: if the connection breaks, it may or may not have started, so the run counts as
    running until the supervisor is asked. A host with another key has received nothing.
    """
    try:
        yield
    except HostKeyRefused:
        raise
    except HostUnreachable as error:
        _believe_running(layout)
        name = layout.run_id
        raise HostUnreachable(
            f"{error.what}: {name} may or may not have started",
            seen=error.seen,
            fix=f"{error.fix or 'bring the host back'}; then gangline ps says whether {name} is running: if so, "
            f"gangline attach {name}; if it is lost, gangline resume {name}",
            reason=error.reason,
        ) from error
    except KeyboardInterrupt:
        _believe_running(layout)
        raise


def _believe_running(layout: RunLayout) -> None:
    """The run counts as running until its supervisor is asked; without one it is lost."""
    state = RunState.load(layout)
    if state.phase == "preparing":
        replace(state, phase="running").save(layout)


@contextlib.contextmanager
def _supervised_by(layout: RunLayout, cluster: Cluster, supervisor: SupervisorRecord) -> Iterator[None]:
    """Write the supervisor's host and the hosts of the run; if it does not start there, restore both."""
    before = SupervisorRecord.load(layout), layout.cluster.read_bytes()
    write_documents(layout, {"cluster": cluster.to_json()})
    supervisor.save(layout)
    try:
        yield
    except BaseException as error:
        may_be_up = isinstance(error, HostUnreachable | KeyboardInterrupt) and not isinstance(error, HostKeyRefused)
        if not may_be_up:
            write_atomic(layout.cluster, before[1])
            before[0].save(layout)
        raise


def _documents(paths: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Records that are there, by path."""
    found = {path: load_if_there(path, dict) for path in paths}
    return {path: value for path, value in found.items() if value is not None}


def _earlier(layout: RunLayout, number: int) -> dict[Path, dict[str, Any]]:
    """Records of earlier attempts, whose leftovers the new supervisor's host ends."""
    found: dict[Path, dict[str, Any]] = {}
    for each in range(1, number):
        cluster = load_if_there(layout.attempt_cluster(each), Cluster)
        if cluster is None or not layout.request(each).exists():
            continue
        found[layout.attempt_cluster(each)] = seen_from_head(cluster).to_json()
        found |= _documents((layout.request(each), layout.outcome(each)))
    return found


# The records and inputs that are written to the hosts before the start.


@contextlib.contextmanager
def preparing(layout: RunLayout, state: RunState, *, before: RunState | None = None) -> Iterator[None]:
    """Keep state.json up to date while the run is prepared. An error is written before it is raised; after a failed
    resume the state is what it was `before`.
    """
    state.save(layout)
    try:
        yield
    except BaseException as error:
        if RunState.load(layout).phase == "preparing":  # otherwise its supervisor has written how it ended
            (before or _unprepared(state, error)).save(layout)
        raise


@contextlib.contextmanager
def discarded_unless_begun(layout: RunLayout, cluster: Cluster, context: Context) -> Iterator[None]:
    """Delete a run that ended before its ranks ran; where something of it may run, report how to go on."""
    try:
        yield
    except BaseException:
        if _may_run(layout):
            context.console.report(_kept(layout.run_id, read_record(layout).phase))
        else:
            discard(layout, cluster, context)
            context.console.report("nothing was started; files that were copied stay on the hosts for the next start")
        raise


ENDED = {"failed": "has failed", "stopped": "was stopped"}
"""Phase of a run that has ended -> its verb."""


def _may_run(layout: RunLayout) -> bool:
    """Whether anything of a run may run, or its supervisor has left a log that tells why nothing does."""
    state = load_if_there(layout.state, RunState)
    if state is None:
        return False
    if state.phase not in ENDED:
        return True
    if (outcome := load_if_there(layout.outcome(state.attempt), AttemptOutcome)) is not None:
        return bool(outcome.doubtful or outcome.failures)
    log = layout.supervisor_log(state.attempt)
    return log.exists() and log.stat().st_size > 0


def _kept(name: str, phase: str) -> str:
    if phase in ENDED:
        return (
            f"{name} {ENDED[phase]}, and something of it may be left. Look: gangline explain {name}. "
            f"End it: gangline stop {name}"
        )
    # the start was interrupted while its supervisor came up
    return (
        f"{name} may be running. Check: gangline ps. Follow: gangline attach {name}. Stop: gangline stop {name}. "
        f"If it is lost: gangline resume {name}"
    )


def _unprepared(state: RunState, error: BaseException) -> RunState:
    if isinstance(error, KeyboardInterrupt):
        return dataclasses.replace(state, phase="stopped", supervisor=None)
    known = error if isinstance(error, GanglineError) else GanglineError(f"{type(error).__name__}: {error}")
    return dataclasses.replace(state, phase="failed", supervisor=None, error=known.to_json())


def bring_inputs(
    layout: RunLayout, decision: Decision, ready: Ready, context: Context, *, before: Inputs | None = None
) -> tuple[Plan, Ready]:
    """Copy the job, model and data to the hosts, and tokenise once, on the head; the plan with the counted samples, and
    the hosts with the folders that they read.

    before: the inputs of earlier attempts, which must be the same.
    """
    run_id, cluster, console = layout.run_id, ready.cluster, context.console
    reads = bring_reads(decision.job, cluster, context.transports, home=context.home, console=console)
    cluster = reads.seen_from(cluster, decision.job)
    for host in cluster.hosts:
        alone = dataclasses.replace(cluster, hosts=(host,))
        job = reads.localised(decision.job, host)
        place_documents(alone, context.transports, run_id, {"job": job.to_json()})
    secrets = context.secrets if cluster.head.transport == "ssh" else None
    console.progress(f"getting ready to tokenise on {cluster.head.name}")  # torch is imported there
    with reads.named_as_here():
        inputs = prepare_inputs(
            cluster,
            context.transports,
            run_id,
            secrets=secrets,
            on_progress=lambda record: console.progress(_tokenising(record)),
        )
    if before is not None:
        require_same(run_id, before, inputs)
    distribute(cluster, context.transports, inputs, scratch=context.home, console=console)
    place_documents(cluster, context.transports, run_id, {"inputs": inputs.record})
    return _settled(layout, decision, inputs, reads, console), dataclasses.replace(ready, cluster=cluster)


def _settled(layout: RunLayout, decision: Decision, inputs: Inputs, reads: Reads, console: Console) -> Plan:
    """The plan now that the samples are counted."""
    from gangline.planner.plan import DataCount  # not for `run`, which pays no planner: 0.1 s
    from gangline.planner.report import length, lines_in_steps

    counts = inputs.record["counts"]["train"]
    settled = decision.plan.with_data(
        decision.job, DataCount(num_samples=counts["samples"], num_tokens=counts.get("tokens"))
    )
    write_documents(layout, {"inputs": inputs.record, "plan": settled.to_json()})
    if counts.get("skipped_rows"):
        some = reads.named("; ".join(counts["bad_rows"][:3]))
        console.report(f"skipped    {counts['skipped_rows']} bad rows, such as {some}")
    if counts.get("dropped_rows"):
        limit, rule = decision.job.data.sequence_length, decision.job.data.overlong
        which = "that are longer than a sample" if rule == "drop" else "whose prompt alone fills a sample"
        console.report(f"dropped    {counts['dropped_rows']} rows {which} of {limit} tokens (data.overlong: {rule})")
    if counts.get("truncated_rows"):
        console.report(f"truncated  {counts['truncated_rows']} rows to {decision.job.data.sequence_length} tokens")
    console.report(f"data       {length(settled)}")
    for line in lines_in_steps(settled):
        console.report(line)
    return settled


def inputs_before(layout: RunLayout) -> Inputs | None:
    """The inputs of earlier attempts; None where the run failed before its data was tokenised."""
    return load_if_there(layout.inputs, Inputs.from_json)


def _tokenising(record: dict[str, Any]) -> str:
    done, total = record.get("done_bytes", 0), record.get("total_bytes", 0)
    if not total:
        return f"tokenising: {record.get('rows', 0)} rows"
    return f"tokenising: {100 * done // total} % of {format_bytes(total)}, {record.get('rows', 0)} rows"


# `resume`: a run that has ended, and its checkpoints.


def resumable(run: RunHandle, deps: Dependencies) -> RunState:
    """The state of a run that can be resumed; raises UsageError or CheckpointError for any other."""
    layout = run.layout
    name, record = layout.run_id, run.record()
    if record.suspended is not None:
        raise UsageError(
            f"{name} is suspended, not ended",
            seen=str(record.silent),
            fix=f"it goes on by itself after: scontrol resume {record.suspended}",
        )
    if record.silent is not None:
        raise HostUnreachable(
            f"{name} may still be running, but its supervisor does not respond",
            seen=record.silent,
            fix="bring the supervisor's host back, which has the state of the run; if it is off, go on without it: "
            f"gangline resume {name} --without {run.supervisor.host}",
        )
    record.require_state()
    try:
        state = RunState.load(layout)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{name} cannot be resumed", seen=f"{layout.state}: {error}", fix="start a new run: gangline train"
        ) from error
    if record.phase == "preparing" or (not run.is_over and deps.is_alive(run.records, run.supervisor_host)):
        raise UsageError(
            f"{name} is running",
            seen=f"expected a run that has ended, found one that is {state.phase}",
            fix=f"follow it: gangline attach {name}, or end it first: gangline stop {name}",
        )
    require_unfinished(name, state)
    return state


def require_unfinished(name: str, state: RunState) -> None:
    """Raise UsageError for a run with nothing left to do."""
    if state.phase == "finished":
        raise UsageError(
            f"{name} has finished",
            seen="expected a run that was stopped, has failed, or has lost hosts",
            fix=f"use it: gangline export {name}, or start a new run: gangline train",
        )


def next_state(ended: RunState) -> RunState:
    """The state while the next attempt is prepared by this process."""
    return dataclasses.replace(
        ended,
        attempt=ended.attempt + 1,
        phase="preparing",
        error=None,
        quiet_since=None,
        supervisor=ProcessId.current(),
    )


def places_of(run: RunHandle, ready: Ready, context: Context) -> dict[str, CheckpointHost]:
    """Every place where checkpoints may lie; hosts of the new cluster under their own names."""
    hosts = ready.cluster.hosts
    places = {host.name: CheckpointHost(host=host, transport=context.transports[host.name]) for host in hosts}
    theirs = {_spot(host) for host in hosts}
    for host in run.cluster.hosts:
        if _spot(host) not in theirs:
            label = host.name if host.name not in places else f"{host.name} (before)"
            places[label] = CheckpointHost(host=host, transport=run.transports[host.name])
    return places


def carry_on(run: RunHandle, ready: Ready, context: Context) -> None:
    """Copy metrics, events and curves from the old head to the new one."""
    before, now = run.cluster.head, ready.cluster.head
    old = spot_on(before, run.transports, before.workdir)
    if not carry_history(old, spot_on(now, context.transports, now.workdir), run.layout.run_id):
        context.console.report(f"{before.name}, the previous head, does not answer; its metrics will be missing")


def _spot(host: Host) -> tuple[str, ...]:
    """A key that is equal for two hosts with the same folder on the same machine."""
    return (host.workdir,) if host.transport == "local" else (host.workdir, host.ssh or host.name, str(host.ssh_port))


def choose_checkpoint(places: dict[str, CheckpointHost], run_id: str, *, console: Console) -> CheckpointChoice:
    """The checkpoint to resume from; reports the ones that were rejected, with the reason."""
    console.progress("looking for checkpoints")
    choice = find_checkpoint(places, run_id)
    for rejection in choice.rejected:
        console.report(f"skipped checkpoint: {rejection}")
    if choice.step is None and choice.rejected:
        raise rejected_error(run_id, choice)
    start = "from the beginning: no checkpoint was saved" if choice.step is None else f"from step {choice.step}"
    console.report(f"resuming {run_id} {start}")
    return choice
