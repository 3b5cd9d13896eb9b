"""The training loop: one column of steps, the same for every strategy and number of ranks."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Literal

import torch

from gangline.errors import CheckpointError, RunFailed
from gangline.worker.agree import RankTimes, StepReport, agree
from gangline.worker.batch import pick
from gangline.worker.checkpoint import Saver
from gangline.worker.evaluate import Evaluation, evaluate
from gangline.worker.flops import step_flops, utilisation
from gangline.worker.memory import memory_bytes
from gangline.worker.model import trainable
from gangline.worker.optimizer import clip, gradient_norm, set_learning_rate, state_tensors
from gangline.worker.order import Indices, deal, micro_batch_seed
from gangline.worker.phase import PhaseFile
from gangline.worker.progress import Progress
from gangline.worker.record import Recorder
from gangline.worker.schedule import learning_rate
from gangline.worker.session import Session
from gangline.worker.signals import StopFlag

_SLOW_SAVE_S = 60.0
"""A background write that takes longer puts the next save off: waiting for it would hold the other ranks up."""

log = logging.getLogger(__name__)

Result = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where a loop writes and whom it obeys. The recorder exists on rank 0, the saver on one rank of each host."""

    recorder: Recorder | None
    saver: Saver | None
    stop: StopFlag
    phase: PhaseFile | None = None


@dataclass(slots=True)
class _Tally:
    """One step of this rank while it runs."""

    loss_sum: torch.Tensor
    data_s: float = 0.0


class Loop:
    """Runs a session from `progress` to its end, or until the gang is asked to stop."""

    def __init__(self, session: Session, outlets: Outlets, progress: Progress) -> None:
        self.session = session
        self.progress = progress
        self._out = outlets
        self._parameters = list(trainable(session.model).values())
        self._saved_step = progress.step
        self._saved_s = time.monotonic()
        self._micro_batch_s = 0.0
        self._known_failure: CheckpointError | None = None
        self._save_waits = False

    def run(self) -> Result:
        """Train. Every rank returns the same result."""
        session, progress = self.session, self.progress
        if progress.step == 0 and session.job.evaluation.at_start:
            self._evaluate()
        while progress.step < session.total_steps:
            report = self._train_step()
            if report.save_failed and self._give_up_after_failed_save():
                return "failed"
            if report.stop and progress.step < session.total_steps:
                self._save(wait=True)
                return self._end("stopped")
            self._evaluate_if_due()
            if self._save_is_due(report):
                self._save(wait=False)
        self._save(wait=True)
        return self._end("finished")

    def _train_step(self) -> StepReport:
        session, progress = self.session, self.progress
        started = time.perf_counter()
        step, samples = progress.step, session.order.samples(progress.step)
        tally = self._accumulate(step, label_tokens=int(session.train_set.label_counts[samples].sum()))
        norm = self._gradient_norm()
        report = agree(self._report(tally, norm, started), session.world)
        rate = learning_rate(
            step, session.total_steps, peak=session.job.optimizer.learning_rate, schedule=session.job.schedule
        )
        self._update(report, norm, rate, samples=samples)
        progress.step += 1
        self._record(report, norm, rate, samples=samples, step_s=time.perf_counter() - started)
        return report

    def _accumulate(self, step: int, *, label_tokens: int) -> _Tally:
        """Gradients of this rank's micro-batches, exchanged with the others' at its last one."""
        session, world = self.session, self.session.world
        micro_batches = session.order.micro_batches(step)
        mine = deal(len(micro_batches), world.shares)[world.rank]
        tally = _Tally(torch.zeros((), dtype=torch.float64, device=world.device))
        scale = (session.scaler.get_scale() if session.scaler else 1.0) / max(1, label_tokens)
        for index in mine:
            self._enter("data")
            started = time.perf_counter()
            batch = pick(micro_batches[index], session.train_set).to(world.device)
            tally.data_s += time.perf_counter() - started
            last = index == mine[-1]
            self._enter("exchange" if last else "compute")
            self._simulate_slowness()
            torch.manual_seed(micro_batch_seed(session.job.seed, step, index))
            tally.loss_sum += session.strategy.forward_backward(batch, scale=scale, last=last).double()
        if not mine:
            self._enter("exchange")
            session.strategy.join()
        return tally

    def _gradient_norm(self) -> torch.Tensor:
        if self.session.scaler is not None:
            self.session.scaler.unscale_(self.session.optimizer)
        return gradient_norm(self._parameters)

    def _report(self, tally: _Tally, norm: torch.Tensor, started: float) -> StepReport:
        session, saver = self.session, self._out.saver
        loss_sum = float(tally.loss_sum.item())
        wait_s = session.strategy.waited_s()
        compute_s = max(0.0, time.perf_counter() - started - tally.data_s - wait_s)
        num_mine = max(1, session.world.shares[session.world.rank])
        self._micro_batch_s = compute_s / num_mine / session.world.gang.ranks[session.world.rank].slowdown
        return StepReport(
            loss_sum=loss_sum,
            bad=int(not (math.isfinite(loss_sum) and bool(torch.isfinite(norm)))),
            stop=int(self._out.stop.raised),
            save=int(session.world.is_head and self._minutes_are_up()),
            save_failed=int(saver is not None and saver.failure not in (None, self._known_failure)),
            slow_saves=int(saver is not None and saver.busy and time.monotonic() - self._saved_s > _SLOW_SAVE_S),
            times=(
                RankTimes(
                    data_s=tally.data_s,
                    compute_s=compute_s,
                    wait_s=wait_s,
                    memory_bytes=memory_bytes(session.world.device),
                ),
            ),
        )

    def _update(self, report: StepReport, norm: torch.Tensor, rate: float, *, samples: Indices) -> None:
        session = self.session
        self._enter("update")
        if report.bad:
            self._skip(report, norm, samples)
        else:
            self.progress.skipped_in_a_row = 0
            clip(self._parameters, norm, maximum=session.job.optimizer.clip_norm)
            set_learning_rate(session.optimizer, rate)
            if session.scaler is None:
                session.optimizer.step()
            else:
                session.scaler.step(session.optimizer)
        if session.scaler is not None:
            session.scaler.update()
        session.optimizer.zero_grad(set_to_none=not session.strategy.keeps_gradients)

    def _skip(self, report: StepReport, norm: torch.Tensor, samples: Indices) -> None:
        """Leave the weights as they are. All ranks know of it from the same report, so all of them skip."""
        progress, job = self.progress, self.session.job
        progress.skipped += 1
        scaler = self.session.scaler
        searching_scale = scaler is not None and math.isfinite(report.loss_sum) and scaler.get_scale() >= 1
        progress.skipped_in_a_row += 0 if searching_scale else 1
        names = [int(sample) for sample in samples]
        log.warning("step %d skipped: summed loss %s, samples %s", progress.step + 1, report.loss_sum, names)
        if self._out.recorder is not None:
            self._out.recorder.event(
                "step-skipped", step=progress.step + 1, loss=report.loss_sum, grad_norm=float(norm), samples=names
            )
        if progress.skipped_in_a_row > job.max_skipped_steps:
            raise RunFailed(
                f"the loss or its gradient was not finite in {progress.skipped_in_a_row} steps in a row, "
                f"up to step {progress.step + 1}",
                seen=f"expected finite numbers; summed loss {report.loss_sum}, gradient norm {norm:.6g}; "
                f"samples of the last step: {names[:16]}",
                fix="look at these samples (events.jsonl lists all), lower optimizer.learning_rate, or set "
                "precision: fp32; what was saved before is untouched",
            )

    def _evaluate_if_due(self) -> None:
        every = self.session.job.evaluation.every_steps
        step = self.progress.step
        if step == self.session.total_steps or (every and step % every == 0):
            self._evaluate()

    def _evaluate(self) -> None:
        session = self.session
        if session.evaluation_set is None:
            return
        self._enter("evaluate")
        evaluation: Evaluation = evaluate(
            session.loss,
            session.evaluation_set,
            world=session.world,
            precision=session.precision,
            micro_batch=session.job.micro_batch,
            max_samples=session.job.evaluation.max_samples,
        )
        self.progress.evaluated(evaluation.loss)
        log.info("evaluation at step %d: loss %.6g", self.progress.step, evaluation.loss)
        if self._out.recorder is not None:
            self._out.recorder.evaluation(evaluation, step=self.progress.step)

    def _minutes_are_up(self) -> bool:
        minutes = self.session.job.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._saved_s >= 60 * minutes

    def _save_is_due(self, report: StepReport) -> bool:
        job = self.session.job.checkpoint
        best = self.progress.is_best and job.keep_best
        due = best or bool(report.save) or bool(job.every_steps and self.progress.step % job.every_steps == 0)
        self._save_waits = self._save_waits or due
        return self._save_waits and not report.slow_saves

    def _save(self, *, wait: bool) -> None:
        session, progress = self.session, self.progress
        if progress.step != self._saved_step and self._out.saver is not None:
            self._enter("save")
            log.info("saving step %d", progress.step)
            tensors = state_tensors(session.model, session.optimizer)
            self._out.saver.save(progress.step, tensors, progress.to_json(session.scaler), wait=wait)
            if self._out.recorder is not None:
                self._out.recorder.event("saving", step=progress.step)
        self._saved_step, self._saved_s, self._save_waits = progress.step, time.monotonic(), False
        if wait and self._out.saver is not None:
            self._out.saver.wait()

    def _end(self, result: Result) -> Result:
        """A save that failed at the very end must not look like success, on any host."""
        saver = self._out.saver
        failure = saver.failure if saver is not None else None
        nothing = RankTimes(data_s=0.0, compute_s=0.0, wait_s=0.0, memory_bytes=0)
        report = agree(
            StepReport(loss_sum=0.0, save_failed=int(failure is not None), times=(nothing,)), self.session.world
        )
        if failure is not None:
            raise failure
        if report.save_failed:
            return "failed"
        if self._out.recorder is not None:
            self._out.recorder.event(result, step=self.progress.step, skipped=self.progress.skipped)
        log.info("%s at step %d of %d", result, self.progress.step, self.session.total_steps)
        self._enter("ended")
        return result

    def _give_up_after_failed_save(self) -> bool:
        """Whether the run ends for it. The rank whose save failed says why; the others just leave."""
        saver, job = self._out.saver, self.session.job.checkpoint
        failure = saver.failure if saver is not None else None
        self._known_failure = failure
        if failure is not None:
            log.error("%s", failure)
        if self._out.recorder is not None:
            what = failure.what if failure is not None else "on another host; see the logs of its first rank"
            self._out.recorder.event("save-failed", step=self.progress.step, what=what)
        if job.on_failure == "continue":
            return False
        if failure is not None:
            raise failure
        return True

    def _record(self, report: StepReport, norm: torch.Tensor, rate: float, *, samples: Indices, step_s: float) -> None:
        if self._out.recorder is None:
            return
        session = self.session
        lengths = session.train_set.lengths[samples]
        label_tokens = int(session.train_set.label_counts[samples].sum())
        self._out.recorder.step(
            report,
            step=self.progress.step,
            steps=session.total_steps,
            epoch=round(self.progress.step / session.order.steps_per_epoch, 4),
            loss=report.loss_sum / max(1, label_tokens),
            learning_rate=rate,
            grad_norm=float(norm),
            samples=len(samples),
            tokens=int(lengths.sum()),
            label_tokens=label_tokens,
            step_s=round(step_s, 6),
            tokens_per_s=round(float(lengths.sum()) / step_s, 2),
            mfu=self._utilisation(lengths, step_s),
            skipped=bool(report.bad),
        )

    def _utilisation(self, lengths: Indices, step_s: float) -> float | None:
        """MFU; the catalogue's peaks are those of half-precision products."""
        session = self.session
        peaks = [rank.peak_flops for rank in session.world.gang.ranks]
        if session.precision.compute.itemsize > 2 or None in peaks:
            return None
        flops = step_flops(session.model, lengths, full=session.job.method.kind == "full")
        return utilisation(flops, step_s, peaks)

    def _simulate_slowness(self) -> None:
        slowdown = self.session.world.gang.ranks[self.session.world.rank].slowdown
        if slowdown > 1:
            time.sleep((slowdown - 1) * self._micro_batch_s)

    def _enter(self, phase: str) -> None:
        if self._out.phase is not None:
            self._out.phase.enter(phase, step=self.progress.step + 1)
