"""Measured questions that tell the causes of a symptom apart: each is put to what is recorded of a run, or was seen of
hosts, and answers with a cause, with what is ruled out, or with why that is not known. Pure.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gangline.checks.rules import Finding
from gangline.inventory.measured import Link, Network
from gangline.planner.outcome import RankTime
from gangline.report.host_samples import HostSamples, card_events, reason_at, seconds_of
from gangline.report.run_history import Attempt, EventRecord
from gangline.report.run_summary import RunRecords
from gangline.strategies.table import plan_half
from gangline.units import fold_names, format_duration

Verdict = Literal["cause", "no", "unknown", "seen", "absent"]
"""A cause; ruled out; not known; the symptom is there; it is not there."""
Confidence = Literal["high", "medium", "low"]

PART = 0.10
"""What takes less than this part of a step does not make it slow."""
SLOWER = 1.15
"""A rank that takes so many times as long as those like it is slow: runs of equal cards differ by less."""
PRESSURE = {"cpu": 20.0, "memory": 5.0, "io": 20.0}
"""Percent of the time in which some process waited for it."""
LEAST_STEPS = 10
MOST_SEEN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What there is to be asked."""

    run: RunRecords | None = None
    """With the samples of its hosts."""
    start: tuple[str, ...] = ()
    """How far its hosts had come in the start of its last attempt."""
    findings: tuple[Finding, ...] = ()
    """Of a check of the hosts, as far as they have to do with the symptom."""
    hosts: tuple[str, ...] = ()
    """Those that were looked at; empty: none was, and `unchecked` says why."""
    unchecked: tuple[str, ...] = ()
    network: Network | None = None
    """As `gangline bench network` measured it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a question came to."""

    verdict: Verdict
    what: str
    seen: tuple[str, ...] = ()
    fix: str = ""
    confidence: Confidence = "medium"


Ask = Callable[[Evidence], Iterable[Reply]]


def _no(what: str, *seen: str) -> list[Reply]:
    return [Reply(verdict="no", what=what, seen=seen)]


def _unknown(what: str) -> list[Reply]:
    return [Reply(verdict="unknown", what=what)]


def _seen(what: str, *seen: str) -> list[Reply]:
    return [Reply(verdict="seen", what=what, seen=seen)]


def _absent(what: str) -> list[Reply]:
    return [Reply(verdict="absent", what=what)]


def _cause(what: str, *seen: str, fix: str, confidence: Confidence = "medium") -> Reply:
    return Reply(verdict="cause", what=what, seen=seen[:MOST_SEEN], fix=fix, confidence=confidence)


def _of_run(question: Callable[[RunRecords], Iterable[Reply]]) -> Ask:
    return lambda evidence: _unknown("no run was named") if evidence.run is None else question(evidence.run)


def _of_times(question: Callable[[RunRecords, list[RankTime], float], Iterable[Reply]]) -> Ask:
    """A question to the times of the ranks: they, by rank, and the seconds of all their steps."""

    def asked(run: RunRecords) -> Iterable[Reply]:
        ranks = sorted(run.figures.ranks.values(), key=lambda each: each.rank)
        whole_s = max((_seconds(each) for each in ranks), default=0.0)
        if not whole_s or run.figures.num_steps < LEAST_STEPS:
            return _unknown(f"{run.history.id} has no {LEAST_STEPS} steps with the times of its ranks")
        return question(run, ranks, whole_s)

    return _of_run(asked)


def _seconds(rank: RankTime) -> float:
    return rank.compute_s + rank.data_s + rank.waits_s + rank.network_s + rank.rest_s


def _name(rank: RankTime) -> str:
    return f"rank {rank.rank} on {rank.host}"


def _mixed(run: RunRecords) -> str:
    """Why computing and exchanges of a run cannot be told apart; "": they can."""
    if run.plan is None or plan_half(run.plan.strategy).parts == "none":
        return ""
    return f"under {run.plan.strategy} exchanges are part of computing"


# Where the time of a step goes.


@_of_run
def slowed(run: RunRecords) -> Iterable[Reply]:
    """Did a rank, or a link, become slower than it was in the first steps?"""
    return [_slow(run, event, over) for event, over in _stragglers(run)] or _no(
        "none did, by the times of every step" if run.figures.ranks else "no event tells of one"
    )


def _stragglers(run: RunRecords) -> list[tuple[EventRecord, bool]]:
    """Of every cause and host the last event that it is slow, and whether that was over in the same attempt."""
    found: dict[tuple[str, ...], tuple[EventRecord, bool]] = {}
    for event in itertools.chain.from_iterable(attempt.told for attempt in run.history.attempts):
        key = tuple(str(event.get(name)) for name in ("cause", "host", "rank", "peer"))
        if event.get("event") == "straggler":
            found[key] = event, False
        elif event.get("event") == "straggler-over" and key in found:
            found[key] = found[key][0], True
    return list(found.values())


_SLOW_FIX = {
    "compute": "look what else runs there, and at heat and power: gangline check --only gpus, gangline top RUN",
    "data": "bring the rows to a local disk of that host; look what else reads there: gangline top RUN",
    "network": "look at cable, switch port and other traffic there: gangline check --tier full --only network",
}


def _slow(run: RunRecords, event: EventRecord, over: bool) -> Reply:
    time, host = seconds_of(event.get("time")), str(event.get("host"))
    sampled = next((each for each in run.samples if each.host == host), None)
    reason = reason_at(sampled, time) if sampled and time and event.get("cause") == "compute" else None
    what = str(event.get("what") or f"{host} is slow")
    return _cause(
        f"{what}; it was over later" if over else what,
        f"event straggler at step {event.get('step')} of {run.history.id}",
        *([f"at that time {reason}"] if reason else []),
        fix=_SLOW_FIX.get(str(event.get("cause")), _SLOW_FIX["compute"]).replace("RUN", run.history.id),
        confidence="medium" if over else "high",
    )


@_of_times
def unlike(run: RunRecords, ranks: list[RankTime], _whole_s: float) -> Iterable[Reply]:
    """Does a rank take longer for a micro-batch than the others?"""
    if run.plan and plan_half(run.plan.strategy).layers == "staged":
        return _unknown("the stages of a pipeline compute different layers")
    if why := _mixed(run):
        return _unknown(why)
    counts = run.figures.micro_batches
    took = {each: each.compute_s / count for each in ranks if (count := counts.get((each.host, each.rank)))}
    if len(took) < 2:
        return _unknown("fewer than two ranks tell their micro-batches")
    kinds: dict[str, list[RankTime]] = {}
    for each in took:
        kinds.setdefault(_kind(run, each), []).append(each)
    return _slower_than_alike(took, kinds) or _unlike_kinds(took, kinds) or _no(_spread(took))


def _kind(run: RunRecords, rank: RankTime) -> str:
    """What a rank computes on, and whether by settings of its own it computes more than others of that kind."""
    planned = run.plan.ranks[rank.rank] if run.plan and rank.rank < len(run.plan.ranks) else None
    again = " with activation checkpointing" if planned is not None and planned.activation_checkpointing else ""
    events = itertools.chain.from_iterable(attempt.events for attempt in run.history.attempts)
    words = [str(event.get("settings")) for event in events if event.get("event") == "restarting"]
    is_smaller = any(f"{_name(rank)} " in each for each in words)
    smaller = ", with smaller settings since it ran out of memory" if is_smaller else ""
    return f"{_device(run, rank)}{again}{smaller}"


def _device(run: RunRecords, rank: RankTime) -> str:
    """As the facts of its host and the plan say."""
    facts = next((each for each in run.inventory.hosts if each.host == rank.host), None) if run.inventory else None
    if facts is None:
        return "a device that is not known"
    planned = run.plan.ranks[rank.rank] if run.plan and rank.rank < len(run.plan.ranks) else None
    cards = [gpu.name for gpu in facts.gpus]
    if planned is not None and planned.device < len(cards):
        label = " (simulated)" if facts.gpu_driver.simulated else ""
        return f"{cards[planned.device]}{label}"
    return f"{facts.num_cpus} processors"


def _slower_than_alike(took: Mapping[RankTime, float], kinds: Mapping[str, list[RankTime]]) -> list[Reply]:
    found = []
    for kind, alike in kinds.items():
        for rank in alike if len(alike) > 1 else ():
            usual_s = statistics.median(took[other] for other in alike if other is not rank)
            if usual_s and took[rank] >= SLOWER * usual_s:
                what = f"{_name(rank)} takes {took[rank] / usual_s:.2g} times as long for a micro-batch as the others"
                seen = f"{1000 * took[rank]:.3g} ms, the others {1000 * usual_s:.3g} ms, all on {kind}"
                found.append(_cause(what, seen, fix=_SLOW_FIX["compute"].replace("top RUN", "top"), confidence="high"))
    return found


def _unlike_kinds(took: Mapping[RankTime, float], kinds: Mapping[str, list[RankTime]]) -> list[Reply]:
    """The kinds differ: what is slow by nature is no fault."""
    speeds = {kind: statistics.median(took[rank] for rank in alike) for kind, alike in kinds.items()}
    slow, fast = max(speeds, key=speeds.__getitem__), min(speeds, key=speeds.__getitem__)
    if not speeds[fast] or speeds[slow] < SLOWER * speeds[fast]:
        return []
    names = fold_names(list(dict.fromkeys(rank.host for rank in kinds[slow])))
    what = f"{names} computes on {slow}, which is {speeds[slow] / speeds[fast]:.2g} times slower than {fast}"
    seen = [f"{kind}: {1000 * taken:.3g} ms for a micro-batch" for kind, taken in speeds.items()]
    fix = "no fault: gangline gives it fewer micro-batches; gangline plan JOB --why says whether it helps at all"
    return [_cause(what, *seen, fix=fix)]


def _spread(took: Mapping[RankTime, float]) -> str:
    least, most = min(took.values()), max(took.values())
    return f"all take about as long: {1000 * least:.3g} to {1000 * most:.3g} ms for a micro-batch"


@_of_times
def reads(_run: RunRecords, ranks: list[RankTime], whole_s: float) -> Iterable[Reply]:
    """Do ranks wait for their rows?"""
    slow = [each for each in ranks if each.data_s >= PART * whole_s]
    most = max(ranks, key=lambda each: each.data_s)
    share = f"{most.data_s / whole_s:.0%} of the time of all steps"
    if not slow:
        return _no(f"reading and collating takes at most {share}, on {_name(most)}")
    seen = [f"{_name(each)}: {each.data_s / whole_s:.0%}" for each in slow]
    fix = "keep the rows on a local disk, tokenised once (gangline data JOB); more processors for that host"
    return [_cause(f"{_name(most)} reads its rows for {share}", *seen, fix=fix, confidence="high")]


@_of_times
def waits(run: RunRecords, ranks: list[RankTime], whole_s: float) -> Iterable[Reply]:
    """Do ranks wait for slower ones?"""
    if why := _mixed(run):
        return _unknown(why)
    most, least = max(ranks, key=lambda each: each.waits_s), min(ranks, key=lambda each: each.waits_s)
    share = f"{most.waits_s / whole_s:.0%} of the time of all steps"
    if most.waits_s < PART * whole_s:
        return _no(f"no rank waits for others for more than {share}")
    fix = f"gangline explain --ask one-gpu-slower {run.history.id}"
    return [_cause(f"{_name(most)} waits for slower ranks for {share}; {_name(least)} waits least", fix=fix)]


@_of_times
def exchanges(run: RunRecords, ranks: list[RankTime], whole_s: float) -> Iterable[Reply]:
    """How much of a step is the exchange that computing does not hide?"""
    if len({each.host for each in ranks}) < 2:
        return _absent("the run has one host: nothing of a step goes over the network")
    if why := _mixed(run):
        return _unknown(why)
    share = max(each.network_s for each in ranks) / whole_s
    said = f"{share:.0%} of the time of all steps is exchange that no computing hides"
    if share < PART:
        return _absent(f"{said}: the network does not make this run slow")
    figure = run.comparison.exposed_s if run.comparison else None
    if figure is None or not figure.planned:
        return _seen(said)
    ratio = figure.measured / figure.planned
    planned = f"planned {1000 * figure.planned:.3g} ms of a step, measured {1000 * figure.measured:.3g} ms"
    if ratio >= 1.5:
        fix = "measure the network again and compare: gangline bench network; look at cables and other traffic"
        return [*_seen(said), _cause(f"the exchange takes {ratio:.2g} times as long as planned", planned, fix=fix)]
    fix = "a larger batch, or a strategy that sends less (local-sgd, lora): gangline plan JOB --why compares them"
    return [*_seen(said), _cause("the job sends as much as this network takes so long for", planned, fix=fix)]


def measured_links(evidence: Evidence) -> Iterable[Reply]:
    """Is a way between two hosts slower than the others, as last measured?"""
    network = evidence.network
    ways = [] if network is None else [link for link in network.links if link.throughput_mbps]
    if network is None or not ways:
        return _unknown("never measured with these hosts: gangline bench network does, while they are idle")
    usual, slow = statistics.median(map(_mbps, ways)), min(ways, key=_mbps)
    when = f"measured {network.measured[:10]}"
    if len(ways) < 2 or _mbps(slow) > usual / 2:
        return _no(f"{_mbps(slow):.0f} to {max(map(_mbps, ways)):.0f} Mbit/s between hosts, {when}")
    what = f"{slow.source} to {slow.target} reaches {_mbps(slow):.0f} Mbit/s, the middle of all ways {usual:.0f}"
    return [_cause(what, when, fix=_SLOW_FIX["network"])]


def _mbps(link: Link) -> float:
    return link.throughput_mbps or 0.0


# What the hosts did meanwhile.


def cards(*kinds: str) -> Ask:
    """A question for what happened to the cards of a run: throttled, foreign, ecc, lost."""

    def asked(run: RunRecords) -> Iterable[Reply]:
        sampled = [each for each in run.samples if each.rows and each.cards]
        if not sampled:
            return _unknown("no samples of cards are recorded")
        of_kind = [dataclasses.replace(each, events=_of_kinds(each, kinds)) for each in sampled]
        told = [sentence for _, sentence in card_events(of_kind, run.figures.written)]
        if not told:
            count = sum(len(each.cards) for each in sampled)
            return _no(f"none of {count} card{'s' * (count != 1)} did, by samples every {sampled[0].interval_s:g} s")
        return [_cause(told[0], *told[1:], fix=_CARD_FIX[kinds[0]], confidence="high")]

    return _of_run(asked)


def _of_kinds(host: HostSamples, kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    return [each for each in host.events if str(each.get("event")).removesuffix("-over") in kinds]


_CARD_FIX = {
    "throttled": "see to its cooling and power supply, and end the other program",
    "ecc": "restart that host; if errors come again, have the card replaced",
}


@_of_run
def presses(run: RunRecords) -> Iterable[Reply]:
    """Do processes of a host wait for its processor, memory or disk?"""
    sampled = [each for each in run.samples if each.rows]
    found = []
    for what, limit in PRESSURE.items():
        shares = {each.host: each.mean(f"pressure/{what}_percent") for each in sampled}
        known = {host: share for host, share in shares.items() if share is not None}
        for host, share in known.items():
            # where every host computes on its processors, all of them wait alike, and none is to blame
            others = [other for name, other in known.items() if name != host]
            if share >= limit and (what != "cpu" or not others or share >= 2 * min(others)):
                said = f"processes on {host} wait for {_WAITED[what]} in {share:.0f} % of the time"
                found.append(_cause(said, *(_beside(known, host)), fix=_PRESSURE_FIX[what]))
    if not any(each.names("pressure/") for each in sampled):
        return _unknown("no samples of the hosts tell it")
    return found or _no(f"no more than usual on {fold_names([each.host for each in sampled])}")


_WAITED = {"cpu": "a processor", "memory": "memory", "io": "a disk"}
_PRESSURE_FIX = {
    "cpu": "end what else computes there, or give that host fewer slots; gangline top shows it",
    "memory": "end what else takes memory there, or a smaller micro_batch; a host that swaps is slow",
    "io": "keep rows and checkpoints on another disk; look what else reads and writes there",
}


def _beside(shares: Mapping[str, float], host: str) -> list[str]:
    return [f"on {other} {share:.0f} %" for other, share in shares.items() if other != host]


@_of_run
def used(run: RunRecords) -> Iterable[Reply]:
    """How much are the cards in use?"""
    means: dict[str, float] = {}
    planned = {f"GPU {rank.device} of {rank.host}" for rank in run.plan.ranks} if run.plan else set()
    for host in run.samples:
        label = " (simulated)" if host.is_simulated else ""
        for card in host.cards:
            mean = host.mean(f"gpu/{card.get('index')}/utilization_percent")
            if mean is not None:
                means[f"GPU {card.get('index')} of {host.host}{label}"] = mean
    if not means:
        return _unknown("no samples of cards are recorded")
    shown = [f"{name}: in use {mean:.0f} % of the time" for name, mean in means.items()]
    if min(means.values()) >= 80:
        return _absent(f"every card is in use for at least {min(means.values()):.0f} % of the time")
    idle = [name for name, mean in means.items() if mean < 1 and name.removesuffix(" (simulated)") not in planned]
    if idle and len(idle) < len(means):
        fix = "`slots` of that host says how many cards are used; gangline plan JOB shows which rank has which"
        return [*_seen("cards are idle", *shown), _cause(f"{', '.join(idle)} has no rank that uses it", fix=fix)]
    return _seen("cards are idle for a part of the time", *shown)


@_of_run
def devices(run: RunRecords) -> Iterable[Reply]:
    """Did ranks compute on the processor although there are cards?"""
    facts = {each.host: each for each in run.inventory.hosts} if run.inventory else {}
    with_cards = [name for name, each in facts.items() if each.gpus]
    if not facts:
        return _unknown(f"{run.history.id} has no facts of its hosts")
    if not with_cards:
        reasons = [f"{name}: {each.gpu_reason}" for name, each in facts.items() if each.gpu_reason]
        what = f"no GPU was found on {fold_names(list(facts))}, so the ranks compute on the processor"
        return [_cause(what, *reasons, fix="gangline check --only gpus says what is missing", confidence="high")]
    torches = [(name, each.torch) for name, each in facts.items() if each.gpus and each.torch is not None]
    blind = [name for name, built in torches if built is not None and not built.cuda]
    if blind:
        what = f"torch on {fold_names(blind)} is built without CUDA: its ranks compute on the processor"
        return [_cause(what, fix="install a torch with CUDA there: gangline check --only versions", confidence="high")]
    return _no(f"{fold_names(with_cards)}: cards were found, by a torch that can use them")


# How a run begins.


@_of_run
def began(run: RunRecords) -> Iterable[Reply]:
    """How far did its start come, and what stopped it?"""
    last = run.history.attempts[-1] if run.history.attempts else None
    if last is None:
        return _unknown(f"{run.history.id} has no attempt yet")
    if last.error is not None and last.to_step is None:
        lines = [line for line in str(last.error.get("seen", "")).splitlines() if line.strip()]
        fix = str(last.error.get("fix", "")) or f"gangline explain {run.history.id}"
        return [_cause(str(last.error.get("what", "")), *lines[:MOST_SEEN], fix=fix, confidence="high")]
    if last.to_step is not None:
        return _absent(f"attempt {last.number} has come to step {last.to_step:,}")
    told = [event for event in last.events if event.get("event") in {"hanging", "standing", "unreachable", "beginning"}]
    if told:
        what = str(told[-1].get("what") or told[-1].get("why") or f"{told[-1].get('host')} does not answer")
        return [_cause(what, fix=f"gangline explain {run.history.id} shows where it stands", confidence="high")]
    if last.of("started") is None:
        return _seen(f"attempt {last.number} is being prepared: no rank was started yet")
    return _seen(f"attempt {last.number} was started, and no step is done")


def board(evidence: Evidence) -> Iterable[Reply]:
    """Which stage of the start had each host reached?"""
    if not evidence.start:
        return _unknown("no start of the run is recorded")
    return _seen("seconds until each host had reached each stage; - is one that it has not reached", *evidence.start)


@_of_run
def stages(run: RunRecords) -> Iterable[Reply]:
    """Which part of the start takes longest?"""
    last = run.history.attempts[-1] if run.history.attempts else None
    first_step = next((time for time, _ in run.figures.written), None)
    if last is None or first_step is None or len(run.history.attempts) > 1:
        return _unknown("this is told of runs with one attempt that has done a step")
    marks = [("prepare", seconds_of(run.history.run.created)), ("start", _time_of(last)), ("load", _ready(last))]
    known = [(name, time) for name, time in marks if time is not None and time <= first_step]
    ends = [*(time for _, time in known[1:]), first_step]
    took = {name: max(0.0, end - time) for (name, time), end in zip(known, ends, strict=True)}
    whole_s = sum(took.values())
    shown = [f"{_STAGES[name]}: {format_duration(seconds)}" for name, seconds in took.items()]
    if whole_s < 60.0:
        return _absent(f"the first step is done after {format_duration(whole_s)}: {'; '.join(shown)}")
    longest = max(took, key=took.__getitem__)
    what = f"{_STAGES[longest]} takes {took[longest] / whole_s:.0%} of {format_duration(whole_s)}"
    return [_cause(what, *shown, fix=_STAGE_FIX[longest])]


_STAGES = {
    "prepare": "looking at the hosts and bringing environment, model and data",
    "start": "starting the ranks until all have joined",
    "load": "loading the model until the first step is done",
}
_STAGE_FIX = {
    "prepare": "a folder that all hosts share (`shared` in cluster.yaml); what was brought stays for later starts",
    "start": "keep the environment on a local disk of each host: importing torch from a file server takes minutes",
    "load": "keep the model on a local disk; evaluation.at_start: false, if an evaluation comes first",
}


def _time_of(attempt: Attempt) -> float | None:
    return seconds_of((attempt.of("started") or {}).get("time"))


def _ready(attempt: Attempt) -> float | None:
    """When its ranks had joined: rank 0 says then that it has started."""
    event = next((each for each in attempt.told if each.get("event") in {"started", "resumed"}), {})
    return seconds_of(event.get("time"))


# How the loss goes.


def _of_losses(question: Callable[[RunRecords, list[float]], Iterable[Reply]]) -> Ask:
    """A question to the losses, by step."""

    def asked(run: RunRecords) -> Iterable[Reply]:
        curve = run.figures.curves["loss"]
        if len(curve) < LEAST_STEPS:
            return _unknown(f"{run.history.id} has no {LEAST_STEPS} steps with a loss")
        return question(run, [curve[step] for step in sorted(curve)])

    return _of_run(asked)


def _tenths(losses: Sequence[float]) -> list[float]:
    """Medians of ten equal parts."""
    size = len(losses) / 10
    return [statistics.median(losses[round(index * size) : round((index + 1) * size)]) for index in range(10)]


@_of_losses
def diverges(run: RunRecords, losses: list[float]) -> Iterable[Reply]:
    """Does the loss rise?"""
    parts = _tenths(losses)
    low = min(parts)
    said = f"by tenths of the run: {', '.join(f'{part:.3g}' for part in parts)}"
    if parts[-1] > low + 0.1 * abs(low) or run.figures.skipped:
        return _seen(f"from {low:.4g} in its best tenth to {parts[-1]:.4g} in the last", said)
    return _absent(f"the last tenth of the run is at {parts[-1]:.4g}, the best at {low:.4g}")


@_of_losses
def stays(_run: RunRecords, losses: list[float]) -> Iterable[Reply]:
    """Does the loss stay where it was?"""
    parts = _tenths(losses)
    fall = (parts[0] - min(parts[1:])) / (abs(parts[0]) or 1.0)
    said = f"by tenths of the run: {', '.join(f'{part:.3g}' for part in parts)}"
    return _absent(f"it falls by {fall:.0%}: {said}") if fall >= 0.03 else _seen("it does not fall", said)


@_of_run
def not_finite(run: RunRecords) -> Iterable[Reply]:
    """Were steps skipped because the loss or a gradient was not finite?"""
    figures = run.figures
    if not figures.num_steps:
        return _unknown(f"{run.history.id} has no steps")
    if not figures.skipped:
        return _no(f"none of {figures.num_steps:,} steps")
    told = [event for event in _told(run) if event.get("event") == "step-skipped"]
    samples = [f"step {event.get('step')}: samples {event.get('samples')}" for event in told if event.get("samples")]
    precision = run.plan.precision if run.plan else ""
    fix = "precision: bf16 or fp32" if precision == "fp16" else "a smaller learning rate; look at the samples named"
    what = f"{figures.skipped:,} of {figures.num_steps:,} steps were skipped: loss or gradient were not finite"
    return [_cause(what, f"precision {precision or 'not known'}", *samples, fix=fix, confidence="high")]


def _told(run: RunRecords) -> list[EventRecord]:
    return [event for attempt in run.history.attempts for event in attempt.told]


@_of_run
def replicas(run: RunRecords) -> Iterable[Reply]:
    """Did weights of a rank differ from those of the others?"""
    told = [str(event.get("what")) for event in _told(run) if event.get("event") == "replicas-differ"]
    fix = "leave that host out and test its card and memory: gangline check --tier burn"
    return [_cause(told[-1], fix=fix, confidence="high")] if told else _no("no comparison of weights found one")


@_of_run
def spikes(run: RunRecords) -> Iterable[Reply]:
    """Does it begin with single steps of a far larger loss?"""
    told = [str(event.get("what")) for event in _told(run) if event.get("event") == "spike"]
    fix = "look at the rows of these samples (gangline data JOB --rows); a smaller learning rate if they are good"
    return [_cause(told[0], *told[1:], fix=fix)] if told else _no("no step stands out")


@_of_run
def gradients(run: RunRecords) -> Iterable[Reply]:
    """Does the norm of the gradient grow before the loss does?"""
    curve, rates = run.figures.curves["grad_norm"], run.figures.curves["learning_rate"]
    if len(curve) < LEAST_STEPS:
        return _unknown("no norms of the gradient are recorded")
    parts = _tenths([curve[step] for step in sorted(curve)])
    shown = f"by tenths of the run: {', '.join(f'{part:.3g}' for part in parts)}"
    if max(parts) < 5 * parts[0] or not parts[0]:
        return _no(f"no, {shown}")
    rate = f"learning rate at most {max(rates.values()):.2g}" if rates else "learning rate not known"
    fix = "a third of the learning rate, or a longer warm-up; clip the gradient"
    return [_cause(f"the norm of the gradient grows to {max(parts) / parts[0]:.2g} times", shown, rate, fix=fix)]


@_of_run
def jumps(run: RunRecords) -> Iterable[Reply]:
    """Does the loss jump where the run was resumed?"""
    curve, found = run.figures.curves["loss"], []
    starts = [(each.number, each.from_step) for each in run.history.attempts[1:] if each.from_step]
    for number, start in starts:
        before, after = ([curve[step] for step in steps if step in curve] for steps in _around(start))
        if before and after and (one := statistics.median(before)) * 1.2 < (other := statistics.median(after)):
            what = f"attempt {number} went on from step {start:,} with a loss of {other:.4g} after {one:.4g}"
            fix = f"compare the checkpoint's step with the attempt before: gangline explain {run.history.id}"
            found.append(_cause(what, fix=fix))
    return found or _no("it was not resumed" if not starts else "it goes on there as before")


def _around(step: int) -> tuple[range, range]:
    return range(step - 4, step + 1), range(step + 1, step + 6)


@_of_run
def evaluations(run: RunRecords) -> Iterable[Reply]:
    """Does only the evaluation become worse?"""
    curve, losses = run.figures.evaluations, run.figures.curves["loss"]
    if len(curve) < 3 or len(losses) < LEAST_STEPS:
        return _unknown("fewer than three evaluations")
    best, last = min(curve, key=curve.__getitem__), max(curve)
    parts = _tenths([losses[step] for step in sorted(losses)])
    said = f"evaluation loss {curve[best]:.4g} at step {best:,}, {curve[last]:.4g} at step {last:,}"
    if curve[last] <= 1.03 * curve[best] or parts[-1] > min(parts) * 1.03:
        return _no(said)
    fix = "fewer epochs, early stopping, or more rows; gangline export --step brings an earlier checkpoint"
    return [_cause("the training loss falls and the evaluation rises: it learns its rows by heart", said, fix=fix)]


@_of_run
def learning_rate(run: RunRecords) -> Iterable[Reply]:
    """Is the learning rate too small to change anything?"""
    rates = run.figures.curves["learning_rate"]
    if not rates:
        return _unknown("no learning rate is recorded")
    most = max(rates.values())
    if most > 1e-7:
        return _no(f"it is at most {most:.2g}")
    fix = "optimizer.learning_rate: 1e-4 to 3e-4 for LoRA, 1e-5 to 5e-5 for all weights are usual"
    return [_cause(f"the learning rate never exceeds {most:.2g}", fix=fix, confidence="high")]


@_of_run
def no_gradient(run: RunRecords) -> Iterable[Reply]:
    """Is there a gradient?"""
    norms = run.figures.curves["grad_norm"]
    if not norms:
        return _unknown("no norms of the gradient are recorded")
    middle = statistics.median(norms.values())
    if middle > 1e-9:
        return _no(f"its norm is {middle:.3g} in the middle step")
    fix = "look which tokens have a loss: gangline data JOB --rows; all masked, or frozen weights, train nothing"
    return [_cause("the gradient is 0: nothing is trained", fix=fix, confidence="high")]


@_of_run
def labels(run: RunRecords) -> Iterable[Reply]:
    """Have enough tokens a loss?"""
    figures = run.figures
    if figures.label_tokens is None or not figures.tokens:
        return _unknown("no counts of tokens are recorded")
    share = figures.label_tokens / figures.tokens
    said = f"{figures.label_tokens:,} of {figures.tokens:,} tokens ({share:.1%})"
    if share >= 0.01:
        return _no(said)
    fix = "answers may be cut off by sequence_length, or the template marks none: gangline data JOB --rows"
    return [_cause(f"hardly a token has a loss: {said}", fix=fix, confidence="high")]


# What a check of the hosts finds.


_SURE: Mapping[str, Confidence] = {"fail": "high", "warn": "medium", "info": "low"}


def checks(evidence: Evidence) -> Iterable[Reply]:
    """Does gangline check find something on the hosts that does this?"""
    if not evidence.hosts:
        return _unknown("; ".join(evidence.unchecked) or "no host was looked at")
    found = [
        _cause(
            f"{fold_names(each.hosts)}: {each.title}" if each.hosts else each.title,
            f"{each.id}, {each.severity}: {each.evidence}",
            each.meaning,
            fix=each.fix,
            confidence=_SURE[each.severity],
        )
        for each in evidence.findings
    ]
    return found or _no(f"nothing on {fold_names(evidence.hosts)}")
