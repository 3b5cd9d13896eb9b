"""Rounds of local SGD: every host trains apart for some steps of the run, then all move to the mean of where they got.

A round takes the samples of the next `inner_steps` steps, in the run's one order. Their micro-batches are dealt to
hosts in proportion to speed; a host takes AdamW steps of its own over what it got, as many as that makes, and keeps
AdamW's states to itself. Then hosts exchange what their weights have changed by (`strategy/outer.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gangline.errors import RunFailed
from gangline.worker.agree import RankTimes, StepReport, agree
from gangline.worker.contribution import Contribution, mean_loss, mean_norm, meet
from gangline.worker.dealer import Moved
from gangline.worker.flops import session_utilisation
from gangline.worker.inner import Inner, MicroBatch, Tally
from gangline.worker.keep import Keeper, Outlets
from gangline.worker.memory import memory_bytes
from gangline.worker.order import Indices
from gangline.worker.pace import Pace
from gangline.worker.progress import Progress
from gangline.worker.replicas import Replicas
from gangline.worker.round_deal import InnerBatch, RoundDealer
from gangline.worker.schedule import learning_rate
from gangline.worker.session import Session
from gangline.worker.strategy.local_sgd import LATE, LocalSgd

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """What is done before the next exchange."""

    steps: range
    """0-based steps of the run."""
    micro_batches: tuple[MicroBatch, ...]
    dealt: list[list[InnerBatch]]
    """Inner steps of every host."""

    @property
    def samples(self) -> Indices:
        """All of them."""
        return np.concatenate([each.samples for each in self.micro_batches])


class Rounds:
    """Moves a run on by one round at a time."""

    def __init__(
        self, session: Session, strategy: LocalSgd, outlets: Outlets, progress: Progress, *, keeper: Keeper
    ) -> None:
        self._session = session
        self._strategy = strategy
        self._out = outlets
        self._progress = progress
        self._keeper = keeper
        self._pace = Pace(session)
        self._inner = Inner(session, strategy, outlets, self._pace)
        per_step = session.job.batch // session.job.micro_batch
        self._dealer = RoundDealer(session.world.gang, per_step=per_step)
        self._replicas = Replicas(session, outlets, exact=True)
        self._round_s: float | None = None
        """Of the last round, until all had come."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank, as nearly as whole ones go."""
        return self._dealer.shares

    def begin(self) -> None:
        """Remember the weights that all hosts begin with; where shares may move, find out how fast every rank is."""
        self._replicas.begin(step=self._progress.step)
        self._strategy.outer.anchor()
        if self._dealer.moving:
            self._out.enter("compute", step=self._progress.step + 1)
            seconds = self._pace.probe(self._session.order.micro_batches(self._progress.step))
            self._learn([Contribution(busy_s=each, tokens=1, micro_batches=1) for each in seconds], cause="start")

    def advance(self) -> StepReport:
        """One round: all that the exchange needs is agreed before it, all that the loop needs after it."""
        started = time.perf_counter()
        this = self._next()
        host = self._session.world.gang.hosts.index(self._session.world.host)
        tally = self._inner.run(this.micro_batches, this.dealt[host])
        ready = time.perf_counter()
        self._out.enter("exchange", step=this.steps[-1] + 1)
        limit_s = self._limit_s(this, ready - started)
        told = meet(tally.told, self._strategy, waiting=self._beat, limit_s=limit_s)
        self._round_s = time.perf_counter() - started
        self._strategy.outer.exchange(self._by_host(told), waiting=self._beat)
        if tally.broken:
            self._inner.forget()
        wait_s = tally.inside_s + time.perf_counter() - ready
        report = agree(self._report(tally, wait_s, len(this.steps)), self._session.world)
        self._note_skipped(this, tally, told)
        self._progress.step = this.steps.stop
        self._record(this, report, told, time.perf_counter() - started)
        self._replicas.look(step=self._progress.step)
        self._stop_if_hopeless(this, told)
        self._learn(told, cause="speeds")
        return report

    def vouch(self) -> None:
        """Make sure that all ranks hold the same weights; see `Replicas.vouch`."""
        self._replicas.vouch(step=self._progress.step)

    def _limit_s(self, this: _Round, own_s: float) -> float:
        """How long to wait for other hosts, which are dealt to end together: a few rounds, or what any step may take.

        In a first round whose shares somebody wrote down, the most that a host has to do stands for the round.
        """
        world = self._session.world
        if self._round_s is not None:
            expected_s = max(own_s, self._round_s)
        else:
            counts = [sum(len(batch.numbers) for batch in batches) for batches in this.dealt]
            own = counts[world.gang.hosts.index(world.host)]
            expected_s = own_s * (1 if self._dealer.moving else max(counts) / own) if own else math.inf
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
        return _Round(steps=steps, micro_batches=micro_batches, dealt=self._dealer.deal(len(micro_batches)))

    def _by_host(self, told: Sequence[Contribution]) -> list[float]:
        gang = self._session.world.gang
        weights = dict.fromkeys(gang.hosts, 0.0)
        for rank, each in zip(gang.ranks, told, strict=True):
            weights[rank.host] += each.weight
        return list(weights.values())

    def _report(self, tally: Tally, wait_s: float, num_steps: int) -> StepReport:
        """Times are per step of the run, so that they compare with a plan's."""
        session, keeper = self._session, self._keeper
        times = RankTimes(
            data_s=tally.data_s / num_steps,
            compute_s=max(0.0, tally.told.busy_s - tally.data_s) / num_steps,
            wait_s=wait_s / num_steps,
            memory_bytes=memory_bytes(session.world.device),
        )
        return StepReport(
            loss_sum=tally.told.loss_sum,
            bad=int(tally.told.lost),
            stop=int(self._out.stop.raised),
            save=int(session.world.is_head and keeper.minutes_are_up),
            save_failed=int(keeper.failed),
            slow_saves=int(keeper.is_slow),
            saving=int(keeper.is_saving),
            times=(times,),
        )

    def _note_skipped(self, this: _Round, tally: Tally, told: Sequence[Contribution]) -> None:
        """Count and name the inner steps that were skipped, and the hosts whose change was left out."""
        hosts = self._session.world.gang.hosts
        if any(each.skipped for each in told):
            flags = [0.0] * max(len(batches) for batches in this.dealt)
            for number in tally.skipped:
                flags[number] = 1.0
            rows = self._strategy.meet(flags, limit_s=self._session.world.gang.collective_timeout_s)
            leaders = self._strategy.outer.hosts.leaders
            for host, batches, leader in zip(hosts, this.dealt, leaders, strict=True):
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
        """Deal the next round by these times. All ranks do the same arithmetic on the same numbers."""
        before = self._dealer.shares
        shares = self._dealer.learn([each.busy_s for each in told], [each.tokens for each in told])
        if shares is None and cause == "speeds":
            return
        shares = shares or before
        each_s = [each.busy_s / each.micro_batches if each.micro_batches else None for each in told]
        moved = Moved(before=before, after=shares, micro_batch_s=tuple(each_s), gain=0.0)
        hosts = [rank.host for rank in self._session.world.gang.ranks]
        self._out.tell_shares(moved, hosts, step=self._progress.step, cause=cause)

    def _record(self, this: _Round, report: StepReport, told: Sequence[Contribution], round_s: float) -> None:
        if self._out.recorder is None:
            return
        session, num_steps = self._session, len(this.steps)
        samples = this.samples
        lengths = session.train_set.lengths[samples]
        last, job = this.steps[-1], session.job
        self._out.recorder.step(
            report,
            step=self._progress.step,
            shares=[int(each.micro_batches) for each in told],
            steps=session.total_steps,
            epoch=round(self._progress.step / session.order.steps_per_epoch, 4),
            loss=mean_loss(told),
            learning_rate=learning_rate(
                last, session.total_steps, peak=job.optimizer.learning_rate, schedule=job.schedule
            ),
            grad_norm=mean_norm(told),
            samples=len(samples),
            tokens=int(lengths.sum()),
            label_tokens=int(session.train_set.label_counts[samples].sum()),
            step_s=round(round_s / num_steps, 6),
            tokens_per_s=round(float(lengths.sum()) / round_s, 2),
            mfu=session_utilisation(session, lengths, round_s),
            skipped=not any(each.weight for each in told),
            round_steps=num_steps,
            inner_steps=self._inner_steps(told),
            sent_bytes=self._strategy.outer.sent_bytes,
        )

    def _inner_steps(self, told: Sequence[Contribution]) -> dict[str, int]:
        """Of every host."""
        ranks = self._session.world.gang.ranks
        firsts = self._strategy.outer.hosts.leaders
        return {ranks[rank].host: int(told[rank].inner_steps) for rank in firsts}
