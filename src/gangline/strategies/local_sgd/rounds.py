"""Rounds of local SGD: every host trains apart for some steps of the run, then all move to the mean of where they got.

A round takes the samples of the next `inner_steps` steps, in the run's one order. Their micro-batches are split among
hosts in proportion to speed; a host takes AdamW steps of its own over what it got, as many as that makes, and keeps
AdamW's states to itself. Then hosts exchange what their weights have changed by (`train.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gangline.errors import RunFailed
from gangline.strategies.local_sgd.train import LATE, LocalSgd
from gangline.strategies.local_sgd.work_split import InnerBatch, RoundBalancer
from gangline.worker.agree import StepReport, agree
from gangline.worker.balance import SharesMoved
from gangline.worker.batch import Indices, joined
from gangline.worker.loop import Tally, TrainingRun, read
from gangline.worker.replicas import Replicas
from gangline.worker.spikes import Spikes

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Contribution:
    """One rank's part of a round. The figures of a host's inner steps are told by its first rank."""

    weight: float = 0.0
    """First rank: trained tokens of the inner steps that moved this host; 0: its change is left out."""
    lost: float = 0.0
    """First rank: 1 if this host had work, and nothing of it can be used."""
    inner_steps: float = 0.0
    """First rank: those that were tried."""
    skipped: float = 0.0
    """First rank: those of them that were skipped: their loss or gradient was not finite, or far off."""
    norm_sum: float = 0.0
    """First rank: gradient norms of those that were not skipped."""
    loss_sum: float = 0.0
    """Summed loss of this rank's micro-batches in inner steps that count."""
    micro_batches: float = 0.0
    tokens: float = 0.0
    """Of its micro-batches, padding included."""
    busy_s: float = 0.0
    """Reading and computing."""


def meet(own: Contribution, strategy: LocalSgd, *, waiting: Callable[[], None], limit_s: float) -> list[Contribution]:
    """The contributions of all ranks, by rank; collective. waiting, limit_s, errors: see `LocalSgd.meet`."""
    rows = strategy.meet(list(dataclasses.astuple(own)), waiting=waiting, limit_s=limit_s)
    return [Contribution(**dict(zip(_NAMES, row, strict=True))) for row in rows]


_NAMES = [field.name for field in dataclasses.fields(Contribution)]


def mean_loss(contributions: Sequence[Contribution]) -> float:
    """Loss per trained token over all that counts; not a number where nothing does."""
    tokens = math.fsum(each.weight for each in contributions)
    return math.fsum(each.loss_sum for each in contributions) / tokens if tokens else math.nan


def mean_norm(contributions: Sequence[Contribution]) -> float:
    """Mean gradient norm of the inner steps that count."""
    steps = math.fsum(each.inner_steps - each.skipped for each in contributions)
    return math.fsum(each.norm_sum for each in contributions) / steps if steps else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One of the run's micro-batches."""

    step: int
    """0-based step of the run that its samples stand for."""
    index: int
    """Its place in that step."""
    samples: Indices


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What is done before the next exchange."""

    steps: range
    """0-based steps of the run."""
    micro_batches: tuple[MicroBatch, ...]
    work_split: list[list[InnerBatch]]
    """Inner steps of every host."""

    @property
    def samples(self) -> Indices:
        """All of them."""
        return np.concatenate([each.samples for each in self.micro_batches])


class Rounds:
    """Moves a run on by one round at a time."""

    def __init__(self, run: TrainingRun, strategy: LocalSgd) -> None:
        self._run = run
        self._session = session = run.session
        self._strategy = strategy
        self._out = run.out
        self._progress = run.progress
        self._inner = Inner(run, strategy)
        per_step = session.job.batch // session.job.micro_batch
        self._balancer = RoundBalancer(session.world.gang, per_step=per_step)
        self._replicas = Replicas(session, run.out, exact=True)
        self._round_s: float | None = None
        """Of the last round, until all had come."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank, as nearly as whole ones go."""
        return self._balancer.shares

    def begin(self) -> None:
        """Remember the weights that all hosts begin with; where shares may move, find out how fast every rank is."""
        self._replicas.begin(step=self._progress.step)
        self._strategy.outer.anchor()
        if self._balancer.moving:
            self._out.enter("compute", step=self._progress.step + 1)
            seconds = self._run.pace.probe(self._session.order.micro_batches(self._progress.step))
            self._learn([Contribution(busy_s=each, tokens=1, micro_batches=1) for each in seconds], cause="start")

    def advance(self) -> StepReport:
        """One round: all that the exchange needs is agreed before it, all that the loop needs after it."""
        started = time.perf_counter()
        this = self._next()
        host = self._session.world.gang.hosts.index(self._session.world.host)
        tally = self._inner.run(this.micro_batches, this.work_split[host])
        ready = time.perf_counter()
        self._out.enter("exchange", step=this.steps[-1] + 1)
        limit_s = self._limit_s(this, ready - started)
        told = meet(tally.told, self._strategy, waiting=self._beat, limit_s=limit_s)
        self._round_s = time.perf_counter() - started
        self._strategy.outer.exchange(self._by_host(told), waiting=self._beat)
        if tally.broken:
            self._inner.forget()
        wait_s = tally.inside_s + time.perf_counter() - ready
        own = self._run.report(
            tally,
            compute_s=max(0.0, tally.told.busy_s - tally.data_s),
            wait_s=wait_s,
            num_steps=len(this.steps),
            loss_sum=tally.told.loss_sum,
            bad=int(tally.told.lost),
        )
        report = agree(own, self._session.world)
        self._note_skipped(this, tally, told)
        self._progress.step = this.steps.stop
        self._record(this, report, told, time.perf_counter() - started)
        self._replicas.look(step=self._progress.step)
        self._stop_if_hopeless(this, told)
        self._learn(told, cause="speeds")
        return report

    def verify_replicas(self) -> None:
        """Make sure that all ranks hold the same weights; see `Replicas.verify_replicas`."""
        self._replicas.verify_replicas(step=self._progress.step)

    def _limit_s(self, this: _Round, own_s: float) -> float:
        """How long to wait for other hosts: a few rounds, or what any step may take. All end at about the same time.

        In a first round whose shares somebody wrote down, the most that a host has to do stands for the round.
        """
        world = self._session.world
        if self._round_s is not None:
            expected_s = max(own_s, self._round_s)
        else:
            counts = [sum(len(batch.numbers) for batch in batches) for batches in this.work_split]
            own = counts[world.gang.hosts.index(world.host)]
            expected_s = own_s * (1 if self._balancer.moving else max(counts) / own) if own else math.inf
        return max(world.gang.collective_timeout_s, LATE * expected_s)

    def _beat(self) -> None:
        if self._out.phase is not None:
            self._out.phase.beat()

    def _next(self) -> _Round:
        session, first = self._session, self._progress.step
        steps = range(first, min(session.total_steps, first + session.job.strategy.inner_steps))
        micro_batches = tuple(
            MicroBatch(step=step, index=index, samples=samples)
            for step in steps
            for index, samples in enumerate(session.order.micro_batches(step))
        )
        return _Round(
            steps=steps, micro_batches=micro_batches, work_split=self._balancer.split_work(len(micro_batches))
        )

    def _by_host(self, told: Sequence[Contribution]) -> list[float]:
        gang = self._session.world.gang
        weights = dict.fromkeys(gang.hosts, 0.0)
        for rank, each in zip(gang.ranks, told, strict=True):
            weights[rank.host] += each.weight
        return list(weights.values())

    def _note_skipped(self, this: _Round, tally: _RoundTally, told: Sequence[Contribution]) -> None:
        """Count and name the inner steps that were skipped, and the hosts whose change was left out."""
        hosts = self._session.world.gang.hosts
        if any(each.skipped for each in told):
            flags = [0.0] * max(len(batches) for batches in this.work_split)
            for number in tally.skipped:
                flags[number] = 1.0
            rows = self._strategy.meet(flags, limit_s=self._session.world.gang.collective_timeout_s)
            leaders = self._strategy.outer.hosts.leaders
            for host, batches, leader in zip(hosts, this.work_split, leaders, strict=True):
                for number, batch in enumerate(batches):
                    if rows[leader][number]:
                        self._note_inner_step(this, host, batch)
        for rank, each in zip(self._session.world.gang.ranks, told, strict=True):
            if each.lost:
                log.warning("round of steps %d to %d: %s is left out", this.steps[0] + 1, this.steps[-1] + 1, rank.host)
                what = f"the round of steps {this.steps[0] + 1} to {this.steps[-1] + 1} went on without its change"
                self._out.event("host-left-out", step=this.steps[-1] + 1, host=rank.host, what=what)

    def _note_inner_step(self, this: _Round, host: str, batch: InnerBatch) -> None:
        together = [this.micro_batches[number] for number in batch.numbers]
        names = [int(sample) for each in together for sample in each.samples]
        self._progress.skipped += 1
        log.warning("an inner step of %s at step %d skipped: samples %s", host, together[0].step + 1, names)
        self._out.event("step-skipped", step=together[0].step + 1, host=host, loss=None, samples=names)

    def _stop_if_hopeless(self, this: _Round, told: Sequence[Contribution]) -> None:
        """A host that is left out again and again would take its part of the data with it, unheard."""
        progress, job = self._progress, self._session.job
        lost = [rank.host for rank, each in zip(self._session.world.gang.ranks, told, strict=True) if each.lost]
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if lost else 0
        if progress.skipped_in_a_row > job.max_skipped_steps:
            raise RunFailed(
                f"in {progress.skipped_in_a_row} rounds in a row, up to step {this.steps[-1] + 1}, a host had no inner "
                "step with a finite loss and gradient, or weights that were no numbers after it",
                seen=f"expected finite numbers; in the last round from {', '.join(lost)}",
                fix="look at the samples of these steps (events.jsonl lists them), lower optimizer.learning_rate or "
                "strategy.outer.learning_rate, or set precision: fp32; what was saved before is untouched",
            )

    def _learn(self, told: Sequence[Contribution], *, cause: str) -> None:
        """Split the next round by these times. All ranks do the same arithmetic on the same numbers."""
        before = self._balancer.shares
        shares = self._balancer.learn([each.busy_s for each in told], [each.tokens for each in told])
        if shares is None and cause == "speeds":
            return
        shares = shares or before
        each_s = [each.busy_s / each.micro_batches if each.micro_batches else None for each in told]
        moved = SharesMoved(before=before, after=shares, micro_batch_s=tuple(each_s), gain=0.0)
        self._run.announce(moved, cause=cause)

    def _record(self, this: _Round, report: StepReport, told: Sequence[Contribution], round_s: float) -> None:
        self._run.record(
            report,
            samples=this.samples,
            seconds=round_s,
            steps=this.steps,
            shares=[int(each.micro_batches) for each in told],
            loss=mean_loss(told),
            grad_norm=mean_norm(told),
            skipped=not any(each.weight for each in told),
            round_steps=len(this.steps),
            inner_steps=self._inner_steps(told),
            sent_bytes=self._strategy.outer.sent_bytes,
        )

    def _inner_steps(self, told: Sequence[Contribution]) -> dict[str, int]:
        """Of every host."""
        ranks = self._session.world.gang.ranks
        firsts = self._strategy.outer.hosts.leaders
        return {ranks[rank].host: int(told[rank].inner_steps) for rank in firsts}


@dataclass(slots=True, kw_only=True)
class _RoundTally(Tally):
    """A round of this rank while it runs."""

    told: Contribution
    skipped: list[int]
    """Inner steps that were skipped, by number."""
    inside_s: float = 0.0
    """Waiting for the other ranks of this host."""
    searching: bool = False
    """Whether a step was skipped only to find a loss scale."""
    broken: bool = False
    """Whether this host's weights are no numbers any more."""


class Inner:
    """This rank's part in its host's inner steps. What a host skips is decided inside it; other hosts hear later."""

    def __init__(self, run: TrainingRun, strategy: LocalSgd) -> None:
        self._run = run
        self._session = session = run.session
        self._strategy = strategy
        self._out = run.out
        world = session.world
        hosts = [rank.host for rank in world.gang.ranks]
        self._pass_length = world.gang.pass_lengths(session.order.micro_batch)[world.rank]
        self._place = world.rank - hosts.index(world.host)
        """Of this rank among those of its host."""
        self._spikes = Spikes(warmup_steps=session.job.schedule.warmup_steps)
        """Of this rank's part of inner steps; where one of a host's ranks sees one, none of them takes the step."""

    def run(self, micro_batches: Sequence[MicroBatch], batches: Sequence[InnerBatch]) -> _RoundTally:
        """All inner steps of this host in a round. micro_batches: of the whole round, for all hosts."""
        zero = torch.zeros((), dtype=torch.float64, device=self._session.world.device)
        tally = _RoundTally(loss_sum=zero, told=Contribution(), skipped=[])
        label_tokens = 0
        for number, batch in enumerate(batches):
            started, inside_before_s = time.perf_counter(), tally.inside_s
            counted = self._step(number, [micro_batches[each] for each in batch.numbers], batch, tally)
            label_tokens += counted
            if batch.by_rank[self._place]:  # what it takes to join only would make this rank look slow
                tally.told.busy_s += time.perf_counter() - started - (tally.inside_s - inside_before_s)
        tally.told.micro_batches, tally.told.tokens = tally.micro_batches, tally.tokens
        tally.broken = not self._strategy.all_agree(self._is_finite())
        self._judge(tally, label_tokens, num_steps=len(batches))
        return tally

    def forget(self) -> None:
        """Begin anew with AdamW's states, after weights that were no numbers."""
        for state in self._session.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def _step(self, number: int, together: Sequence[MicroBatch], batch: InnerBatch, tally: _RoundTally) -> int:
        """One inner step; the trained tokens that it moved this host by, 0 if it was skipped."""
        session, told = self._session, tally.told
        started, data_before_s = time.perf_counter(), tally.data_s
        label_tokens = sum(self._run.label_tokens(each.samples) for each in together)
        begin = sum(len(numbers) for numbers in batch.by_rank[: self._place])
        mine = together[begin : begin + len(batch.by_rank[self._place])]
        on_device = self._accumulate(mine, together[0].step, label_tokens, tally)
        loss_sum, norm = read(on_device, self._run.gradient_norm())
        self._session.world.require_sums()
        is_finite = math.isfinite(loss_sum) and bool(torch.isfinite(norm))
        is_spike = is_finite and self._is_spike(mine, loss_sum, float(norm))
        sound = self._strategy.all_agree(is_finite and not is_spike)
        waited_s = self._strategy.waited_s()
        tally.inside_s += waited_s
        self._run.pace.took(max(0.0, time.perf_counter() - started - (tally.data_s - data_before_s) - waited_s))
        told.inner_steps += self._is_first
        if sound:
            told.loss_sum += loss_sum
            told.norm_sum += float(norm) * self._is_first
        else:
            told.skipped += self._is_first
            tally.skipped.append(number)
            scale_is_high = session.scaler is not None and session.scaler.get_scale() >= 1
            tally.searching |= self._strategy.all_agree(math.isfinite(loss_sum) and scale_is_high and not is_spike)
        self._run.update(norm, step=together[0].step, skipped=not sound)
        return label_tokens if sound else 0

    def _is_spike(self, mine: Sequence[MicroBatch], loss_sum: float, norm: float) -> bool:
        """Whether this rank's micro-batches stand out; see `Spikes`."""
        if not mine:
            return False
        tokens = sum(self._run.label_tokens(each.samples) for each in mine)
        return self._spikes.judge(loss_sum / max(1, tokens), norm, step=mine[0].step) is not None

    def _accumulate(self, mine: Sequence[MicroBatch], step: int, label_tokens: int, tally: _RoundTally) -> torch.Tensor:
        """Gradients of this rank's micro-batches, summed over the host at its last pass; their summed loss.

        step: of the inner step, to which dropout by sample belongs: a pass may join micro-batches of several of the
        run's.
        """
        scale = self._run.loss_scale(label_tokens)
        loss_sum = torch.zeros_like(tally.loss_sum)
        for together in joined(range(len(mine)), self._pass_length):
            first, samples = mine[together.start], np.concatenate([mine[place].samples for place in together])
            batch = self._run.micro_batch(samples, step=first.step, index=first.index, phase="compute", tally=tally)
            with self._run.draws(samples, step=step):
                loss = self._strategy.forward_backward(batch, scale=scale, last=together.stop == len(mine))
            loss_sum += loss.double()
            tally.micro_batches += len(together)
        if not mine:
            self._out.enter("compute", step=step + 1)
            self._strategy.join(last=True)
        return loss_sum

    def _judge(self, tally: _RoundTally, label_tokens: int, *, num_steps: int) -> None:
        """What the change of this host counts for."""
        if tally.broken:
            label_tokens, tally.told.loss_sum = 0, 0.0
        tally.told.weight = float(label_tokens * self._is_first)
        unmoved = 0 < num_steps == len(tally.skipped)
        tally.told.lost = float((tally.broken or (unmoved and not tally.searching)) and self._is_first)

    def _is_finite(self) -> bool:
        """Of all trained weights; their extremes are looked at, for NaN is both."""
        extremes = [torch.stack(torch.aminmax(each.detach())) for each in self._run.parameters]
        return bool(torch.isfinite(torch.stack(extremes).float()).all())

    @property
    def _is_first(self) -> bool:
        return self._place == 0
