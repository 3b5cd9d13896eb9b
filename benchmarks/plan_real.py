"""How near is a plan to training that really computes? Reported, no bar: ranks share two processors.

    python -m benchmarks.plan_real --out real.jsonl                  # as root, for the lab; about 5 minutes

Three lab hosts at 1 Gbit. `gangline.worker.calibrate` times a copy with two layers on all ranks at once, all-reduces of
two sizes are timed, and gangline.planner predicts the step of the whole model; then gangline's own DDP, loss and
optimizer do some steps of it. One JSON line per case in --out; what is there is not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from gangline.bench.compute import points_of, timed_batches
from gangline.planner.calibration import fit_compute, shallow_config, with_optimizer
from gangline.planner.config import read_architecture
from gangline.planner.speed import RankWork, step_query, step_time
from gangline.planner.traffic import Fabric, fit_all_reduce, traffic, trained_weights
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, SourceJob

RATE, SIZE = "1gbit", 3
LENGTH, MICRO_BATCH, MICRO_BATCHES, STEPS, SECONDS = 128, 2, 2, 4, 40.0
SIZES = (256 << 10, 8 << 20)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "vocab_size": 8000,
    "max_position_embeddings": 512,
}
CASES = {
    "lora": Training(method="lora", micro_batch=MICRO_BATCH, sequence_length=LENGTH, compute="fp32"),
    "full": Training(method="full", micro_batch=MICRO_BATCH, sequence_length=LENGTH, compute="fp32"),
    "full, checkpointing": Training(
        method="full", micro_batch=MICRO_BATCH, sequence_length=LENGTH, compute="fp32", checkpointing=True
    ),
}
Line = dict[str, Any]


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", help="an order: this process is a rank")
    arguments = parser.parse_args()
    if arguments.rank:
        return rank(json.loads(arguments.rank))
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    for name, training in CASES.items():
        if name not in {line["case"] for line in lines}:
            lines.append(measured(name, training))
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(lines[-1]) + "\n")
    report(lines)
    return 0


def measured(name: str, training: Training) -> Line:
    """One case, predicted and measured."""
    from benchmarks.plan_time import ranks

    copy = shallow_config(CONFIG)
    order = {
        "job": job(training).to_json(),
        "config": copy,
        "whole": CONFIG,
        "layers": 2,
        "points": points_of(training),
        "by_module": False,
        "seconds": SECONDS,
        "sizes": SIZES,
    }
    load = os.getloadavg()[0]
    said = ranks(order, RATE, module=["benchmarks.plan_real", "--rank"])
    whole = read_architecture(CONFIG)
    work = []
    for number in range(SIZE):
        own = [line for line in said if line["rank"] == number]
        model = fit_compute(timed_batches(own), read_architecture(copy), whole, training, source="calibrated")
        update = next(line for line in own if line["kind"] == "optimizer")
        trained = trained_weights(whole, training)
        model = with_optimizer(model, seconds=update["seconds"], numbers=update["numbers"], trained=trained)
        work.append(RankWork(compute=model, micro_batches=MICRO_BATCHES))
    points = [(line["num_bytes"], line["seconds"]) for line in said if line["kind"] == "link" and line["rank"] == 0]
    link = fit_all_reduce(points, SIZE, source="all-reduces")
    assert link is not None
    strategy = PlannedStrategy(kind="ddp", world_size=SIZE)
    sent = traffic(whole, training, strategy, micro_batches=MICRO_BATCHES, backend="gloo")
    fabric = Fabric(slots=(1,) * SIZE, wire=link, inside=link)
    time_s = step_time(step_query(strategy, sent, work, fabric, tokens=training.tokens, length=LENGTH))
    steps = [max(line["step_s"][number] for line in said if line["kind"] == "steps") for number in range(STEPS)]
    return {
        "case": name,
        "load": load,
        "low_s": time_s.low_s,
        "predicted_s": time_s.total_s,
        "high_s": time_s.high_s,
        "measured_s": sorted(steps)[STEPS // 2],
        "steps_s": steps,
    }


def job(training: Training) -> Job:
    """What the worker is told."""
    return Job(
        name="plan",
        model=ModelJob(path="model"),
        data=DataJob(train=SourceJob(files=("none",)), sequence_length=LENGTH),
        batch=MICRO_BATCH * MICRO_BATCHES * SIZE,
        micro_batch=MICRO_BATCH,
        method=MethodJob(kind="full" if training.method == "full" else "lora", rank=training.rank),
        activation_checkpointing=training.checkpointing,
    )


def rank(order: Line) -> int:
    """Calibrate, then train the whole model for some steps."""
    import torch
    import torch.distributed as dist

    from benchmarks.plan_ranks import setup_of
    from gangline.strategies.ddp.train import Ddp
    from gangline.worker import bench_collective, calibrate
    from gangline.worker.model import trainable
    from gangline.worker.optimizer import clip, gradient_norm
    from gangline.worker.process_group import ProcessGroup

    torch.set_num_threads(1)
    device = torch.device("cpu")
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    calibrate.run(order, calibrate.build(order, device))
    for size in order["sizes"]:
        seconds = bench_collective.measure(size, device, 3.0)
        bench_collective.report("link", num_bytes=size, seconds=seconds[len(seconds) // 2])
    whole = calibrate.build({**order, "config": order["whole"]}, device)
    ranks = tuple(GangRank(host=f"pc{rank}", share=MICRO_BATCHES) for rank in range(SIZE))
    world = ProcessGroup(gang=Gang(run_id="bench", attempt=1, ranks=ranks), rank=dist.get_rank(), device=device)
    strategy = Ddp(replace(setup_of(world), precision=whole.precision))
    strategy.wrap(whole.loss)
    batch = calibrate._batch(whole, MICRO_BATCH, LENGTH)
    took = []
    for _ in range(STEPS + 1):
        dist.barrier()
        begun = time.perf_counter()
        for number in range(MICRO_BATCHES):
            strategy.forward_backward(batch, scale=1 / batch.trained.numel(), last=number == MICRO_BATCHES - 1)
        parameters = list(trainable(whole.loss.model).values())
        clip(parameters, gradient_norm(parameters), maximum=1.0)
        whole.optimizer.step()
        whole.optimizer.zero_grad(set_to_none=True)
        took.append(time.perf_counter() - begun)
    bench_collective.report("steps", step_s=took[1:])
    os._exit(0)  # a gloo group that is torn down may hang: see gangline.worker.process_group.leave


def report(lines: Sequence[Line]) -> None:
    """A table."""
    print("| case | load | step predicted | from | to | measured | error |\n|---|---|---|---|---|---|---|")
    for line in lines:
        print(
            f"| {line['case']} | {line['load']:.1f} | {line['predicted_s']:.2f} s | {line['low_s']:.2f} s "
            f"| {line['high_s']:.2f} s | {line['measured_s']:.2f} s "
            f"| {line['predicted_s'] / line['measured_s'] - 1:+.1%} |"
        )


if __name__ == "__main__":
    sys.exit(main())
