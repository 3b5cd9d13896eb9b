"""examples/two_by_eight from end to end, on two hosts with four ranks each: a host is lost, another takes its place.

A small mixture of experts of the same family (GLM-4.5) stands for the 107 billion weights; the job is the example's own,
with what of it depends on size and time said anew on the command line, and the order to shard inside hosts, which the
plan takes by itself only where a card is too small. Hosts share no disk.
"""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.lab.hosts import ROOT, lab_folders
from tests.lab.user import NewUser, processes_of_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLE = ROOT / "examples" / "two_by_eight"
MAKE_MIXTURE = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, Glm4MoeConfig
from tests.train.tiny import VOCABULARY, write_tokenizer
config = Glm4MoeConfig(hidden_size=64, intermediate_size=128, moe_intermediate_size=48, n_routed_experts=8,
    n_shared_experts=1, num_experts_per_tok=2, first_k_dense_replace=1, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, n_group=1, topk_group=1, vocab_size=VOCABULARY, max_position_embeddings=256,
    bos_token_id=0, eos_token_id=1)
torch.manual_seed(0)
folder = Path(sys.argv[1])
AutoModelForCausalLM.from_config(config).save_pretrained(folder)
write_tokenizer(folder)
"""
WORDS = (
    *("model=./model", "data.sequence_length=96", "data.eval=0.05", "evaluation.every_steps=20", "precision=fp32"),
    *("batch=16", "micro_batch=1", "activation_checkpointing=true", "strategy=hsdp", "steps=80"),
    *("optimizer.learning_rate=3e-3", "schedule.warmup_steps=5", "failures.wait=24h"),
)
ANSWERS = "".join(
    json.dumps({"prompt": f"Which node has shard {number}?", "completion": f"Node {number % 2}, on its own disk."})
    + "\n"
    for number in range(336)
)


@pytest.fixture
def user(lab, tmp_path):
    folder = tmp_path / "model"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", MAKE_MIXTURE, str(folder)], check=True, env=env)
    made = lab(3, binds=lab_folders(), meshed=True, disk="4g", shm="2g")
    user = NewUser(made.user)
    user.lab = made
    user.brings(folder, job=(EXAMPLE / "job.yaml").read_text())
    user.desk.write("answers.jsonl", ANSWERS)
    return user


def describe(user, name, *hosts):
    """A cluster file with four ranks on each of two hosts."""
    user.describes(*hosts, slots=4, name=name)


def test_the_two_nodes_of_the_example_in_small(user):
    h0, h1, h2 = user.lab.hosts
    describe(user, "cluster.yaml", "h0", "h1")
    assert "0 failed" in user.types("check").stdout

    planned = user.types("plan", "job.yaml", *WORDS).stdout
    assert re.search(r"strategy +hsdp", planned), planned

    started = user.types("train", "job.yaml", *WORDS, "--detach", timeout_s=300)
    run = started.stdout.strip()
    user.awaits(run, lambda row: (row["step"] or 0) > 45, "it trains on eight ranks", patience_s=300)
    saved = checkpoints(h0, run)
    assert {20, 40} <= saved == checkpoints(h1, run)  # every host has every one of them
    metrics = lines(h0, run)
    assert [line["step"] for line in metrics if line["kind"] == "evaluation"][:3] == [0, 20, 40]
    assert all(len(line["ranks"]) == 8 for line in metrics if line["kind"] == "step")

    h1.power_off()
    user.awaits(run, lambda row: row["phase"] != "running", "it is noticed")
    user.types("stop", run, code=None)
    describe(user, "other.yaml", "h0", "h2")
    resumed = user.types("resume", run, "--cluster", "other.yaml", "--detach", timeout_s=300).stderr
    brought = re.search(r"copied step (\d+)\b.* to h2", resumed)
    assert brought is not None, resumed
    assert int(brought[1]) >= 40

    user.awaits(run, lambda row: row["phase"] == "finished", "its end", patience_s=300)
    metrics = lines(h0, run)
    assert sorted({line["step"] for line in metrics if line["kind"] == "step"}) == list(range(1, 81))
    losses = {}
    for line in metrics:  # steps that were done again came to what they came to before
        if line["kind"] == "step":
            assert losses.setdefault(line["step"], line["loss"]) == pytest.approx(line["loss"], rel=1e-5)
    evaluations = {line["step"]: line["loss"] for line in metrics if line["kind"] == "evaluation"}
    assert sorted(evaluations) == [0, 20, 40, 60, 80]
    assert evaluations[80] < 0.9 * evaluations[0]
    assert 80 in checkpoints(h2, run)
    assert [line for host in (h0, h2) for line in processes_of_runs(host)] == []

    folder = user.types("export", run).stdout.strip()
    assert "adapter_model.safetensors" in user.desk.check(["ls", folder])
    merged = user.types("export", run, "--merged", "--to", "whole").stdout.strip()
    assert "model.safetensors" in user.desk.check(["ls", merged])


def checkpoints(host, run):
    """Steps of which a host has a whole part and a record."""
    found = host.check(["sh", "-c", f"ls -d gangline/runs/{run}/checkpoints/step-*/COMMITTED"]).split()
    return {int(re.search(r"step-(\d+)", path)[1]) for path in found}


def lines(host, run):
    """What it says of steps and evaluations."""
    return [json.loads(line) for line in host.read(f"gangline/runs/{run}/metrics.jsonl").decode().splitlines()]
