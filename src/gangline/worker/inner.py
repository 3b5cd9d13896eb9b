"""The inner steps of a round of local SGD: what the ranks of one host do together, while other hosts do theirs."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gangline.worker.batch import pick
from gangline.worker.contribution import Contribution
from gangline.worker.draws import begin_draws
from gangline.worker.keep import Outlets
from gangline.worker.model import trainable
from gangline.worker.optimizer import clip, gradient_norm, set_learning_rate
from gangline.worker.order import Indices, micro_batch_seed
from gangline.worker.pace import Pace
from gangline.worker.round_deal import InnerBatch
from gangline.worker.schedule import learning_rate
from gangline.worker.session import Session
from gangline.worker.spikes import Spikes
from gangline.worker.strategy.local_sgd import LocalSgd


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One of the run's micro-batches."""

    step: int
    """0-based step of the run that its samples stand for."""
    index: int
    """Its place in that step."""
    samples: Indices


@dataclass(slots=True, kw_only=True)
class Tally:
    """A round of this rank while it runs."""

    told: Contribution
    skipped: list[int]
    """Inner steps that were skipped, by number."""
    data_s: float = 0.0
    inside_s: float = 0.0
    """Waiting for the other ranks of this host."""
    searching: bool = False
    """Whether a step was skipped only to find a loss scale."""
    broken: bool = False
    """Whether this host's weights are no numbers any more."""


class Inner:
    """This rank's part in its host's inner steps. What a host skips is decided inside it; other hosts hear later."""

    def __init__(self, session: Session, strategy: LocalSgd, outlets: Outlets, pace: Pace) -> None:
        self._session = session
        self._strategy = strategy
        self._out = outlets
        self._pace = pace
        self._parameters = list(trainable(session.model).values())
        world = session.world
        hosts = [rank.host for rank in world.gang.ranks]
        self._place = world.rank - hosts.index(world.host)
        """Of this rank among those of its host."""
        self._spikes = Spikes(warmup_steps=session.job.schedule.warmup_steps)
        """Of this rank's part of inner steps; where one of a host's ranks sees one, none of them takes the step."""

    def run(self, micro_batches: Sequence[MicroBatch], batches: Sequence[InnerBatch]) -> Tally:
        """All inner steps of this host in a round. micro_batches: of the whole round, for all hosts."""
        tally = Tally(told=Contribution(), skipped=[])
        label_tokens = 0
        for number, batch in enumerate(batches):
            started, inside_before_s = time.perf_counter(), tally.inside_s
            counted = self._step(number, [micro_batches[each] for each in batch.numbers], batch, tally)
            label_tokens += counted
            if batch.by_rank[self._place]:  # what it takes to join only would make this rank look slow
                tally.told.busy_s += time.perf_counter() - started - (tally.inside_s - inside_before_s)
        tally.broken = not self._strategy.all_agree(self._is_finite())
        self._judge(tally, label_tokens, num_steps=len(batches))
        return tally

    def forget(self) -> None:
        """Begin anew with AdamW's states, after weights that were no numbers."""
        for state in self._session.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def _step(self, number: int, together: Sequence[MicroBatch], batch: InnerBatch, tally: Tally) -> int:
        """One inner step; the trained tokens that it moved this host by, 0 if it was skipped."""
        session, told = self._session, tally.told
        started, data_before_s = time.perf_counter(), tally.data_s
        label_tokens = sum(int(session.train_set.label_counts[each.samples].sum()) for each in together)
        begin = sum(len(numbers) for numbers in batch.by_rank[: self._place])
        mine = together[begin : begin + len(batch.by_rank[self._place])]
        loss_sum = self._accumulate(mine, together[0].step, label_tokens, tally)
        if session.scaler is not None:
            session.scaler.unscale_(session.optimizer)
        norm = gradient_norm(self._parameters)
        is_finite = math.isfinite(loss_sum) and bool(torch.isfinite(norm))
        is_spike = is_finite and self._is_spike(mine, loss_sum, float(norm))
        sound = self._strategy.all_agree(is_finite and not is_spike)
        waited_s = self._strategy.waited_s()
        tally.inside_s += waited_s
        self._pace.took(max(0.0, time.perf_counter() - started - (tally.data_s - data_before_s) - waited_s))
        told.inner_steps += self._is_first
        if sound:
            told.loss_sum += loss_sum
            told.norm_sum += float(norm) * self._is_first
        else:
            told.skipped += self._is_first
            tally.skipped.append(number)
            scale_is_high = session.scaler is not None and session.scaler.get_scale() >= 1
            tally.searching |= self._strategy.all_agree(math.isfinite(loss_sum) and scale_is_high and not is_spike)
        self._update(norm, step=together[0].step, sound=sound)
        return label_tokens if sound else 0

    def _is_spike(self, mine: Sequence[MicroBatch], loss_sum: float, norm: float) -> bool:
        """Whether this rank's micro-batches stand out; see `Spikes`."""
        if not mine:
            return False
        tokens = sum(int(self._session.train_set.label_counts[each.samples].sum()) for each in mine)
        return self._spikes.judge(loss_sum / max(1, tokens), norm, step=mine[0].step) is not None

    def _accumulate(self, mine: Sequence[MicroBatch], step: int, label_tokens: int, tally: Tally) -> float:
        """Gradients of this rank's micro-batches, summed over the host at its last one; their summed loss."""
        session, device = self._session, self._session.world.device
        scale = (session.scaler.get_scale() if session.scaler else 1.0) / max(1, label_tokens)
        loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        for place, each in enumerate(mine):
            self._out.enter("data", step=each.step + 1)
            started = time.perf_counter()
            batch = pick(each.samples, session.train_set)
            # not the copy to the device: it may wait for what the device still computes
            tally.data_s += time.perf_counter() - started
            batch = batch.to(device)
            self._out.enter("compute", step=each.step + 1)
            self._pace.simulate_slowness(batch)
            begin_draws(micro_batch_seed(session.job.seed, each.step, each.index), device)
            loss_sum += self._strategy.forward_backward(batch, scale=scale, last=place == len(mine) - 1).double()
            tally.told.micro_batches += 1
            tally.told.tokens += batch.input_ids.numel()
        if not mine:
            self._out.enter("compute", step=step + 1)
            self._strategy.join(last=True)
        return float(loss_sum.item())

    def _update(self, norm: torch.Tensor, *, step: int, sound: bool) -> None:
        session, optimizer = self._session, self._session.optimizer
        self._out.enter("update", step=step + 1)
        if sound:
            clip(self._parameters, norm, maximum=session.job.optimizer.clip_norm)
            peak = session.job.optimizer.learning_rate
            rate = learning_rate(step, session.total_steps, peak=peak, schedule=session.job.schedule)
            set_learning_rate(optimizer, rate)
            if session.scaler is None:
                optimizer.step()
            else:
                session.scaler.step(optimizer)
        if session.scaler is not None:
            session.scaler.update()
        optimizer.zero_grad(set_to_none=not self._strategy.keeps_gradients)

    def _judge(self, tally: Tally, label_tokens: int, *, num_steps: int) -> None:
        """What the change of this host counts for."""
        if tally.broken:
            label_tokens, tally.told.loss_sum = 0, 0.0
        tally.told.weight = float(label_tokens * self._is_first)
        unmoved = 0 < num_steps == len(tally.skipped)
        tally.told.lost = float((tally.broken or (unmoved and not tally.searching)) and self._is_first)

    def _is_finite(self) -> bool:
        """Of all trained weights; their extremes are looked at, for NaN is both."""
        extremes = [torch.stack(torch.aminmax(each.detach())) for each in self._parameters]
        return bool(torch.isfinite(torch.stack(extremes).float()).all())

    @property
    def _is_first(self) -> bool:
        return self._place == 0
