"""The training loop, and the step: the same for every strategy and number of ranks.

`Loop.run` is the column of a run: step, evaluate, save. `Synchronous.advance` is the column of a step: work split,
forward and backward, norm, agreement of all ranks, update, record. Another stepper is local SGD's (`Strategy.stepper`);
what both of them write down and report is `TrainingRun`'s.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, Protocol

import numpy as np
import torch

from gangline.callbacks import Action
from gangline.errors import BadState, RunFailed
from gangline.runs.step_schedule import cadence, learning_rate
from gangline.worker.agree import NO_TIMES, RankTimes, StepReport, agree
from gangline.worker.balance import LoadBalancer, SharesMoved, padded_tokens
from gangline.worker.batch import Batch, Indices, begin_draws, joined, micro_batch_seed, pick
from gangline.worker.compiled import compile_layers
from gangline.worker.dropout import SampleDropout, random_parts
from gangline.worker.exchange import settle_exchange
from gangline.worker.memory_watch import MemoryWatch, memory_bytes
from gangline.worker.model import base_of, trainable
from gangline.worker.optimizer import clip, norm_of, set_learning_rate
from gangline.worker.pace import TokenSpeed, session_utilisation
from gangline.worker.progress import TrainingProgress
from gangline.worker.record import evaluate
from gangline.worker.replicas import Replicas
from gangline.worker.run_io import CheckpointSchedule, RunIO
from gangline.worker.session import Session
from gangline.worker.spikes import Spike, Spikes
from gangline.worker.stragglers import Stragglers

log = logging.getLogger(__name__)

LoopResult = Literal["finished", "stopped", "failed"]


class Stepper(Protocol):
    """What moves a run on."""

    @property
    def shares(self) -> tuple[int, ...]:
        """How many micro-batches of a full step each rank does at present."""
        ...

    def begin(self) -> None:
        """Find out what has to be known before the first step of an attempt; collective."""
        ...

    def advance(self) -> StepReport:
        """One or more optimizer steps; `Progress.step` counts them. All ranks get the same report."""
        ...

    def verify_replicas(self) -> None:
        """Make sure that all ranks hold the same weights, before they are saved; collective. Raises BadState."""
        ...


@dataclass(slots=True, kw_only=True)
class Tally:
    """One step, or one round, of this rank while it runs."""

    loss_sum: torch.Tensor
    data_s: float = 0.0
    micro_batches: int = 0
    tokens: int = 0
    """Of its micro-batches, padding included."""


def read(loss_sum: torch.Tensor, norm: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The loss and the gradient norm of a step, both scalars, on the processor; the norm as a tensor of its own dtype.

    It is the one place in a step that waits for the device: a test runs the step with tensors that have no numbers, and
    the test on a GPU has torch refuse every other wait.
    """
    if loss_sum.device == norm.device:
        loss, length = torch.stack([loss_sum.double(), norm.double()]).tolist()
    else:  # of weights in the machine's memory
        loss, length = float(loss_sum), float(norm)
    return loss, torch.tensor(length, dtype=norm.dtype)


class TrainingRun:
    """One attempt on one rank: its parts, and what every stepper does with them."""

    def __init__(self, session: Session, out: RunIO, progress: TrainingProgress) -> None:
        """A run that goes on from `progress`."""
        self.session, self.out, self.progress = session, out, progress
        self.checkpoints = CheckpointSchedule(session, out, progress)
        self.pace = TokenSpeed(session)
        self._joins = max(session.world.gang.pass_lengths(session.order.micro_batch)) > 1
        parts = random_parts(session.model, getattr(base_of(session.model), "config", None))
        self._drops = session.draws_by_sample and next(parts, None) is not None
        self._is_watched = session.draws_by_sample and self._joins and not session.job.compile
        """Whether the next pass shows if the model draws at random in other ways, which unlike sizes refuse."""
        self.parameters = list(trainable(session.model).values())
        """Those that are trained."""

    def draws(self, samples: Indices, *, step: int) -> AbstractContextManager[object]:
        """Around forward and backward of a pass over these samples: dropout by sample, where the run has that."""
        if not self._drops and not self._is_watched:
            return nullcontext()
        self._is_watched = False
        device, seed = self.session.world.device, self.session.job.seed
        return SampleDropout(samples, seed=seed, step=step, device=device, joined=self._joins)

    def micro_batch(self, samples: Indices, *, step: int, index: int, phase: str, tally: Tally) -> Batch:
        """The micro-batch `index` of 0-based step `step` on the device, with its own random seed begun.

        phase: the one that its passes belong to.
        """
        session = self.session
        self.out.enter("data", step=step + 1)
        started = time.perf_counter()
        with self.out.data():
            batch = pick(samples, session.train_set)
        # not the copy to the device: it may wait for what the device still computes
        tally.data_s += time.perf_counter() - started
        tally.tokens += batch.input_ids.numel()
        batch = batch.to(session.world.device)
        self.out.enter(phase, step=step + 1)
        self.pace.simulate_slowness(batch)
        begin_draws(micro_batch_seed(session.job.seed, step, index), session.world.device)
        return batch

    def loss_scale(self, label_tokens: int) -> float:
        """What a summed loss is multiplied by: one over the trained tokens of the step, and fp16's own scale."""
        scaler = self.session.scaler
        return (scaler.get_scale() if scaler else 1.0) / max(1, label_tokens)

    def gradient_norm(self) -> torch.Tensor:
        """Of the step's gradient, a scalar; collective where weights are divided."""
        session = self.session
        if session.scaler is not None:
            session.scaler.unscale_(session.optimizer)
        return norm_of(session.strategy.gradients(self.parameters), parts=session.strategy.shard_group)

    def learning_rate(self, step: int) -> float:
        """Of the 0-based step."""
        session = self.session
        peak = session.job.optimizer.learning_rate
        return learning_rate(step, session.total_steps, peak=peak, schedule=session.job.schedule)

    def update(self, norm: torch.Tensor, *, step: int, skipped: bool) -> None:
        """Clip and take the optimizer's step, unless it is skipped; gradients are gone then.

        norm: of the gradient, as `read` has given it.
        """
        session = self.session
        self.out.enter("update", step=step + 1)
        if not skipped:
            if not session.strategy.clips:
                clip(self.parameters, norm, maximum=session.job.optimizer.clip_norm)
            set_learning_rate(session.optimizer, self.learning_rate(step))
            if session.scaler is None:
                session.optimizer.step()
            else:
                session.scaler.step(session.optimizer)
            session.strategy.after_update()
        if session.scaler is not None:
            session.scaler.update()
        session.optimizer.zero_grad(set_to_none=not session.strategy.keeps_gradients)

    def report(self, tally: Tally, *, compute_s: float, wait_s: float, num_steps: int = 1, **flags: Any) -> StepReport:
        """This rank's word on the steps that have just ended; times are per step, so that they compare with a plan's.

        flags: see `StepReport`.
        """
        checkpoints, world = self.checkpoints, self.session.world
        asks_save = self.out.wants_save(step=self.progress.step)
        times = RankTimes(
            data_s=tally.data_s / num_steps,
            compute_s=compute_s / num_steps,
            wait_s=wait_s / num_steps,
            memory_bytes=memory_bytes(world.device),
        )
        return StepReport(
            stop=int(self.out.stop.raised),
            finish=int(self.out.asked(Action.finish, step=self.progress.step)),
            save=int(asks_save or (world.is_head and checkpoints.minutes_are_up)),
            save_failed=int(checkpoints.failed),
            slow_saves=int(checkpoints.is_slow),
            saving=int(checkpoints.is_saving),
            profile=self.out.profile.asked() if self.out.profile is not None else 0,
            times=(times,),
            **flags,
        )

    def record(
        self, report: StepReport, *, samples: Indices, seconds: float, steps: range, shares: Sequence[int], **more: Any
    ) -> None:
        """Write down the steps that have just ended. samples, seconds: of all of them. more: loss, grad_norm ..."""
        if self.out.recorder is None:
            return
        session = self.session
        lengths = session.train_set.lengths[samples]
        self.out.recorder.step(
            report,
            step=self.progress.step,
            shares=shares,
            steps=session.total_steps,
            epoch=round(self.progress.step / session.order.steps_per_epoch, 4),
            learning_rate=self.learning_rate(steps[-1]),
            samples=len(samples),
            tokens=int(lengths.sum()),
            label_tokens=self.label_tokens(samples),
            step_s=round(seconds / len(steps), 6),
            tokens_per_s=round(float(lengths.sum()) / seconds, 2),
            mfu=session_utilisation(session, lengths, seconds),
            **more,
        )

    def label_tokens(self, samples: Indices) -> int:
        """Trained tokens of these samples."""
        return int(self.session.train_set.label_counts[samples].sum())

    def announce(self, moved: SharesMoved, *, cause: str) -> None:
        """Note who does how much from the next step on."""
        hosts = [rank.host for rank in self.session.world.gang.ranks]
        self.out.tell_shares(moved, hosts, step=self.progress.step, cause=cause)


class Loop:
    """Runs a session from `progress` to its end, or until the gang is asked to stop."""

    def __init__(self, session: Session, outlets: RunIO, progress: TrainingProgress) -> None:
        self.session = session
        self.progress = progress
        self._out = outlets
        run = TrainingRun(session, outlets, progress)
        self._checkpoints = run.checkpoints
        asked = session.job.evaluation
        self._evaluations = cadence(
            asked.every_steps, asked.every_epochs, steps_per_epoch=session.order.steps_per_epoch
        )
        self._stepper = session.strategy.stepper(run) or Synchronous(run)

    def run(self) -> LoopResult:
        """Train. Every rank returns the same result."""
        session, progress, checkpoints = self.session, self.progress, self._checkpoints
        if session.job.evaluation.at_start if progress.step == 0 else self._lacks_evaluation():
            self._evaluate()
        if not self._is_done():
            self._compile()
            self._stepper.begin()
        while not self._is_done():
            before = progress.step
            report = self._stepper.advance()
            self._profile(report)
            if report.save_failed and checkpoints.gives_up():
                return "failed"
            if report.stop and progress.step < session.total_steps:
                self._save(wait=True)
                return self._end("stopped")
            self._evaluate_if_due(before)
            if report.finish:
                break
            if self._is_paused(before):
                self._save(wait=True)
                return self._end("stopped")
            if checkpoints.is_due(report, before=before):
                self._save(wait=False)
        self._save(wait=True)
        self._tell_early_end()
        return self._end("finished")

    def _profile(self, report: StepReport) -> None:
        """Begin or end to record steps; after the step's end on every rank, before an evaluation or a save."""
        profile, step = self._out.profile, self.progress.step
        if profile is None:
            return
        if profile.ends_with(step):  # many steps on a card are written for longer than a step may take
            self._out.enter("save", step=step + 1)
        profile.after(report.profile, step=step)

    def _compile(self) -> None:
        """Compile the layers where the job says so, and note how long it took."""
        if self.session.job.compile:
            self._out.enter("compile", step=self.progress.step + 1)
            self._out.event("compiled", step=self.progress.step, **compile_layers(self.session))

    def _is_done(self) -> bool:
        """Whether no step is left, or the evaluation loss falls no more. All ranks know the same losses."""
        progress, early = self.progress, self.session.job.early_stopping
        stops = early is not None and progress.evaluations_since >= early.patience
        return stops or progress.step >= self.session.total_steps

    def _tell_early_end(self) -> None:
        progress, early, total = self.progress, self.session.job.early_stopping, self.session.total_steps
        if early is None or progress.step == total:
            return
        least = f" by more than {early.min_improvement:g}" if early.min_improvement else ""
        best = "none was a number"
        if progress.best_loss is not None:
            best = f"the lowest is {progress.best_loss:.6g}, of step {progress.best_step}"
        what = f"the evaluation loss has not improved{least} in {progress.evaluations_since} evaluations: {best}"
        log.info("early stopping at step %d of %d: %s", progress.step, total, what)
        self._out.event("early-stopping", step=progress.step, what=what)

    def _lacks_evaluation(self) -> bool:
        """Whether an attempt ended between a step and its evaluation: what follows from it has to be the same."""
        step, evaluated = self.progress.step, self.progress.evaluated_step
        is_last = step == self.session.total_steps and evaluated != step
        return is_last or self._evaluations.is_due(step, before=max(0, evaluated))

    def _save(self, *, wait: bool) -> None:
        self._stepper.verify_replicas()
        self._checkpoints.save(wait=wait)

    def _is_paused(self, before: int) -> bool:
        """Whether the run is to stop at this step, which is not its last."""
        step, pause = self.progress.step, self.session.job.pause_at
        return pause is not None and before < pause <= step < self.session.total_steps

    def _evaluate_if_due(self, before: int) -> None:
        step = self.progress.step
        if step == self.session.total_steps or self._is_paused(before) or self._evaluations.is_due(step, before=before):
            self._evaluate()

    def _evaluate(self) -> None:
        session = self.session
        if session.evaluation_set is None:
            return
        self._out.enter("evaluate", step=self.progress.step + 1)
        evaluation = evaluate(session, shares=self._stepper.shares, beat=self._out.beat)
        early = session.job.early_stopping
        self.progress.evaluated(evaluation.loss, min_improvement=early.min_improvement if early else 0.0)
        log.info("evaluation at step %d: loss %.6g", self.progress.step, evaluation.loss)
        if self._out.recorder is not None:
            self._out.recorder.evaluation(evaluation, step=self.progress.step)

    def _end(self, result: LoopResult) -> LoopResult:
        """A save that failed at the very end must not look like success, on any host."""
        saver = self._out.saver
        failure = saver.failure if saver is not None else None
        last = StepReport(loss_sum=0.0, save_failed=int(failure is not None), times=(NO_TIMES,))
        report = agree(last, self.session.world)
        if failure is not None:
            raise failure
        if report.save_failed:
            return "failed"
        self._out.event(result, step=self.progress.step, skipped=self.progress.skipped)
        log.info("%s at step %d of %d", result, self.progress.step, self.session.total_steps)
        self._out.enter("ended", step=self.progress.step + 1)
        return result


class Synchronous:
    """Moves a run on by one optimizer step at a time: each rank does its part of the micro-batches, and the sum of
    gradients moves every replica.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._session = session = run.session
        self._out = run.out
        self._progress = run.progress
        gang = session.world.gang
        self._balancer = LoadBalancer(
            session.world.shares, moving=gang.moving_shares, replica_groups=gang.replica_groups
        )
        self._pass_lengths = gang.pass_lengths(session.order.micro_batch)
        self._stragglers = Stragglers(session.world, run.out)
        self._replicas = Replicas(session, run.out)
        self._memory_watch = MemoryWatch(session.world, run.out)
        self._spikes = Spikes(warmup_steps=session.job.schedule.warmup_steps)

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of a full step, by rank."""
        return self._balancer.shares

    def begin(self) -> None:
        """Compare the replicas, measure the links, and, where shares may move, every rank's speed.

        A checkpoint holds nothing of it but the size of buckets that came of it.
        """
        self._replicas.begin(step=self._progress.step)
        self._stragglers.begin()
        self._out.enter("compute", step=self._progress.step + 1)
        micro_batches = self._session.order.micro_batches(self._progress.step)
        settled = settle_exchange(self._session, self._progress, self._typical(micro_batches))
        if settled is not None:
            self._out.event("exchange", step=self._progress.step, **settled)
        if self._balancer.moving:
            self._run.announce(self._balancer.begin(self._run.pace.probe(micro_batches)), cause="start")

    def advance(self) -> StepReport:
        """One optimizer step."""
        session, progress, run = self._session, self._progress, self._run
        started = time.perf_counter()
        step, samples = progress.step, session.order.samples(progress.step)
        micro_batches = session.order.micro_batches(step)
        tally = self.accumulate(step)
        loss_sum, norm = read(tally.loss_sum, run.gradient_norm())
        session.world.require_sums()
        report = agree(self._report(tally, loss_sum, norm, started), session.world)
        _require_all(report, len(micro_batches), step=step + 1)
        spike = self._spike(report, samples)
        skipped = bool(report.bad) or spike is not None
        if skipped:
            self._skip(report, spike, samples)
        else:
            progress.skipped_in_a_row = 0
        run.update(norm, step=step, skipped=skipped)
        progress.step += 1
        run.record(
            report,
            samples=samples,
            seconds=time.perf_counter() - started,
            steps=range(step, step + 1),
            shares=self._balancer.counts(len(micro_batches)),
            loss=self._loss(report, samples),
            grad_norm=report.norm,
            skipped=skipped,
        )
        self._replicas.look(step=progress.step)
        self._memory_watch.look(report.times, step=progress.step)
        self._watch(report, micro_batches)
        self._learn(report, micro_batches)
        return report

    def verify_replicas(self) -> None:
        """Make sure that all ranks hold the same weights; see `Replicas.verify_replicas`."""
        self._replicas.verify_replicas(step=self._progress.step)

    def accumulate(self, step: int) -> Tally:
        """Gradients of this rank's micro-batches of a step, exchanged with the others' at its last one."""
        run, strategy, world = self._run, self._session.strategy, self._session.world
        micro_batches = self._session.order.micro_batches(step)
        passes = self._passes(len(micro_batches))
        mine = passes[world.rank]
        empty = max(map(len, passes)) - len(mine) if strategy.lockstep else int(not mine)
        tally = Tally(loss_sum=torch.zeros((), dtype=torch.float64, device=world.device))
        scale = run.loss_scale(run.label_tokens(self._session.order.samples(step)))
        for together in mine:
            last = together == mine[-1] and not empty
            phase = "exchange" if last or strategy.lockstep else "compute"
            samples = np.concatenate(micro_batches[together.start : together.stop])
            batch = run.micro_batch(samples, step=step, index=together[0], phase=phase, tally=tally)
            with run.draws(samples, step=step):
                tally.loss_sum += strategy.forward_backward(batch, scale=scale, last=last).double()
            tally.micro_batches += strategy.counts_loss * len(together)
        for number in range(empty):
            self._out.enter("exchange", step=step + 1)
            strategy.join(last=number == empty - 1)
        return tally

    def _passes(self, num_micro_batches: int) -> list[list[range]]:
        """Adjacent micro-batches of each rank, by the forward passes in which it does them together."""
        work_split = self._balancer.split_work(num_micro_batches)
        return [joined(mine, length) for mine, length in zip(work_split, self._pass_lengths, strict=True)]

    def _tokens(self, micro_batches: list[Indices]) -> list[int]:
        """Of every micro-batch, with the padding that its pass gives it."""
        passes = chain.from_iterable(self._passes(len(micro_batches))) if max(self._pass_lengths) > 1 else None
        return padded_tokens(micro_batches, self._session.train_set.lengths, passes)

    def _typical(self, micro_batches: list[Indices]) -> Indices:
        """Samples of a pass of this rank, of middling length."""
        tokens = padded_tokens(micro_batches, self._session.train_set.lengths)
        ordered = sorted(range(len(tokens)), key=tokens.__getitem__)
        length = self._pass_lengths[self._session.world.rank]
        start = max(0, len(ordered) // 2 - length // 2)
        return np.concatenate([micro_batches[index] for index in ordered[start : start + length]])

    def _report(self, tally: Tally, loss_sum: float, norm: torch.Tensor, started: float) -> StepReport:
        wait_s = self._session.strategy.waited_s()
        compute_s = max(0.0, time.perf_counter() - started - tally.data_s - wait_s)
        self._run.pace.took(compute_s)
        return self._run.report(
            tally,
            compute_s=compute_s,
            wait_s=wait_s,
            loss_sum=loss_sum,
            bad=int(not (math.isfinite(loss_sum) and bool(torch.isfinite(norm)))),
            look=int(self._stragglers.wants_look),
            micro_batches=tally.micro_batches,
            norm=float(norm) if self._session.world.is_head else 0.0,
        )

    def _spike(self, report: StepReport, samples: Indices) -> Spike | None:
        """Whether the loss is finite and far off. All ranks judge the same numbers."""
        if report.bad:
            return None
        return self._spikes.judge(self._loss(report, samples), report.norm, step=self._progress.step)

    def _loss(self, report: StepReport, samples: Indices) -> float:
        """Per trained token."""
        return report.loss_sum / max(1, self._run.label_tokens(samples))

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
            self.verify_replicas()  # one replica that is damaged spoils every step of all: then that is the cause
            raise _hopeless(progress, what, names)

    def _watch(self, report: StepReport, micro_batches: list[Indices]) -> None:
        """Look for stragglers in steps that nothing else disturbs: no evaluation before it, no save; collective."""
        progress = self._progress
        if not self._session.strategy.finds_stragglers:
            return
        if report.look:
            self._stragglers.look(step=progress.step)
        elif not report.saving and progress.step - 1 not in {self._run.checkpoints.saved_step, progress.evaluated_step}:
            work_split = self._balancer.split_work(len(micro_batches))
            self._stragglers.learn(report.times, work_split, self._tokens(micro_batches), step=progress.step)

    def _learn(self, report: StepReport, micro_batches: list[Indices]) -> None:
        """Move shares where the ranks' speeds have changed. All of them do the same arithmetic on the same report."""
        moved = self._balancer.learn(report.times, self._tokens(micro_batches))
        if moved is not None:
            self._run.announce(moved, cause="speeds")


def _require_all(report: StepReport, num_micro_batches: int, *, step: int) -> None:
    """Every rank splits the work by its own figures; if they ever differed, samples would be lost or counted twice."""
    if report.micro_batches != num_micro_batches:
        raise RunFailed(
            f"ranks do not agree on who does what in step {step}",
            seen=f"expected {num_micro_batches} micro-batches from all of them together, saw {report.micro_batches}",
            fix="continue from the last checkpoint: gangline resume; please report this with the run's logs",
        )


def _hopeless(progress: TrainingProgress, what: str, samples: list[int]) -> BadState:
    """Going on leads nowhere: the weights may be spoilt, so an earlier checkpoint is all that can help."""
    return BadState(
        f"the loss or its gradient was not finite, or far off, in {progress.skipped_in_a_row} steps in a row, "
        f"up to step {progress.step + 1}",
        seen=f"expected finite numbers, near those of the steps before; {what}; "
        f"samples of the last step: {samples[:16]}",
        fix="look at these samples (events.jsonl lists all), lower optimizer.learning_rate, or set precision: fp32; "
        "what was saved before is untouched",
    )
