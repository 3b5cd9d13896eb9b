"""`plan --trace`: the trainer's own code on tensors without data, for the ways that are left at the end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from gangline.errors import ModelError
from gangline.planning.option import Option, builds_method
from gangline.planning.report import name
from gangline.runs.job import Job
from gangline.steps.counted import ask_trace
from gangline.steps.foretell import Foretold
from gangline.steps.seams import Means
from gangline.units import format_bytes

BUILT_STACK = "gangline"
ON_A_PROCESSOR = {"attention_kernel": "cpu", "rounding_bytes": 1}
"""Where a rank computes without a GPU: its own kernels and exact bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What one way of running the job really allocates, as far as a computer without the card can say."""

    option: Option
    answer: dict[str, Any]
    """See `worker.trace.line.TraceResult`."""

    @property
    def peak_bytes(self) -> int:
        """At the worst instant, for the model's full depth."""
        return int(self.answer["peak_bytes"])

    @property
    def line(self) -> str:
        """For people."""
        formula = self.option.needs[0].memory.allocated_bytes
        text = f"{self.option.strategy.kind}, micro-batch {self.option.training.micro_batch}"
        text += ", activations computed twice" if self.option.training.checkpointing else ""
        return (
            f"{text}: {format_bytes(self.peak_bytes)} of tensors traced, {format_bytes(formula)} by formula "
            f"({100 * (formula / self.peak_bytes - 1):+.1f} %); {self.answer['seconds']:.0f} s, torch "
            f"{self.answer['versions']['torch']}" + "".join(f"; {note}" for note in self.answer["notes"])
        )


def trace(foretold: Foretold, means: Means) -> list[Traced]:
    """Trace what our trainer would run. Raises ModelError where it has no code for the job, or torch is not here."""
    verdict, config = foretold.outlook.verdict, foretold.outlook.config
    if verdict is None or config is None:
        raise ModelError(
            "nothing can be traced", seen=foretold.outlook.unknown, fix="name a model whose config.json is here"
        )
    finalists = _finalists(verdict.runnable, [option for option in verdict.by_kind if option.is_built])
    ours = verdict.question.training.stack.name.startswith(BUILT_STACK)
    question = verdict.question
    if not builds_method(question.training, question.architecture) or not ours:
        raise ModelError(
            "gangline's own trainer has no code for this job, so there is nothing to trace",
            seen=f"method {foretold.job.method.kind}, stack {verdict.question.training.stack.name}",
            fix="trace it with method=lora or method=full and --stack gangline",
        )
    if question.training.offloading:
        raise ModelError(
            "what lies in the machine's memory cannot be traced",
            seen="activation_offloading: true; a trace has no cards that anything could be moved from",
            fix="trace it with activation_offloading=false, or plan without --trace",
        )
    if any(option.strategy.half.layers != "all" for option in finalists):
        raise ModelError(
            f"a rank of {finalists[0].strategy.kind} cannot be traced",
            seen=f"{name(finalists[0].strategy)}; a trace is of a rank with all layers, and all of each",
            fix="trace it with strategy=ddp, or plan without --trace",
        )
    means.talk.tick("running the trainer's code on tensors without data")
    answers = ask_trace([order_of(foretold.job, option, config) for option in finalists], means=means)
    return [Traced(option=option, answer=answer) for option, answer in zip(finalists, answers, strict=True)]


def _finalists(winner: Option | None, built: list[Option]) -> list[Option]:
    """The winner, else what came nearest to fitting."""
    return [winner] if winner is not None else built[:1]


def order_of(job: Job, option: Option, config: dict[str, Any]) -> dict[str, Any]:
    """See `worker.trace.order.TraceOrder`."""
    training = option.training
    return {
        "config": config,
        "method": dataclasses.asdict(job.method),
        "precision": training.compute,
        "parameters": job.parameters,
        "micro_batch": training.micro_batch,
        "micro_batches": max(option.shares),
        "sequence_length": training.sequence_length,
        "packing": job.data.packing,
        "activation_checkpointing": training.checkpointing,
        "optimizer": dataclasses.asdict(job.optimizer),
        "attention": job.model.attention,
        "ranks": len(option.needs),
        **({} if all(need.seat.gpu is not None for need in option.needs) else ON_A_PROCESSOR),
    }
