"""`gangline explain --ask`: which cause of a symptom is left, by the figures of a run and what its hosts say."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from gangline.checks.rules import Finding
from gangline.errors import UsageError
from gangline.inventory.measured import Link, Network
from gangline.planner.outcome import compare, observe
from gangline.report.host_samples import HostSamples, parse_samples
from gangline.report.run_summary import RunRecords, read_records
from gangline.report.symptom_questions import Evidence, Reply
from gangline.report.symptoms import SYMPTOMS, Inquiry, inquire, inquiry_json, inquiry_lines, symptom_menu, symptom_of
from gangline.runs.state import iso
from tests.unit.planner.outcomes import plan
from tests.unit.report.stories import BEGUN, STORIES, Past

STEPS = 60
SLOW_LINK = Finding(
    id="E-NET-07",
    severity="warn",
    hosts=("pc2",),
    title="the link is slow",
    evidence="94 Mbit/s",
    meaning="every step waits for the slowest link",
    fix="replace cable and port",
)


def step(
    number: int,
    *,
    compute: tuple[float, ...] = (0.5, 0.5),
    data: float = 0.01,
    exposed: float = 0.01,
    hosts: tuple[str, ...] = ("pc1", "pc2"),
    **more: Any,
) -> dict[str, Any]:
    """A line of a healthy step: the loss falls, the ranks are equal, and wait for hardly anything."""
    ranks = [
        {
            "host": host,
            "rank": rank,
            "micro_batches": 4,
            "data_s": data,
            "compute_s": compute[rank],
            "memory_bytes": 1 << 30,
            "wait_s": max(compute) - compute[rank] + exposed,
        }
        for rank, host in enumerate(hosts)
    ]
    record = {
        "kind": "step",
        "time": iso(BEGUN + 10 + number),
        "attempt": 1,
        "step": number,
        "steps": STEPS,
        "loss": 2.0 + 3.0 / number,
        "learning_rate": 2e-4,
        "grad_norm": 1.0,
        "samples": 8,
        "tokens": 800,
        "label_tokens": 400,
        "step_s": max(compute) + data + exposed,
        "skipped": False,
        "ranks": ranks,
    }
    return {**record, **more}


def samples(host: str, *events: dict[str, Any], use: float = 95.0, waits_for_disk: float = 0.0) -> HostSamples:
    """A host with a card that is in use, which `simulated` says is none."""
    lines: list[Any] = [
        {"samples": host, "interval_s": 2.0, "cards": [{"index": 0, "name": "RTX 4070", "simulated": True}]},
        {"columns": ["cpu_percent", "pressure/io_percent", "gpu/0/utilization_percent"]},
        [1000.0, 1, [50.0, waits_for_disk, use]],
        *events,
    ]
    return parse_samples(host, [json.dumps(line).encode() for line in lines])


def trained(root: Path, *lines: dict[str, Any], sampled: tuple[HostSamples, ...] | None = None) -> RunRecords:
    """A finished run of these steps."""
    past = Past(root)
    past.event("started", hosts=["pc1", "pc2"])
    for line in lines or [step(number) for number in range(1, STEPS + 1)]:
        past.line(past.head.metrics, line)
    past.state("finished")
    return sampled_run(past, sampled)


def sampled_run(past: Past, sampled: tuple[HostSamples, ...] | None = None) -> RunRecords:
    """What is recorded of it."""
    run = read_records(past.view, records=past.layout, remote=None, own=None, can_resume=True)
    return dataclasses.replace(run, samples=(samples("pc1"), samples("pc2")) if sampled is None else sampled)


def steps(**more: Any) -> list[dict[str, Any]]:
    return [step(number, **more) for number in range(1, STEPS + 1)]


def asked(name: str, run: RunRecords | None, **more: Any) -> Inquiry:
    """The inquiry, which can be shown in both forms."""
    found = inquire(name, Evidence(run=run, **more))
    json.dumps(inquiry_json(found))
    assert all("\n" not in line for line in inquiry_lines(found))
    return found


def first(inquiry: Inquiry) -> Reply:
    assert inquiry.verdict == "cause", inquiry_lines(inquiry)
    return inquiry.causes[0]


@pytest.mark.parametrize("name", SYMPTOMS)
def test_a_healthy_run_on_healthy_hosts_is_accused_of_nothing(tmp_path: Path, name: str) -> None:
    inquiry = asked(name, trained(tmp_path), hosts=("pc1", "pc2"))
    assert inquiry.causes == []


@pytest.mark.parametrize("name", SYMPTOMS)
def test_without_a_run_and_without_hosts_nothing_is_known_and_all_of_it_told(name: str) -> None:
    inquiry = asked(name, None)
    assert inquiry.verdict == "open"
    assert len(inquiry.left) == len(SYMPTOMS[name].questions)
    assert any("RUN asks a run" in line for line in inquiry_lines(inquiry))


@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("name", SYMPTOMS)
def test_runs_that_ended_badly_can_be_asked_everything(tmp_path: Path, name: str, story: str) -> None:
    past = Past(tmp_path)
    STORIES[story](past)
    asked(name, sampled_run(past, ()))


# Slow ranks and networks.


def straggler(past: Past, *more: str) -> None:
    what = "pc2 computes 1.9 times as long as in its first steps"
    for event in ("straggler", *more):
        past.event(event, source="worker", step=30, cause="compute", host="pc2", rank=1, factor=1.9, what=what)


def test_a_rank_that_became_slow_is_named_with_the_heat_at_that_time(tmp_path: Path) -> None:
    past = Past(tmp_path)
    straggler(past)
    past.state("finished")
    hot = {"event": "throttled", "time": 1_700_000_000.0, "gpu": 0, "simulated": True, "reasons": ["temperature"]}
    inquiry = asked("one-gpu-slower", sampled_run(past, (samples("pc2", hot),)))
    cause = first(inquiry)
    assert (cause.what, cause.confidence) == ("pc2 computes 1.9 times as long as in its first steps", "high")
    assert cause.seen == (
        "event straggler at step 30 of calm-otter-7",
        "at that time GPU 0 (simulated) throttled: temperature",
    )
    assert "pc2 GPU 0 (simulated) throttled: temperature" in [each.what for each in inquiry.causes[1:]]


def test_a_rank_that_is_no_longer_slow_is_told_as_such(tmp_path: Path) -> None:
    past = Past(tmp_path)
    straggler(past, "straggler-over")
    past.state("finished")
    cause = first(asked("one-gpu-slower", sampled_run(past)))
    assert (cause.what.endswith("; it was over later"), cause.confidence) == (True, "medium")


@pytest.mark.parametrize(("compute", "named"), [((0.5, 0.7), True), ((0.5, 0.52), False)])
def test_a_rank_that_is_slower_than_those_like_it(tmp_path: Path, compute: tuple[float, float], named: bool) -> None:
    inquiry = asked("one-gpu-slower", trained(tmp_path, *steps(compute=compute)))
    said = ["rank 1 on pc2 takes 1.4 times as long for a micro-batch as the others"] if named else []
    assert [each.what for each in inquiry.causes] == said


@pytest.mark.parametrize("by_plan", [True, False])
def test_a_rank_that_recomputes_alone_is_not_accused_of_being_slow(tmp_path: Path, by_plan: bool) -> None:
    run = trained(tmp_path, *steps(compute=(0.5, 0.7)))
    if by_plan:
        one, other = plan().ranks
        run = dataclasses.replace(
            run, plan=plan(ranks=(one, dataclasses.replace(other, activation_checkpointing=True)))
        )
    else:
        settings = "rank 1 on pc2 computes activations again from here on; the others go on as before"
        (attempt,) = run.history.attempts
        event = {"event": "restarting", "settings": settings}
        attempts = (dataclasses.replace(attempt, events=(*attempt.events, event)),)
        run = dataclasses.replace(run, history=dataclasses.replace(run.history, attempts=attempts))
    (cause,) = asked("one-gpu-slower", run).causes
    assert cause.fix.startswith("no fault")
    assert ("with activation checkpointing" if by_plan else "since it ran out of memory") in cause.what


def test_ranks_of_a_pipeline_are_not_compared(tmp_path: Path) -> None:
    run = trained(tmp_path, *steps(compute=(0.5, 0.9)))
    inquiry = asked("one-gpu-slower", dataclasses.replace(run, plan=plan(strategy="pipeline")))
    assert inquiry.causes == []
    assert "the stages of a pipeline compute different layers" in [why for _, why in inquiry.left]


@pytest.mark.parametrize("name", ["one-gpu-slower", "gpu-not-used"])
def test_ranks_that_wait_for_their_rows(tmp_path: Path, name: str) -> None:
    sampled = (samples("pc1", use=40.0), samples("pc2", use=40.0))
    cause = first(asked(name, trained(tmp_path, *steps(data=0.4), sampled=sampled)))
    assert cause.what == "rank 0 on pc1 reads its rows for 44% of the time of all steps"


def test_a_host_whose_processes_wait_for_a_disk(tmp_path: Path) -> None:
    run = trained(tmp_path, sampled=(samples("pc1"), samples("pc2", waits_for_disk=60.0)))
    assert first(asked("starts-slowly", run)).what == "processes on pc2 wait for a disk in 60 % of the time"


def test_a_network_that_takes_as_long_as_planned_is_not_called_broken(tmp_path: Path) -> None:
    lines = steps(exposed=0.3)
    run = trained(tmp_path, *lines)
    compared = compare(plan(), observe(lines, attempt=1, batch=8, num_ranks=2), run_id="calm-otter-7", attempt=1)
    assert compared is not None

    def planned(exposed_s: float) -> Reply:
        figure = dataclasses.replace(compared.exposed_s, planned=exposed_s)
        told = dataclasses.replace(run, comparison=dataclasses.replace(compared, exposed_s=figure))
        return first(asked("slow-network", told))

    assert planned(0.1).what == "the exchange takes 3 times as long as planned"
    assert "a strategy that sends less" in planned(0.3).fix


def test_a_run_on_one_host_has_no_slow_network(tmp_path: Path) -> None:
    inquiry = asked("slow-network", trained(tmp_path, *steps(hosts=("pc1", "pc1"))))
    assert inquiry.verdict == "absent"
    assert (
        inquiry_lines(inquiry)[3]
        == "cause    none found: the run has one host: nothing of a step goes over the network"
    )


def test_exchanges_that_are_part_of_computing_are_not_judged(tmp_path: Path) -> None:
    run = dataclasses.replace(trained(tmp_path), plan=plan(strategy="fsdp"))
    assert "under fsdp exchanges are part of computing" in [why for _, why in asked("slow-network", run).left]


@pytest.mark.parametrize(("mbps", "named"), [(94.0, True), (800.0, False)])
def test_a_way_that_was_measured_to_be_slow(mbps: float, named: bool) -> None:
    ways = [("pc1", "pc2", 940.0), ("pc2", "pc1", 941.0), ("pc1", "pc3", mbps)]
    network = Network(
        cluster="home",
        measured="2026-11-20T00:00:00Z",
        method="",
        addresses={},
        slots={},
        versions={},
        links=tuple(Link(source=one, target=other, throughput_mbps=rate) for one, other, rate in ways),
    )
    causes = asked("slow-network", None, network=network).causes
    said = ["pc1 to pc3 reaches 94 Mbit/s, the middle of all ways 940"]
    assert [each.what for each in causes] == (said if named else [])


def test_what_a_check_finds_is_a_cause_the_worst_first() -> None:
    worse = dataclasses.replace(SLOW_LINK, id="E-NET-12", severity="fail", title="many packets are lost")
    inquiry = asked("slow-network", None, hosts=("pc1", "pc2"), findings=(SLOW_LINK, worse))
    assert [(each.what, each.confidence) for each in inquiry.causes] == [
        ("pc2: many packets are lost", "high"),
        ("pc2: the link is slow", "medium"),
    ]


def test_cards_that_no_rank_uses(tmp_path: Path) -> None:
    idle = samples("pc2", use=0.0)
    cause = first(asked("gpu-not-used", trained(tmp_path, sampled=(samples("pc1"), idle))))
    assert cause.what == "GPU 0 of pc2 (simulated) has no rank that uses it"


def test_an_idle_card_whose_rank_the_plan_names_is_not_said_to_have_none(tmp_path: Path) -> None:
    planned = plan()
    (place, *_) = planned.ranks
    run = trained(tmp_path, sampled=(samples(place.host, use=0.0), samples("another")))
    inquiry = asked("gpu-not-used", dataclasses.replace(run, plan=planned))
    assert not [each for each in inquiry.causes if "has no rank" in each.what]


def test_cards_that_are_in_use_are_told_so(tmp_path: Path) -> None:
    inquiry = asked("gpu-not-used", trained(tmp_path))
    assert "every card is in use for at least 95 % of the time" in [each.what for each in inquiry.absent]


# Losses.


def losses(*values: float, **more: Any) -> list[dict[str, Any]]:
    """Steps whose losses go through these values."""
    each = STEPS // len(values)
    return [
        step(number, loss=values[min((number - 1) // each, len(values) - 1)], **more) for number in range(1, STEPS + 1)
    ]


def test_a_loss_that_rises_with_its_gradient(tmp_path: Path) -> None:
    lines = losses(3.0, 2.5, 2.2, 4.0, 7.0)
    for line in lines[30:]:
        line["grad_norm"] = 40.0
    inquiry = asked("loss-diverges", trained(tmp_path, *lines))
    assert first(inquiry).what == "the norm of the gradient grows to 40 times"
    assert inquiry.asked[0][1][0].verdict == "seen"


def test_steps_that_were_skipped(tmp_path: Path) -> None:
    lines = steps()
    lines[20] |= {"loss": "nan", "skipped": True}
    run = trained(tmp_path, *lines)
    cause = first(asked("loss-diverges", dataclasses.replace(run, plan=plan(precision="fp16"))))
    assert cause.what == "1 of 60 steps were skipped: loss or gradient were not finite"
    assert cause.fix == "precision: bf16 or fp32"


@pytest.mark.parametrize(("event", "fix"), [("replicas-differ", "burn"), ("spike", "rows of these samples")])
def test_what_rank_0_told_of_losses_and_weights(tmp_path: Path, event: str, fix: str) -> None:
    past = Past(tmp_path)
    past.event(event, source="worker", step=30, what="what was seen")
    past.state("finished")
    cause = first(asked("loss-diverges", sampled_run(past)))
    assert cause.what == "what was seen"
    assert fix in cause.fix


def test_an_evaluation_that_alone_becomes_worse(tmp_path: Path) -> None:
    told = [
        {"kind": "evaluation", "attempt": 1, "step": number, "loss": loss}
        for number, loss in ((10, 2.5), (20, 2.2), (60, 2.9))
    ]
    cause = first(asked("loss-diverges", trained(tmp_path, *steps(), *told)))
    assert cause.seen == ("evaluation loss 2.2 at step 20, 2.9 at step 60",)


def test_a_loss_that_jumps_where_the_run_was_resumed(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", source="worker", step=0)
    for line in losses(3.0, 2.0):
        past.line(past.head.metrics, line)
    past.event("restarting", next=2, what="pc3 does not answer", step=60)
    past.event("resumed", source="worker", attempt=2, step=60)
    for number in range(61, 70):
        past.line(past.head.metrics, step(number, loss=4.0, attempt=2))
    past.state("finished", attempt=2)
    causes = asked("loss-diverges", sampled_run(past)).causes
    assert "attempt 2 went on from step 60 with a loss of 4 after 2" in [each.what for each in causes]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"grad_norm": 0.0}, "the gradient is 0: nothing is trained"),
        ({"learning_rate": 1e-9}, "the learning rate never exceeds 1e-09"),
        ({"label_tokens": 1}, "hardly a token has a loss: 60 of 48,000 tokens (0.1%)"),
    ],
)
def test_a_loss_that_stays(tmp_path: Path, more: dict[str, Any], said: str) -> None:
    inquiry = asked("loss-stuck", trained(tmp_path, *steps(loss=5.0, **more)))
    assert first(inquiry).what == said
    assert inquiry.absent == []


def test_a_loss_that_falls_is_not_stuck(tmp_path: Path) -> None:
    assert asked("loss-stuck", trained(tmp_path)).verdict == "absent"


# Starts.


def test_a_start_that_ended_says_why(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1", "pc2"])
    error = {"kind": "RunFailed", "what": "pc2 never joined", "seen": "no answer", "fix": "open its ports"}
    past.state("failed", error={**error, "exit_code": 5})
    cause = first(asked("hangs-at-start", sampled_run(past)))
    assert (cause.what, cause.seen, cause.fix) == ("pc2 never joined", ("no answer",), "open its ports")


def test_a_run_that_trains_does_not_hang_at_its_start(tmp_path: Path) -> None:
    inquiry = asked("hangs-at-start", trained(tmp_path))
    assert [each.what for each in inquiry.absent] == ["attempt 1 has come to step 60"]


def test_a_start_that_stands_names_what_it_waits_for(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1", "pc2"])
    past.event("beginning", stage="load", what="pc2 loads the model for 4 min")
    past.state("running")
    inquiry = asked(
        "hangs-at-start", sampled_run(past), start=("host  ssh  joined  ranks", "pc2   0.3  -       0 of 1")
    )
    assert first(inquiry).what == "pc2 loads the model for 4 min"
    assert any(line.endswith("0 of 1") for line in inquiry_lines(inquiry))


@pytest.mark.parametrize(("before_s", "said"), [(1200, "bringing environment"), (20, None)])
def test_the_longest_part_of_a_start_is_named(tmp_path: Path, before_s: int, said: str | None) -> None:
    past = Past(tmp_path)
    past.event("started", hosts=["pc1"])
    past.event("started", source="worker", step=0)
    for line in steps():
        past.line(past.head.metrics, line)
    past.state("finished", created=iso(BEGUN - before_s))
    inquiry = asked("starts-slowly", sampled_run(past))
    if said is None:
        assert inquiry.verdict == "absent"
    else:
        assert said in first(inquiry).what


# Names of symptoms.


@pytest.mark.parametrize("word", ["slow-network", "slow network", "Slow_Network"])
def test_a_symptom_may_be_written_with_blanks(word: str) -> None:
    assert symptom_of(word) == "slow-network"


def test_an_unknown_symptom_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"no such symptom: 'loss-diverge'") as caught:
        symptom_of("loss-diverge")
    assert "--ask loss-diverges" in caught.value.fix


def test_every_symptom_has_questions_and_stands_in_the_menu() -> None:
    assert [line.split()[1] for line in symptom_menu()] == list(SYMPTOMS)
    assert all(each.questions and each.more for each in SYMPTOMS.values())
