"""What `gangline plan` answers: for the machines as they are, or as somebody thinks of having them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from gangline.errors import ModelError, UsageError
from gangline.planning.decision import Verdict
from gangline.planning.instead import Way
from gangline.planning.report import Length
from gangline.planning.saves import Saving
from gangline.planning.training import GANGLINE, STACKS, Stack
from gangline.planning.world import World, assumed_link, bus_of, imagine, link, with_hosts, without_hosts
from gangline.runs.job import Job
from gangline.steps.decide import Decision, decide
from gangline.steps.forecast import Outlook, foresee_job, ways_of
from gangline.steps.machines import disk_rate
from gangline.steps.reach import Start, load, reached
from gangline.steps.samples import estimated_steps, length_unknown
from gangline.steps.seams import Means, Seams, Talk


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """In what the machines of the question differ from those that are there."""

    hosts: str | None = None
    """These machines, and nobody is asked; see `planning.world.imagine`."""
    add: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    link: str | None = None
    stack: str = GANGLINE.name

    @property
    def changes_machines(self) -> bool:
        """Whether the answer is for machines that are not there."""
        return bool(self.hosts or self.add or self.without or self.link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """The answer."""

    job: Job
    world: World
    outlook: Outlook
    decision: Decision | None
    """What `train` would decide; None where nobody was asked."""
    before: Verdict | None = None
    """What it would be without the change that somebody thinks of."""
    ways: tuple[Way, ...] = field(default=())
    """What would make it fit, where it does not."""

    @property
    def can_start(self) -> bool:
        """Whether `train` would get as far as starting something."""
        if self.decision is None or any(each.severity == "fail" for each in self.decision.findings):
            return False
        return self.outlook.verdict is None or self.outlook.runnable is not None

    @property
    def length(self) -> Length:
        """How long the run is, as far as that is known or can be guessed, and how it saves."""
        known, words = estimated_steps(self.job), self.job.checkpoint
        inventory = None if self.decision is None else self.decision.inventory
        saving = Saving(
            every_steps=words.every_steps,
            every_minutes=words.every_minutes,
            waits=not words.asynchronous,
            disk=disk_rate(self.world, inventory),
            by_host=words.each_host == "part",
        )
        return Length(known=known, saving=saving, unknown="" if known else length_unknown(self.job))


def foretell(start: Start, what_if: WhatIf, *, talk: Talk, seams: Seams) -> Foretold:
    """Look, unless the machines are thought of, and weigh. Starts nothing, and writes nothing to a host."""
    stack = _stack(what_if.stack)
    if what_if.hosts is not None:
        job = _job_without_data(start)
        means = Means(transports={}, home=start.home, talk=talk, seams=seams)
        before = changed(_imagined(what_if), WhatIf(link=what_if.link))
        world = changed(before, dataclasses.replace(what_if, link=None))
        return _foretold(job, world, None, means, stack=stack, before=before)
    job, cluster = load(start)
    with reached(cluster, home=start.home, talk=talk, seams=seams) as (cluster, means):
        decision = decide(job, cluster, means)
        stopped = any(each.severity == "fail" for each in decision.findings)
        if decision.outlook.error is not None and not stopped:  # else what stops the start is said first
            raise decision.outlook.error
        world = changed(decision.world, what_if)
        if world == decision.world and stack == GANGLINE:
            ways = tuple(ways_of(decision.outlook))
            return Foretold(job=decision.job, world=world, outlook=decision.outlook, decision=decision, ways=ways)
        return _foretold(job, world, decision, means, stack=stack, before=decision.world)


def changed(world: World, what_if: WhatIf) -> World:
    """The world with what somebody thinks of changing."""
    for text in what_if.add:
        world = with_hosts(world, text)
    if what_if.without:
        world = without_hosts(world, what_if.without)
    if what_if.link is not None:
        world = dataclasses.replace(world, wire=link(what_if.link))
    return world


def _foretold(
    job: Job, world: World, decision: Decision | None, means: Means, *, stack: Stack, before: World
) -> Foretold:
    outlook = foresee_job(job, world, means, stack=stack)
    if outlook.error is not None:
        raise outlook.error
    if outlook.verdict is None and decision is None:
        raise ModelError("nothing can be foreseen", seen=outlook.unknown, fix="name a model whose config.json is here")
    same = outlook.with_batch(job)
    earlier = None if before == world else foresee_job(same, before, means, stack=stack).verdict
    ways = tuple(ways_of(outlook))
    return Foretold(
        job=outlook.settled(job), world=world, outlook=outlook, decision=decision, before=earlier, ways=ways
    )


def _job_without_data(start: Start) -> Job:
    """The job; on machines that nobody has, what it trains on need not be there either."""
    from gangline.spec.load import load_job

    return load_job(start.job, start.overrides, needs_data=False)


def _stack(name: str) -> Stack:
    if name not in STACKS:
        raise UsageError(f"there is no stack {name!r}", seen=f"expected one of {', '.join(STACKS)}", fix="name one")
    return STACKS[name]


def _imagined(what_if: WhatIf) -> World:
    assert what_if.hosts is not None
    seats = imagine(what_if.hosts)
    return World(seats=seats, wire=assumed_link(), inside=bus_of(seats), asked=False)
