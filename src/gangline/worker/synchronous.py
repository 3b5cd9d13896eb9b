"""Steps of all ranks together: each does its part of the micro-batches; the sum of gradients moves every replica."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from dataclasses import dataclass

import torch

from gangline.errors import BadState, RunFailed
from gangline.worker.agree import RankTimes, StepReport, agree
from gangline.worker.batch import pick
from gangline.worker.dealer import Dealer, Moved, padded_tokens
from gangline.worker.draws import begin_draws
from gangline.worker.exchange import settle_exchange
from gangline.worker.flops import session_utilisation
from gangline.worker.foreseen import Foreseen
from gangline.worker.keep import Keeper, Outlets
from gangline.worker.memory import memory_bytes
from gangline.worker.model import trainable
from gangline.worker.optimizer import clip, norm_of, set_learning_rate
from gangline.worker.order import Indices, micro_batch_seed
from gangline.worker.pace import Pace
from gangline.worker.progress import Progress
from gangline.worker.replicas import Replicas
from gangline.worker.schedule import learning_rate
from gangline.worker.session import Session
from gangline.worker.spikes import Spike, Spikes
from gangline.worker.stragglers import Stragglers
from gangline.worker.strategy.pipeline import Pipeline

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tally:
    """One step of this rank while it runs."""

    loss_sum: torch.Tensor
    data_s: float = 0.0
    micro_batches: int = 0


class Synchronous:
    """Moves a run on by one optimizer step at a time."""

    def __init__(self, session: Session, outlets: Outlets, progress: Progress, *, keeper: Keeper) -> None:
        self._session = session
        self._out = outlets
        self._progress = progress
        self._keeper = keeper
        self._parameters = list(trainable(session.model).values())
        gang = session.world.gang
        self._dealer = Dealer(session.world.shares, moving=gang.moving_shares, crews=gang.crews)
        if isinstance(session.strategy, Pipeline):
            session.strategy.beat = outlets.beat
        self._pace = Pace(session)
        self._stragglers = Stragglers(session.world, outlets)
        self._replicas = Replicas(session, outlets)
        self._foreseen = Foreseen(session.world, outlets)
        self._spikes = Spikes(warmup_steps=session.job.schedule.warmup_steps)

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank."""
        return self._dealer.shares

    def begin(self) -> None:
        """Look at the links, and, where shares may move, at every rank's speed.

        Before that, at what they begin with. Checkpoints hold nothing of it but the size of buckets that came of it.
        """
        self._replicas.begin(step=self._progress.step)
        self._stragglers.begin()
        self._out.enter("compute", step=self._progress.step + 1)
        micro_batches = self._session.order.micro_batches(self._progress.step)
        settled = settle_exchange(self._session, self._progress, self._typical(micro_batches))
        if settled is not None:
            self._out.event("exchange", step=self._progress.step, **settled)
        if self._dealer.moving:
            self._tell(self._dealer.begin(self._pace.probe(micro_batches)), cause="start")

    def _typical(self, micro_batches: list[Indices]) -> Indices:
        """The one of middling length."""
        tokens = padded_tokens(micro_batches, self._session.train_set.lengths)
        return micro_batches[sorted(range(len(tokens)), key=tokens.__getitem__)[len(tokens) // 2]]

    def advance(self) -> StepReport:
        """One optimizer step."""
        session, progress = self._session, self._progress
        started = time.perf_counter()
        step, samples = progress.step, session.order.samples(progress.step)
        micro_batches = session.order.micro_batches(step)
        tally = self.accumulate(step)
        norm = self._gradient_norm()
        report = agree(self._report(tally, norm, started), session.world)
        _require_all(report, len(micro_batches), step=step + 1)
        rate = learning_rate(
            step, session.total_steps, peak=session.job.optimizer.learning_rate, schedule=session.job.schedule
        )
        spike = self._spike(report, samples)
        skipped = bool(report.bad) or spike is not None
        if skipped:
            self._skip(report, spike, samples)
        self._update(norm, rate, skipped=skipped)
        progress.step += 1
        self._record(report, rate, samples=samples, skipped=skipped, step_s=time.perf_counter() - started)
        self._replicas.look(step=progress.step)
        self._foreseen.look(report.times, step=progress.step)
        self._watch(report, micro_batches)
        self._learn(report, micro_batches)
        return report

    def vouch(self) -> None:
        """Make sure that all ranks hold the same weights; see `Replicas.vouch`."""
        self._replicas.vouch(step=self._progress.step)

    def accumulate(self, step: int) -> _Tally:
        """Gradients of this rank's micro-batches of a step, exchanged with the others' at its last one."""
        session, world = self._session, self._session.world
        micro_batches = session.order.micro_batches(step)
        label_tokens = int(session.train_set.label_counts[session.order.samples(step)].sum())
        dealt = self._dealer.deal(len(micro_batches))
        mine = dealt[world.rank]
        empty = max(map(len, dealt)) - len(mine) if session.strategy.in_step else int(not mine)
        tally = _Tally(torch.zeros((), dtype=torch.float64, device=world.device))
        scale = (session.scaler.get_scale() if session.scaler else 1.0) / max(1, label_tokens)
        for index in mine:
            self._enter("data")
            started = time.perf_counter()
            batch = pick(micro_batches[index], session.train_set)
            # not the copy to the device: it may wait for what the device still computes
            tally.data_s += time.perf_counter() - started
            batch = batch.to(world.device)
            last = index == mine[-1] and not empty
            self._enter("exchange" if last or session.strategy.in_step else "compute")
            self._pace.simulate_slowness(batch)
            begin_draws(micro_batch_seed(session.job.seed, step, index), world.device)
            tally.loss_sum += session.strategy.forward_backward(batch, scale=scale, last=last).double()
            tally.micro_batches += session.strategy.has_loss
        for number in range(empty):
            self._enter("exchange")
            session.strategy.join(last=number == empty - 1)
        return tally

    def _gradient_norm(self) -> torch.Tensor:
        if self._session.scaler is not None:
            self._session.scaler.unscale_(self._session.optimizer)
        strategy = self._session.strategy
        return norm_of(strategy.gradients(self._parameters), parts=strategy.parts)

    def _report(self, tally: _Tally, norm: torch.Tensor, started: float) -> StepReport:
        session, keeper = self._session, self._keeper
        loss_sum = float(tally.loss_sum.item())
        wait_s = session.strategy.waited_s()
        compute_s = max(0.0, time.perf_counter() - started - tally.data_s - wait_s)
        self._pace.took(compute_s)
        return StepReport(
            loss_sum=loss_sum,
            bad=int(not (math.isfinite(loss_sum) and bool(torch.isfinite(norm)))),
            stop=int(self._out.stop.raised),
            save=int(session.world.is_head and keeper.minutes_are_up),
            save_failed=int(keeper.failed),
            slow_saves=int(keeper.is_slow),
            saving=int(keeper.is_saving),
            look=int(self._stragglers.wants_look),
            micro_batches=tally.micro_batches,
            norm=float(norm) if session.world.is_head else 0.0,
            times=(
                RankTimes(
                    data_s=tally.data_s,
                    compute_s=compute_s,
                    wait_s=wait_s,
                    memory_bytes=memory_bytes(session.world.device),
                ),
            ),
        )

    def _update(self, norm: torch.Tensor, rate: float, *, skipped: bool) -> None:
        session = self._session
        self._enter("update")
        if not skipped:
            self._progress.skipped_in_a_row = 0
            if not session.strategy.clips:
                clip(self._parameters, norm, maximum=session.job.optimizer.clip_norm)
            set_learning_rate(session.optimizer, rate)
            if session.scaler is None:
                session.optimizer.step()
            else:
                session.scaler.step(session.optimizer)
        if session.scaler is not None:
            session.scaler.update()
        session.optimizer.zero_grad(set_to_none=not session.strategy.keeps_gradients)

    def _spike(self, report: StepReport, samples: Indices) -> Spike | None:
        """Whether the loss is finite and far off. All ranks judge the same numbers."""
        if report.bad:
            return None
        return self._spikes.judge(self._loss(report, samples), report.norm, step=self._progress.step)

    def _loss(self, report: StepReport, samples: Indices) -> float:
        """Per trained token."""
        return report.loss_sum / max(1, int(self._session.train_set.label_counts[samples].sum()))

    def _skip(self, report: StepReport, spike: Spike | None, samples: Indices) -> None:
        """The weights will stay as they are. All ranks know of it from the same report, so all of them skip."""
        progress, scaler = self._progress, self._session.scaler
        progress.skipped += 1
        finite = math.isfinite(report.loss_sum) and spike is None
        searching_scale = scaler is not None and finite and scaler.get_scale() >= 1
        progress.skipped_in_a_row += 0 if searching_scale else 1
        names = [int(sample) for sample in samples]
        what = f"summed loss {report.loss_sum}, gradient norm {report.norm:.6g}" if spike is None else spike.words
        log.warning("step %d skipped: %s, samples %s", progress.step + 1, what, names)
        if spike is None:
            figures = {"loss": report.loss_sum, "grad_norm": report.norm}
            self._out.event("step-skipped", step=progress.step + 1, **figures, samples=names)
        else:
            self._out.event("spike", step=progress.step + 1, **dataclasses.asdict(spike), what=what, samples=names)
        if progress.skipped_in_a_row > self._session.job.max_skipped_steps:
            self.vouch()  # one replica that is damaged spoils every step of all: then that is the cause
            raise _hopeless(progress, what, names)

    def _watch(self, report: StepReport, micro_batches: list[Indices]) -> None:
        """Look for stragglers in steps that nothing else disturbs: no evaluation before it, no save; collective."""
        progress = self._progress
        if isinstance(self._session.strategy, Pipeline):
            return  # a stage that is slow makes all of them wait: the plan's layers tell who should take how long
        if report.look:
            self._stragglers.look(step=progress.step)
        elif not report.saving and progress.step - 1 not in {self._keeper.saved_step, progress.evaluated_step}:
            tokens = padded_tokens(micro_batches, self._session.train_set.lengths)
            dealt = self._dealer.deal(len(micro_batches))
            self._stragglers.learn(report.times, dealt, tokens, step=progress.step)

    def _learn(self, report: StepReport, micro_batches: list[Indices]) -> None:
        """Move shares where the ranks' speeds have changed. All of them do the same arithmetic on the same report."""
        moved = self._dealer.learn(report.times, padded_tokens(micro_batches, self._session.train_set.lengths))
        if moved is not None:
            self._tell(moved, cause="speeds")

    def _tell(self, moved: Moved, *, cause: str) -> None:
        hosts = [rank.host for rank in self._session.world.gang.ranks]
        self._out.tell_shares(moved, hosts, step=self._progress.step, cause=cause)

    def _record(self, report: StepReport, rate: float, *, samples: Indices, skipped: bool, step_s: float) -> None:
        if self._out.recorder is None:
            return
        session = self._session
        lengths = session.train_set.lengths[samples]
        label_tokens = int(session.train_set.label_counts[samples].sum())
        num_micro_batches = -(-len(samples) // session.job.micro_batch)
        self._out.recorder.step(
            report,
            step=self._progress.step,
            shares=self._dealer.counts(num_micro_batches),
            steps=session.total_steps,
            epoch=round(self._progress.step / session.order.steps_per_epoch, 4),
            loss=self._loss(report, samples),
            learning_rate=rate,
            grad_norm=report.norm,
            samples=len(samples),
            tokens=int(lengths.sum()),
            label_tokens=label_tokens,
            step_s=round(step_s, 6),
            tokens_per_s=round(float(lengths.sum()) / step_s, 2),
            mfu=session_utilisation(session, lengths, step_s),
            skipped=skipped,
        )

    def _enter(self, phase: str) -> None:
        self._out.enter(phase, step=self._progress.step + 1)


def _require_all(report: StepReport, num_micro_batches: int, *, step: int) -> None:
    """Every rank deals by its own books; if they ever differed, samples would be lost or counted twice, unseen."""
    if report.micro_batches != num_micro_batches:
        raise RunFailed(
            f"ranks do not agree on who does what in step {step}",
            seen=f"expected {num_micro_batches} micro-batches from all of them together, saw {report.micro_batches}",
            fix="gangline resume goes on from the last checkpoint; please report this with the run's logs",
        )


def _hopeless(progress: Progress, what: str, samples: list[int]) -> BadState:
    """Going on leads nowhere: the weights may be spoilt, so an earlier checkpoint is all that can help."""
    return BadState(
        f"the loss or its gradient was not finite, or far off, in {progress.skipped_in_a_row} steps in a row, "
        f"up to step {progress.step + 1}",
        seen=f"expected finite numbers, near those of the steps before; {what}; "
        f"samples of the last step: {samples[:16]}",
        fix="look at these samples (events.jsonl lists all), lower optimizer.learning_rate, or set precision: fp32; "
        "what was saved before is untouched",
    )
