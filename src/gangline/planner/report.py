"""The decision as lines for people: what fits, what it takes, and why nothing else was taken. Pure."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gangline.planner.candidate import Candidate, RankSettings, builds_method, lacking
from gangline.planner.decision import AS_FAST, Choice
from gangline.planner.machines import Placement, PlannedCluster, link
from gangline.planner.memory import Memory
from gangline.planner.memory_fit import EVEN, Need
from gangline.planner.plan import Plan, PlannedRank
from gangline.planner.saves import SaveCost, Saving, save_cost
from gangline.planner.traffic import LinkModel, trained_weights, wire_bytes
from gangline.planner.training import PlannedStrategy
from gangline.planner.ways_out import Suggestion
from gangline.runs.checkpoints import LEAST_MIN, MOST_MIN
from gangline.runs.gang import rows_of
from gangline.runs.job import ScheduleJob
from gangline.runs.step_schedule import Cadence, marks_in_words, warmup_steps
from gangline.strategies.table import DEFAULT
from gangline.units import format_bytes, format_count, format_duration, name_runs

# Why gangline's own trainer does not do what the plan found best. Pure.


def why_not(candidate: Candidate) -> str:
    """One sentence of an option that is not built."""
    half = candidate.strategy.half
    if (missing := lacking(candidate.strategy, candidate.training, candidate.architecture)) is not None:
        return f"gangline train cannot do {missing.what} yet"
    return f"gangline train does {half.kind} only where the job asks for it, for {half.capabilities.asked_only}"


GIB = 2**30
LETTERS = {
    " r": "with activation checkpointing",
    " o": "with activation checkpointing whose inputs lie in the machine's memory",
}
"""What stands behind the passes of a rank."""
MOST_GROUPS, MOST_ENTRIES = 4, 8
"""Groups of hosts that are named, and entries of hosts that have unlike shares."""
MUCH_FASTER = 2.0
"""So much faster has a strategy to be that does not compute the same as one big machine, to be mentioned."""
TITLE, COLUMN = 11, 18
"""Characters of the titles, and of a column of the table of memory."""


@dataclass(frozen=True, slots=True)
class Length:
    """How long the run is, as far as that is known."""

    known: tuple[int, str] | None
    """Optimizer steps, and that in words."""
    saving: Saving = field(default_factory=Saving)
    """How the job saves."""
    unknown: str = ""
    """Why `known` is not, in words."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps of the run."""
        return None if self.known is None else self.known[0]


def report(choice: Choice, length: Length, *, why: bool = False, width: int = 120) -> list[str]:
    """All that was decided. why: every strategy that was weighed, not the usual ones alone; width: of the screen."""
    best = choice.best
    rows = [("model", _model(choice)), *_fit_rows(choice, width)]
    if best is None:
        rows.append(("strategy", "none fits"))
    else:
        apart = " (if these cards could exchange, see note)" if len(best.world.makers) > 1 else ""
        rows += [("strategy", f"{name(best.strategy)}{apart}: {best.strategy.half.meaning}")]
        rows += [("disk", text) for text in [best.on_disk] if text]
        rows += [("shares", text) for text in [_shares(best)] if text]
        rows += [("divides", text) for text in _divides(choice)]
        rows += [("the sum", text) for text in _sum(choice)]
        rows += [("step", text) for text in _step(best)]
        rows += [("run", text) for text in _run(best, length)]
        rows += [("saves", text) for text in _saves(save_cost(best, length.saving), length.saving, why=why)]
    rows += [("instead of", text) for text in _others(choice, every=why)]
    rows += [("machines", text) for text in _machines(choice, length.steps)]
    rows += [("today", text) for text in _today(choice, length.steps)]
    rows += [("note", text) for text in _notes(choice)]
    return aligned(rows, width)


def change_line(before: Choice, after: Choice, width: int) -> list[str]:
    """What the change of machines, links or model brings, in a line."""
    old, new = before.best, after.best
    texts = ["does not fit" if each is None else f"{_seconds(each.seconds)} a step" for each in (old, new)]
    text = f"{texts[0]} without the change, {texts[1]} with it"
    if old is not None and new is not None and old.time is not None and new.time is not None:
        text += f" ({old.seconds / new.seconds:.2f} x as fast)"
    return aligned([("change", text)], width)


def ways_lines(ways: Sequence[Suggestion], width: int = 120) -> list[str]:
    """What would make it fit."""
    if not ways:
        return ["instead     no option fits: use a smaller model or more hosts"]
    rows = []
    for way in ways:
        need = way.candidate.tightest
        text = f"{' and '.join(way.words)}: fits with {name(way.candidate.strategy)}, {_need(need)} GiB"
        text += f" of {_gib(need.placement.free_bytes)}" if need.placement.free_bytes is not None else ""
        most = max(wanted for wanted, _ in way.candidate.host_memory.values())
        text += f", and {_gib(most)} GiB of host memory" if most else ""
        text += f"; {_seconds(way.candidate.seconds)} a step" if way.candidate.scenario.is_timed else ""
        text += "" if way.candidate.is_built else " (gangline train cannot do this yet)"
        rows.append(("instead", text))
    if any(way.bought for way in ways):
        rows.append(("instead", "no price is known here: prices are yours to compare, with renting too"))
    return aligned(rows, width)


def terms(choice: Choice, width: int = 120) -> list[str]:
    """The terms of memory of the option that was taken, or of the nearest one; of the rank that needs most."""
    candidate = choice.best or max(choice.by_kind, key=lambda each: each.chance)
    memory = candidate.tightest.memory
    rows = [("memory", f"{name(candidate.strategy)} on {candidate.tightest.placement.host}, GiB:")]
    rows += [("", f"{_gib2(term.num_bytes)}  {term.name}: {term.source}") for term in memory.persistent]
    rows += [("", f"{_gib2(memory.peak.num_bytes)}  at the peak, {memory.peak.name}, of which")]
    rows += [("", f"    {_gib2(term.num_bytes)}  {term.name}: {term.source}") for term in memory.peak.terms]
    rows += [("", f"{_gib2(memory.allocated_bytes)}  of tensors in all")]
    process = memory.process
    low, high = _gib2(process.low).strip(), _gib2(process.high).strip()
    rows += [("", f"{_gib2(process.likely)}  of the process ({low} to {high}): the allocator's gaps, context, buffers")]
    moved = [("", f"{_gib2(memory.offloaded_bytes)}  in the machine's memory, in place of the card's")]
    return aligned(rows + (moved if memory.offloaded_bytes else []), width)


def name(strategy: PlannedStrategy) -> str:
    """A strategy with what belongs to it."""
    return strategy.half.title(strategy)


def _model(choice: Choice) -> str:
    architecture, training = choice.query.architecture, choice.query.training
    text = f"{architecture.model_type}, {format_count(architecture.num_parameters)} parameters in "
    text += f"{architecture.num_layers} layers; {training.method}"
    if training.method != "full":
        text += f", rank {training.rank}"
    candidate = choice.best or choice.by_kind[0]
    trained = format_count(trained_weights(architecture, candidate.training))
    return f"{text}: {trained} trained, compute in {training.compute}"


def _fit_rows(choice: Choice, width: int) -> Iterator[tuple[str, str]]:
    """Tables of as many columns as the screen has room for: a column per kind of placement, a row per strategy."""
    yield "fits", "GiB needed by a rank, and the chance that it fits"
    groups = list(_groups(choice.world.placements).values())
    names = [name(candidate.strategy) for candidate in choice.by_kind]
    first = max(len(each) for each in (*names, "free")) + 2
    room = max(1, (width - TITLE - first) // (COLUMN + 2))
    for begin in range(0, len(groups), room):
        part = groups[begin : begin + room]
        heads = [textwrap.wrap(_column_head(placements).replace(" x ", "\xa0x "), COLUMN) for placements in part]
        for line in range(max(map(len, heads))):
            cells = [head[line].replace("\xa0", " ") if line < len(head) else "" for head in heads]
            yield "", _table_row("", first, cells)
        yield "", _table_row("free", first, [_free(placements[0]) for placements in part])
        for candidate, title in zip(choice.by_kind, names, strict=True):
            yield "", _table_row(title, first, [_cell(candidate, placements) for placements in part])
    yield from (("with", text) for text in _settings(choice))


def _table_row(title: str, first: int, cells: Sequence[str]) -> str:
    return (title.ljust(first) + "  ".join(cell.ljust(COLUMN) for cell in cells)).rstrip()


def _settings(choice: Choice) -> Iterator[str]:
    """What was chosen for each row of the table, where the job leaves that open."""
    groups: dict[str, list[str]] = {}
    for candidate in choice.by_kind:
        recomputed = ", with activation checkpointing" if candidate.training.checkpointing else ""
        words = f"micro-batches of {candidate.training.micro_batch}{recomputed}"
        words = "each machine's own settings" if candidate.scenario.settings else words
        words += f", gradients sent in {candidate.training.exchange}" if candidate.training.exchange else ""
        groups.setdefault(words, []).append(candidate.strategy.kind)
    if choice.query.open:
        yield "; ".join(f"{words}: {', '.join(kinds)}" for words, kinds in groups.items())


def _groups(placements: Sequence[Placement]) -> dict[tuple[object, ...], list[Placement]]:
    """Placements with the same card and as much free memory, whatever their host."""
    groups: dict[tuple[object, ...], list[Placement]] = {}
    for placement in placements:
        free = None if placement.free_bytes is None else round(placement.free_bytes / GIB, 1)
        groups.setdefault((placement.gpu, free, placement.memory_from), []).append(placement)
    return groups


def _column_head(placements: Sequence[Placement]) -> str:
    hosts = list(dict.fromkeys(placement.host for placement in placements))
    where = hosts[0] if len(hosts) == 1 else f"{folded(hosts)}:" if len(hosts) > 2 else ",".join(hosts)
    return f"{where} {f'{len(placements)} x ' if len(placements) > 1 else ''}{placements[0].label}"


def folded(hosts: Sequence[str]) -> str:
    """Hosts by name; three or more whose numbers go up by one are folded: "pc1 to pc8, nas"."""
    runs = name_runs(hosts)
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run) for run in runs]
    more = sum(map(len, runs[MOST_GROUPS:]))
    return ", ".join(words[:MOST_GROUPS]) + (f" and {more} more" if more else "")


def each_host(pairs: Iterable[tuple[str, str]]) -> str:
    """What each host has; three or more neighbours with the same are folded: "pc1 to pc8 each 5 (12.5 %), pc9 2"."""
    words: list[str] = []
    for same, group in groupby(pairs, key=lambda pair: pair[1]):
        hosts = [host for host, _ in group]
        words += [f"{folded(hosts)} each {same}"] if len(hosts) > 2 else [f"{host} {same}" for host in hosts]
    more = f" and {len(words) - MOST_ENTRIES} more" if len(words) > MOST_ENTRIES else ""
    return ", ".join(words[:MOST_ENTRIES]) + more


def _free(placement: Placement) -> str:
    if placement.free_bytes is None:
        return "not known"
    return f"{'' if placement.memory_from == 'measured' else 'about '}{_gib(placement.free_bytes)} GiB"


def _cell(candidate: Candidate, placements: Sequence[Placement]) -> str:
    """The greatest need among these placements, and the chance that it fits."""
    needs = [need for need in candidate.needs if need.placement in placements]
    if not needs:
        return "-"
    worst = min(needs, key=lambda need: 1.0 if need.chance is None else need.chance)
    return f"{_need(worst)} {_verdict(worst)}"


def _verdict(need: Need) -> str:
    if need.chance is None:
        return "?"
    per_cent = f"{100 * need.chance:.0f} %"
    word = "yes" if need.chance >= 0.9 else "tight" if need.chance >= 0.5 else "no"
    return word if need.chance < 0.005 or need.chance > 0.995 else f"{word} {per_cent}"


def _shares(candidate: Candidate) -> str:
    training, settings = candidate.training, candidate.scenario.settings
    if settings and candidate.strategy.half.layers == "all":
        return _own_shares(candidate)
    text = f"micro-batches of {training.micro_batch}"
    text += f", with activation checkpointing{_where(candidate)}" if training.checkpointing else ""
    if candidate.strategy.replicas > 1:
        return f"{text}: {split_to_rows(candidate.work_split)}"
    if candidate.strategy.world_size == 1 or candidate.strategy.half.layers == "staged":
        return (
            f"1 {text.replace('batches', 'batch', 1)}" if candidate.shares[0] == 1 else f"{candidate.shares[0]} {text}"
        )
    total = sum(candidate.work_split)
    hosts: dict[str, int] = {}
    together = candidate.strategy.half.layers == "sliced"
    for need, share in zip(candidate.needs, candidate.shares, strict=True):
        hosts[need.placement.host] = share if together else hosts.get(need.placement.host, 0) + share
    return f"{text}: {each_host((host, f'{share} ({100 * share / total:.0f} %)') for host, share in hosts.items())}"


def _where(candidate: Candidate) -> str:
    """The hosts of those ranks that alone recompute, as " on pc1, pc3"; "" where all do."""
    ranks = zip(candidate.needs, candidate.scenario.settings, strict=False)
    hosts = dict.fromkeys(need.placement.host for need, own in ranks if own.training.checkpointing)
    return f" on {folded(list(hosts))}" if hosts else ""


def _own_shares(candidate: Candidate) -> str:
    """Samples of every host, and its own settings: "pc1 12 (50 %) as 2 x 6, pc2 4 (17 %) as 4 x 1 recomputed"."""
    unit, total = candidate.training.micro_batch, sum(candidate.shares)
    hosts: dict[str, list[RankSettings]] = {}
    for need, own in zip(candidate.needs, candidate.scenario.settings, strict=True):
        hosts.setdefault(need.placement.host, []).append(own)
    words = []
    for host, ranks in hosts.items():
        share = sum(own.share for own in ranks)
        ways = list(dict.fromkeys(_own_passes(own) for own in ranks))
        each = f" on each of {len(ranks)} ranks" if len(ways) == 1 and len(ranks) > 1 else ""
        words.append((host, f"{unit * share} ({100 * share / total:.0f} %) as {' + '.join(ways)}{each}"))
    letters = {_letter(own) for own in candidate.scenario.settings}
    legend = "".join(f", {letter.strip()}: {meaning}" for letter, meaning in LETTERS.items() if letter in letters)
    return f"samples as passes x samples of a pass{legend}: {each_host(words)}"


def _own_passes(own: RankSettings) -> str:
    return f"{own.passes} x {own.training.micro_batch}{_letter(own)}"


def _letter(own: RankSettings) -> str:
    return " o" if own.training.offloading else " r" if own.training.checkpointing else ""


def split_to_rows(shares: Sequence[int]) -> str:
    """Micro-batches of pipelines: "12 in each of 2 pipelines", "14 + 10 in 2 pipelines"."""
    if len(set(shares)) == 1:
        return f"{shares[0]} in each of {len(shares)} pipelines"
    return f"{' + '.join(map(str, shares[:8]))}{' + ...' if len(shares) > 8 else ''} in {len(shares)} pipelines"


def _divides(choice: Choice) -> Iterator[str]:
    """Why this batch, or what is bad about it; of what would be run, which may be another way than the best."""
    dividing, run = choice.dividing, choice.runnable
    if dividing is not None and dividing.words:
        other = run is not None and choice.best is not None and run.strategy.kind != choice.best.strategy.kind
        yield f"with {name(run.strategy)}, {dividing.words}" if run is not None and other else dividing.words


def _sum(choice: Choice) -> Iterator[str]:
    """How much of the sum of their speeds the machines reach together."""
    part, alone_s = choice.part_of_sum, choice.alone_s
    if part is not None:
        each = each_host((host, _seconds(seconds)) for host, seconds in alone_s.items())
        more = "; together is more: each holds less of the model or of the work, and has room for faster ways"
        words = f"{100 * part:.1f} % of what all machines do in sum, each alone in its own best way: {each} a step"
        yield words + (more if part > 1 else "")


def _step(candidate: Candidate) -> Iterator[str]:
    time = candidate.time
    if time is None:
        yield "step time is unknown; measure it: gangline bench compute JOB"
        return
    wire = wire_bytes(candidate.traffic, candidate.world.fabric.slots)
    text = f"{_seconds(time.total_s)} ({_seconds(time.low_s)} to {_seconds(time.high_s)})"
    if candidate.traffic.exchanges:
        share = f"{100 * time.communication_share:.1f} %"
        text += f", of which {_seconds(time.exposed_s)} waiting for the network ({share})"
    yield text
    yield from _format(candidate)
    if candidate.traffic.exchanges:
        out, inside = max(wire.out, default=0.0), max(wire.inside, default=0.0)
        ways = [f"each host sends {format_bytes(out)} per step ({candidate.world.wire.source})"] if out else []
        ways += (
            [f"each GPU sends {format_bytes(inside)} to its neighbour ({candidate.world.inside.source})"]
            if inside
            else []
        )
        yield f"{' and '.join(ways)}: {_seconds(time.communication_s)} without overlap"
    yield f"computation {candidate.source or 'not known'}"
    if any(
        placement.spec and placement.spec.laptop and placement.power_limit_w is None
        for placement in candidate.world.placements
    ):
        yield "laptop GPU speed depends on its power limit; the middle of the range is assumed"


def _format(candidate: Candidate) -> Iterator[str]:
    """What gradients travel as, where that is worth a word."""
    time, narrow_s = candidate.time, candidate.narrow_s
    if candidate.training.exchange and candidate.strategy.world_size == 1:
        yield f"exchange: {candidate.training.exchange} does nothing: one rank exchanges no gradients"
    elif candidate.training.exchange and candidate.strategy.half.narrows:
        yield f"gradients travel in {candidate.training.exchange}"
    elif time is not None and narrow_s is not None and narrow_s * AS_FAST < time.total_s:
        gain = f"{_seconds(time.total_s - narrow_s)} off a step of {_seconds(time.total_s)}"
        yield f"exchange: bf16 would take {gain}; gradients are then rounded"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """What a whole run takes."""

    steps: int
    words: str
    """Where `steps` is from."""
    seconds: tuple[float, float, float]
    """The least, what is likely, and the most."""
    kwh: float | None
    """Of the GPUs alone, at most: each at its full power for what is likely; None where one is not known."""


def run_cost(candidate: Candidate, length: Length) -> RunCost | None:
    """None where the length of the run or the time of a step is not known."""
    time = candidate.time
    if time is None or length.known is None:
        return None
    steps, words = length.known
    low, likely, high = (steps * each for each in (time.low_s, time.total_s, time.high_s))
    powers = _powers(candidate)
    kwh = sum(powers) * likely / 3.6e6 if powers else None
    return RunCost(steps=steps, words=words, seconds=(low, likely, high), kwh=kwh)


def _powers(candidate: Candidate) -> list[float]:
    """In watts, by rank; none where one is not known."""
    specs = [placement.spec for placement in candidate.world.placements]
    known = [spec.power_w for spec in specs if spec is not None and math.isfinite(spec.power_w)]
    return known if len(known) == len(candidate.world.placements) else []


def _run(candidate: Candidate, length: Length) -> Iterator[str]:
    if length.known is None and length.unknown:
        yield f"total time is unknown: {length.unknown}"
    if (cost := run_cost(candidate, length)) is None:
        return
    low, likely, high = map(format_duration, cost.seconds)
    yield f"{cost.words}: {likely} ({low} to {high})"
    if cost.kwh is not None and cost.kwh >= 0.01:
        watts = _range(_powers(candidate))
        yield f"{cost.kwh:.3g} kWh at most, for the GPUs alone, each at its full {watts} W"


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _saves(cost: SaveCost, saving: Saving, *, why: bool) -> Iterator[str]:
    where = "in parts, over all hosts" if cost.in_parts else "on every host"
    about = "about " if saving.every_minutes == "auto" else ""
    every = "" if cost.minutes is None else f"; a power cut loses {about}{cost.minutes:.3g} min at most"
    yield f"{format_bytes(cost.num_bytes)} for a checkpoint, {where}{every}"
    if not (why or cost.is_notable):
        return
    least, likely, most = map(_seconds, cost.write_s)
    text = f"{likely} to write each ({least} to {most}; {cost.source})"
    text += ", while training waits" if saving.waits else f"; training waits {_seconds(cost.hold_s[1])}, to copy it"
    yield text + ("" if cost.share is None else f": {100 * cost.share:.1f} % of the run")
    if cost.is_late:
        yield "on a slow disk a save outlasts the pause between saves: saves come less often, and a fault loses more"


def _others(choice: Choice, *, every: bool) -> Iterator[str]:
    """What was not taken, and the reason."""
    best = choice.best
    for candidate in choice.by_kind:
        if best is not None and candidate.strategy.kind == best.strategy.kind:
            continue
        if every or best is None or candidate.strategy.half.usual:
            yield f"{name(candidate.strategy)}: {_reason(candidate, best)}"


def _reason(candidate: Candidate, best: Candidate | None) -> str:
    if not candidate.may_fit:
        need = candidate.tightest
        return f"does not fit on {need.placement.host}: {_need(need)} of {_gib(need.placement.free_bytes)} GiB"
    if candidate.time is None or best is None or best.time is None:
        return (
            "its results differ from one big machine" if not candidate.is_exact else "fits, but does more work per step"
        )
    words = f"{_seconds(candidate.time.total_s)} a step against {_seconds(best.time.total_s)}"
    if not candidate.is_exact and candidate.seconds < best.seconds:
        return f"{words}, but its results differ from one big machine"
    if candidate.seconds <= best.seconds * 1.02:
        return f"{words}: hardly faster, with more that can fail" if candidate.fits else f"{words}: memory is tight"
    heavy = max(candidate.traffic.exchanges, key=lambda each: each.sent_bytes, default=None)
    if heavy is not None and candidate.time.exposed_s > 0.2 * (candidate.time.total_s - best.time.total_s):
        words += f"; {heavy.what}: {format_bytes(heavy.sent_bytes)} per step and rank over this link"
    return words


def _machines(choice: Choice, steps: int | None) -> Iterator[str]:
    """What 1..n machines take; the first lines to read for who thinks of another one."""
    rows = [few.best for few in choice.by_hosts if few.best is not None and few.best.time is not None]
    if len(choice.world.hosts) < 2 or not rows:
        return
    for candidate in rows:
        ratio = f", {rows[0].seconds / candidate.seconds:.2f} x" if candidate is not rows[0] else ""
        hosts = f"{len(candidate.world.hosts)} ({_who(candidate)})"
        apart = "; but they cannot exchange" if len(candidate.world.makers) > 1 else ""
        yield f"{hosts} {_length(candidate, steps)}{ratio}, {name(candidate.strategy)}{apart}"


def _who(candidate: Candidate) -> str:
    hosts = candidate.world.hosts
    return ", ".join(hosts) if len(hosts) <= 4 else folded(hosts)


def _length(candidate: Candidate, steps: int | None) -> str:
    return format_duration(steps * candidate.seconds) if steps else f"{_seconds(candidate.seconds)} a step"


def _today(choice: Choice, steps: int | None) -> Iterator[str]:
    """What gangline's own trainer can do, where that is not what was chosen."""
    best, today = choice.best, choice.today
    if best is None or best.is_built:
        if best is None and today is not None:
            yield f"gangline train would try {name(today.strategy)} on {_who(today)}"
        return
    lacking = why_not(best)
    if today is not None:
        length = f": {_length(today, steps)}" if today.time is not None else ""
        yield f"{lacking}; it can do {name(today.strategy)} on {_who(today)}{length}"
    elif builds_method(best.training, best.architecture):
        yield f"{lacking}, and no strategy that it supports fits"
    else:
        yield lacking


def _cards(world: PlannedCluster) -> Iterator[str]:
    """Cards that the trainer cannot use, and what the catalogue says of others."""
    if len(world.makers) > 1:
        who = " and ".join(f"{maker} ({', '.join(hosts)})" for maker, hosts in world.makers.items())
        yield (
            f"cards of {who} cannot train together: NCCL, RCCL and the others talk to their own kind alone. Figures of "
            "them together only say what an exchange would bring. Plan a run for each maker, by --without HOST"
        )
    for label, reason in dict.fromkeys(
        (placement.label, placement.spec.untrained) for placement in world.placements if placement.spec is not None
    ):
        if reason:
            hosts = dict.fromkeys(placement.host for placement in world.placements if placement.label == label)
            yield f"planned only: gangline train cannot use the {label} of {', '.join(hosts)} yet; {reason}"
    figures = "gpu: {tflops_bf16: ..., memory_gib: ..., bandwidth_gbs: ...}"
    yield from dict.fromkeys(
        f"no list has the {placement.label} of {placement.host}: write its figures into the cluster file, {figures}"
        for placement in world.placements
        if placement.gpu is not None and placement.spec is None
    )
    yield from dict.fromkeys(f"{placement.label}: {placement.note}" for placement in world.placements if placement.note)


def _notes(choice: Choice) -> Iterator[str]:
    best = choice.best
    yield from _cards(choice.world)
    if best is not None and not best.fits:
        yield f"memory is tight: it fits with a chance of {100 * best.chance:.0f} %"
    if len(choice.world.hosts) > 1 and choice.world.wire.warning:
        yield choice.world.wire.warning
    if (slower := slower_than_alone(choice)) is not None:
        yield slower
    for candidate in choice.by_kind:
        if (
            best is not None
            and not candidate.is_exact
            and candidate.may_fit
            and candidate.seconds * MUCH_FASTER < best.seconds
        ):
            yield (
                f"{candidate.strategy.kind} would take {_seconds(candidate.seconds)} a step instead of "
                f"{_seconds(best.seconds)}, with other numbers than one big machine: an exchange every "
                f"{candidate.strategy.inner_steps} steps; choose it with strategy: {candidate.strategy.kind}"
            )
    if best is not None:
        yield from _precision(best)
    if (runnable := choice.runnable) is not None and runnable is not best:
        yield from _format(runnable)


def _precision(best: Candidate) -> Iterator[str]:
    """Which numbers cards without bf16 end with, and what that costs."""
    compute, specs = best.training.compute, [need.placement.spec for need in best.needs]
    lacking = _labels(
        need.placement for need in best.needs if need.placement.spec is not None and not need.placement.spec.bf16
    )
    if compute == "bf16" and lacking:
        yield f"{lacking} cannot compute in bf16: precision: auto takes fp16"
    if compute == "fp16" and lacking:
        yield f"products are in fp16, with a loss scale: {lacking} cannot compute in bf16, and all cards use one format"
    slow = _labels(
        need.placement for need in best.needs if need.placement.spec is not None and need.placement.spec.fp16_share < 1
    )
    if compute == "fp16" and slow:
        share = min(spec.fp16_share for spec in specs if spec is not None)
        yield (
            f"{slow} has no tensor cores, and multiplies fp16 at about {100 * share:.0f} % of the rate of fp32: "
            "precision: fp32 is faster there, if it fits; plan with it too, and without that GPU"
        )


def _labels(placements: Iterable[Placement]) -> str:
    return ", ".join(dict.fromkeys(placement.label for placement in placements))


def slower_than_alone(choice: Choice) -> str | None:
    """The sentence that says so, where fewer machines are faster than all of them, and why.

    Of what can be started, else of what was chosen.
    """
    for whole, runnable in ((choice.runnable, True), (choice.best, False)):
        fastest = fastest_of_fewer(choice, runnable=runnable)
        if whole is not None and fastest is not None and fastest.seconds < whole.seconds < float("inf"):
            alone, all_s = ", ".join(fastest.world.hosts[:4]), _seconds(whole.seconds)
            figures = f"{alone} alone {_seconds(fastest.seconds)} a step, all {all_s}"
            cause, by_network = slowness_cause(choice, whole, fastest)
            if not by_network:
                return f"not all of these machines help: {figures}; {cause}"
            machines = "one machine is" if len(fastest.world.hosts) == 1 else f"{len(fastest.world.hosts)} hosts are"
            return f"{machines} faster than all: {figures}; {cause}"
    return None


LADDER = ("1gbit", "2.5gbit", "5gbit", "10gbit", "25gbit", "100gbit", "hdr", "ndr")
"""Links that are tried where the network is too slow, the slowest first."""


def slowness_cause(choice: Choice, whole: Candidate, fewer: Candidate) -> tuple[str, bool]:
    """Why all machines are slower than fewer of them, and whether that is the network; then the first link is named
    with which they would not be.
    """
    wire = whole.world.wire
    free_s = on_link(whole, dataclasses.replace(wire, latency_s=0.0, bytes_per_s=math.inf)).seconds
    if whole.seconds - free_s >= free_s - fewer.seconds:
        for text, other in ((each, link(each)) for each in LADDER):
            if other.bytes_per_s > wire.bytes_per_s and (there := on_link(whole, other)).seconds <= fewer.seconds:
                return f"the network is the cause: with {text} all would take {_seconds(there.seconds)}", True
        least = f"{LADDER[-1]} would not change it: without any wait all take {_seconds(free_s)}"
        return f"the network is the cause, and {least}", True
    plain = next((each for each in choice.by_kind if each.strategy.kind == DEFAULT), None)
    needs = () if plain is None or plain_fits(whole) else plain.needs
    crowded = [need.placement.host for need in needs if need.chance is not None and need.chance < EVEN]
    if crowded:
        hosts = folded(list(dict.fromkeys(crowded)))
        return f"the network is not the cause: the whole model, which is divided for it, has no room on {hosts}", False
    return "the network is not the cause: computing and updating takes longer with all of them", False


def plain_fits(candidate: Candidate) -> bool:
    """Whether each of its ranks has the whole model."""
    half = candidate.strategy.half
    return half.layers == "all" and half.parts == "none"


def on_link(candidate: Candidate, wire: LinkModel) -> Candidate:
    """The same way to run the job on another network."""
    world = dataclasses.replace(candidate.world, wire=wire)
    return dataclasses.replace(candidate, scenario=dataclasses.replace(candidate.scenario, world=world))


def fastest_of_fewer(choice: Choice, *, runnable: bool) -> Candidate | None:
    """The fastest way with some of the machines; `runnable`: that our own trainer can do."""
    fewer = [few for few in choice.by_hosts if few.count < len(choice.world.hosts)]
    options = [few.runnable if runnable else few.best for few in fewer]
    known = [candidate for candidate in options if candidate is not None and candidate.time is not None]
    return min(known, key=lambda candidate: candidate.seconds, default=None)


def _seconds(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown"
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else format_duration(seconds)


def _gib(num_bytes: float | None) -> str:
    return "?" if num_bytes is None else f"{num_bytes / GIB:.1f}"


def _need(need: Need) -> str:
    return _gib(need.memory.process.likely)


def _gib2(num_bytes: float) -> str:
    return f"{num_bytes / GIB:6.2f}"


def aligned(rows: Sequence[tuple[str, str]], width: int) -> list[str]:
    """Titles in a column of their own, each said once; long lines go on below their beginning."""
    lines, last = [], ""
    for title, text in rows:
        shown = "" if title == last else title
        indent = len(text) - len(text.lstrip())
        parts = textwrap.wrap(text, max(40, width - TITLE), subsequent_indent=" " * (indent + 2)) or [""]
        if title in {"", "fits"}:
            parts = [text]
        lines += [f"{shown if number == 0 else '':<10} {part}".rstrip() for number, part in enumerate(parts)]
        last = title or last
    return lines


# The decision as plain data, for programs. Pure.


def choice_json(choice: Choice, ways: list[Suggestion]) -> dict[str, Any]:
    """Everything that was weighed; bytes and seconds."""
    return {
        "model": {
            "type": choice.query.architecture.model_type,
            "parameters": choice.query.architecture.num_parameters,
            "layers": choice.query.architecture.num_layers,
        },
        # what divides how well: `ceiling` is the part of an exact division that its shares reach
        "batch": None if choice.dividing is None else dataclasses.asdict(choice.dividing),
        "best": choice.best and candidate_json(choice.best),
        "runnable": choice.runnable and candidate_json(choice.runnable),
        "strategies": [candidate_json(candidate) for candidate in choice.by_kind],
        "today": choice.today and candidate_json(choice.today),
        # seconds of a step by host, each alone in its own best way, and the part of the sum of these speeds
        "alone": choice.alone_s,
        "part_of_sum": choice.part_of_sum,
        "by_hosts": [
            {"num_hosts": few.count, **candidate_json(few.best)} for few in choice.by_hosts if few.best is not None
        ],
        "instead": [
            {"changes": list(way.words), "bought": way.bought, **candidate_json(way.candidate)} for way in ways
        ],
    }


def run_json(candidate: Candidate, length: Length) -> dict[str, Any]:
    """What the whole run takes; without hours, why these are not known."""
    cost = run_cost(candidate, length)
    if cost is None:
        return {"steps": length.steps, "words": "", "hours": None, "kwh": None, "unknown": length.unknown}
    hours = dict(zip(("low", "likely", "high"), (each / 3600 for each in cost.seconds), strict=True))
    return {"steps": cost.steps, "words": cost.words, "hours": hours, "kwh": cost.kwh, "unknown": ""}


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """One way to run the job."""
    wire = wire_bytes(candidate.traffic, candidate.world.fabric.slots)
    # ranks that do the same share one
    memories = {id(need.memory): need.memory for need in candidate.needs}
    told = {number: memory_json(memory) for number, memory in memories.items()}
    return {
        "strategy": dataclasses.asdict(candidate.strategy),
        "method": candidate.training.method,
        "micro_batch": candidate.training.micro_batch,
        "activation_checkpointing": candidate.training.checkpointing,
        "own_settings": bool(candidate.scenario.settings),
        "chance": round(candidate.chance, 4),
        "fits": candidate.fits,
        "built": candidate.is_built,
        "exact": candidate.is_exact,
        "hosts": list(candidate.world.hosts),
        "sent_bytes": {"inside": list(wire.inside), "between": list(wire.between), "out": list(wire.out)},
        "step": None if candidate.time is None else dataclasses.asdict(candidate.time),
        "source": candidate.source,
        "network": candidate.world.wire.source,
        "ranks": [
            {
                "host": need.placement.host,
                "device": need.placement.device,
                "gpu": need.placement.gpu,
                "share": share,
                "micro_batch_size": training.micro_batch,
                "activation_checkpointing": training.checkpointing,
                "activation_offloading": training.offloading,
                "free_bytes": need.placement.free_bytes,
                "memory_from": need.placement.memory_from,
                "untrained": (need.placement.spec and need.placement.spec.untrained) or None,
                "note": need.placement.note,
                "chance": need.chance,
                "memory": told[id(need.memory)],
                "reserved_bytes": need.memory.reserved_bytes(need.placement.free_bytes),
            }
            for need, share, training in zip(candidate.needs, candidate.shares, candidate.rank_trainings, strict=True)
        ],
    }


def memory_json(memory: Memory) -> dict[str, Any]:
    """What a rank needs, term by term."""
    return {**dataclasses.asdict(memory), "allocated_bytes": memory.allocated_bytes}


# The plan as lines for people.


MOST_ROWS = 4
"""Pipelines whose layers are named."""


def explain(plan: Plan, *, without: Container[str] = ()) -> list[str]:
    """The plan in plain lines, most important first. without: titles of lines that were said already."""
    rows = [
        ("strategy", f"{plan.strategy}: {plan.reason}"),
        ("method", f"{plan.method}, precision {_plan_precision(plan)}"),
        ("batch", _batch(plan)),
        ("shares", _plan_shares(plan)),
        *([("divides", plan.divides)] if plan.divides else []),
        *_speeds(plan),
        *_forecast(plan),
        ("length", length(plan)),
        *([("warm-up", _warmup(plan, plan.warmup_ratio))] if plan.warmup_ratio is not None else []),
        ("saves", _plan_saves(plan)),
        ("evaluates", _evaluates(plan)),
    ]
    rows += [("note", note) for note in plan.notes]
    return [f"{title:<10} {text}" for title, text in rows if title not in without]


def _forecast(plan: Plan) -> Iterator[tuple[str, str]]:
    """The forecast, as far as it is known."""
    forecast = plan.forecast
    if forecast is None:
        return
    known = [(rank, planned) for rank, planned in zip(forecast.ranks, plan.ranks, strict=True) if rank.free_bytes]
    if known:
        rank, planned = min(known, key=lambda row: 1.0 if row[0].chance is None else row[0].chance)
        free = format_bytes(rank.free_bytes or 0)
        text = f"{format_bytes(rank.process_bytes)} for a rank; {free} free on {planned.host}"
        yield "memory", text
    if forecast.step_s is not None:
        low, high = (format_duration(each or 0.0) for each in (forecast.step_low_s, forecast.step_high_s))
        yield "step", f"about {format_duration(forecast.step_s)} ({low} to {high}), {forecast.source}"


def lines_in_steps(plan: Plan) -> list[str]:
    """Once the samples are counted: the lines of what the job counts in epochs or as a part of the run."""
    asked = {
        "warm-up": plan.warmup_ratio is not None,
        "saves": plan.checkpoint_every_epochs is not None,
        "evaluates": plan.evaluation_every_epochs is not None,
    }
    return [line for line in explain(plan) if asked.get(line.partition(" ")[0])]


def _batch(plan: Plan) -> str:
    if any(rank.micro_batch_size not in (None, plan.micro_batch) for rank in plan.ranks):
        return f"{plan.batch} samples, in forward passes of each rank's own size"
    return f"{plan.batch} samples = {plan.num_micro_batches} micro-batches of {plan.micro_batch}"


def _plan_precision(plan: Plan) -> str:
    return "auto: the best that every device supports" if plan.precision == "auto" else plan.precision


def _plan_shares(plan: Plan) -> str:
    """One entry per host, ranks of equal share folded: "pc1 2 x 5 (41.7 % each)"; of a pipeline, everybody's layers.

    Under tp all ranks of a host do what the first of them does.
    """
    layers = plan.half.layers
    if layers == "staged":
        return _layers(plan)
    hosts: dict[str, list[PlannedRank]] = {}
    for rank in plan.ranks:
        hosts.setdefault(rank.host, []).append(rank)
    kept = 1 if layers == "sliced" else None
    return each_host((host, _host_share(ranks[:kept])) for host, ranks in hosts.items())


def _layers(plan: Plan) -> str:
    """For instance: all 24 micro-batches go through every rank; layers: pc1 13, pc2 10+17.

    Of several pipelines: 14 of 24 micro-batches go through pc1 13, pc2 10; 10 through pc3 12, pc4 11.
    """
    # without stages where no layer could be cut
    parts = [
        (rank.host, f"{layers}{' recomputed' if rank.activation_checkpointing else ''}")
        for rank, layers in zip(plan.ranks, plan.stages, strict=False)
    ]
    if plan.replicas == 1:
        named = _by_host(parts) or "not known"
        return f"all {plan.num_micro_batches} micro-batches go through every rank; layers: {named}"
    rows = rows_of(plan.stages, replicas=plan.replicas)
    words = [f"{plan.ranks[row[0]].share} through {_by_host(parts[row.start : row.stop])}" for row in rows[:MOST_ROWS]]
    more = f"; and {len(rows) - MOST_ROWS} more pipelines" if len(rows) > MOST_ROWS else ""
    return f"of {plan.num_micro_batches} micro-batches {'; '.join(words)} (layers){more}"


def _by_host(parts: Sequence[tuple[str, str]]) -> str:
    hosts: dict[str, list[str]] = {}
    for host, layers in parts:
        hosts.setdefault(host, []).append(layers)
    return each_host((host, "+".join(layers)) for host, layers in hosts.items())


def _speeds(plan: Plan) -> Iterator[tuple[str, str]]:
    """What shares do once the run is on its way; nothing where the cluster file gave them, for they stay then."""
    if plan.moving_shares:
        rounds = plan.half.in_rounds
        when = f"measured before the first step and in every {'round' if rounds else 'step'}"
        results = "so results depend on them" if rounds else "and results do not change"
        yield "speeds", f"{when}; shares follow the speeds, {results}"


def _host_share(ranks: list[PlannedRank]) -> str:
    own = list(dict.fromkeys(_own_setting(rank) for rank in ranks if rank.micro_batch_size is not None))
    return " ".join([_amount(ranks), *([f"in passes of {' and '.join(own)}"] if own else [])])


def _own_setting(rank: PlannedRank) -> str:
    moved = " from inputs in the machine's memory" if rank.activation_offloading else ""
    return f"{rank.micro_batch_size}{', recomputed' if rank.activation_checkpointing else ''}{moved}"


def _amount(ranks: list[PlannedRank]) -> str:
    if len(ranks) == 1:
        return f"{ranks[0].share} ({ranks[0].percent:g} %)"
    if len({rank.share for rank in ranks}) == 1:
        return f"{len(ranks)} x {ranks[0].share} ({ranks[0].percent:g} % each)"
    return f"{'+'.join(str(rank.share) for rank in ranks)} ({sum(rank.percent for rank in ranks):.3g} %)"


def length(plan: Plan) -> str:
    """How long the run is, as far as it is known."""
    epochs = "" if plan.epochs is None else f"{plan.epochs:g} {'epoch' if plan.epochs == 1 else 'epochs'}"
    if plan.data is None:
        return f"{plan.steps} steps" if epochs == "" else f"{epochs}; steps are known once the data is tokenised"
    size = f"{plan.data.num_samples} samples"
    if plan.data.num_tokens is not None:
        size += f", {format_count(plan.data.num_tokens)} tokens"
    return f"{plan.steps} steps{f' = {epochs}' if epochs else ''} over {size}"


def _plan_saves(plan: Plan) -> str:
    steps, minutes = plan.checkpoint_every_steps, plan.checkpoint_every_minutes
    every = [f"every {steps} steps"] if steps is not None else []
    every += [_epochs(plan, plan.checkpoint_every_epochs, plan.saves)] if plan.checkpoint_every_epochs else []
    if minutes == "auto":
        every.append(f"every {LEAST_MIN:g} to {MOST_MIN:g} min (by what a save costs)")
    elif minutes is not None:
        every.append(f"every {minutes:g} min")
    return " and ".join([*every, "at the end"])


def _epochs(plan: Plan, every: float, marks: Cadence | None) -> str:
    """The steps themselves, once they are known."""
    words = f"every {every:g} {'epoch' if every == 1 else 'epochs'}"
    return words if marks is None or plan.steps is None else f"{words} ({marks_in_words(marks, plan.steps)})"


def _warmup(plan: Plan, ratio: float) -> str:
    if plan.steps is None:
        return f"{ratio:g} of all steps, which are known once the data is tokenised"
    steps = warmup_steps(ScheduleJob(warmup_ratio=ratio), plan.steps)
    return f"{steps} {'step' if steps == 1 else 'steps'} = {ratio:g} of {plan.steps}, rounded up"


def _evaluates(plan: Plan) -> str:
    if not plan.evaluates:
        return "never: the job has no data.eval"
    start = "at the start, " if plan.evaluation_at_start else ""
    every = f"every {plan.evaluation_every_steps} steps, " if plan.evaluation_every_steps is not None else ""
    if plan.evaluation_every_epochs is not None:
        every = f"{_epochs(plan, plan.evaluation_every_epochs, plan.evaluations)}, "
    return f"{start}{every}at the end"
