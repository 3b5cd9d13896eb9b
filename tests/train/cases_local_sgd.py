"""What the ranks do in test_local_sgd: rounds on one host and on several, exchanges, bad numbers, saves."""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from gangline.errors import GanglineError
from gangline.runs.checkpoints import part_folder
from gangline.runs.job import OptimizerJob, OuterJob, ScheduleJob, StrategyJob
from gangline.runs.manifest import PART_FILE, commit_record
from gangline.runs.step_schedule import learning_rate
from gangline.strategies.local_sgd import train as quantise
from gangline.strategies.local_sgd.rounds import Inner, MicroBatch
from gangline.strategies.local_sgd.train import CHUNK, ExchangePeers, Outer
from gangline.strategies.local_sgd.work_split import InnerBatch
from gangline.worker.checkpoint import Saver
from gangline.worker.loop import Loop, Synchronous, TrainingRun
from gangline.worker.model import trainable
from gangline.worker.pace import SLOWDOWN
from gangline.worker.progress import TrainingProgress, restore
from gangline.worker.rank_files import StopFlag
from gangline.worker.run_io import RunIO
from tests.saved import place_commit
from tests.train.small import make_job, make_session, make_world, model_folder, run_loop

LINEAR = OptimizerJob(learning_rate=30.0, beta1=0.0, beta2=0.0, epsilon=1e7, clip_norm=None)
"""AdamW whose step is the gradient times learning_rate / epsilon, to 1e-9: the mean of steps is the step of the mean."""


def local_job(*, inner_steps: int = 4, payload: str = "int8", outer=(0.7, 0.9), **changes):
    """A small job that is trained in rounds. outer: learning rate and momentum."""
    strategy = StrategyJob(
        kind="local-sgd",
        inner_steps=inner_steps,
        payload=payload,
        outer=OuterJob(learning_rate=outer[0], momentum=outer[1]),
    )
    return replace(make_job(**changes), strategy=strategy)


def local_world(shares, *, rank=None, hosts=None, resume_step=None):
    """A gang that trains in rounds."""
    world = make_world(shares, rank=dist.get_rank() if rank is None else rank, hosts=hosts, resume_step=resume_step)
    return replace(world, gang=replace(world.gang, strategy="local-sgd"))


@dataclass
class Heard:
    """A recorder that keeps all figures, and the digest of the weights at the end of every round."""

    model: object
    steps: list = field(default_factory=list)
    digests: list = field(default_factory=list)
    evaluations: list = field(default_factory=list)
    events: list = field(default_factory=list)

    def step(self, report, *, step, shares, **figures) -> None:
        waits = [rank.wait_s for rank in report.times]
        self.steps.append({"step": step, "micro_batches": list(shares), "waits": waits, **figures})
        self.digests.append(digest(self.model))

    def evaluation(self, evaluation, *, step) -> None:
        self.evaluations.append([step, evaluation.loss])

    def event(self, event, **details) -> None:
        self.events.append({"event": event, **details})


def flat(model) -> torch.Tensor:
    """All trained weights as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in trainable(model).values()])


def digest(model) -> str:
    """Of all trained weights."""
    return str(torch.hash_tensor(flat(model)).item())


def run_rounds(session, *, saver=None, progress=None, stop=None):
    """Train to the end; the result, and what was recorded, on every rank."""
    heard = Heard(session.model)
    outlets = RunIO(recorder=heard, saver=saver, stop=stop or StopFlag())
    return Loop(session, outlets, progress or TrainingProgress()).run(), heard


def one_host(*, inner_steps: int):
    """Largest difference of weights between rounds that only go where the host went, and plain steps."""
    job = local_job(precision="fp64", inner_steps=inner_steps, outer=(1.0, 0.0), steps=16)
    apart = make_session(job, local_world([10], rank=0), num_samples=60, num_evaluation=0)
    _, heard = run_rounds(apart)
    together = make_session(job, make_world([10], rank=0), num_samples=60, num_evaluation=0)
    start = flat(together.model).clone()
    _, plain = run_loop(together)
    return {
        "steps": [line["step"] for line in heard.steps],
        "round_steps": [line["round_steps"] for line in heard.steps],
        "difference": float((flat(apart.model) - flat(together.model)).abs().max()),
        "moved": float((flat(together.model) - start).abs().max()),
        "losses": [heard.steps[-1]["loss"], plain.steps[-1][1]],
        "last_rate": heard.steps[-1]["learning_rate"],
        "rate": learning_rate(15, 16, peak=3e-4, schedule=job.schedule),
    }


def linear(shares, *, hosts=None, outer=(1.0, 0.0), **model):
    """Rounds of one step, whose mean is the step of the whole batch; against that step and torch's own SGD."""
    job = local_job(precision="fp64", inner_steps=1, payload="fp32", outer=outer, batch=sum(shares), steps=8)
    job = replace(job, model=replace(job.model, path=model_folder(**model)))
    job = replace(job, optimizer=LINEAR, schedule=ScheduleJob(kind="linear", warmup_steps=3))
    session = make_session(job, local_world(shares, hosts=hosts), num_samples=5 * sum(shares), num_evaluation=0)
    start = flat(session.model).clone()
    _, heard = run_rounds(session)
    wanted = _by_sgd(job, sum(shares), outer)
    return {
        "error": float((flat(session.model) - wanted).norm() / (wanted - start).norm()),
        "digest": digest(session.model),
        "inner_steps": heard.steps[0]["inner_steps"],
    }


def _by_sgd(job, share, outer) -> torch.Tensor:
    """One process, gradients of whole batches, torch's SGD with Nesterov momentum as the outer optimizer."""
    session = make_session(job, make_world([share], rank=0), num_samples=5 * share, num_evaluation=0)
    outlets, progress = RunIO(recorder=None, saver=None, stop=StopFlag()), TrainingProgress()
    plain = Synchronous(TrainingRun(session, outlets, progress))
    rate, momentum = outer
    sgd = torch.optim.SGD(trainable(session.model).values(), lr=rate, momentum=momentum, nesterov=momentum > 0)
    for step in range(session.total_steps):
        plain.accumulate(step)
        inner = learning_rate(step, session.total_steps, peak=LINEAR.learning_rate, schedule=job.schedule)
        for parameter in trainable(session.model).values():
            parameter.grad.mul_(inner / LINEAR.epsilon)
        sgd.step()
        sgd.zero_grad()
    return flat(session.model)


def replicas(shares, *, payload: str, hosts=None, precision: str = "fp32"):
    """Digests by round, and what each round was made of."""
    job = local_job(precision=precision, payload=payload, steps=22, inner_steps=4)
    session = make_session(job, local_world(shares, hosts=hosts), num_samples=60, num_evaluation=0)
    _, heard = run_rounds(session)
    momentum = session.strategy.state_tensors()
    return {
        "digests": heard.digests,
        "momentum": [str(torch.hash_tensor(tensor).item()) for tensor in momentum.values()],
        "lines": [
            {key: line[key] for key in ("step", "samples", "micro_batches", "inner_steps", "round_steps", "sent_bytes")}
            for line in heard.steps
        ],
        "num_weights": flat(session.model).numel(),
    }


def reads(shares, *, hosts=None):
    """How often this rank read which sample in three passes over the data; the last batch of a pass is short."""
    job = local_job(precision="fp32", steps=None, epochs=3.0, inner_steps=3)
    session = make_session(job, local_world(shares, hosts=hosts), num_samples=37, num_evaluation=0)
    counts = Counter()
    plain = session.train_set.sample

    def sample(index):
        counts[int(index)] += 1
        return plain(index)

    session.train_set.sample = sample
    run_rounds(session)
    return counts


def codec(*, payload: str):
    """Rows of unlike sizes through the wire's form; the largest error over that of the block's largest value."""
    torch.manual_seed(0)
    values = torch.randn(3, 8 * quantise.BLOCK) * torch.logspace(-6, 3, 8 * quantise.BLOCK)
    values[1, : quantise.BLOCK] = 0.0
    values[2, : quantise.BLOCK] = 1e-37
    data = quantise.encode(values, payload)
    back = quantise.decode(data, payload, dtype=torch.float32)
    blocks, found = (each.view(-1, quantise.BLOCK) for each in (values, back))
    largest = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-30)
    return {
        "error": float(((found - blocks).abs() / largest).max()),
        "zeros": bool((back[1, : quantise.BLOCK] == 0).all()),
        "row_bytes": data.shape[1],
        "said_bytes": quantise.row_bytes(values.shape[1], payload, torch.float32),
        "num_values": values.shape[1],
    }


def widths():
    """Bytes of a changed weight on the wire, by payload, and weights that are on their way at once."""
    payloads = ("int8", "bf16", "fp32")
    return {
        "bytes": {each: quantise.row_bytes(quantise.BLOCK, each, torch.float32) / quantise.BLOCK for each in payloads},
        "at_once": CHUNK,
    }


def exchanged(*, payload: str, weights, chunk: int):
    """One exchange of made-up changes without momentum: error against the weighted mean, and equality of replicas."""
    import gangline.strategies.local_sgd.train as module

    before, module.CHUNK = module.CHUNK, chunk
    try:
        return _exchanged(payload, weights)
    finally:
        module.CHUNK = before


def _exchanged(payload, weights):
    rank, count = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    shapes = {"a": (70, 11), "b": (5,), "c": (300, 9)}
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}
    changes = [{name: torch.randn(shape) * 0.01 for name, shape in shapes.items()} for _ in range(count)]
    hosts = ExchangePeers(index=rank, leaders=range(count), is_leader=True)
    job = StrategyJob(kind="local-sgd", payload=payload, outer=OuterJob(learning_rate=1.0, momentum=0.0))
    outer = Outer(parameters, job=job, hosts=hosts)
    outer.anchor()
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data -= changes[rank][name]
        if weights[rank] == 0:
            parameter.data.fill_(float("nan"))
    outer.exchange(weights)
    error = 0.0
    for name, parameter in parameters.items():
        mean = sum(weight * change[name] for weight, change in zip(weights, changes, strict=True)) / max(
            1, sum(weights)
        )
        error = max(error, float((parameter.detach() - (start[name] - mean)).abs().max()))
    joined = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
    largest = max(float(change[name].abs().max()) for change in changes for name in shapes)
    return {
        "error": error / largest,
        "digest": str(torch.hash_tensor(joined).item()),
        "sent_bytes": outer.sent_bytes,
        "num_values": joined.numel(),
    }


def poisoned(shares, *, host: int, bad: str, rounds: int = 1):
    """Train with numbers that are none on one host, whose inner steps have three micro-batches.

    bad: `step`: one inner step of its second round; `all`: every one of its first `rounds`; `weights`: its weights
    overflow in its first round.
    """
    job = local_job(precision="fp32", steps=24, batch=sum(shares), inner_steps=3)
    session = make_session(job, local_world(shares), num_samples=240, num_evaluation=0)
    if dist.get_rank() == host:
        _poison(session, bad, per_round=3 * shares[host], rounds=rounds)
    heard, progress = Heard(session.model), TrainingProgress()
    try:
        result = Loop(session, RunIO(recorder=heard, saver=None, stop=StopFlag()), progress).run()
    except GanglineError as error:
        return {"error": error.to_json(), "rounds": len(heard.steps)}
    return {
        "result": result,
        "events": [event for event in heard.events if event["event"] in {"step-skipped", "host-left-out"}],
        "losses": [line["loss"] for line in heard.steps],
        "skipped_lines": [line["skipped"] for line in heard.steps],
        "digests": heard.digests,
        "finite": bool(torch.isfinite(flat(session.model)).all()),
        "finite_states": all(
            bool(torch.isfinite(each["exp_avg_sq"]).all()) for each in session.optimizer.state.values()
        ),
        "skipped": progress.skipped,
    }


def _poison(session, bad: str, *, per_round: int, rounds: int) -> None:
    """From here on, some micro-batches of this rank give a gradient that is not a number."""
    plain, numbers = session.strategy.forward_backward, iter(range(10**6))

    def forward_backward(batch, *, scale, last):
        number = next(numbers)
        if bad == "weights" and number == per_round - 1:
            with torch.no_grad():
                session.model.get_output_embeddings().weight[0, 0] = float("inf")
        is_bad = (bad == "step" and number == per_round + 1) or (bad == "all" and number < rounds * per_round)
        return plain(batch, scale=scale * float("nan") if is_bad else scale, last=last)

    session.strategy.forward_backward = forward_backward


def piece(folder: str, *, shares, resume_step=None, stop_in_step=None, hosts=None, job=None):
    """One attempt of 24 steps in rounds of 4: from `resume_step` until done, or asked to leave within a step."""
    world = local_world(shares, hosts=hosts, resume_step=resume_step)
    made = local_job(**{"precision": "fp32", "steps": 24, "inner_steps": 4, "batch": 10, **(job or {})})
    session = make_session(made, world, num_evaluation=0)
    names = list(world.gang.hosts)
    checkpoints = Path(folder)
    description = {"attempt": 1, "hosts": names, "num_ranks": len(shares), "fingerprints": {"train": "t"}}
    saver = None
    if world.is_first_of_host:
        saver = Saver(checkpoints, host=world.host, job=made.checkpoint, description=description)
    progress, stop = restore(session, checkpoints), StopFlag()
    if stop_in_step is not None and dist.get_rank() == 0:
        _stop_within(session, stop, num_reads=stop_in_step)
    result, heard = run_rounds(session, saver=saver, progress=progress, stop=stop)
    if saver is not None:
        saver.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        parts = {name: (part_folder(checkpoints, progress.step, name) / PART_FILE).read_bytes() for name in names}
        place_commit(checkpoints, commit_record(parts))
    dist.barrier()
    states = [state["exp_avg_sq"].flatten() for state in session.optimizer.state.values()]
    return {
        "result": result,
        "step": progress.step,
        "losses": [[line["step"], line["loss"]] for line in heard.steps],
        "digests": heard.digests,
        "states": str(torch.hash_tensor(torch.cat(states)).item()),
    }


def _stop_within(session, stop: StopFlag, *, num_reads: int) -> None:
    """What SIGTERM does, once this rank has read so many samples."""
    plain, reads = session.train_set.sample, iter(range(10**6))

    def sample(index):
        stop.raised = stop.raised or next(reads) >= num_reads
        return plain(index)

    session.train_set.sample = sample


class ListingSaver:
    """A saver that only remembers which steps it was given."""

    failure = None
    busy = False

    def __init__(self) -> None:
        self.saves: list[int] = []

    def save(self, step, tensors, state, *, wait=False) -> None:
        self.saves.append(step)

    def wait(self) -> None:
        """Nothing is in flight."""


def borders(shares):
    """Evaluations every 5 steps and saves every 6, in rounds of 4: when they come."""
    job = local_job(precision="fp32", steps=22, inner_steps=4)
    job = replace(
        job,
        evaluation=replace(job.evaluation, every_steps=5),
        checkpoint=replace(job.checkpoint, every_steps=6, keep_best=False),
    )
    session = make_session(job, local_world(shares))
    saver = ListingSaver()
    _, heard = run_rounds(session, saver=saver)
    return {"evaluations": [step for step, _ in heard.evaluations], "saves": saver.saves}


def learns(shares, *, payloads, steps: int):
    """Evaluation losses of rounds on several hosts, by payload, and of plain steps, at equal samples."""
    found = {}
    for payload in payloads:
        job = local_job(precision="fp32", dropout=0.0, payload=payload, steps=steps, inner_steps=5, batch=sum(shares))
        job = replace(job, optimizer=replace(job.optimizer, learning_rate=3e-3))
        _, heard = run_rounds(make_session(job, local_world(shares), num_samples=240))
        found[payload] = heard.evaluations
    if dist.get_rank() == 0:
        _, plain = run_loop(make_session(job, make_world([sum(shares)], rank=0), num_samples=240))
        found["plain"] = plain.evaluations
    return found


def speeds(shares, *, slowdown: float):
    """Rounds whose shares follow speeds, one host made slower: micro-batches by round, and whether replicas agree."""
    job = local_job(precision="fp32", steps=24, inner_steps=4, batch=12)
    world = local_world(shares)
    world = replace(world, gang=replace(world.gang, moving_shares=True))
    session = make_session(job, world, num_samples=240, num_evaluation=0)
    with patch.dict(os.environ, {SLOWDOWN: str(slowdown if world.rank == len(shares) - 1 else 1)}):
        _, heard = run_rounds(session)
    return {
        "micro_batches": [line["micro_batches"] for line in heard.steps],
        "digests": heard.digests,
        "events": [event for event in heard.events if event["event"] == "shares"],
    }


class Beats:
    """A phase file that only notes what is done while a rank is in an exchange."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self._phase = ""

    def enter(self, phase, *, step) -> None:
        self._phase = phase

    def beat(self) -> None:
        self.note("beat")

    def note(self, what: str) -> None:
        if self._phase == "exchange":
            self.noted.append(what)


def beats(*, hosts, chunk: int):
    """What ranks note while they exchange one round, without the beats of waiting for slower hosts.

    Ranks that are not the first of their host take themselves for ones with a GPU.
    """
    import gangline.strategies.local_sgd.train as module

    shares = [1] * len(hosts)
    job = local_job(precision="fp32", steps=4, inner_steps=4, batch=len(hosts))
    session = make_session(job, local_world(shares, hosts=hosts), num_samples=60, num_evaluation=0)
    strategy, phase = session.strategy, Beats()
    meet, chunk_before, synchronize = strategy.meet, module.CHUNK, torch.cuda.synchronize
    strategy.meet = lambda row, *, waiting, limit_s: meet(row, limit_s=limit_s)
    if not strategy.outer.hosts.is_leader:
        strategy.outer._device = torch.device("cuda")
    module.CHUNK, torch.cuda.synchronize = chunk, lambda device: phase.note("synchronize")
    try:
        Loop(session, RunIO(recorder=None, saver=None, stop=StopFlag(), phase=phase), TrainingProgress()).run()
    finally:
        module.CHUNK, torch.cuda.synchronize = chunk_before, synchronize
    return {"noted": phase.noted, "num_chunks": -(-flat(session.model).numel() // chunk)}


def hung(shares, *, head_answers: bool):
    """The last host does not end its first round: how the others fail, and whether they said that they wait."""
    import gangline.strategies.local_sgd.train as module

    world = local_world(shares)
    world = replace(world, gang=replace(world.gang, collective_timeout_s=1.0))
    session = make_session(local_job(precision="fp32", inner_steps=4), world, num_evaluation=0)
    phase = Beats()
    loop = Loop(session, RunIO(recorder=None, saver=None, stop=StopFlag(), phase=phase), TrainingProgress())
    if dist.get_rank() == len(shares) - 1:
        loop._stepper.begin()
        return None
    if not head_answers:
        module.ANSWER_S = 0.1
        session.strategy._arrivals._store = SilentStore()
    try:
        loop.run()
    except GanglineError as error:
        return {"error": error.to_json(), "beats": len(phase.noted)}


class SilentStore:
    """A store whose machine hangs: it takes what it is sent, and never answers."""

    def set(self, key, value) -> None:
        """Sent, and not confirmed."""

    def check(self, keys) -> bool:
        threading.Event().wait()
        return False


def joins():
    """Busy seconds of two ranks of a host, of which the second one has work in no inner step."""
    session = make_session(
        local_job(precision="fp32"), local_world([1, 1], hosts=["a", "a"]), num_samples=60, num_evaluation=0
    )
    outlets = RunIO(recorder=None, saver=None, stop=StopFlag())
    samples = session.order.micro_batches(0)
    batches = [InnerBatch(by_rank=((2 * number, 2 * number + 1), ())) for number in range(3)]
    micro_batches = [MicroBatch(step=0, index=index, samples=each) for index, each in enumerate(samples)]
    return (
        Inner(TrainingRun(session, outlets, TrainingProgress()), session.strategy)
        .run(micro_batches, batches)
        .told.busy_s
    )
