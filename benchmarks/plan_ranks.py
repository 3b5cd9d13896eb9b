"""A rank of plan_time.py: real exchanges over gloo between emulated computation.

    python -m benchmarks.plan_ranks '<json>'      # with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set

Computation is EMULATED: a rank sleeps to absolute deadlines, so that what the processor really does meanwhile (copies,
sums, sending) costs nothing extra as long as it fits. A device slower than it should be is seen: `alone_s` is the same
step without exchanges.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gangline.runs.formulas import Window, choose_buckets
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, SourceJob
from gangline.strategies.ddp.train import Ddp
from gangline.worker.batch import Batch
from gangline.worker.bench_collective import measure
from gangline.worker.exchange import measure_wire
from gangline.worker.precision import Precision
from gangline.worker.process_group import ProcessGroup
from gangline.worker.strategy import StrategySetup

CPU = torch.device("cpu")
FP32 = Precision(name="fp32", compute=torch.float32, parameters=torch.float32)
BACKWARD = 2 / 3
Case = dict[str, Any]


class Device:
    """Takes max(floor, a + b * tokens) * factor for a micro-batch."""

    def __init__(self, spec: dict[str, float]) -> None:
        self._spec = spec
        self._deadline = 0.0

    def micro_s(self, tokens: int) -> float:
        """What a micro-batch has to take."""
        spec = self._spec
        return max(spec["floor"], spec["a"] + spec["b"] * tokens) * spec["factor"]

    def begin(self) -> None:
        """Nothing was computed until now: the rank waited."""
        self._deadline = max(self._deadline, time.monotonic())

    def work(self, seconds: float) -> None:
        """Be busy until `seconds` after what was done before."""
        self._deadline += seconds
        time.sleep(max(0.0, self._deadline - time.monotonic()))


class Work(torch.autograd.Function):
    """One layer: takes its time, and gives gradients of the right size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: Device, seconds: float, *weights: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """The same, later."""
        ctx.device, ctx.seconds, ctx.shapes = device, seconds, [weight.shape for weight in weights]
        device.work(seconds * (1 - BACKWARD))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Zeros, later."""
        ctx.device.work(ctx.seconds * BACKWARD)
        return grads[0], None, None, *(torch.zeros(shape) for shape in ctx.shapes)


class Model(nn.Module):
    """Trained weights by layer: the first entry is the embedding table, the last the head; both take no time."""

    def __init__(self, sizes: list[list[int]], device: Device) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ParameterList([torch.zeros(size) for size in part]) for part in sizes])
        self.device = device

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """A scalar that depends on every weight."""
        depth = len(self.parts) - 2
        each_s = self.device.micro_s(batch[0].numel()) / depth
        self.device.begin()
        x = torch.zeros((), requires_grad=True)
        for number, part in enumerate(self.parts):
            x = Work.apply(x, self.device, each_s if 0 < number <= depth else 0.0, *part)  # type: ignore[no-untyped-call]
        return x


def main() -> int:
    """Measure the device, then links and the case, for every case."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    device = Device(order["devices"][rank])
    dist.init_process_group("gloo", timeout=timedelta(seconds=order["limit_s"]))
    for tokens in order["points"]:
        times = [timed(lambda tokens=tokens: alone(device, tokens, 1)) for _ in range(3)]
        tell("point", tokens=tokens, seconds=sorted(times)[1])
    for case in order["cases"]:
        for size in order["sizes"]:
            seconds = measure(size, CPU, order["link_s"])
            tell("link", before=case["name"], num_bytes=size, seconds=seconds[len(seconds) // 2])
        steps = {"ddp": ddp, "fsdp": sharded, "local-sgd": local_sgd}[case["kind"]]
        run(case, device, steps(case, device))
    sys.stdout.flush()
    os._exit(0)  # a gloo group that is torn down may hang: see gangline.worker.process_group.leave


def run(case: Case, device: Device, step: Callable[[], None]) -> None:
    """Three times without exchanges, one step to warm up, then as many as asked for."""
    mine = case["micro_batches"][dist.get_rank()]
    alone_s = sorted(timed(lambda: alone(device, case["tokens"], mine)) for _ in range(3))[1]
    step()
    dist.barrier()
    time.sleep(0.2)  # until what the warm-up sent has been acknowledged
    sent, begun = sent_bytes(), time.perf_counter()
    for _ in range(case["steps"]):
        step()
    took = time.perf_counter() - begun
    dist.barrier()
    time.sleep(0.2)
    inner = case.get("inner_steps", 1) * case["steps"]
    tell(
        "case",
        name=case["name"],
        step_s=took / inner,
        alone_s=alone_s,
        nominal_s=mine * device.micro_s(case["tokens"]),
        sent_bytes=(sent_bytes() - sent) / inner,
    )


def alone(device: Device, tokens: int, micro_batches: int) -> None:
    """Computation only."""
    for _ in range(micro_batches):
        device.begin()
        device.work(device.micro_s(tokens))


def ddp(case: Case, device: Device) -> Callable[[], None]:
    """Our own DDP, buckets and all."""
    shares = tuple(GangRank(host=f"pc{rank}", share=share) for rank, share in enumerate(case["micro_batches"]))
    world = ProcessGroup(gang=Gang(run_id="bench", attempt=1, ranks=shares), rank=dist.get_rank(), device=CPU)
    strategy = Ddp(setup_of(world))
    strategy.wrap(Model(case["weights"], device))  # type: ignore[arg-type]
    mine = case["micro_batches"][dist.get_rank()]
    begin(strategy, case, device.micro_s(case["tokens"]), mine)
    batch = Batch(*(torch.zeros(1, case["tokens"], dtype=torch.int64),) * 4)

    def step() -> None:
        for number in range(mine):
            strategy.forward_backward(batch, scale=1.0, last=number == mine - 1)
        strategy._ddp.zero_grad()
        device.begin()
        device.work(case["optimizer_s"])

    return step


def setup_of(world: ProcessGroup, *, beat: Callable[[], None] = lambda: None) -> StrategySetup:
    """What a strategy is told, of a job that nothing is read of."""
    job = Job(
        name="bench",
        model=ModelJob(path="emulated"),
        method=MethodJob(kind="full"),
        data=DataJob(train=SourceJob()),
        batch=1,
        micro_batch=1,
        exchange="fp32",
    )
    return StrategySetup(job=job, world=world, precision=FP32, beat=beat)


def begin(strategy: Ddp, case: Case, micro_s: float, mine: int) -> None:
    """Cut gradients as the trainer does, from the links as they are; the embedding table's are ready last."""
    table = torch.zeros(dist.get_world_size(), 2, dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor([mine * micro_s, BACKWARD * micro_s])
    dist.all_reduce(table)
    windows = [Window(busy_s=busy_s, backward_s=backward_s) for busy_s, backward_s in table.tolist()]
    tail_bytes = 4 * sum(case["weights"][0])
    strategy.begin(choose_buckets(strategy.num_bytes, measure_wire(CPU), windows, tail_bytes=tail_bytes).num_bytes)


def local_sgd(case: Case, device: Device) -> Callable[[], None]:
    """Steps of one's own, then all weights at once."""
    buffer = torch.zeros(case["exchanges"][0]["num_bytes"] // 4)

    def step() -> None:
        for _ in range(case["inner_steps"]):
            alone(device, case["tokens"], case["micro_batches"][dist.get_rank()])
            device.work(case["optimizer_s"])
        dist.all_reduce(buffer)

    return step


class Sharded:
    """The collectives of FSDP2: the next layer's weights are fetched while one computes.

    They run one after the other, as on a communicator of NCCL; gloo by itself would run two at a time, whose rings keep
    each other waiting (8 % slower at 100 Mbit).
    """

    def __init__(self, case: Case, device: Device) -> None:
        self._case, self._device = case, device
        self._queue = ThreadPoolExecutor(1)
        self._sizes = {(each["what"], each["hides"] == "nothing"): each["num_bytes"] for each in case["exchanges"]}
        self._pools: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def step(self) -> None:
        """One optimizer step."""
        depth = self._case["depth"]
        each_s = self._device.micro_s(self._case["tokens"]) / depth
        for _ in range(self._case["micro_batches"][dist.get_rank()]):
            self._start("weights for forward", outside=True).result()
            self._pass("weights for forward", each_s * (1 - BACKWARD), reduces=False)
            self._start("weights for backward", outside=True).result()
            self._pass("weights for backward", each_s * BACKWARD, reduces=True)
            self._start("gradients", outside=True).result()
        self._device.begin()
        self._device.work(self._case["optimizer_s"])

    def _pass(self, what: str, seconds: float, *, reduces: bool) -> None:
        reduced = []
        coming = self._start(what)
        for number in range(self._case["depth"]):
            coming.result()
            if number < self._case["depth"] - 1:
                coming = self._start(what)
            self._device.begin()
            self._device.work(seconds)
            if reduces:
                reduced.append(self._start("gradients"))
                if len(reduced) > 1:  # as FSDP2 does: one at a time
                    reduced.pop(0).result()
        for each in reduced:
            each.result()

    def _start(self, what: str, *, outside: bool = False) -> Future[Any]:
        size = self._sizes[what, outside]
        dtype = torch.float32 if what == "gradients" else torch.bfloat16
        world = dist.get_world_size()
        numbers = size // dtype.itemsize // world * world
        whole, part = self._buffers(what, numbers, dtype)
        if what == "gradients":
            return self._queue.submit(dist.reduce_scatter_tensor, part, whole)
        return self._queue.submit(dist.all_gather_into_tensor, whole, part)

    def _buffers(self, what: str, numbers: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Three of a kind, in turn: one is filled while another is used."""
        pool = self._pools.setdefault((what, numbers), [])
        if len(pool) < 3:
            pool.append((torch.zeros(numbers, dtype=dtype), torch.zeros(numbers // dist.get_world_size(), dtype=dtype)))
        pool.append(pool.pop(0))
        return pool[-1]


def sharded(case: Case, device: Device) -> Callable[[], None]:
    """FSDP2's traffic."""
    return Sharded(case, device).step


def timed(what: Callable[[], None]) -> float:
    """Seconds."""
    begun = time.perf_counter()
    what()
    return time.perf_counter() - begun


def sent_bytes() -> int:
    """By the host's network card since it is there."""
    return int(Path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def tell(kind: str, **figures: Any) -> None:
    """One JSON line."""
    print(json.dumps({"kind": kind, "rank": dist.get_rank(), **figures}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
