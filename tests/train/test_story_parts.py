"""Models in parts through the real command: they lose a rank, go on by themselves, elsewhere, and leave."""

import importlib.util
import json
import os
import re
import shutil
import signal

import pytest

from tests.train.story import copy_world, make_user, write_cluster, write_job
from tests.train.tolerances import FP32

pytestmark = [pytest.mark.timeout(400), pytest.mark.rotating]

SMALL = {"batch": 4}
SLOW = {"env": {"GANGLINE_SIMULATED_SLOWDOWN": 2}}
"""Ranks that sleep between few micro-batches: a run that is to be stopped does not end before `gangline stop` is there."""


@pytest.fixture
def user(world, quick_python, tmp_path):
    """Somebody whose job trains every weight in parts, on two hosts with two ranks each."""
    user = make_user(tmp_path, python=quick_python)
    copy_world(world, user)
    write_job(user, strategy="hsdp", steps=40, **SMALL)
    write_cluster(user, "first", pc1={"slots": 2, **SLOW}, pc2={"slots": 2, **SLOW})
    write_cluster(user, "second", pc4={})
    yield user
    user.end_runs()


def test_a_model_in_parts_goes_on_after_a_kill_and_on_one_rank(user):
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "first.yaml")
    run = watching.stdout.readline().strip()
    user.wait_for_step(run, 12)
    record = json.loads((user.at_host("pc2", run) / "attempts" / "1" / "rank-3.pid").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    user.wait_for_step(run, 22)
    user.gangline("stop", run)
    told = watching.communicate()[1]
    assert "the ranks of every host have one copy of the model between them" in told
    assert "rank 3 on pc2 was killed by SIGKILL" in told
    assert "resumed" in {each["event"] for each in events(user, "pc1", run)}
    user.gangline("resume", run, "--cluster", "second.yaml")
    assert user.wait_for_end(run) == "finished"
    metrics = user.metrics("pc4", run)
    assert sorted({line["step"] for line in metrics}) == list(range(1, 41))
    assert {line["attempt"] for line in metrics} == {1, 2, 3}
    again = [line["step"] for line in metrics if line["attempt"] == 2]
    before = [line["step"] for line in metrics if line["attempt"] == 1]
    assert 0 <= before[-1] + 1 - again[0] <= 5  # checkpoint.every_steps: what survivors hold is in parts
    out = user.gangline("export", run, "--to", "out")
    assert (user.folder / "out" / "model.safetensors").is_file(), out


def test_layers_that_ranks_of_a_host_have_between_them_go_on_after_a_kill(user):
    write_job(user, strategy="tp", steps=30, **SMALL)
    write_cluster(user, "first", pc1={"slots": 2}, pc2={"slots": 2})
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "first.yaml")
    run = watching.stdout.readline().strip()
    user.wait_for_step(run, 8)
    record = json.loads((user.at_host("pc2", run) / "attempts" / "1" / "rank-3.pid").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    assert user.wait_for_end(run) == "finished"
    told = watching.communicate()[1]
    assert "the ranks of every host compute each layer together" in told
    assert "rank 3 on pc2 was killed by SIGKILL" in told
    metrics = user.metrics("pc1", run)
    assert sorted({line["step"] for line in metrics}) == list(range(1, 31))
    losses = {}
    for line in metrics:
        assert losses.setdefault(line["step"], line["loss"]) == pytest.approx(line["loss"], rel=FP32)
    out = user.gangline("export", run, "--to", "out")
    assert (user.folder / "out" / "model.safetensors").is_file(), out


def test_a_checkpoint_in_parts_is_lost_with_a_disk_and_used_again_once_the_part_is_back(user):
    write_job(user, strategy="fsdp", steps=30, checkpoint={"every_steps": 5, "each_host": "part"}, **SMALL)
    write_cluster(user, "first", pc1={"slots": 2, **SLOW}, pc2=SLOW)
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "first.yaml")
    run = watching.stdout.readline().strip()
    user.wait_for_step(run, 7)
    user.gangline("stop", run)
    watching.communicate()
    steps = sorted((user.at_host("pc2", run) / "checkpoints").glob("step-*"))
    assert [[part.name for part in step.glob("part-*")] for step in steps] == [["part-pc2"]] * len(steps)

    out = user.gangline("export", run, "--to", "out")
    assert (user.folder / "out" / "model.safetensors").is_file(), out
    shutil.rmtree(user.at_host("pc1", run) / "checkpoints" / steps[-1].name / "part-pc2")  # export had it brought
    for step in steps:
        (step / "part-pc2").rename(user.folder / f"{step.name}-part-pc2")
    said = user.gangline("resume", run, code=5).err
    assert "without pc2: they lie in parts, one on each host" in said
    assert "part-pc2 was not found on any host; it held the rows of rank 2 of 3" in said
    back = user.at_host("pc1", run) / "checkpoints" / steps[-1].name / "part-pc2"
    (user.folder / f"{steps[-1].name}-part-pc2").rename(back)
    user.gangline("resume", run, "--cluster", "second.yaml")
    assert user.wait_for_end(run) == "finished"
    assert sorted({line["step"] for line in user.metrics("pc4", run)}) == list(range(1, 31))


def test_two_pipelines_over_4_bits_go_on_after_a_kill(user):
    method = {"kind": "qlora", "rank": 4}
    write_job(user, strategy={"kind": "pipeline", "replicas": 2}, steps=30, method=method, batch=6)
    write_cluster(user, "first", pc1={}, pc2={"slots": 3})
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "first.yaml")
    run = watching.stdout.readline().strip()
    user.wait_for_step(run, 12)
    record = json.loads((user.at_host("pc2", run) / "attempts" / "1" / "rank-3.pid").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    assert user.wait_for_end(run) == "finished"
    told = watching.communicate()[1]
    assert re.search(r"of 6 micro-batches \d+ through pc1 1, pc2 1; \d+ through pc2 1\+1 \(layers\)", told)
    assert "rank 3 on pc2 was killed by SIGKILL" in told
    metrics = user.metrics("pc1", run)
    assert sorted({line["step"] for line in metrics}) == list(range(1, 31))
    losses = {}
    for line in metrics:  # steps that were done again came to what they came to before
        assert losses.setdefault(line["step"], line["loss"]) == pytest.approx(line["loss"], rel=FP32)
    out = user.gangline("export", run, "--merged", "--to", "out")
    assert (user.folder / "out" / "model.safetensors").is_file(), out


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_zero_goes_on_after_a_kill_and_leaves_as_any_other(user):
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}, "bf16": {"enabled": "auto"}}
    (user.folder / "ds.json").write_text(json.dumps(config))
    write_job(user, strategy={"kind": "zero-3", "offload": "optimizer", "deepspeed": "ds.json"}, steps=30, **SMALL)
    write_cluster(user, "first", pc1={}, pc2={})
    watching = user.start("gangline", "train", "job.yaml", "--cluster", "first.yaml")
    run = watching.stdout.readline().strip()
    user.wait_for_step(run, 7)
    record = json.loads((user.at_host("pc2", run) / "attempts" / "1" / "rank-1.pid").read_text())
    os.kill(record["pid"], signal.SIGKILL)
    assert user.wait_for_end(run) == "finished"
    told = watching.communicate()[1]
    assert "DeepSpeed has all state in parts over the 2 ranks, and of it optimizer in the machines' memory" in told
    assert "rank 1 on pc2 was killed by SIGKILL" in told
    losses = {}
    for line in user.metrics("pc1", run):  # steps that were done again came to what they came to before
        assert losses.setdefault(line["step"], line["loss"]) == pytest.approx(line["loss"], rel=FP32)
    assert sorted(losses) == list(range(1, 31))
    out = user.gangline("export", run, "--to", "out")
    assert (user.folder / "out" / "model.safetensors").is_file(), out


def events(user, host, run):
    lines = (user.at_host(host, run) / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
