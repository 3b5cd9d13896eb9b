"""What is written down and brought to the hosts before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from gangline.errors import GanglineError
from gangline.planning.explain import length
from gangline.planning.plan import DataCount, Plan
from gangline.runs.layout import RunLayout
from gangline.runs.registry import read_record
from gangline.runs.state import RunState
from gangline.runs.versions import load_if_there
from gangline.steps.decide import Decision
from gangline.steps.equip import Ready
from gangline.steps.seams import Means, Talk
from gangline.sync.inputs import Inputs, bring_reads, distribute, prepare_inputs, require_same
from gangline.sync.trees import place_documents, write_documents
from gangline.units import format_bytes


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
            talk.say(_kept(layout.run_id, read_record(layout).phase))
        raise


def _kept(name: str, phase: str) -> str:
    if phase in {"running", "stopping", "finished", "lost"}:  # it was broken off while its supervisor came up
        return (
            f"kept as {name}, which may be running: gangline ps asks; if it is running, gangline attach {name} follows "
            f"it and gangline stop {name} ends it; if it is lost, gangline resume {name} starts it"
        )
    return (
        f"kept as {name}, which is {phase}: gangline resume {name} once the cause is gone; for a mistake in the job, "
        "correct it and start anew: gangline train"
    )


def _unprepared(state: RunState, error: BaseException) -> RunState:
    if isinstance(error, KeyboardInterrupt):
        return dataclasses.replace(state, phase="stopped", supervisor=None)
    known = error if isinstance(error, GanglineError) else GanglineError(f"{type(error).__name__}: {error}")
    return dataclasses.replace(state, phase="failed", supervisor=None, error=known.to_json())


def bring_inputs(
    layout: RunLayout, decision: Decision, ready: Ready, means: Means, *, before: Inputs | None = None
) -> tuple[Plan, Ready]:
    """Bring the job and what it reads to the hosts, tokenised once, on the head; the plan now that samples are counted,
    and the hosts, which see what is read.

    before: what the run has read so far, which it must go on to read.
    """
    run_id, cluster, talk = layout.run_id, ready.cluster, means.talk
    reads = bring_reads(decision.job, cluster, means.transports, home=means.home, tell=talk)
    cluster = reads.seen_from(cluster, decision.job)
    for host in cluster.hosts:
        alone = dataclasses.replace(cluster, hosts=(host,))
        job = reads.localised(decision.job, host)
        place_documents(alone, means.transports, run_id, {"job": job.to_json()})
    secrets = means.secrets if cluster.head.transport == "ssh" else None
    talk.tick(f"getting ready to tokenise on {cluster.head.name}")  # torch is imported there
    inputs = prepare_inputs(
        cluster,
        means.transports,
        run_id,
        secrets=secrets,
        on_progress=lambda record: talk.tick(_tokenising(record)),
    )
    if before is not None:
        require_same(run_id, before, inputs)
    distribute(cluster, means.transports, inputs, scratch=means.home, tell=talk)
    place_documents(cluster, means.transports, run_id, {"inputs": inputs.record})
    return _settled(layout, decision, inputs, talk), dataclasses.replace(ready, cluster=cluster)


def _settled(layout: RunLayout, decision: Decision, inputs: Inputs, talk: Talk) -> Plan:
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


def inputs_before(layout: RunLayout) -> Inputs | None:
    """What the run has read so far; None where it failed before its data was tokenised."""
    return load_if_there(layout.inputs, Inputs.from_json)


def _tokenising(record: dict[str, Any]) -> str:
    done, total = record.get("done_bytes", 0), record.get("total_bytes", 0)
    if not total:
        return f"tokenising: {record.get('rows', 0)} rows"
    return f"tokenising: {100 * done // total} % of {format_bytes(total)}, {record.get('rows', 0)} rows"
