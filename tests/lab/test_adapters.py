"""Added tokens, whose rows a tiny model does not have, and an adapter that another run goes on with, over real ssh."""

import json
import re

import pytest

from tests.lab.hosts import lab_folders
from tests.lab.user import TEXT, NewUser, make_model, processes_of_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOKENS = [f"<t{number}>" for number in range(60)]
"""More than the 42 rows for which the tokenizer of 258 has no token."""
JOB = """
name: tiny
model: ./model
method: {kind: lora, METHOD}
tokens: {add: ADD}
data: {train: ./fox.txt, sequence_length: 64}
batch: 12
micro_batch: 2
steps: 20
optimizer: {learning_rate: 0.02}
strategy: fsdp
"""


def job_of(method):
    return JOB.replace("METHOD", method).replace("ADD", json.dumps(TOKENS))


def test_a_run_with_added_tokens_and_one_that_goes_on_with_its_adapter(lab, tmp_path):
    made = lab(2, binds=lab_folders(), disk="8g", shm="2g")
    user = NewUser(made.user)
    user.brings(make_model(tmp_path, tie_word_embeddings=True), job=job_of("rank: 4, train_tokens: added"))
    user.desk.write("fox.txt", re.sub(r"fox number (\d)", r"<t\1>", TEXT))
    user.describes("h0", "h1")

    first = losses_of(user, made.hosts)
    assert first[-1] < 0.8 * first[0]
    adapter = user.types("export", first.run, "--to", "adapter").stdout.strip()
    config = json.loads(user.desk.read("adapter/adapter_config.json"))
    assert config["trainable_token_indices"] == list(range(258, 318))
    assert "<t59>" in user.desk.read("adapter/tokenizer.json").decode()

    user.desk.write("tp.yaml", job_of("adapter: ./adapter").replace("fsdp", "pipeline"))
    refused = user.types("train", "tp.yaml", "--detach", code=2).stderr
    assert "method.adapter" in refused
    assert "method.train_tokens with strategy: pipeline" in refused

    user.desk.write("job.yaml", job_of("adapter: ./adapter"))
    second = losses_of(user, made.hosts)
    assert second[0] < 1.05 * first[-1] < first[0]
    assert second[-1] < second[0]
    folder = user.types("export", second.run, "--merged", "--to", "whole").stdout.strip()
    assert json.loads(user.desk.read(f"{folder}/config.json"))["vocab_size"] == 318
    assert adapter
    assert [line for host in (*made.hosts, made.user) for line in processes_of_runs(host)] == []


class Losses(list):
    """Of the steps of a run."""

    run: str


def losses_of(user, hosts):
    """Train job.yaml to its end."""
    run = user.types("train", "job.yaml", "--detach", timeout_s=300).stdout.strip()
    user.awaits(run, lambda row: row["phase"] not in ("running", "starting"), "its end", patience_s=240)
    assert user.row(run)["phase"] == "finished", user.types("explain", run, code=None).stdout
    texts = [host.run(["cat", f"gangline/runs/{run}/metrics.jsonl"]).stdout for host in hosts]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    losses = Losses(line["loss"] for line in lines if line["kind"] == "step")
    losses.run = run
    assert len(losses) == 20
    return losses
