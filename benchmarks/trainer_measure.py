"""One measurement of the trainer benchmark: one side, one case, one process.

    python -m benchmarks.trainer_measure <case> <steps> <side> <folder>

prints one JSON line. With the side `prepare` it writes the case's model and rows into the folder instead.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.trainer_cases import CASES, SEED, Case
from benchmarks.trainer_inputs import InOrder, document_lengths, open_rows, prepare, stack
from benchmarks.trainer_sides import Clock, load_side
from gangline.worker.batch import SampleOrder


class Memory:
    """Peak memory of this process from now on, and what it held before: resident on a CPU, allocated on a GPU."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.is_exact = True
        """Whether the peak could be reset; if not, it may be from before."""
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            self._reset()
        self.start_bytes = self._read("VmRSS") if device == "cpu" else torch.cuda.memory_allocated()

    def peak_bytes(self) -> int:
        """The most that was held."""
        return self._read("VmHWM") if self._device == "cpu" else torch.cuda.max_memory_allocated()

    def _reset(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            self.is_exact = False

    @staticmethod
    def _read(name: str) -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def measure(case: Case, side: str, folder: Path) -> dict[str, Any]:
    """Train one side; its figures."""
    train = load_side(side)
    if case.device == "cuda":
        torch.cuda.init()
    memory, clock = Memory(case.device), Clock(case)
    model, mean_loss = train(case, folder, clock)
    peak_bytes = memory.peak_bytes()
    tokens, flops = _work(case, folder)
    return {
        "tokens_per_s": round(tokens / clock.duration_s, 2),
        "flops_per_s": flops / clock.duration_s,
        "duration_s": round(clock.duration_s, 4),
        "cpu_s": round(clock.cpu_s, 4),
        "step_s": [round(seconds, 5) for seconds in clock.step_s()],
        "tokens": tokens,
        "peak_bytes": peak_bytes,
        "start_bytes": memory.start_bytes,
        "peak_was_reset": memory.is_exact,
        "mean_loss": mean_loss,
        "final_loss": final_loss(case, model, folder),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if case.device == "cuda" else "cpu",
    }


@torch.no_grad()
def final_loss(case: Case, model: nn.Module, folder: Path) -> float:
    """Loss of the trained model on the first row, computed alike for all sides: equal weights give equal losses."""
    batch = stack([InOrder(open_rows(folder, case), dataclasses.replace(case, packed=True))[0]])
    ids, labels, positions = (batch[name].to(case.device) for name in ("input_ids", "labels", "position_ids"))
    model.eval()
    with torch.autocast(case.device, dtype=torch.bfloat16, enabled=case.precision == "bf16" and not case.pure):
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return float(F.cross_entropy(logits[0, :-1].float(), labels[0, 1:]))


def _work(case: Case, folder: Path) -> tuple[int, float]:
    """Tokens (without padding) and model FLOPs of the timed steps; the same for every side."""
    rows = open_rows(folder, case)
    order = SampleOrder(num_samples=len(rows), batch=case.batch, micro_batch=case.micro_batch, seed=SEED)
    steps = range(case.warmup_steps, case.steps)
    tokens = sum(int(rows.lengths[order.samples(step)].sum()) for step in steps)
    return tokens, sum(model_flops(case, document_lengths(rows, order.samples(step))) for step in steps)


def model_flops(case: Case, lengths: np.ndarray) -> float:
    """FLOPs that documents of these lengths need, as `gangline.worker.pace.step_flops` counts them.

    Without adapters and recomputation. Of experts those count through which a token goes; attention counts inside of
    documents, as a whole square.
    """
    shape = case.shape
    attention = 2 * shape.hidden * shape.hidden * (1 + shape.kv_heads / shape.heads)
    inner = 3 * shape.hidden * shape.intermediate * (shape.active_experts or 1) + shape.hidden * shape.experts
    weights = shape.layers * (attention + inner) + shape.vocabulary * shape.hidden
    squares = float((lengths.astype(np.float64) ** 2).sum())
    passes = 3 if case.method == "full" else 2
    return passes * (2.0 * weights * float(lengths.sum()) + 4.0 * shape.layers * shape.hidden * squares)


def main(argv: list[str]) -> None:
    """Prepare, or measure and print."""
    name, steps, side, folder = argv
    case = dataclasses.replace(CASES[name], steps=int(steps))
    warnings.filterwarnings("ignore")
    if side == "prepare":
        prepare(Path(folder), case)
        return
    print(json.dumps(measure(case, side, Path(folder))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
