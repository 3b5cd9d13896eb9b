"""Does the plan say how long a step takes, and which strategy is the fastest? Predicted against measured.

    python -m benchmarks.plan_time --out plan.jsonl                  # as root, for the lab; about 15 minutes

Three lab hosts whose speeds are as 1 : 0.56 : 0.45, at 100 Mbit, 1 and 2.5 Gbit. Exchanges are real, over gloo; those
of ddp are gangline's own DDP's, those of fsdp and local-sgd come from a script of the same traffic (see plan_ranks.py;
for pipelines, and for FSDP2 itself, see pipeline_plan.py). COMPUTATION IS EMULATED by sleeping to absolute deadlines:
three ranks on two processors would measure each other. Micro-batches of three sizes are timed first, and all-reduces of
two sizes before each case, for the load of the machine changes; from these alone gangline.planner predicts. Ranks are
preferred to other programs (nice).

One JSON line per case in --out; what is there is not measured again. Exit code 0 if every predicted step time is within
10 % of the measured one, the network's share of it within 5 points, and strategies come in the same order, at every
speed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gangline.planner.architecture import Architecture, Layer, Linear
from gangline.planner.calibration import fit_line
from gangline.planner.speed import ComputeModel, RankWork, StepTime, step_query, step_time
from gangline.planner.traffic import Fabric, LinkModel, Traffic, fit_all_reduce, traffic, wire_bytes
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.gang import shares_by_time
from tests.lab.hosts import Lab, lab_folders

BAR, SHARE_BAR = 0.10, 0.05
"""Of the step time; and of the step, for the network's share of it."""
CLOSE = 0.02
"""Strategies whose steps are nearer to each other than this have no order."""
RATES = {"100mbit": 1, "1gbit": 3, "2.5gbit": 3}
"""And how many steps of each case are measured."""
FACTORS = (1.0, 1.8, 2.2)
DEVICE = {"floor": 0.10, "a": 0.05, "b": 0.00012}
TOKENS, MICRO_BATCHES, OPTIMIZER_S, INNER_STEPS = 2048, 9, 0.02, 10
POINTS, SIZES, LINK_S = (256, 2048, 4096), (256 << 10, 8 << 20), 3.0
DEPTH, HIDDEN, WIDTH, VOCABULARY = 8, 384, 1024, 6000
ROOT = Path(__file__).resolve().parents[1]
PYTHON = str(Path(sys.prefix) / "bin" / "python")
LIMIT_S = 560
FULL = Training(method="full", micro_batch=1, sequence_length=TOKENS)
LORA = Training(method="lora", micro_batch=1, sequence_length=TOKENS)
COLUMNS = (
    "| strategy | link | step predicted | measured | error | network's share predicted | measured | bytes predicted "
    "| counted |\n|---|---|---|---|---|---|---|---|---|"
)
Line = dict[str, Any]


def architecture() -> Architecture:
    """A small llama: 19 million weights, 1.9 million of adapters."""
    square = [Linear(name=f"{x}_proj", inputs=HIDDEN, outputs=HIDDEN, part="attention") for x in "qkvo"]
    wide = [Linear(name=f"{x}_proj", inputs=HIDDEN, outputs=WIDTH, part="mlp") for x in ("gate", "up")]
    down = Linear(name="down_proj", inputs=WIDTH, outputs=HIDDEN, part="mlp")
    layer = Layer(
        count=DEPTH,
        linears=(*square, *wide, down),
        heads=6,
        kv_heads=6,
        head_dim=64,
        value_dim=64,
        width=WIDTH,
        vectors=2 * HIDDEN,
    )
    return Architecture(
        model_type="llama", hidden=HIDDEN, vocabulary=VOCABULARY, tied=False, layers=(layer,), vectors=HIDDEN
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One strategy, and who does how much."""

    name: str
    training: Training
    strategy: PlannedStrategy
    micro_batches: tuple[int, ...]

    @property
    def traffic(self) -> Traffic:
        """Of one step."""
        return traffic(
            architecture(),
            self.training,
            self.strategy,
            micro_batches=max(self.micro_batches),
            backend="gloo",
        )

    def order(self, steps: int) -> Line:
        """What ranks are told."""
        inner = self.strategy.inner_steps
        return {
            "name": self.name,
            "kind": self.strategy.kind,
            "micro_batches": self.micro_batches,
            "tokens": TOKENS,
            "steps": 1 if inner > 1 else steps,
            "inner_steps": inner,
            "optimizer_s": OPTIMIZER_S,
            "depth": DEPTH,
            "weights": weights(self.training),
            "exchanges": [{"what": x.what, "num_bytes": x.num_bytes, "hides": x.hides} for x in self.traffic.exchanges],
        }


def weights(training: Training) -> list[list[int]]:
    """Trained tensors: of the embedding table, of every layer, of the head."""
    (layer,) = architecture().layers
    if training.method == "full":
        inside = [linear.num_weights for linear in layer.linears] + [HIDDEN] * 2
        return [[VOCABULARY * HIDDEN], *[inside] * DEPTH, [HIDDEN, VOCABULARY * HIDDEN]]
    inside = [training.rank * size for linear in layer.linears for size in (linear.inputs, linear.outputs)]
    return [[], *[inside] * DEPTH, []]


def cases() -> list[Case]:
    """All of them do the same samples in a step."""
    micro_s = [DEVICE["a"] + DEVICE["b"] * TOKENS] * len(FACTORS)
    micro_s = [each * factor for each, factor in zip(micro_s, FACTORS, strict=True)]
    work_split = shares_by_time(micro_s, MICRO_BATCHES)
    size = len(FACTORS)
    equal = (MICRO_BATCHES // size,) * size
    ddp, fsdp = (
        PlannedStrategy(kind="ddp", world_size=size),
        PlannedStrategy(kind="fsdp", world_size=size, shard_size=size),
    )
    local = PlannedStrategy(kind="local-sgd", world_size=size, inner_steps=INNER_STEPS)
    return [
        Case(name="ddp lora", training=LORA, strategy=ddp, micro_batches=work_split),
        Case(name="ddp full", training=FULL, strategy=ddp, micro_batches=work_split),
        Case(name="fsdp full", training=FULL, strategy=fsdp, micro_batches=equal),
        Case(name="local-sgd full", training=FULL, strategy=local, micro_batches=work_split),
    ]


def main() -> int:
    """Measure what is missing, then report."""
    arguments = _arguments()
    for rate in arguments.rates:
        there = {(line["rate"], line["case"]) for line in read(arguments.out)}
        missing = [case for case in cases() if (rate, case.name) not in there]
        if missing:
            for line in measured(rate, missing):
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
    return report(read(arguments.out), arguments.rates)


def measured(rate: str, wanted: Sequence[Case]) -> list[Line]:
    """The cases at one speed, predicted and measured."""
    order = {
        "devices": [{**DEVICE, "factor": factor} for factor in FACTORS],
        "sizes": SIZES,
        "link_s": LINK_S,
        "points": POINTS,
        "limit_s": LIMIT_S,
        "cases": [case.order(RATES[rate]) for case in wanted],
    }
    load = os.getloadavg()[0]
    said = ranks(order, rate)
    computes = [device(said, rank) for rank in range(len(FACTORS))]
    return [{"rate": rate, "load": load, **compared(case, said, computes)} for case in wanted]


def ranks(
    order: Line, rate: str, module: Sequence[str] = ("benchmarks.plan_ranks",), *, limit_s: int = LIMIT_S
) -> list[Line]:
    """What all ranks said, each of which is `python -m MODULE ORDER` on a host of its own."""
    with Lab(len(FACTORS), binds=lab_folders(), rate=rate, ttl_s=limit_s + 60) as lab:
        common = {"WORLD_SIZE": str(len(FACTORS)), "MASTER_ADDR": lab.hosts[0].address, "MASTER_PORT": "29500"}
        common |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        argv = ["nice", "-n", "-10", PYTHON, "-W", "ignore", "-m", *module, json.dumps(order)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started = [
            host.popen(argv, env={**common, "RANK": str(rank)}, cwd=ROOT, **pipes)
            for rank, host in enumerate(lab.hosts)
        ]
        texts = [process.communicate(timeout=limit_s) for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(errors[-800:] for _, errors in texts))
    return [json.loads(line) for out, _ in texts for line in out.splitlines() if line.startswith('{"')]


def link(said: Sequence[Line], case: Case) -> LinkModel:
    """From the all-reduces before the case."""
    mine = [line for line in said if line["kind"] == "link" and line["before"] == case.name and line["rank"] == 0]
    found = fit_all_reduce([(line["num_bytes"], line["seconds"]) for line in mine], len(FACTORS), source="all-reduces")
    assert found is not None
    return found


def device(said: Sequence[Line], rank: int) -> ComputeModel:
    """From one rank's micro-batches."""
    mine = [line for line in said if line["kind"] == "point" and line["rank"] == rank]
    line = fit_line([(each["tokens"], each["seconds"]) for each in mine])
    return ComputeModel(floor_s=line.floor, overhead_s=line.a, per_token_s=line.b, optimizer_s=OPTIMIZER_S)


def predicted(case: Case, wire: LinkModel, computes: Sequence[ComputeModel]) -> StepTime:
    """What the plan would say."""
    fabric = Fabric(slots=(1,) * len(FACTORS), wire=wire, inside=wire)
    # the emulated update takes the same whatever a rank holds: undo the division by parts that a real one has
    held = {"fsdp": float(len(FACTORS))}.get(case.strategy.kind, 1.0)
    each = [
        RankWork(compute=replace(compute, optimizer_s=compute.optimizer_s * held), micro_batches=count)
        for compute, count in zip(computes, case.micro_batches, strict=True)
    ]
    return step_time(step_query(case.strategy, case.traffic, each, fabric, tokens=TOKENS, length=TOKENS))


def compared(case: Case, said: Sequence[Line], computes: Sequence[ComputeModel]) -> Line:
    """One line of the report."""
    mine = [line for line in said if line["kind"] == "case" and line["name"] == case.name]
    wire_model = link(said, case)
    said_before = predicted(case, wire_model, computes)
    step_s = max(line["step_s"] for line in mine)
    free_s = max(line["alone_s"] for line in mine) + OPTIMIZER_S
    wire = wire_bytes(case.traffic, (1,) * len(FACTORS))
    return {
        "case": case.name,
        "link_mbit": wire_model.bytes_per_s * 8 / 1e6,
        "link_ms": wire_model.latency_s * 1e3,
        "predicted_s": said_before.total_s,
        "measured_s": step_s,
        "predicted_share": said_before.communication_share,
        "measured_share": max(0.0, 1 - free_s / step_s),
        "predicted_bytes": wire.between,
        "measured_bytes": [line["sent_bytes"] for line in mine],
        "slow": max(line["alone_s"] / line["nominal_s"] for line in mine),
    }


def report(lines: Sequence[Line], rates: Sequence[str]) -> int:
    """Tables, and whether the bars are reached."""
    bad = []
    for rate in rates:
        mine = [line for line in lines if line["rate"] == rate]
        if not mine:
            continue
        print(f"\n{rate}; load {mine[-1]['load']:.1f}; computation emulated\n\n{COLUMNS}")
        for line in mine:
            error = line["predicted_s"] / line["measured_s"] - 1
            sent = max(line["predicted_bytes"]), max(line["measured_bytes"])
            print(
                f"| {line['case']} "
                f"| {line['link_mbit']:.0f} Mbit/s | {line['predicted_s']:.3f} s | {line['measured_s']:.3f} s "
                f"| {error:+.1%} "
                f"| {line['predicted_share']:.1%} | {line['measured_share']:.1%} | {sent[0] / 1e6:.2f} MB "
                f"| {sent[1] / sent[0] - 1:+.2%} |"
            )
            if abs(error) > BAR:
                bad.append(f"{rate} {line['case']}: {error:+.1%}")
            if abs(line["predicted_share"] - line["measured_share"]) > SHARE_BAR:
                bad.append(f"{rate} {line['case']}: the network's share")
            if line["slow"] > 1.02:
                bad.append(f"{rate} {line['case']}: the emulation alone took {line['slow']:.3f} of its time")
        bad += [f"{rate}: {words}" for words in wrong_order(mine)]
    print("\n" + ("\n".join(f"NOT REACHED {words}" for words in bad) or "all within 10 %, in the right order"))
    return 1 if bad else 0


def wrong_order(lines: Sequence[Line]) -> list[str]:
    """Pairs of strategies that the prediction has the other way round."""
    return [
        f"{one['case']} before {other['case']}"
        for one in lines
        for other in lines
        if one["predicted_s"] < other["predicted_s"] and one["measured_s"] > other["measured_s"] * (1 + CLOSE)
    ]


def read(path: Path) -> list[Line]:
    """What is measured already."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rates", nargs="*", default=list(RATES), choices=list(RATES))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
