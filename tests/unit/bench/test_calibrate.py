"""bench compute: what ranks are told, what becomes of what they say, and what is kept."""

import dataclasses
import json

import pytest

from gangline.bench.compute import Work, measure_compute, points_of, weights_by_module
from gangline.bench.text import speeds_lines
from gangline.bench.torchrun import BenchHosts
from gangline.decide.hosts import SpeedTable
from gangline.inventory.facts import Gpu, HostFacts, Inventory
from gangline.inventory.measured import find_profile, load_profiles
from gangline.planner.calibration import ProfileKey, architecture_digest, shallow_config
from gangline.planner.config import read_architecture
from gangline.planner.machines import Placement
from gangline.planner.software import with_kernels
from gangline.planner.training import GANGLINE_CPU, Training
from gangline.runs.cluster import Cluster, Host
from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, SourceJob
from tests.fakes.transport import FakeTransport, Scripted

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 300,
}
TRAINING = Training(method="lora", micro_batch=2, sequence_length=512, compute="fp32")
JOB = Job(
    name="tiny",
    model=ModelJob(path="/m"),
    data=DataJob(train=SourceJob(files=("x",))),
    batch=4,
    micro_batch=2,
    method=MethodJob(kind="lora"),
)
WORK = Work(
    job=JOB,
    training=TRAINING,
    whole=read_architecture(CONFIG),
    copy=read_architecture(shallow_config(CONFIG)),
    copy_config=shallow_config(CONFIG),
)
CARD = Gpu(index=0, name="NVIDIA X", uuid="0", memory_total_bytes=1, memory_free_bytes=1, driver="570")


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


def cluster():
    hosts = [Host(name=name, workdir=f"/w/{name}", python="py") for name in ("pc1", "pc2")]
    return Cluster(name="home", hosts=tuple(hosts))


def said(rank, gpu="cpu", each_s=1e-4):
    """Lines of a rank with layers that take `each_s` per token."""
    device = {
        "kind": "device",
        "rank": rank,
        "gpu": gpu,
        "torch": "2.13.0",
        "kernels": "sdpa",
        "fused_loss": True,
        "dtype": "fp32",
        "threads": 1,
    }
    points = [
        {
            "kind": "point",
            "rank": rank,
            "layers": layers,
            "tokens": tokens,
            "length": 512,
            "seconds": 0.001 + tokens * (layers * each_s + 1e-5),
            "head_s": tokens * 1e-5,
            "backward_share": 0.5,
            "spread": 0.01,
            "repeats": 3,
        }
        for tokens in (128, 1024, 2048)
        for layers in (2, 1)
    ]
    update = {"kind": "optimizer", "rank": rank, "numbers": 1000, "seconds": 0.001, "tensors": 4}
    return [device, *points, update]


def text(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


def answering(printed, returncode=0, stderr=""):
    def answer(call):
        if call.argv[1] == "free-port":
            return Scripted(stdout='{"port": 29511}\n')
        return Scripted(stdout=printed, returncode=returncode, stderr=stderr)

    return answer


def measure(tmp_path, *, hosts=None, cards=(), work=WORK, **answers):
    transports = {name: FakeTransport(name, answer=answer) for name, answer in answers.items()}
    seen = Inventory(gathered="2026-01-01T00:00:00+00:00", hosts=(facts("pc1", cards), facts("pc2")), failures=())
    given = BenchHosts(cluster=hosts or cluster(), inventory=seen, transports=transports, networks={})
    found = measure_compute(given, work, home=tmp_path, seconds=30, report=lambda _: None)
    return found, transports


def test_two_layers_of_every_rank_become_its_whole_model(tmp_path):
    found, _ = measure(
        tmp_path, pc1=answering(text(*said(0))), pc2=answering(text({"beat": 1.0}, *said(1, each_s=3e-4)))
    )
    fast, slow = found.ranks
    assert (fast.host, slow.host, found.skipped) == ("pc1", "pc2", ())
    # 8 layers, the head, and 1 ms once
    assert fast.profile.compute.micro_batch_s(1024, 512) == pytest.approx(0.001 + 1024 * (8e-4 + 1e-5), rel=1e-3)
    assert slow.profile.compute.micro_batch_s(1024, 512) == pytest.approx(0.001 + 1024 * (24e-4 + 1e-5), rel=1e-3)
    adapters = 8 * 16 * (4 * 128 + 3 * 192)
    assert fast.profile.compute.optimizer_s == pytest.approx(0.001 * adapters / 1000)


def test_what_was_measured_is_kept_for_the_planner(tmp_path):
    found, _ = measure(
        tmp_path, cards=(CARD,), pc1=answering(text(*said(0, gpu="NVIDIA X"))), pc2=answering(text(*said(1)))
    )
    kept = found.ranks[0].profile
    assert len(load_profiles(tmp_path)) == 2
    wanted = ProfileKey(
        gpu="NVIDIA X",
        driver="570",
        torch="2.13.0",
        kernels="sdpa",
        method="lora r16 all-linear fp32 adamw",
        dtype="fp32",
        architecture=architecture_digest(WORK.whole),
    )
    assert find_profile(load_profiles(tmp_path), wanted) == kept
    assert len(kept.points) == 6


def test_ranks_are_told_what_to_time(tmp_path):
    _, transports = measure(tmp_path, pc1=answering(text(*said(0))), pc2=answering(text(*said(1))))
    started = json.loads(next(call for call in transports["pc2"].calls if call.stdin).stdin)
    assert started["argv"][-3:-1] == ["gangline.worker", "calibrate"]
    order = json.loads(started["argv"][-1])
    assert order["points"] == [[1, 128], [2, 512], [4, 512]]
    assert (order["config"]["num_hidden_layers"], order["layers"]) == (2, 2)
    assert Job.from_json(order["job"]) == JOB
    assert order["deadline_s"] < started["seconds"]
    assert order["by_module"] is False


def test_ranks_are_told_whether_the_strategy_has_weights_by_module(tmp_path):
    found = [weights_by_module(kind, num_ranks=2) for kind in ("zero-3", "zero-2", "fsdp", "auto")]
    assert found == [True, False, False, False]
    assert not weights_by_module("zero-3", num_ranks=1)
    answers = {"pc1": answering(text(*said(0))), "pc2": answering(text(*said(1)))}
    _, transports = measure(tmp_path, work=dataclasses.replace(WORK, by_module=True), **answers)
    started = json.loads(next(call for call in transports["pc2"].calls if call.stdin).stdin)
    assert json.loads(started["argv"][-1])["by_module"] is True


def test_a_measurement_with_kernels_is_none_of_torch_and_the_other_way_round(tmp_path):
    by_kernels = dataclasses.replace(TRAINING, stack=with_kernels(GANGLINE_CPU, ("rms-norm", "lora"), compute="fp32"))
    answers = {"pc1": answering(text(*said(0))), "pc2": answering(text(*said(1)))}
    placement = Placement(host="pc1", gpu=None, spec=None)
    for measured, other in ((by_kernels, TRAINING), (TRAINING, by_kernels)):
        home = tmp_path / ("kernels" if measured is by_kernels else "torch")
        measure(home, work=dataclasses.replace(WORK, training=measured), **answers)
        speeds = SpeedTable(architecture=WORK.whole, home=home)
        assert speeds.profile_of(placement, measured) is not None
        assert speeds.profile_of(placement, other) is None


def test_every_rank_has_a_row_with_its_speed(tmp_path):
    found, _ = measure(tmp_path, pc1=answering(text(*said(0))), pc2=answering(text(*said(1, each_s=2e-4))))
    lines = speeds_lines(found)
    assert lines[0] == "micro-batches of 2 x 512 tokens, the whole model"
    assert lines[1].split() == ["rank", "device", "tokens/s", "micro-batch", "floor", "update", "spread"]
    assert [line.split()[:2] for line in lines[2:4]] == [["pc1:0", "cpu"], ["pc2:1", "cpu"]]
    data = json.loads(json.dumps(found.to_json()))
    assert data["ranks"][0]["tokens_per_s"] == pytest.approx(2.0 * data["ranks"][1]["tokens_per_s"], rel=0.05)


def test_what_did_not_fit_and_who_failed_is_said(tmp_path):
    short = [line for line in said(0) if line.get("tokens", 0) < 2048]
    left_out = {"kind": "skipped", "rank": 0, "what": "4 x 512 tokens", "why": "out of memory"}
    found, _ = measure(
        tmp_path,
        pc1=answering(text(*short, left_out)),
        pc2=answering("", returncode=1, stderr="ModuleNotFoundError: No module named 'torch'\n"),
    )
    assert [each.host for each in found.ranks] == ["pc1"]
    assert [(each.what, each.why) for each in found.skipped] == [
        ("4 x 512 tokens", "out of memory"),
        ("pc2", "ModuleNotFoundError: No module named 'torch'"),
    ]
    assert speeds_lines(found)[-1] == "skipped  pc2: ModuleNotFoundError: No module named 'torch'"


def test_silence_is_said(tmp_path):
    found, _ = measure(tmp_path, pc1=answering(""), pc2=answering(""))
    assert [(each.what, each.why) for each in found.skipped] == [("all ranks", "none said anything")]
    assert speeds_lines(found) == ["skipped  all ranks: none said anything"]
    assert load_profiles(tmp_path) == []


def test_an_error_of_the_worker_is_heard(tmp_path):
    error = {"kind": "error", "what": "no model", "seen": "x", "error_kind": "ModelError"}
    found, _ = measure(tmp_path, pc1=answering(text(error)), pc2=answering(""))
    assert [(each.what, each.why) for each in found.skipped] == [("no model", "x")]


def test_points_are_a_part_of_a_sample_the_micro_batch_and_twice_that():
    assert points_of(TRAINING) == [(1, 128), (2, 512), (4, 512)]
    assert points_of(dataclasses.replace(TRAINING, sequence_length=32)) == [(1, 16), (2, 32), (4, 32)]
