"""A rank of pipeline_plan.py: gangline's own strategies over layers whose computation is EMULATED.

python -m benchmarks.pipeline_ranks '<json>'      # with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.plan_ranks import CPU, Device, Work, sent_bytes, setup_of, tell, timed
from gangline.runs.gang import Gang, GangRank
from gangline.strategies.fsdp.train import Fsdp
from gangline.strategies.pipeline.train import AbsentLayer, Pipeline, PipelineStage
from gangline.worker.batch import Batch
from gangline.worker.bench_collective import measure
from gangline.worker.model import layers_of
from gangline.worker.process_group import ProcessGroup

Order = dict[str, Any]


class Faster(Device):
    """So many times as fast as its figures say, for as long as it is told."""

    times = 1.0

    def micro_s(self, tokens: int) -> float:
        """What a micro-batch has to take."""
        return super().micro_s(tokens) / self.times


class Anew:
    """A device that waits before every layer, for its weights, and computes nothing meanwhile."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def work(self, seconds: float) -> None:
        """Be busy for so long, from now on."""
        self._device.begin()
        self._device.work(seconds)


def main() -> int:
    """Measure the device, then links and the case, for every case."""
    order = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    device = Faster(order["devices"][rank])
    dist.init_process_group("gloo", timeout=timedelta(seconds=order["limit_s"]))
    plain, eager = (pipeline(order, device, eager=eager) for eager in (False, True))
    for tokens in order["points"]:
        tell("point", tokens=tokens, seconds=alone_s(plain, tokens) / plain.part)
    sides: dict[str, Row | Parts] = {"pipeline": plain, "pipeline, eager": eager, "fsdp": fsdp(order, device)}
    for case in order["cases"]:
        device.times = case["faster"]
        name = [case["strategy"], case["tokens"], case["faster"]]
        for size in order["sizes"]:
            seconds = measure(size, CPU, order["link_s"])
            tell("link", before=name, num_bytes=size, seconds=seconds[len(seconds) // 2])
        run(order, case, sides[case["strategy"]])
    sys.stdout.flush()
    os._exit(0)  # a gloo group that is torn down may hang: see gangline.worker.process_group.leave


def alone_s(side: Row, tokens: int) -> float:
    """What a micro-batch takes in this rank's layers, with nobody to send to or to wait for: the median of 9."""
    return statistics.median(timed(lambda: side.alone(tokens)) for _ in range(9))


def run(order: Order, case: Order, side: Row | Parts) -> None:
    """One step to warm up, then as many as asked for; and what the rank's own layers take by themselves."""
    tokens = case["tokens"]
    busy_s = order["micro_batches"] * alone_s(side, tokens) if isinstance(side, Row) else 0.0
    side.step(tokens)
    steps_s, sent = [], []
    for _ in range(case["steps"]):
        dist.barrier()
        time.sleep(0.2)  # until what was sent has been acknowledged
        before = sent_bytes()
        dist.barrier()
        steps_s.append(timed(lambda: side.step(tokens)))
        dist.barrier()
        time.sleep(0.2)
        sent.append(sent_bytes() - before)
    tell(
        "case",
        strategy=case["strategy"],
        tokens=tokens,
        faster=case["faster"],
        steps_s=steps_s,
        sent_bytes=sorted(sent)[len(sent) // 2],
        alone_s=busy_s,
    )


@dataclass(frozen=True, slots=True)
class Row:
    """This rank's layers of a pipeline."""

    strategy: Pipeline
    stage: PipelineStage
    taking: Taking
    device: Device
    count: int

    @property
    def part(self) -> float:
        """Of the model's layers."""
        return self.stage.stages[self.stage.number] / sum(self.stage.stages)

    def step(self, tokens: int) -> None:
        """All micro-batches of so many tokens, forward and back."""
        self.taking.tokens = tokens
        batch = _batch(tokens)
        for number in range(self.count):
            self.strategy.forward_backward(batch, scale=1.0, last=number == self.count - 1)

    def alone(self, tokens: int) -> None:
        """One micro-batch through these layers, from and to nowhere."""
        self.taking.tokens = tokens
        given = None if self.stage.is_first else torch.zeros(1, tokens, self.stage.width, requires_grad=True)
        self.device.begin()
        made = self.strategy._pass(given, _batch(tokens))
        self.device.begin()
        made.backward(torch.ones_like(made))  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Parts:
    """This rank's part of everything, by FSDP2."""

    strategy: Fsdp
    model: nn.Module
    taking: Taking
    count: int

    def step(self, tokens: int) -> None:
        """This rank's micro-batches of so many tokens."""
        self.taking.tokens = tokens
        batch = _batch(tokens)
        for number in range(self.count):
            self.strategy.forward_backward(batch, scale=1.0, last=number == self.count - 1)
        self.model.zero_grad()


def pipeline(order: Order, device: Device, *, eager: bool) -> Row:
    """Cut the model."""
    world = _world(order, "pipeline", eager=eager)
    model = _model(order)
    strategy = Pipeline(setup_of(world, beat=device.begin))
    strategy.split(model)
    loss = strategy.make_loss(model)
    strategy.agree(loss)
    strategy.wrap(loss)
    taking = _emulate(model, device, with_gradients=False)  # nobody is sent any
    return Row(strategy, strategy._stage, taking, device, order["micro_batches"])


def fsdp(order: Order, device: Device) -> Parts:
    """Divide the model."""
    world = _world(order, "fsdp")
    model = _model(order)
    strategy = Fsdp(setup_of(world))
    strategy.wrap(strategy.make_loss(model))
    taking = _emulate(model, device, with_gradients=True)
    return Parts(strategy, model, taking, order["micro_batches"] // world.size)


class Taking:
    """Of how many tokens the micro-batches are, of which layers take their part."""

    tokens = 1


def _emulate(model: nn.Module, device: Device, *, with_gradients: bool) -> Taking:
    """Put sleeping in the place of every layer that is here."""
    taking, layers = Taking(), layers_of(model)
    busy = Anew(device) if with_gradients else device

    def sleeping(layer: nn.Module) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            weights = list(layer.parameters()) if with_gradients else []
            seconds = device.micro_s(taking.tokens) / len(layers)
            return Work.apply(hidden, busy, seconds, *weights)  # type: ignore[no-any-return, no-untyped-call]

        return forward

    for layer in layers:
        if not isinstance(layer, AbsentLayer):
            layer.forward = sleeping(layer)
    return taking


def _model(order: Order) -> nn.Module:
    torch.manual_seed(0)
    config = dict(order["config"])
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))


def _batch(tokens: int) -> Batch:
    places = torch.arange(tokens)
    return Batch(places[None] % 64, (places[None] + 1) % 64, places[None], places)


def _world(order: Order, strategy: str, *, eager: bool = False) -> ProcessGroup:
    rank, size, count = dist.get_rank(), dist.get_world_size(), order["micro_batches"]
    share = count if strategy == "pipeline" else count // size
    ranks = tuple(GangRank(host=f"pc{number}", share=share) for number in range(size))
    cut_at = tuple(order["stages"]) if strategy == "pipeline" else ()
    gang = Gang(run_id="bench", attempt=1, ranks=ranks, strategy=strategy, stages=cut_at, eager=eager)  # type: ignore[arg-type]
    return ProcessGroup(gang=gang, rank=rank, device=CPU)


if __name__ == "__main__":
    sys.exit(main())
