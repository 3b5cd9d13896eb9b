"""A plan of two unlike machines, and the figures of a run of it."""

from __future__ import annotations

from typing import Any

from gangline.planner.calibration import Profile, ProfileKey
from gangline.planner.outcome import Comparison, compare, observe
from gangline.planner.plan import Forecast, Plan, PlannedRank, RankForecast
from gangline.planner.speed import ComputeModel

GIB = 1 << 30
GPU = "NVIDIA GeForce RTX 4070"


def profile(host: str = "pc1", *, per_token_s: float = 1e-3, **more: Any) -> Profile:
    """A card that takes a millisecond for every token."""
    key = ProfileKey(
        gpu=GPU,
        driver="580.1",
        torch="2.13.0",
        kernels="sdpa",
        method="lora r16",
        dtype="bf16",
        architecture="cafe",
    )
    compute = ComputeModel(per_token_s=per_token_s, source="calibrated", spread=0.05)
    measured = "2026-11-20T08:00:00.000Z"
    return Profile(key=key, host=host, compute=compute, **({"measured": measured} | more))


def plan(*, timed: bool = True, profiles: tuple[str | None, str | None] = (None, None), **more: Any) -> Plan:
    """Of 8 micro-batches of one sample of 100 tokens pc1 has six, and pc2, which has no card, two."""
    ranks = (
        RankForecast(
            allocated_bytes=5 * GIB,
            process_bytes=6 * GIB,
            free_bytes=11 * GIB,
            chance=1.0,
            compute_s=0.6 if timed else None,
            gpu=GPU,
            profile=profiles[0],
        ),
        RankForecast(
            allocated_bytes=2 * GIB,
            process_bytes=3 * GIB,
            free_bytes=11 * GIB,
            chance=1.0,
            compute_s=0.5 if timed else None,
            profile=profiles[1],
        ),
    )
    forecast = Forecast(
        ranks=ranks,
        step_s=0.72 if timed else None,
        step_low_s=0.6 if timed else None,
        step_high_s=0.9 if timed else None,
        communication_s=0.2 if timed else None,
        exposed_s=0.1 if timed else None,
        sent_bytes=1e8,
        tokens_per_sample=100.0,
        source="calibrated",
    )
    said: dict[str, Any] = {
        "job": "tiny",
        "strategy": "ddp",
        "reason": "",
        "method": "lora, rank 16",
        "precision": "bf16",
        "batch": 8,
        "micro_batch": 1,
        "ranks": (
            PlannedRank(host="pc1", share=6, percent=75.0),
            PlannedRank(host="pc2", share=2, percent=25.0),
        ),
        "epochs": 1.0,
        "steps": 100,
        "data": None,
        "checkpoint_every_steps": None,
        "checkpoint_every_minutes": 10.0,
        "evaluates": False,
        "evaluation_at_start": False,
        "evaluation_every_steps": None,
        "forecast": forecast,
    }
    return Plan(**(said | more))


def line(
    step: int,
    *,
    step_s: float = 0.8,
    compute: tuple[float, float] = (0.6, 0.5),
    shares: tuple[int, int] = (6, 2),
    attempt: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """One step as metrics.jsonl has it; the exchange takes 0.1 s from when the last rank is ready."""
    ready_s = max(compute)
    ranks = [
        {
            "rank": rank,
            "host": f"pc{rank + 1}",
            "micro_batches": shares[rank],
            "data_s": 0.0,
            "compute_s": compute_s,
            "wait_s": ready_s - compute_s + 0.1,
            "memory_bytes": (4 + step % 2) * GIB,
        }
        for rank, compute_s in enumerate(compute)
    ]
    record = {
        "kind": "step",
        "attempt": attempt,
        "step": step,
        "time": f"2026-11-21T08:{step // 60:02d}:{step % 60:02d}.000+00:00",
        "samples": 8,
        "tokens": 800,
        "step_s": step_s,
        "skipped": False,
        "ranks": ranks,
    }
    return record | more


def evaluation(step: int, attempt: int = 1) -> dict[str, Any]:
    return {"kind": "evaluation", "attempt": attempt, "step": step, "loss": 2.0, "duration_s": 30.0}


def outcome(made: Plan, records: list[dict[str, Any]], *, run_id: str = "calm-otter-7") -> Comparison | None:
    """What is kept of a run."""
    observed = observe(records, attempt=1, batch=made.batch, num_ranks=len(made.ranks))
    return compare(made, observed, run_id=run_id, attempt=1)
