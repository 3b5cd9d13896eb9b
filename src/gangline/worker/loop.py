"""The training loop: one column of steps, the same for every strategy and number of ranks."""

from __future__ import annotations

import logging
from typing import Literal, Protocol

from gangline.worker.agree import NO_TIMES, StepReport, agree
from gangline.worker.evaluate import evaluate
from gangline.worker.keep import Keeper, Outlets
from gangline.worker.progress import Progress
from gangline.worker.rounds import Rounds
from gangline.worker.session import Session
from gangline.worker.strategy.local_sgd import LocalSgd
from gangline.worker.synchronous import Synchronous

log = logging.getLogger(__name__)

Result = Literal["finished", "stopped", "failed"]


class Stepper(Protocol):
    """What moves a run on."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Who does how much at present, by rank."""
        ...

    def begin(self) -> None:
        """Whatever has to be known before the first step of an attempt; collective."""
        ...

    def advance(self) -> StepReport:
        """One or more optimizer steps; `Progress.step` counts them. All ranks get the same report."""
        ...

    def vouch(self) -> None:
        """Make sure that all ranks hold the same weights, before they are saved; collective. Raises BadState."""
        ...


class Loop:
    """Runs a session from `progress` to its end, or until the gang is asked to stop."""

    def __init__(self, session: Session, outlets: Outlets, progress: Progress) -> None:
        self.session = session
        self.progress = progress
        self._out = outlets
        self._keeper = Keeper(session, outlets, progress)
        self._stepper = self._make_stepper()

    def _make_stepper(self) -> Stepper:
        strategy = self.session.strategy
        if isinstance(strategy, LocalSgd):
            return Rounds(self.session, strategy, self._out, self.progress, keeper=self._keeper)
        return Synchronous(self.session, self._out, self.progress, keeper=self._keeper)

    def run(self) -> Result:
        """Train. Every rank returns the same result."""
        session, progress, keeper = self.session, self.progress, self._keeper
        if progress.step == 0 and session.job.evaluation.at_start:
            self._evaluate()
        if progress.step < session.total_steps:
            self._stepper.begin()
        while progress.step < session.total_steps:
            before = progress.step
            report = self._stepper.advance()
            if report.save_failed and keeper.gives_up():
                return "failed"
            if report.stop and progress.step < session.total_steps:
                self._save(wait=True)
                return self._end("stopped")
            self._evaluate_if_due(before)
            if keeper.is_due(report, before=before):
                self._save(wait=False)
        self._save(wait=True)
        return self._end("finished")

    def _save(self, *, wait: bool) -> None:
        self._stepper.vouch()
        self._keeper.save(wait=wait)

    def _evaluate_if_due(self, before: int) -> None:
        every = self.session.job.evaluation.every_steps
        step = self.progress.step
        if step == self.session.total_steps or (every and step // every > before // every):
            self._evaluate()

    def _evaluate(self) -> None:
        session = self.session
        if session.evaluation_set is None:
            return
        self._out.enter("evaluate", step=self.progress.step + 1)
        evaluation = evaluate(session, shares=self._stepper.shares, beat=self._out.beat)
        self.progress.evaluated(evaluation.loss)
        log.info("evaluation at step %d: loss %.6g", self.progress.step, evaluation.loss)
        if self._out.recorder is not None:
            self._out.recorder.evaluation(evaluation, step=self.progress.step)

    def _end(self, result: Result) -> Result:
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
