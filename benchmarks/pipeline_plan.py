"""Does a pipeline wait, and send, what the plan says; and how does FSDP2 do on the same hosts? COMPUTATION EMULATED.

    python -m benchmarks.pipeline_plan --out pipeline_plan.jsonl        # as root, for the lab; about 18 minutes

Three lab hosts whose speeds are as 1 : 0.56 : 0.45, on links of 1 Gbit/s (shaped). gangline's own strategies train all
weights of a Llama (60 M in fp32, cut by those speeds) over gloo: what is sent, waited for and put together is real. A
decoder layer computes nothing: it sleeps to an absolute deadline for the time of a card that does about 0.8 TFLOP/s in
all, forward and backward, and gives gradients of zeros; three ranks on two processors would measure each other
(pipeline_lan.py computes, and does). Micro-batches of each size are timed first through each rank's layers, and
all-reduces before each case; from these alone gangline.planner predicts.

The bubble is the part of a step in which the busiest stage does not compute. One JSON line per case and time in --out;
what is there is not measured again. Exit code 0 if, for the median of its times, every pipeline's step and traffic are
within 10 % of what was foreseen and its bubble within 10 % (or 1 point, where it is small), and with micro-batches of
up to 128 tokens a pipeline does ten times what FSDP2 does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan_time
from benchmarks.plan_time import FACTORS, read
from benchmarks.scaling import commit, quiet
from gangline.planner.architecture import Architecture
from gangline.planner.config import read_architecture
from gangline.planner.shares import stages_named
from gangline.planner.speed import ComputeModel, RankWork, StepTime, step_query, step_time
from gangline.planner.traffic import Fabric, LinkModel, Traffic, fit_all_reduce, traffic, wire_bytes
from gangline.planner.training import PlannedStrategy, Training
from gangline.runs.gang import split_layers

RATE, TIMES = "1gbit", 2
TOKENS = (8, 32, 128, 512, 2048)
FAST = (2048, 5.0)
"""Where sending takes longest: cards so many times as fast."""
MICRO_BATCHES, SMALL, BAR, POINT, FASTER = 12, 128, 0.10, 0.01, 10.0
PIPELINES = ("pipeline", "pipeline, eager")
STEPS = {"pipeline": 5, "pipeline, eager": 5, "fsdp": 1}
DEVICE = {"floor": 0.0, "a": 0.06, "b": 0.0005}
SIZES, LINK_S, LIMIT_S = (4 << 10, 8 << 20), 3.0, 900
"""Of all-reduces: one that is latency, and one that the shaped link does not let through in a burst."""
DEPTH, HIDDEN = 12, 640
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 1720,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
Line = dict[str, Any]


def stages() -> tuple[int, ...]:
    """Layers of each rank."""
    found = split_layers(list(FACTORS), DEPTH, most=[DEPTH] * len(FACTORS))
    assert found is not None
    return tuple(found)


def cases() -> Iterator[Line]:
    """What is measured each time, sides in turn."""
    for tokens in TOKENS:
        for kind, steps in STEPS.items():
            yield {"strategy": kind, "tokens": tokens, "faster": 1.0, "steps": steps}
    for kind in PIPELINES:
        yield {"strategy": kind, "tokens": FAST[0], "faster": FAST[1], "steps": STEPS[kind]}


def key(line: Line) -> list[Any]:
    """What a case is called."""
    return [line["strategy"], line["tokens"], line["faster"]]


def main() -> int:
    """Measure what is missing, then report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, continued if it exists")
    out = parser.parse_args().out
    for time in range(TIMES):
        done = [key(line) for line in read(out) if line["time"] == time]
        wanted = [case for case in cases() if key(case) not in done]
        if not wanted:
            continue
        load = quiet()
        for line in measured(wanted):
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"time": time, "load": load, "commit": commit(), **line}) + "\n")
    return report(read(out))


def measured(wanted: Sequence[Line]) -> list[Line]:
    """These cases, predicted and measured."""
    order = {
        "devices": [{**DEVICE, "factor": factor} for factor in FACTORS],
        "config": CONFIG,
        "stages": stages(),
        "micro_batches": MICRO_BATCHES,
        "points": TOKENS,
        "sizes": SIZES,
        "link_s": LINK_S,
        "limit_s": LIMIT_S,
        "cases": wanted,
    }
    said = plan_time.ranks(order, RATE, module=("benchmarks.pipeline_ranks",), limit_s=LIMIT_S)
    return [compared(case, said) for case in wanted]


def compared(case: Line, said: Sequence[Line]) -> Line:
    """One line of the report."""
    mine = [line for line in said if line["kind"] == "case" and key(line) == key(case)]
    links = [line for line in said if line["kind"] == "link" and line["before"] == key(case) and not line["rank"]]
    wire = fit_all_reduce([(line["num_bytes"], line["seconds"]) for line in links], len(FACTORS), source="all-reduces")
    assert wire is not None
    computes = [plan_time.device(said, rank).scaled(1 / case["faster"]) for rank in range(len(FACTORS))]
    foreseen, sent = predicted(case, wire, computes)
    step_s = statistics.median(max(times) for times in zip(*(line["steps_s"] for line in mine), strict=True))
    bubble = {
        "bubble": 1 - max(line["alone_s"] for line in mine) / step_s,
        "foreseen_bubble": 1 - max(foreseen.compute_s) / foreseen.total_s,
    }
    return {
        **{name: case[name] for name in ("strategy", "tokens", "faster")},
        **(bubble if case["strategy"] in PIPELINES else {}),
        "link_mbit": wire.bytes_per_s * 8 / 1e6,
        "link_ms": wire.latency_s * 1e3,
        "step_s": step_s,
        "worst_s": max(max(line["steps_s"]) for line in mine),
        "foreseen_s": foreseen.total_s,
        "sent_bytes": [line["sent_bytes"] for line in mine],
        "planned_bytes": max(wire_bytes(sent, (1,) * len(FACTORS)).between),
    }


def predicted(case: Line, wire: LinkModel, computes: Sequence[ComputeModel]) -> tuple[StepTime, Traffic]:
    """What the plan says of one step."""
    size, tokens, piped = len(FACTORS), case["tokens"], case["strategy"] in PIPELINES
    training = Training(method="full", micro_batch=1, sequence_length=tokens, compute="fp32")
    strategy = PlannedStrategy(kind="fsdp", world_size=size, shard_size=size)
    if piped:
        eager = case["strategy"] != PIPELINES[0]
        strategy = PlannedStrategy(kind="pipeline", world_size=size, stages=stages(), eager=eager)
    count = MICRO_BATCHES if piped else MICRO_BATCHES // size
    exchanged = traffic(model(), training, strategy, micro_batches=count, backend="gloo")
    works = [RankWork(compute=replace(each, optimizer_s=0.0), micro_batches=count) for each in computes]
    fabric = Fabric(slots=(1,) * size, wire=wire, inside=wire)
    return step_time(step_query(strategy, exchanged, works, fabric, tokens=tokens, length=tokens)), exchanged


def model() -> Architecture:
    """As the plan reads it."""
    return read_architecture(CONFIG)


def report(lines: Sequence[Line]) -> int:
    """Tables, and whether the bars are reached."""
    bad: list[str] = []
    print(f"computation EMULATED, links of {RATE} and strategies real; layers {stages_named(stages())}; median (worst)")
    print("\n| | tokens | step | foreseen | bubble | foreseen | MB sent | foreseen |\n|" + "---|" * 8)
    for name in map(key, cases()):
        mine = [line for line in lines if key(line) == name and name[0] in PIPELINES]
        bad += report_row(f"{name[0]} | {name[1]}{f', {name[2]:g} x as fast' if name[2] > 1 else ''}", mine)
    print("\n| tokens | pipeline | FSDP2 | FSDP2 foreseen | times as fast |\n|" + "---|" * 5)
    for tokens in TOKENS:
        sides = [[line for line in lines if key(line) == [kind, tokens, 1.0]] for kind in (PIPELINES[0], "fsdp")]
        if not all(sides):
            continue
        ours, theirs = (statistics.median(line["step_s"] for line in side) for side in sides)
        foreseen = statistics.median(line["foreseen_s"] for line in sides[1])
        least = min(line["step_s"] for line in sides[1]) / max(line["step_s"] for line in sides[0])
        print(f"| {tokens} | {ours:.3f} s | {theirs:.2f} s | {foreseen:.2f} s | {theirs / ours:.1f} ({least:.1f}) |")
        if tokens <= SMALL and theirs / ours < FASTER:
            bad.append(f"{tokens} tokens: {theirs / ours:.1f} times FSDP2")
    print("\n" + ("\n".join(f"NOT REACHED {words}" for words in bad) or "all bars reached"))
    return 1 if bad else 0


def report_row(name: str, mine: Sequence[Line]) -> list[str]:
    """A row for one pipeline; what of it is not reached."""
    if not mine:
        return []

    def middle(name: str) -> float:
        return statistics.median(line[name] for line in mine)

    sent = statistics.median(max(line["sent_bytes"]) for line in mine)
    step = middle("foreseen_s") / middle("step_s") - 1
    bubble = middle("foreseen_bubble") - middle("bubble")
    moved = middle("planned_bytes") / sent - 1
    worst = max(abs(line["foreseen_s"] / line["step_s"] - 1) for line in mine)
    print(
        f"| {name} | {middle('step_s'):.3f} s | {step:+.1%} ({worst:.1%}) "
        f"| {middle('bubble'):.1%} | {middle('foreseen_bubble'):.1%} | {sent / 1e6:.2f} | {moved:+.1%} |"
    )
    found = [f"{name}: step {step:+.1%}"] if abs(step) > BAR else []
    found += [f"{name}: traffic {moved:+.1%}"] if abs(moved) > BAR else []
    if abs(bubble) > max(POINT, BAR * middle("bubble")):
        found.append(f"{name}: bubble off by {bubble:+.1%} of the step")
    return found


if __name__ == "__main__":
    sys.exit(main())
