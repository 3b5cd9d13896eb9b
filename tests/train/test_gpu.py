"""Promises about a GPU: what a card answers, and beside it what a processor can answer for it."""

import json
import os

import pytest

from gangline.agent.host_facts import nvidia
from gangline.agent.host_facts.samples import CardReader
from tests.train import cases_gpu
from tests.train.story import copy_world, make_user, write_cluster, write_job
from tests.waiting import wait_until

ON_BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
READ = ["read"]
"""The function of worker/loop.py that waits once a step."""


def names(waits):
    """Functions that wait, by step."""
    return [[each.rpartition(" ")[2] for each in step] for step in waits]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("method", "dropout"), [("full", 0.0), ("lora", 0.0), ("lora", 0.1)])
def test_a_step_asks_the_device_once(zygote, method, dropout, packed):
    waits = zygote.fork(cases_gpu.waits_without_a_gpu, method=method, dropout=dropout, packed=packed).result()
    assert names(waits) == [READ] * cases_gpu.STEPS, waits


SPLITS = {"ddp": [6, 4], "fsdp": [5, 5], "tp": [10], "pipeline": [1, 1], "zero-2": [5, 5], "local-sgd": [5, 5]}


@pytest.mark.parametrize("strategy", SPLITS)
def test_a_step_of_several_ranks_would_wait_for_their_cards_once(pool, strategy):
    words = {"method": "full", "precision": "fp32", "dropout": 0.0}
    for waits in pool(2).run(cases_gpu.waits_on_processors, words=words, strategy=strategy, shares=SPLITS[strategy]):
        found = names(waits)
        if strategy == "zero-2":  # DeepSpeed asks for itself whether its norm is a number
            found = [[each for each in step if each != "is_invalid_grad_norm"] for step in found]
        assert found == [READ] * cases_gpu.STEPS, waits


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        {"method": "full", "precision": "fp32", "dropout": 0.0},
        {"method": "full", "precision": "bf16", "dropout": 0.0},
        {"method": "lora", "precision": "bf16", "dropout": 0.1},
        {"method": "qlora", "precision": "bf16", "dropout": 0.0},
    ],
)
def test_a_step_waits_for_the_card_once(zygote, words, packed):
    waits = zygote.fork(cases_gpu.waits_on_a_gpu, words=words, packed=packed).result()
    assert names(waits) == [READ] * cases_gpu.STEPS, waits


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp", "pipeline"])
def test_a_step_of_two_ranks_waits_for_the_card_once(pool, strategy):
    words = {"method": "full", "precision": "bf16", "dropout": 0.0}
    place = {"strategy": strategy, "shares": SPLITS[strategy]}
    for waits in pool(2, "cuda").run(cases_gpu.waits_on_a_gpu, words=words, packed=True, **place):
        assert names(waits) == [READ] * cases_gpu.STEPS, waits


def test_a_rank_without_a_card_is_refused_beside_one_with(pool):
    for error in pool(2).run(cases_gpu.with_a_rank_on_a_processor):
        assert error["what"] == "some ranks of the gang have a GPU and some have none"


@pytest.mark.parametrize(("env", "mode"), [({}, "2"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "1")])
def test_the_watchdog_of_nccl_ends_waits_and_no_process_unless_the_user_says_otherwise(zygote, env, mode):
    assert zygote.fork(cases_gpu.joined, env=env).result() == {"mode": mode, "backend": "cpu:gloo,cuda:nccl"}


def test_a_step_whose_sums_nccl_gave_up_moves_nothing(pool):
    for found in pool(2).run(cases_gpu.step_without_sums, error="COMM_ERROR"):
        assert not found["moved"]
        assert found["said"].startswith("NCCL gave up on a rank in this step (COMM_ERROR in the group world)")
    for found in pool(2).run(cases_gpu.step_without_sums, error="SUCCESS"):
        assert found == {"said": "", "moved": True}


@pytest.mark.gpu
def test_nobody_opens_the_driver_before_a_fork(zygote):
    assert not zygote.fork(cases_gpu.driver_is_open).result()
    assert zygote.fork(cases_gpu.card).result()["total"] > 0


@pytest.mark.gpu
def test_facts_of_the_card_are_those_of_torch(zygote):
    seen, said = zygote.fork(cases_gpu.card).result(), nvidia.gpus({})
    assert said["reason"] is None
    assert said["faults"] == []
    (found,) = said["cards"]
    assert (found["name"], found["compute_capability"]) == (seen["name"], seen["capability"])
    # the driver keeps a part of the memory that NVML counts
    assert 0.97 < seen["total"] / found["memory_total_bytes"] <= 1
    assert found["uuid"].startswith("GPU-")
    assert found["throttle"] == [each for each in found["throttle"] if each in nvidia.THROTTLES.values()]


@pytest.mark.gpu
def test_samples_of_a_busy_card_say_so(zygote):
    reader = CardReader()
    idle = reader.figures()
    work = zygote.fork(cases_gpu.keep_busy, seconds=4.0)
    wait_until(lambda: reader.figures()["gpu/0/utilization_percent"] > 50, "the card is busy", timeout_s=30.0)
    busy = reader.figures()
    assert work.result() > 0
    assert busy["gpu/0/power_w"] > idle["gpu/0/power_w"] > 10
    assert busy["gpu/0/memory_bytes"] > idle["gpu/0/memory_bytes"]
    assert 10 < busy["gpu/0/temperature_c"] < 110
    assert busy["gpu/0/clock_mhz"] > 200
    assert {busy["gpu/0/throttled_percent"], busy["gpu/0/at_power_limit_percent"]} <= {0.0, 100.0}


@pytest.fixture
def user(world, quick_python, tmp_path):
    """Somebody with a corpus and a model, and with the packages of these tests; nothing of theirs runs afterwards."""
    packages = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    user = make_user(tmp_path / "user", python=quick_python, env=packages)
    copy_world(world, user)
    yield user
    user.end_runs()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", ON_BOTH)
def test_the_real_command_trains_on_the_device(user, device):
    job = write_job(user, steps=12, evaluation={"every_steps": 6})
    write_cluster(user, "one", pc1={} if device == "cuda" else {"gpu": "none"})
    user.gangline("train", job, "--cluster", "one.yaml")
    (run,) = user.recorded()
    steps = user.metrics("pc1", run)
    assert [each["step"] for each in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"]
    (log,) = user.at_host("pc1", run).glob("attempts/1/rank-0.log")
    assert f"joined: rank 0 of 1 on pc1, {device}" in log.read_text()


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_memory_that_does_not_suffice_is_met_by_smaller_micro_batches(user):
    job = write_job(user, steps=4, batch=192, micro_batch=192, data={"train": "corpus.jsonl", "sequence_length": 64})
    write_cluster(user, "one", pc1={"env": {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.0007"}})
    user.gangline("train", job, "--cluster", "one.yaml")
    (run,) = user.recorded()
    folder = user.at_host("pc1", run)
    assert "OutOfMemoryError" in (folder / "attempts/1/rank-0.log").read_text()
    sizes = [json.loads(path.read_text())["micro_batch"] for path in sorted(folder.glob("attempts/*/gang.json"))]
    assert len(sizes) > 1
    assert 0 < sizes[-1] < 192
    assert [each["step"] for each in user.metrics("pc1", run)] == [1, 2, 3, 4]
