"""`bench-scaling`: every host alone, then all together, by the trainer's own steps, under torchrun.

    python -m gangline.worker bench-scaling '{"job": {...}, "config": {...}, "gang": {...}, "seconds": 180,
                                              "deadline_s": 500}'

config: of the whole model, as config.json has it; weights and samples are drawn at random, and nothing is downloaded,
learned or written. Three ways to train take turns, so that heat and other programs meet all of them:

    alone     the ranks of each host among themselves, all hosts at the same time, each as if it had the whole batch
    together  all ranks, with the shares of a run
    even      all ranks, with equal shares

A turn is as many steps as fit into its part of the time, and one at least. Rank 0 writes a JSON line for each turn.
Each rank ends by itself at its deadline, wherever it hangs.

What a machine's processors have done, and how much of it was this rank's.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gangline.errors import DoesNotFit, GanglineError, UsageError
from gangline.runs.decode import build as decoded
from gangline.runs.gang import Gang, split_whole
from gangline.runs.job import Job, ScheduleJob
from gangline.worker.agree import StepReport, gather
from gangline.worker.batch import Indices, SampleOrder
from gangline.worker.bench_collective import read_order, report, settle, timed
from gangline.worker.data.tokens import RepeatedSamples, Sample
from gangline.worker.json_lines import error_document
from gangline.worker.loop import Synchronous, TrainingRun
from gangline.worker.loss import CausalLoss
from gangline.worker.model import base_of, random_model, trainable
from gangline.worker.optimizer import update_once
from gangline.worker.pace import simulated_slowdown
from gangline.worker.precision import Precision, agree_precision
from gangline.worker.process_group import ProcessGroup, join, leave
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from gangline.worker.session import Session, assemble, make_strategy
from gangline.worker.strategy import Strategy, StrategySetup

POOL = 64
"""Different samples; more would only take memory."""


def random_samples(num_samples: int, *, length: int, vocabulary: int, seed: int = 0) -> RepeatedSamples:
    """Samples of `length` random tokens, trained on every token."""
    draw = np.random.default_rng(seed)
    positions = np.arange(length)
    texts = [draw.integers(0, vocabulary, length + 1) for _ in range(min(num_samples, POOL))]
    samples = [Sample(input_ids=text[:-1], targets=text[1:], position_ids=positions) for text in texts]
    return RepeatedSamples(samples, num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Warming(SampleOrder):
    """An order whose first steps have fewer samples: kernels, memory and connections need no whole step to be ready."""

    warm_steps: int
    warm_batch: int

    def samples(self, step: int) -> Indices:
        """Sample indices of 0-based step `step`."""
        samples = SampleOrder.samples(self, step)  # super() does not know the class that slots make anew
        return samples[: self.warm_batch] if step < self.warm_steps else samples


TURNS = (("alone", "together", "even"), *[("alone", "together")] * 4, ("even",), ("even",))
"""What is measured, in this order, as long as there is time; the first `LEAST` of them in any case."""
LEAST = 1
WARM, WARM_STEPS = 4, 2
"""Passes of each rank in a step that only warms up, and how many of these steps there are."""
UPDATES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSetup:
    """What all ways to train have in common."""

    session: Session
    """Of all ranks."""
    host: ProcessGroup
    """This rank's place among those of its host."""
    group: Any
    """Of these ranks."""
    alone: Strategy
    """Exchanges among them only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingVariant:
    """One way to train."""

    world: ProcessGroup
    stepper: Synchronous
    num_micro_batches: int
    """Of a step."""
    num_warm: int
    """Of a step that only warms up."""
    group: Any = None
    """Of the ranks that work together; None: of all."""


def scaling_main(argv: list[str]) -> int:
    """Entry point; does not return once the ranks have met."""
    order = read_order(argv)
    gang = decoded(Gang, order["gang"])
    world = join(dataclasses.replace(gang, collective_timeout_s=order["deadline_s"]))
    try:
        measure(order, world)
    except GanglineError as error:
        report(**error_document(error))
        leave(error.exit_code)
    leave(0)


def measure(order: dict[str, Any], world: ProcessGroup) -> None:
    """Build the model and take all turns. Raises DoesNotFit, and UsageError where a step takes too long."""
    try:
        ScalingBenchmark(build(order, world), seconds=order["seconds"]).run()
    except torch.cuda.OutOfMemoryError as error:
        raise DoesNotFit(
            f"{world.host}: the job does not fit on {torch.cuda.get_device_name(world.device)}",
            seen=str(error).split(". ", 1)[0],
            fix="take a smaller micro_batch, or set activation_checkpointing: true",
        ) from error


def build(order: dict[str, Any], world: ProcessGroup) -> ScalingSetup:
    """The model, drawn at random on the device, with one strategy for all ranks and one for those of a host."""
    job = world.gang.settings_of(world.rank, _measured_job(Job.from_json(order["job"])))
    precision = agree_precision(job, world.device, world_size=world.size)
    drawn = precision.parameters if job.method.kind == "full" else precision.compute
    model = random_model(job, order["config"], device=world.device, compute=precision.compute, drawn=drawn)
    loss = CausalLoss(model, compute=precision.compute)
    vocabulary = int(base_of(model).config.get_text_config().vocab_size)  # type: ignore[union-attr, operator]
    rows = random_samples(job.batch, length=job.data.sequence_length, vocabulary=vocabulary)
    groups = {host: dist.new_group(world.gang.ranks_on(host)) for host in world.gang.hosts}
    host, group = _own_host(world), groups[world.host]
    with standing_for_all(group):
        alone = assemble(loss, _strategy(job, host, precision), train_set=rows).strategy
    # gradients stay where the exchange of all ranks has them, instead of being made anew beside these
    alone.keeps_gradients = True
    session = assemble(loss, _strategy(job, world, precision), train_set=rows)
    return ScalingSetup(session=session, host=host, group=group, alone=alone)


def _strategy(job: Job, world: ProcessGroup, precision: Precision) -> Strategy:
    return make_strategy(StrategySetup(job=job, world=world, precision=precision))


class ScalingBenchmark:
    """All turns of one rank."""

    def __init__(self, setup: ScalingSetup, *, seconds: float) -> None:
        self._setup = setup
        self._world = setup.session.world
        self._until = time.monotonic() + seconds
        self._seconds = seconds
        self._turn_s = 0.0
        self._steps: dict[str, int] = {}
        self._lasts_s: dict[str, float] = {}

    def run(self) -> None:
        """Take all turns that fit into the time."""
        busy = Busy.now()
        self._tell_device()
        variants = self._variants()
        for number, turn in enumerate(TURNS):
            needed_s = sum(self._lasts_s[name] for name in turn)
            if number >= LEAST and self._slowest(float(needed_s > self._until - time.monotonic())):
                continue
            for name in turn:
                self._take(name, variants[name])
        report("busy", machine=boot_id(), **busy.until_now())

    def _variants(self) -> dict[str, TrainingVariant]:
        """All variants, warmed up, and how many steps of each make a turn."""
        job, gang = self._setup.session.job, self._world.gang
        whole = job.batch // job.micro_batch
        together = self._variant(gang)
        warm(together)  # the first one: how gradients are exchanged is settled for it, as in a run
        equal = _with_shares(gang, split_whole(whole, [1] * self._world.size))
        even = self._variant(dataclasses.replace(equal, moving_shares=False))
        unit_s = _unit_s(warm(even), even)
        self._turn_s = -self._slowest(time.monotonic() - self._until) / sum(map(len, TURNS))
        together_s, even_s = (
            max(share * each_s for share, each_s in zip(way.stepper.shares, unit_s, strict=True))
            for way in (together, even)
        )
        self._plan("together", together_s)
        self._plan("even", even_s)
        alone = self._alone(unit_s, whole)
        warm(alone)
        self._require_time(together_s, even_s)
        return {"alone": alone, "together": together, "even": even}

    def _alone(self, unit_s: Sequence[float], whole: int) -> TrainingVariant:
        """Of this host. A slow one would not get through the whole batch in the time: its steps are then shorter."""
        gang = self._setup.host.gang
        own = [each for each, rank in zip(unit_s, self._world.gang.ranks, strict=True) if rank.host == self._world.host]
        rate = sum(1 / each for each in own)
        fit = int(self._turn_s * rate) // len(own) * len(own)
        count = min(whole, max(len(own), fit))
        self._plan("alone", count / rate)
        return self._variant(_with_shares(gang, split_whole(count, [1] * len(own))), alone=True)

    def _variant(self, gang: Gang, *, alone: bool = False) -> TrainingVariant:
        """Steps in the order of `gang`'s shares: of all ranks, or of those of this host."""
        setup, session = self._setup, self._setup.session
        world = dataclasses.replace(setup.host if alone else self._world, gang=gang)
        count, size = sum(world.shares), session.job.micro_batch
        num_warm = min(count, WARM * sum(gang.pass_lengths(size)))
        order = Warming(
            num_samples=count * size,
            batch=count * size,
            micro_batch=size,
            seed=session.job.seed,
            warm_steps=WARM_STEPS,
            warm_batch=num_warm * size,
        )
        strategy = setup.alone if alone else session.strategy
        session = dataclasses.replace(session, world=world, order=order, strategy=strategy)
        outlets, progress = RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()
        stepper = Synchronous(TrainingRun(session, outlets, progress))
        return TrainingVariant(
            world=world,
            stepper=stepper,
            num_micro_batches=count,
            num_warm=num_warm,
            group=setup.group if alone else None,
        )

    def _plan(self, name: str, step_s: float) -> None:
        """How many steps make a turn, and how long the slowest host will take for its own. step_s: of a step here."""
        self._steps[name] = max(1, int(self._turn_s / step_s))
        self._lasts_s[name] = self._slowest(self._steps[name] * step_s)

    def _require_time(self, together_s: float, even_s: float) -> None:
        needed_s = sum(self._lasts_s[name] for turn in TURNS[:LEAST] for name in turn)
        late_s = self._slowest(needed_s - (self._until - time.monotonic()))
        if late_s > 0:
            raise UsageError(
                f"bench scaling cannot measure this job in {self._seconds:.0f} s",
                seen=f"a step of all hosts takes about {together_s:.3g} s, with an even split {even_s:.3g} s",
                fix=f"--seconds {math.ceil((self._seconds + late_s) * 1.1)}, or a smaller batch",
            )

    def _take(self, name: str, way: TrainingVariant) -> None:
        """One turn; what it took is told by rank 0."""
        world, device, exposed = self._world, self._world.device, []
        gather(0.0, world)
        with standing_for_all(way.group):
            settle(device)
            begun = time.perf_counter()
            for _ in range(self._steps[name]):
                step = way.stepper.advance()
                exposed.append(min(times.wait_s for times in step.times))
            settle(device)
            took_s = time.perf_counter() - begun
        update_s = 0.0
        if name == "alone":
            update_s = time_updates(dataclasses.replace(self._setup.session, strategy=self._setup.alone))
        figures = {
            "steps": self._steps[name],
            "seconds": took_s,
            "micro_batches": way.num_micro_batches,
            "update_s": update_s,
            "exposed_s": statistics.median(exposed),
        }
        ranks = {key: gather(float(value), world) for key, value in figures.items()}
        mine = world.gang.ranks_on(world.host) if name == "alone" else range(world.size)
        self._plan(name, max(ranks["seconds"][rank] for rank in mine) / figures["steps"])
        if world.is_head:
            report("turn", way=name, shares=list(way.stepper.shares), ranks=ranks)

    def _tell_device(self) -> None:
        """What this rank computes on."""
        session, world = self._setup.session, self._world
        device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        slowdown = simulated_slowdown()
        report(
            "device",
            device=f"{device}, slowed {slowdown:g} x (simulated)" if slowdown > 1 else device,
            torch=torch.__version__,
            dtype=session.precision.name,
            trained=sum(each.numel() for each in trainable(session.model).values()),
        )

    def _slowest(self, value: float) -> float:
        return max(gather(value, self._world))


@contextmanager
def standing_for_all(group: Any) -> Iterator[None]:
    """Have a group of ranks taken for all of them: whatever asks torch for the default group gets this one.

    None: all ranks are meant.
    """
    whole = dist.group.WORLD
    dist.group.WORLD = group or whole
    try:
        yield
    finally:
        dist.group.WORLD = whole


def warm(way: TrainingVariant) -> StepReport:
    """Steps that are not timed; the last report."""
    with standing_for_all(way.group):
        way.stepper.begin()
        return [way.stepper.advance() for _ in range(WARM_STEPS)][-1]


def time_updates(session: Session) -> float:
    """Seconds of what a step does once, whatever its number of micro-batches: norm, clipping, optimizer."""
    parameters = list(trainable(session.model).values())

    def once() -> None:
        update_once(session.optimizer, parameters, maximum=session.job.optimizer.clip_norm)
        session.optimizer.zero_grad(set_to_none=False)

    return statistics.median(timed(session.world.device, once) for _ in range(UPDATES))


def _measured_job(asked: Job) -> Job:
    """The job for ever, at a rate of 0: it learns nothing, and all weights stay equal."""
    return dataclasses.replace(
        asked,
        optimizer=dataclasses.replace(asked.optimizer, learning_rate=0.0),
        schedule=ScheduleJob(kind="constant"),
        epochs=None,
        steps=1 << 30,
    )


def _own_host(world: ProcessGroup) -> ProcessGroup:
    """This rank's place in a gang of the ranks of its host only."""
    numbers = world.gang.ranks_on(world.host)
    ranks = tuple(world.gang.ranks[rank] for rank in numbers)
    gang = dataclasses.replace(world.gang, ranks=ranks, moving_shares=len(ranks) > 1)
    return ProcessGroup(gang=gang, rank=numbers.index(world.rank), device=world.device)


def _with_shares(gang: Gang, shares: Sequence[int]) -> Gang:
    ranks = tuple(dataclasses.replace(rank, share=share) for rank, share in zip(gang.ranks, shares, strict=True))
    return dataclasses.replace(gang, ranks=ranks)


def _unit_s(step: StepReport, way: TrainingVariant) -> list[float]:
    """Seconds of a micro-batch on every rank, from a step that warmed up."""
    counts = split_whole(way.num_warm, way.stepper.shares)
    return [
        max(1e-6, (times.data_s + times.compute_s) / max(1, count))
        for times, count in zip(step.times, counts, strict=True)
    ]


STAT, BOOT = Path("/proc/stat"), Path("/proc/sys/kernel/random/boot_id")
USER, NICE, SYSTEM, IRQ, SOFTIRQ = 0, 1, 2, 5, 6
"""Columns of the first line of /proc/stat after its name (proc(5)), in ticks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds so far; of two moments the difference counts."""

    clock_s: float
    machine_s: float | None
    """Of all processors, whoever had them; None where the machine does not say."""
    own_s: float
    """Of this process, all its threads."""

    @staticmethod
    def now() -> Busy:
        """Until now."""
        return Busy(clock_s=time.monotonic(), machine_s=_machine_s(), own_s=time.process_time())

    def until_now(self) -> dict[str, float | None]:
        """Seconds that have passed since, and how many processors on average all programs, and this rank, had."""
        then = Busy.now()
        passed_s = max(1e-6, then.clock_s - self.clock_s)
        known = self.machine_s is not None and then.machine_s is not None
        machine_s = (then.machine_s or 0.0) - (self.machine_s or 0.0) if known else None
        return {
            "seconds": passed_s,
            "machine_cpus": None if machine_s is None else machine_s / passed_s,
            "own_cpus": (then.own_s - self.own_s) / passed_s,
            "num_cpus": os.cpu_count() or 1,
        }


def boot_id() -> str:
    """Names the running kernel: hosts that have the same are one machine. "" where nobody can say."""
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _machine_s() -> float | None:
    try:
        columns = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
        ticks = sum(int(columns[which]) for which in (USER, NICE, SYSTEM, IRQ, SOFTIRQ))
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")
