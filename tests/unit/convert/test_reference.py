"""Generated files are those that the tables give; names of other trainers get no advice that changes a meaning."""

from pathlib import Path

import pytest

from gangline.config.load import load_cluster, load_job
from gangline.convert.move import TOOLS
from gangline.convert.reference import NAMES, PAGE, lacking, names, page
from gangline.errors import SpecError

ROOT = Path(__file__).parents[3]
OURS = "model: acme/small-1b\ndata: {train: rows.jsonl}\nbatch: 8\n"


def test_the_page_is_that_of_the_tables():
    assert (ROOT / PAGE).read_text() == page(tuple(TOOLS.values())), "python -m gangline.convert.reference ."


def test_the_names_are_those_of_the_tables():
    text = (ROOT / NAMES).read_text()
    assert text.split('"')[1::2] == names(), "python -m gangline.convert.reference ."


def test_the_page_names_what_alone_keeps_files_out():
    found = lacking(TOOLS.values())
    assert "qat.*" in found["training with fake quantisation"]["Axolotl"]
    assert "train_on_prompt" in found["loss on the prompt, too"]["LLaMA-Factory"]


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("gradient_accumulation_steps: 4", "write `batch`"),
        ("output_dir: out", "runs lie in gangline's home"),
        ("wandb_watch: all", "delete it"),
        ("stage: sft", "gangline trains supervised"),
        ("lora_r: 8", 'did you mean "method.rank"?'),
        ("max_samples: 10", 'did you mean "data.max_samples"?'),
        ("warmup_ratio: 0.1", 'did you mean "schedule.warmup_ratio"?'),
        ("neftune_noise_alpha: 5", "a key of other trainers"),
        ("lisa_n_layers: 5", "a key of other trainers"),
        ("epohcs: 3", 'did you mean "epochs"?'),
    ],
)
def test_a_key_of_another_trainer_in_our_file_gets_advice_that_keeps_its_meaning(tmp_path, key, advice):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "job.yaml").write_text(f"{OURS}{key}\n")
    with pytest.raises(SpecError) as caught:
        load_job(tmp_path / "job.yaml")
    assert advice in caught.value.fix


@pytest.mark.parametrize(
    ("text", "tool"),
    [
        ("base_model: x\nwandb_watch:\n", "Axolotl"),
        ("model_name_or_path: x\nstage: sft\n", "LLaMA-Factory"),
        ("model_name_or_path: x\ndataset_name: y\n", "TRL"),
        ("per_device_train_batch_size: 2\n", "transformers' Trainer"),
        ("model: {_component_: torchtune.models.x}\n", "torchtune"),
        ("compute_environment: LOCAL_MACHINE\n", "accelerate"),
        ('{"zero_optimization": {"stage": 2}}', "DeepSpeed"),
    ],
)
def test_train_and_plan_offer_to_convert_a_foreign_job(tmp_path, text, tool):
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_job(path)
    assert f"a file of {tool}" in caught.value.seen
    assert caught.value.fix == f"gangline convert {path}"


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("ray.yaml", "cluster_name: c\nprovider: {type: local}\n", "Ray"),
        ("task.yaml", "resources: {cpus: 2}\nrun: x\n", "SkyPilot"),
        ("hosts.yaml", "all: {hosts: {pc1: {}}}\n", "Ansible"),
        ("hosts.ini", "[gpu]\npc1\n", "Ansible"),
        ("config", "Host pc1\n  HostName 10.0.0.1\n", "ssh_config"),
    ],
)
def test_a_foreign_list_of_hosts_is_recognised(tmp_path, name, text, tool):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_cluster(path, home=tmp_path)
    assert f"a file of {tool}" in caught.value.seen
    assert caught.value.fix == f"gangline convert {path}"


@pytest.mark.parametrize("text", ["pc1 slots=2\npc2 slots=2\n", "hosts: [{name: here, transport: local}]\n"])
def test_our_own_hosts_are_not_taken_for_foreign_ones(tmp_path, text):
    path = tmp_path / ("hostfile" if "slots" in text else "cluster.yaml")
    path.write_text(text.replace("pc1", "localhost").replace("pc2 slots=2\n", ""))
    assert load_cluster(path, home=tmp_path).hosts
