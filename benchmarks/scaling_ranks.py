"""A rank of scaling.py: one side of one run, with computation emulated (see emulated.py).

python -m benchmarks.scaling_ranks '<json>'      # with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.emulated import FACTORS, Clock, EmulatedLoss, Rows, Setup, Shape, build
from gangline.runs.job import StrategyJob
from gangline.worker.batch import pick
from gangline.worker.loop import Loop
from gangline.worker.progress import TrainingProgress
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO

Order = dict[str, Any]
Found = dict[str, Any]


class Notes:
    """A recorder that keeps what it is told, with the time."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.losses: list[float] = []
        self.samples: list[int] = []
        self.waits: list[list[float]] = []
        self.shares: list[list[int]] = []
        self.events: list[Found] = []

    def step(self, report: Any, *, shares: Any, loss: float, samples: int, **_: Any) -> None:
        """The end of a step, or of a round."""
        self.samples.append(samples)
        self.ends_s.append(time.perf_counter())
        self.losses.append(loss)
        self.waits.append([times.wait_s for times in report.times])
        self.shares.append(list(shares))

    def event(self, event: str, **details: Any) -> None:
        """Anything else."""
        self.events.append({"event": event, **details})


def main() -> int:
    """Do what the order says; one JSON line on stdout."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sides: dict[str, Callable[[Order, int], Found]] = {
        "alone": alone,
        "gangline": gangline,
        "even ddp": even_ddp,
        "accelerate": accelerate,
    }
    if size > 1 and order["side"] not in ("alone", "accelerate"):
        dist.init_process_group("gloo", timeout=timedelta(seconds=order["limit_s"]))
    found = sides[order["side"]](order, rank)
    sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a gloo group that is torn down may hang: see gangline.worker.process_group.leave


def alone(order: Order, rank: int) -> Found:
    """This machine on its own, with the whole batch: no exchange."""
    return _looped(order, rank, setup=setup_of(order, shares=[order["batch"]], moving=False), placement=0)


def gangline(order: Order, rank: int) -> Found:
    """The trainer as it is: shares measured at the start and moved, buckets of its own choice."""
    return _looped(order, rank, setup=setup_of(order, shares=[1] * len(FACTORS), moving=True), placement=rank)


def _looped(order: Order, rank: int, *, setup: Setup, placement: int) -> Found:
    session, rows, _ = build(setup, placement, factor=factor_of(order, rank))
    notes = Notes()
    began_s = time.perf_counter()
    outlets = RunIO(recorder=notes if placement == 0 else None, saver=None, stop=StopFlag())  # type: ignore[arg-type]
    Loop(session, outlets, TrainingProgress()).run()
    return {
        "ends_s": [end_s - began_s for end_s in notes.ends_s],
        "samples": notes.samples,
        "waits": notes.waits,
        "losses": notes.losses,
        "shares": notes.shares,
        "events": notes.events,
        "read": rows.read if order.get("audit") else [],
    }


def even_ddp(order: Order, rank: int) -> Found:
    """What a guide has: torch's DDP with its own settings, as many micro-batches for every rank."""
    setup = setup_of(order, shares=[1] * len(FACTORS), moving=False)
    rows, loss, each = _even(order, rank, setup)
    model = DistributedDataParallel(loss)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.0)
    ends_s, began_s = [], time.perf_counter()
    for step in range(setup.steps):
        for number in range(each):
            batch = pick([(step * each + number) % len(rows)], rows)
            model.require_backward_grad_sync = number == each - 1
            (model(*batch.tensors) / each).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.clock.stepped()
        ends_s.append(time.perf_counter() - began_s)
    return {"ends_s": ends_s, "per_step": each * len(FACTORS)}


def _even(order: Order, rank: int, setup: Setup) -> tuple[Rows, EmulatedLoss, int]:
    clock = Clock(micro_batch_s=setup.micro_batch_s, factor=factor_of(order, rank))
    each = setup.batch // len(FACTORS)
    return Rows(each * setup.steps), EmulatedLoss(setup.shape, clock), each


def accelerate(order: Order, rank: int) -> Found:
    """HF Trainer, which uses accelerate, as it is on several machines."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    setup = setup_of(order, shares=[1] * len(FACTORS), moving=False)
    rows, loss, each = _even(order, rank, setup)
    ends_s: list[float] = []

    class Ticks(TrainerCallback):
        """Notes the end of every step."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            """The optimizer has moved the weights."""
            loss.clock.stepped()
            ends_s.append(time.perf_counter())

    with TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=setup.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=each,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            ddp_backend="gloo",
            ddp_find_unused_parameters=False,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
        )
        trainer = Trainer(
            model=_Trained(loss), args=arguments, train_dataset=_Listed(rows, len(FACTORS)), callbacks=[Ticks()]
        )
        began_s = time.perf_counter()
        trainer.train()
        assert dist.get_world_size() == len(FACTORS), "HF Trainer trained alone"
        assert isinstance(trainer.model_wrapped, DistributedDataParallel)
    return {"ends_s": [end_s - began_s for end_s in ends_s], "per_step": each * len(FACTORS)}


class _Trained(torch.nn.Module):
    """What HF Trainer calls a model: keywords in, a loss out."""

    def __init__(self, loss: EmulatedLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """The mean loss of one row."""
        return {"loss": self.loss(input_ids, labels) / labels.numel()}


class _Listed(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows for all ranks."""

    def __init__(self, rows: Rows, times: int) -> None:
        self._rows, self._times = rows, times

    def __len__(self) -> int:
        return len(self._rows) * self._times

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self._rows.sample(index % len(self._rows))
        return {"input_ids": torch.from_numpy(row.input_ids.copy()), "labels": torch.from_numpy(row.targets.copy())}


def setup_of(order: Order, *, shares: list[int], moving: bool) -> Setup:
    """What the order says of the run."""
    return Setup(
        micro_batch_s=order["micro_batch_s"],
        shares=shares,
        moving=moving,
        batch=order["batch"],
        steps=order["steps"],
        shape=Shape(**order.get("shape", {})),
        fp64=order.get("fp64", False),
        full=order.get("full", False),
        strategy=StrategyJob(**order.get("strategy", {})),
        exchange=order.get("exchange", "fp32"),
    )


def factor_of(order: Order, rank: int) -> Callable[[int], float]:
    """How many times as long this rank takes, by step."""
    slow, usual = order.get("slow"), order.get("factors", FACTORS)[rank]
    if slow is None or slow["rank"] != rank:
        return lambda _step: usual
    return lambda step: usual * (slow["factor"] if slow["begin"] <= step < slow["end"] else 1.0)


if __name__ == "__main__":
    raise SystemExit(main())
