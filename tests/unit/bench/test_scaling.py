"""bench scaling: what ranks are told, the arithmetic of what they say, and the report."""

import dataclasses
import json

import pytest

from gangline.bench.scaling import HostSpeed, Scaling, Task, Turn, batch_s, measure_scaling, others_note, scatter
from gangline.bench.text import scaling_lines
from gangline.bench.torchrun import BenchHosts
from gangline.errors import DoesNotFit, RunFailed, UsageError
from gangline.inventory.facts import Gpu, GpuProcess, HostFacts, Inventory
from gangline.runs.cluster import Cluster, Host
from gangline.runs.gang import Gang, GangRank
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob
from tests.fakes.transport import FakeTransport, Scripted

JOB = Job(
    name="tiny",
    model=ModelJob(path="/m"),
    data=DataJob(train=SourceJob(files=("x",)), sequence_length=100),
    batch=20,
    micro_batch=2,
)
RANKS = (GangRank(host="pc1", share=6), GangRank(host="pc2", share=2), GangRank(host="pc2", share=2))
TASK = Task(
    job=JOB,
    config={"model_type": "llama"},
    ranks=Gang(run_id="bench", attempt=1, ranks=RANKS, moving_shares=True),
)
BUSY_CARD = Gpu(
    index=0,
    name="NVIDIA X",
    uuid="0",
    memory_total_bytes=1,
    memory_free_bytes=1,
    driver="570",
    processes=(GpuProcess(pid=1),),
)


def facts(name, gpus=()):
    return HostFacts(
        host=name,
        hostname=name,
        num_cpus=8,
        memory_total_bytes=1 << 34,
        memory_available_bytes=1 << 33,
        workdir="/w",
        disk_free_bytes=1 << 40,
        python="3.12.1",
        packages={"torch": "2.13.0"},
        gpus=gpus,
    )


def turn(way, *, seconds, steps=(2, 2, 2), micro_batches=(10, 10, 10), update_s=(0.0, 0.0, 0.0), shares=(6, 2, 2)):
    ranks = {
        "steps": list(steps),
        "seconds": list(seconds),
        "micro_batches": list(micro_batches),
        "update_s": list(update_s),
        "exposed_s": [0.01] * 3,
    }
    return {"kind": "turn", "rank": 0, "way": way, "shares": list(shares), "ranks": ranks}


def said(rank, *turns, machine_cpus=3.1, machine="a"):
    device = {"device": "cpu", "torch": "2.13.0+cpu", "dtype": "fp32", "trained": 246_000}
    busy = {"machine": machine, "machine_cpus": machine_cpus, "own_cpus": 1.0, "num_cpus": 8, "seconds": 9.0}
    return [{"kind": "device", "rank": rank, **device}, *turns, {"kind": "busy", "rank": rank, **busy}]


# 2,000 tokens a step: pc1 alone 1,000 tokens/s, pc2 800; together 1,600 and 1,710, evenly 900
TURNS = (
    turn("alone", seconds=(4.0, 4.9, 5.0)),
    turn("together", seconds=(2.5, 2.4, 2.5)),
    turn("even", seconds=(4.0, 4.0, 2000 * 2 / 900), shares=(4, 3, 3)),
    turn("alone", seconds=(4.0, 5.0, 5.0)),
    turn("together", seconds=(2000 * 2 / 1710, 2.3, 2.3)),
)


def text(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def answering(printed, returncode=0, stderr=""):
    def answer(call):
        if call.argv[1] == "free-port":
            return Scripted(stdout='{"port": 29511}\n')
        return Scripted(stdout=printed, returncode=returncode, stderr=stderr)

    return answer


def measure(*, cards=(), transport="ssh", **answers):
    hosts = (
        Host(name="pc1", workdir="/w/1", python="py", transport=transport, address="10.0.0.1"),
        Host(name="pc2", workdir="/w/2", python="py", transport=transport, address="10.0.0.2", slots=2),
    )
    transports = {name: FakeTransport(name, answer=answer) for name, answer in answers.items()}
    seen = Inventory(gathered="2026-01-01T00:00:00+00:00", hosts=(facts("pc1", cards), facts("pc2")), failures=())
    given = BenchHosts(cluster=Cluster(name="home", hosts=hosts), inventory=seen, transports=transports, networks={})
    return measure_scaling(given, TASK, seconds=60, report=lambda _: None), transports


def both(*turns, **more):
    return {
        "pc1": answering(text(*said(0, *turns, **more))),
        "pc2": answering(text({"beat": 1.0}, *said(1, **more), *said(2, **more))),
    }


def test_together_is_compared_with_the_sum_of_every_host_alone():
    found, _ = measure(**both(*TURNS))
    assert [(host.host, host.ranks, host.tokens_per_s) for host in found.hosts] == [
        ("pc1", (0,), pytest.approx(1000)),
        ("pc2", (1, 2), pytest.approx(800)),
    ]
    assert found.ratio == pytest.approx((1600 + 1710) / 2 / 1800)
    assert found.worst == pytest.approx(1600 / 1800)
    assert found.even_ratio == pytest.approx(900 / 1800)
    # 10 micro-batches of 0.2 s at pc1 and 0.5 s at each rank of pc2: 6, 2, 2 take 1.2 s
    assert found.ceiling == pytest.approx(2000 / 1.2 / 1800)
    assert found.doubts == (
        "turns differ by more than 5%: all together 7%",
        "2 of 5 turns had time; --seconds gives more",
    )


def test_the_clock_is_that_of_the_slowest_rank():
    slower = [turn("alone", seconds=(4.0, 9.0, 5.0)), *TURNS[1:3]]
    found, _ = measure(**both(*slower))
    assert found.hosts[1].tokens_per_s == pytest.approx(2000 * 2 / 9)


def test_a_step_alone_with_fewer_micro_batches_is_reckoned_up_with_one_update():
    short = turn("alone", seconds=(4.0, 5.0, 5.0), micro_batches=(10, 4, 4), update_s=(0.3, 0.4, 0.5))
    found, _ = measure(**both(short, *TURNS[1:3]))
    # 2.5 s a step, 0.5 of them for the update: 10 micro-batches take 5 s
    assert found.hosts[1].tokens_per_s == pytest.approx(2000 / 5.5)
    assert found.hosts[0].tokens_per_s == pytest.approx(1000)
    assert any("pc2 4; reckoned up to 10" in line for line in scaling_lines(found))


def test_every_host_gets_the_same_order():
    _, transports = measure(**both(*TURNS))
    orders = []
    for name in ("pc1", "pc2"):
        started = json.loads(next(call for call in transports[name].calls if call.argv[1] == "attached").stdin)
        assert started["argv"][-3:-1] == ["gangline.worker", "bench-scaling"]
        orders.append(json.loads(started["argv"][-1]))
        assert orders[-1]["deadline_s"] < started["seconds"]
    assert orders[0] == orders[1]
    assert Job.from_json(orders[0]["job"]) == JOB
    assert [rank["share"] for rank in orders[0]["gang"]["ranks"]] == [6, 2, 2]


def test_the_report_says_how_it_was_measured():
    found, _ = measure(**both(*TURNS))
    lines = scaling_lines(found)
    assert lines[0].split() == ["host", "computes", "on", "alone", "share"]
    assert lines[1].split() == ["pc1", "cpu", "1", "000", "tokens/s", "6", "of", "10", "(60%)"]
    assert lines[2].split() == ["pc2", "2", "x", "cpu", "800", "tokens/s", "4", "of", "10", "(40%)"]
    assert lines[3:6] == [
        "sum        1 800 tokens/s: what all of them do alone, added up",
        "together   1 655 tokens/s: 91.9% of the sum (worst of 2: 88.9%)",
        "even split 900 tokens/s: 50.0% of the sum",
    ]
    assert lines[6].startswith("exposed    10 ms of a step of 1.17 s (0.9%)")
    assert lines[8] == "missing    8.1%: 7.4% whole micro-batches, 0.9% exposed, -0.2% the rest"
    assert sum(found.missing) == pytest.approx(1 - found.ratio)
    computing = found.ratio + found.missing[0]  # in whole micro-batches, as a part of a step
    assert computing * found.ceiling == pytest.approx(found.ratio)
    assert "tiny: full, 246 k trained weights, fp32; batch 20 = 10 x 2, 100 tokens each" in lines[9]
    assert lines[10].startswith("method     every host alone")
    assert lines[11].startswith(f"measured   {found.measured[:10]} with gangline ")
    assert "torch 2.13.0+cpu" in lines[11]


def test_the_document_has_what_the_screen_has():
    found, _ = measure(**both(*TURNS))
    data = json.loads(json.dumps(found.to_json()))
    assert data["ratio"] == pytest.approx(1655 / 1800)
    assert data["worst_ratio"] < data["ratio"] <= data["ceiling_ratio"]
    assert [host["tokens_per_s"] for host in data["hosts"]] == [pytest.approx(1000), pytest.approx(800)]
    assert data["warnings"] == list(found.doubts)
    assert data["versions"]["torch"] == "2.13.0+cpu"
    assert data["exposed_s"] == 0.01


def test_hosts_on_one_computer_are_said_to_be():
    found, _ = measure(transport="local", **both(*TURNS))
    assert any("all hosts are this one computer" in line for line in scaling_lines(found))


def test_other_programs_are_told_of():
    # one machine, of which three ranks had three processors
    found, _ = measure(cards=(BUSY_CARD,), **both(*TURNS, machine_cpus=5.5))
    assert found.warnings == (
        "pc1: other programs computed on GPU 0 meanwhile",
        "pc1, pc2: other programs had 2.5 of 8 processors meanwhile",
    )
    quiet, _ = measure(**both(*TURNS, machine_cpus=None))
    assert quiet.warnings == ()


def test_processors_of_two_machines_are_not_added_up():
    answers = {
        "pc1": answering(text(*said(0, *TURNS, machine="a", machine_cpus=1.1))),
        "pc2": answering(text(*said(1, machine="b", machine_cpus=4.0), *said(2, machine="b", machine_cpus=3.9))),
    }
    found, _ = measure(**answers)
    assert found.warnings == ("pc2: other programs had 2.0 of 8 processors meanwhile",)


def test_little_is_not_told_of():
    assert others_note(["pc1"], 0.2, num_cpus=2) is None
    assert others_note(["pc1"], 0.9, num_cpus=16) is None
    assert others_note(["pc1"], 1.7, num_cpus=16) == "pc1: other programs had 1.7 of 16 processors meanwhile"


def test_an_error_of_a_rank_ends_it_with_its_own_words():
    error = DoesNotFit("pc2: the job does not fit on NVIDIA X", seen="out of memory", fix="smaller").to_json()
    record = {**error, "error_kind": error["kind"], "kind": "error", "rank": 2}
    with pytest.raises(DoesNotFit, match="pc2: the job does not fit") as caught:
        measure(pc1=answering(text(*said(0))), pc2=answering(text(record), returncode=6, stderr="ChildFailedError"))
    assert caught.value.fix == "smaller"


def test_a_host_that_failed_is_named():
    with pytest.raises(RunFailed, match="pc2: the measurement broke off") as caught:
        measure(
            pc1=answering(text(*said(0))),
            pc2=answering("", returncode=1, stderr="ModuleNotFoundError: No module named 'torch'\n"),
        )
    assert caught.value.seen == "ModuleNotFoundError: No module named 'torch'"


@pytest.mark.parametrize("turns", [(), TURNS[:2]])
def test_half_a_measurement_is_none(turns):
    with pytest.raises(RunFailed, match="broke off"):
        measure(**both(*turns))


def test_time_alone_grows_with_micro_batches_but_for_the_update():
    assert batch_s(2.5, 0.5, measured=4, whole=10) == pytest.approx(5.5)
    assert batch_s(2.5, 0.5, measured=10, whole=10) == pytest.approx(2.5)
    assert batch_s(0.1, 0.2, measured=1, whole=3) == pytest.approx(0.1)


def test_scatter_is_the_range_over_the_median():
    assert scatter([100.0]) == 0
    assert scatter([90.0, 100.0, 110.0]) == pytest.approx(0.2)


def test_the_ceiling_of_the_example_in_the_documentation():
    """1 : 0.55 : 0.45 at 24, 32 and 40 micro-batches."""
    plain = Turn(tokens_per_s=1.0, steps=1, step_s=1.0, exposed_s=0.0, shares=(1, 1, 1))
    speeds = (("a", 1.0), ("b", 0.55), ("c", 0.45))
    base = Scaling(
        job="x",
        method="lora",
        dtype="bf16",
        trained_numbers=1,
        batch=24,
        micro_batch=1,
        sequence_length=1,
        moving=True,
        one_machine=False,
        hosts=tuple(
            HostSpeed(host=name, device="cpu", ranks=(rank,), alone_tokens_per_s=(speed,), alone_micro_batches=1)
            for rank, (name, speed) in enumerate(speeds)
        ),
        together=(plain,),
        even=(plain,),
        measured="2026-01-01",
        versions={},
    )
    ceilings = [dataclasses.replace(base, batch=batch).ceiling for batch in (24, 32, 40)]
    assert ceilings == [pytest.approx(0.943, abs=0.001), pytest.approx(0.978, abs=0.001), pytest.approx(1.0)]
    assert "one turn" in scaling_lines(base)[5]


def test_a_job_that_takes_too_long_is_a_usage_error():
    error = UsageError("bench scaling cannot measure this job in 60 s", fix="--seconds 90").to_json()
    record = {**error, "error_kind": error["kind"], "kind": "error", "rank": 0}
    with pytest.raises(UsageError, match="in 60 s") as caught:
        measure(pc1=answering(text(record), returncode=2), pc2=answering("", returncode=1))
    assert caught.value.exit_code == 2
