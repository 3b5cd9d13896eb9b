"""What the ranks do in test_scaling."""

import contextlib
import io
import json

import torch
import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.runs.decode import build
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, SourceJob
from gangline.worker import bench_scaling
from gangline.worker.bench_scaling import Busy, Warming, random_samples
from gangline.worker.model import trainable
from gangline.worker.process_group import ProcessGroup
from tests.train.cases_calibrate import CONFIG


def order(hosts, *, method="lora", batch=12, seconds=4.0, moving=True, sizes=()):
    shares = [batch // len(hosts) + (rank < batch % len(hosts)) for rank in range(len(hosts))]
    job = Job(
        name="tiny",
        model=ModelJob(path="/nowhere"),
        data=DataJob(train=SourceJob(files=("none.txt",)), sequence_length=32),
        batch=batch,
        micro_batch=1,
        method=MethodJob(kind=method, rank=4),
    )
    ranks = tuple(
        GangRank(host=host, share=share, micro_batch_size=dict(enumerate(sizes)).get(rank))
        for rank, (host, share) in enumerate(zip(hosts, shares, strict=True))
    )
    gang = Gang(run_id="bench", attempt=1, ranks=ranks, moving_shares=moving)
    return {"job": job.to_json(), "config": CONFIG, "gang": gang.to_json(), "seconds": seconds, "deadline_s": 60}


def _world(ask):
    torch.set_num_threads(1)
    return ProcessGroup(gang=build(Gang, ask["gang"]), rank=dist.get_rank(), device=torch.device("cpu"))


def lines(hosts, **more):
    """The lines that this rank writes, or the error that it ends with."""
    ask = order(hosts, **more)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        try:
            bench_scaling.measure(ask, _world(ask))
        except GanglineError as error:
            return error.to_json()
    return [json.loads(line) for line in text.getvalue().splitlines()]


def rows_of_passes(hosts, sizes):
    """The largest number of rows in a pass, alone and together, while ranks are measured."""
    ask = order(hosts, batch=24, sizes=sizes)
    setup = bench_scaling.build(ask, _world(ask))
    bench = bench_scaling.ScalingBenchmark(setup, seconds=30.0)
    variants, rows = bench._variants(), {}
    plain = setup.session.loss.forward

    def forward(input_ids, *more):
        rows[name] = max(rows.get(name, 0), len(input_ids))
        return plain(input_ids, *more)

    setup.session.loss.forward = forward
    for name in ("alone", "together"):
        with bench_scaling.standing_for_all(variants[name].group):
            variants[name].stepper.advance()
    return rows


def exchanges(hosts, method):
    """Gradients of a step alone and of a step together, and the weights before and after both."""
    ask = order(hosts, method=method, batch=4)
    world = _world(ask)
    setup = bench_scaling.build(ask, world)
    bench = bench_scaling.ScalingBenchmark(setup, seconds=15.0)
    variants = bench._variants()
    parameters = list(trainable(setup.session.model).values())
    before = [float(parameter.detach().double().sum()) for parameter in parameters]
    found = {}
    for name in ("alone", "together", "alone"):
        with bench_scaling.standing_for_all(variants[name].group):
            variants[name].stepper.accumulate(bench_scaling.WARM_STEPS)
        found[name] = [round(float(parameter.grad.double().norm()), 9) for parameter in parameters]
        setup.session.optimizer.zero_grad(set_to_none=False)
    bench._take("alone", variants["alone"])
    bench._take("together", variants["together"])
    return {**found, "same_weights": before == [float(parameter.detach().double().sum()) for parameter in parameters]}


def world_sizes(hosts):
    """Ranks that torch counts inside and outside the group of a host."""
    groups = {host: dist.new_group([rank for rank, each in enumerate(hosts) if each == host]) for host in set(hosts)}
    with bench_scaling.standing_for_all(groups[hosts[dist.get_rank()]]):
        inside = [dist.get_world_size(), dist.get_rank()]
    return [inside, [dist.get_world_size(), dist.get_rank()]]


def made_up():
    """Lengths of a set, and samples of the first steps of an order that warms up."""
    rows = random_samples(100, length=8, vocabulary=5)
    row = rows.sample(99)
    steps = Warming(num_samples=6, batch=6, micro_batch=2, seed=0, warm_steps=2, warm_batch=4)
    return {
        "rows": len(rows),
        "tokens": [len(row.input_ids), len(row.targets), int(rows.lengths.sum()), int(rows.label_counts.sum())],
        "shifted": row.input_ids[1:].tolist() == row.targets[:-1].tolist(),
        "micro_batches": [len(steps.micro_batches(step)) for step in range(4)],
    }


def busy():
    """Processors that this rank had while it computed."""
    begun = Busy.now()
    tensor = torch.rand(400, 400)
    while Busy.now().clock_s - begun.clock_s < 0.5:
        tensor = (tensor @ tensor).clamp(0, 1)
    return begun.until_now()
