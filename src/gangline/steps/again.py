"""What `resume` needs: a run that has ended, and the checkpoint to go on from."""

from __future__ import annotations

import dataclasses

from gangline.errors import CheckpointError, HostUnreachable, UsageError
from gangline.runs.checkpoints import Choice
from gangline.runs.cluster import Host
from gangline.runs.process import ProcessId
from gangline.runs.state import RunState
from gangline.steps.equip import Ready
from gangline.steps.keep import Opened
from gangline.steps.seams import Means, Seams, Talk
from gangline.sync.checkpoints import Place, find_checkpoint, rejected_error
from gangline.sync.trees import carry_history, spot_on


def resumable(run: Opened, seams: Seams) -> RunState:
    """The state of a run that has ended and can go on; raises UsageError or CheckpointError for any other."""
    layout = run.layout
    name, record = layout.run_id, run.record()
    if record.silent is not None:
        raise HostUnreachable(
            f"{name} may be running: who looks after it does not answer",
            seen=record.silent,
            fix="bring that host back; only it knows whether the run has ended",
        )
    record.require_state()
    try:
        state = RunState.load(layout)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{name} cannot be resumed", seen=f"{layout.state}: {error}", fix="start a new run: gangline train"
        ) from error
    if record.phase == "preparing" or seams.is_alive(run.kept, run.keeper):
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


def places_of(run: Opened, ready: Ready, means: Means) -> dict[str, Place]:
    """Every place where checkpoints may lie; hosts of the new cluster under their own names."""
    hosts = ready.cluster.hosts
    places = {host.name: Place(host=host, transport=means.transports[host.name]) for host in hosts}
    theirs = {_spot(host) for host in hosts}
    for host in run.cluster.hosts:
        if _spot(host) not in theirs:
            label = host.name if host.name not in places else f"{host.name} (before)"
            places[label] = Place(host=host, transport=run.transports[host.name])
    return places


def carry_on(run: Opened, ready: Ready, means: Means) -> None:
    """Bring what the old head wrote of the run to the new one."""
    before, now = run.cluster.head, ready.cluster.head
    old = spot_on(before, run.transports, before.workdir)
    if not carry_history(old, spot_on(now, means.transports, now.workdir), run.layout.run_id):
        means.talk.say(f"{before.name}, the head before, does not answer: its figures are missing from now on")


def _spot(host: Host) -> tuple[str, ...]:
    """What is the same for two hosts that have one folder: equal paths of two machines are two places."""
    return (host.workdir,) if host.transport == "local" else (host.workdir, host.ssh or host.name, str(host.ssh_port))


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
