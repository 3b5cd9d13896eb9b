"""The next attempt of a run, prepared by its supervisor: the step, the hosts and the request.

Model, data, code and environment are on the hosts already; only the shares of ranks and the rendezvous port are new.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from gangline.launch.backend import Backend, HostRequest, LaunchRequest
from gangline.launch.poll import free_port
from gangline.launch.program import Again, Program
from gangline.provision.checkpoint_sources import CheckpointHost, Places, bring, find_checkpoint, rejected_error
from gangline.provision.trees import Spot, carry_history, place_gang
from gangline.runs.checkpoints import CheckpointChoice
from gangline.runs.cluster import Cluster
from gangline.runs.decode import build as decoded
from gangline.runs.gang import Gang, OwnSettings
from gangline.runs.job import FailureJob, Job
from gangline.runs.layout import RunLayout
from gangline.runs.record_versions import load_if_there, load_record, write_record
from gangline.transport.transport import Transport

COMMAND_WAIT_S = 600.0
"""How long to wait for a host of the user's own program, which may not work with fewer ranks."""
REST_S = 600.0
"""How long host agents wait between two attempts: longer than any wait for a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The attempt that `train` or `resume` started, from which automatic restarts follow."""

    attempt: int
    cluster: Cluster
    """All hosts of the run."""
    gang: Gang
    networks: Mapping[str, Mapping[str, str]]
    left: tuple[str, ...] = ()
    """Hosts that were asked to leave, or shut down in good order, before this attempt."""
    away: tuple[str, ...] = ()
    """Hosts that were lost before it."""
    micro_batch: int | None = None
    """Samples of a micro-batch from this attempt on, after an out-of-memory error; None: as the job says."""
    settings: tuple[OwnSettings, ...] = ()
    """Of ranks of `gang` that have run out of memory, oldest first."""
    again: Again | None = None
    """How the user's own program is restarted; None: it is our trainer."""

    @staticmethod
    def of(layout: RunLayout, attempt: int) -> Base:
        """The base of an attempt; raises FileNotFoundError where no attempt follows automatically."""
        said = _said(layout, attempt)
        attempt = int(said["attempt"])
        return Base(
            attempt=attempt,
            cluster=Cluster.of_attempt(layout, attempt),
            gang=Gang.load(layout.gang(attempt)),
            networks=load_record(layout.networks(attempt), dict),
            left=tuple(said.get("left", ())),
            away=tuple(said.get("away", ())),
            micro_batch=said.get("micro_batch"),
            settings=tuple(decoded(OwnSettings, each) for each in said.get("settings", ())),
            again=_again(layout, attempt),
        )


def look_for_checkpoint(
    layout: RunLayout, base: Base, transports: Mapping[str, Transport], *, answering: Sequence[str]
) -> tuple[Places, CheckpointChoice]:
    """The newest step from which the hosts that answer can resume; raises CheckpointError where all are damaged.

    Where parts are missing, the other hosts of the run are asked, too: one that has left may still have its part.
    """
    every = {host.name: CheckpointHost(host=host, transport=transports[host.name]) for host in base.cluster.hosts}
    places = {name: place for name, place in every.items() if name in answering}
    choice = find_checkpoint(places, layout.run_id)
    if any(rejection.in_parts for rejection in choice.rejected) and places.keys() != every.keys():
        places, choice = every, find_checkpoint(every, layout.run_id)
    if choice.step is None and choice.rejected:
        raise rejected_error(layout.run_id, choice)
    return places, choice


def prepare(
    layout: RunLayout,
    base: Base,
    number: int,
    *,
    hosts: Sequence[str],
    checkpoint: tuple[Places, CheckpointChoice],
    backend: Backend,
) -> LaunchRequest:
    """Copy the checkpoint to these hosts, divide the work, and write the records of the attempt, from which another
    supervisor could continue. base: with the hosts that have left by now.

    Raises GanglineError where a host fails.
    """
    places, choice = checkpoint
    lacking = _lacking(base.gang, choice, hosts)
    gang = _in_smaller(layout, base).on(hosts, attempt=number, resume_step=choice.step, lacking=lacking)
    if choice.step is not None:
        bring(places, layout.run_id, choice.for_ranks_of(gang), targets=hosts, bare=lacking)
    transports = {name: place.transport for name, place in places.items()}
    chosen = [base.cluster.host(name) for name in gang.hosts]
    cluster = dataclasses.replace(base.cluster, hosts=tuple(chosen))
    seen = _seen(base, gang)
    place_gang(cluster, transports, gang)
    port = free_port(seen, transports[gang.hosts[0]])
    program = base.again.program if base.again is not None else Program(rest_s=REST_S, alone=True)
    request = backend.render(seen, gang, port=port, networks=base.networks, program=program)
    _write(layout, number, {"request": request.to_json(), "cluster": cluster.to_json(), "gang": gang.to_json()})
    gone = [host for host in base.gang.hosts if host not in gang.hosts]
    said = {
        "attempt": base.attempt,
        "left": [host for host in gone if host in base.left],
        "away": [host for host in gone if host not in {*base.left, *hosts}],  # a host may take part without ranks
        "micro_batch": base.micro_batch,
        "settings": [dataclasses.asdict(each) for each in base.settings],
    }
    write_record(layout.base(number), said)
    return request


def _seen(base: Base, gang: Gang) -> Cluster:
    """All hosts, those of a gang first: they decide whether all is one machine, and how many threads a rank has."""
    chosen = [base.cluster.host(name) for name in gang.hosts]
    others = [host for host in base.cluster.hosts if host.name not in gang.hosts]
    return dataclasses.replace(base.cluster, hosts=(*chosen, *others))


def standby_part(
    layout: RunLayout, base: Base, number: int, *, hosts: Sequence[str], host: str, backend: Backend
) -> HostRequest:
    """The part of a host that gets ready beside attempt `number`, for a later one on all of these hosts.

    It is like the part that the host will have then, so that its processes can serve that one.
    """
    gang = _in_smaller(layout, base).on(hosts, attempt=number, resume_step=None)
    program = Program(rest_s=REST_S, alone=True)
    request = backend.render(_seen(base, gang), gang, port=0, networks=base.networks, program=program)
    return next(part for part in request.hosts if part.host == host)


def _lacking(gang: Gang, choice: CheckpointChoice, hosts: Sequence[str]) -> tuple[str, ...]:
    """Hosts whose ranks get the state from other ranks, which is faster than copying files. () where every rank has a
    part of the state, the checkpoint lies in parts, or no host that takes part has it.
    """
    holders = {source.host for source in choice.sources} & set(hosts)
    passed_on = gang.half.passes_state and holders and not choice.held
    return tuple(host for host in hosts if host not in holders) if passed_on else ()


def _in_smaller(layout: RunLayout, base: Base) -> Gang:
    """The gang of the base with the current micro-batches, and ranks' settings of their own."""
    gang = base.gang
    if base.micro_batch is None and not base.settings:
        return gang
    job = Job.load(layout.job)
    if base.micro_batch is not None:
        gang = gang.in_smaller(base.micro_batch, before=gang.micro_batch or job.micro_batch)
    for own in base.settings:
        gang = gang.with_settings(own, job)
    return gang


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallerSettings:
    """What changes for a rank that ran out of memory, and the words for it."""

    own: OwnSettings
    """Of a rank of the base's gang."""
    words: str


def words_of(smaller: Sequence[SmallerSettings]) -> str:
    """What ranks do otherwise from here on, in one sentence."""
    sizes_alone = all(each.own.activation_checkpointing is None for each in smaller)
    others = "the others keep theirs" if sizes_alone else "the others go on as before"
    return f"{', '.join(dict.fromkeys(each.words for each in smaller))}; {others}"


def smaller_settings(error: Mapping[str, Any], base: Base, *, current: Gang, job: Job) -> SmallerSettings | None:
    """Smaller settings of its own for a rank of the current attempt; None where ranks cannot have any, or the error
    says none. error: as `cause.OutOfMemory.to_json` gives it.
    """
    size, recomputes = error.get("micro_batch"), error.get("activation_checkpointing") is True
    rank, able = error.get("rank"), "all" if base.gang.world_size == 1 else base.gang.half.rank_settings
    sizes_alike = able != "all" or job.draws != "sample"
    if not able or (sizes_alike and type(size) is int) or type(rank) is not int or not 0 <= rank < current.world_size:
        return None
    host = current.ranks[rank].host
    number = base.gang.ranks_on(host)[current.ranks_on(host).index(rank)]
    who = f"rank {rank} on {host}"
    if type(size) is int:
        before = current.ranks[rank].micro_batch_size or current.micro_batch or job.micro_batch
        words = f"{who} takes micro-batches of {size} in place of {before}"
        return SmallerSettings(own=OwnSettings(rank=number, micro_batch_size=size), words=words)
    if recomputes:
        if current.half.layers == "sliced":  # see `Gang.with_settings`
            words = f"the ranks of {host} compute activations again from here on"
        else:
            words = f"{who} computes activations again from here on"
        return SmallerSettings(own=OwnSettings(rank=number, activation_checkpointing=True), words=words)
    return None


def move_head(layout: RunLayout, places: Places, *, before: str, now: str) -> bool:
    """Copy the files of rank 0 from one head to the next; False: the old one does not answer, so they are missing."""
    if before == now:
        return True
    if before not in places:
        return False
    old, new = (_work_folder(places[name]) for name in (before, now))
    return carry_history(old, new, layout.run_id)


def _work_folder(place: CheckpointHost) -> Spot:
    return Spot(host=place.host, transport=place.transport, path=PurePath(place.host.workdir))


def failures_of(layout: RunLayout, attempt: int) -> FailureJob | None:
    """The restart policy of the job, or of the user's own program; None: the first failure ends the run."""
    if (job := load_if_there(layout.job, Job)) is not None:
        return job.failures
    again = _again(layout, int(_said(layout, attempt)["attempt"]))
    if again is None:
        return None
    return FailureJob(
        restarts=again.restarts, wait_s=COMMAND_WAIT_S, without=False, take_back=False, smaller_micro_batch=False
    )


def _said(layout: RunLayout, attempt: int) -> dict[str, Any]:
    return load_if_there(layout.base(attempt), dict) or {"attempt": attempt}


def _again(layout: RunLayout, attempt: int) -> Again | None:
    return load_if_there(layout.again(attempt), Again)


def _write(layout: RunLayout, number: int, documents: Mapping[str, Any]) -> None:
    layout.attempt(number).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, value in documents.items():
        write_record(layout.attempt(number) / f"{name}.json", value)
