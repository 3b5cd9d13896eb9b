"""`gangline convert`: what it prints, writes and refuses."""

import json

import pytest

from gangline.cli.main import main

AXOLOTL = (
    "base_model: acme/small-1b\nlearning_rate: 1e-4\nwarmup_steps: 5\ndatasets:\n  - {path: acme/rows, type: alpaca}\n"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "axolotl.yaml").write_text(AXOLOTL)
    return tmp_path


def test_it_prints_what_became_of_every_key_and_writes_the_job(folder, capsys):
    assert main(["convert", "axolotl.yaml", "--world-size", "4"]) == 0
    said = capsys.readouterr()
    for key in ("base_model", "learning_rate", "datasets.0.path", "datasets.0.type"):
        assert f"same     {key}" in said.out
    assert "default  optimizer.beta2" in said.out
    assert "Next: gangline plan job.yaml" in said.err
    assert "batch: 4" in (folder / "job.yaml").read_text()


def test_a_refused_key_ends_it_and_nothing_is_written(folder, capsys):
    (folder / "axolotl.yaml").write_text(f"{AXOLOTL}neftune_noise_alpha: 5\n")
    assert main(["convert", "axolotl.yaml", "--world-size", "4"]) == 2
    said = capsys.readouterr()
    assert "missing: noise on embeddings" in said.out
    assert "--leave-out neftune_noise_alpha" in said.err
    assert not (folder / "job.yaml").exists()
    assert main(["convert", "axolotl.yaml", "--world-size", "4", "--leave-out", "neftune_noise_alpha"]) == 0


def test_a_dry_run_shows_the_file(folder, capsys):
    assert main(["convert", "axolotl.yaml", "--world-size", "4", "--dry-run", "seed=7"]) == 0
    assert "\nseed: 7\n" in capsys.readouterr().out
    assert not (folder / "job.yaml").exists()


def test_json_has_every_key_with_its_verdict(folder, capsys):
    assert main(["convert", "axolotl.yaml", "--world-size", "4", "--json", "-o", "mine.yaml"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"base_model", "learning_rate"} <= {each["key"] for each in answer["keys"] if not each["default"]}
    assert answer["job"] == (folder / "mine.yaml").read_text()


def test_hosts_become_a_cluster_file(folder, capsys):
    (folder / "inventory.ini").write_text("[gpu]\npc1 ansible_host=192.168.1.11 ansible_user=alice\n")
    assert main(["convert", "inventory.ini"]) == 0
    assert "gangline init --pin cluster.yaml" in capsys.readouterr().err
    assert "alice@192.168.1.11" in (folder / "cluster.yaml").read_text()


def test_our_own_file_is_none_to_convert(folder, capsys):
    (folder / "job.yaml").write_text("model: acme/small-1b\ndata: {train: rows.jsonl}\nbatch: 8\n")
    assert main(["convert", "job.yaml"]) == 2
    assert "no tool that is known here" in capsys.readouterr().err


def test_a_part_of_a_job_says_what_to_add_and_the_report_follows_the_command_line(folder, capsys):
    (folder / "ds.json").write_text(
        '{"fp16": {"enabled": true}, "zero_optimization": {"stage": 3}, "train_batch_size": 8}'
    )
    assert main(["convert", "ds.json", "--world-size", "4"]) == 2
    assert "say it in a key of the job (precision.compute=VALUE)" in capsys.readouterr().err
    command = ["convert", "ds.json", "--world-size", "4", "precision.compute=bf16"]
    assert main(command) == 2
    said = capsys.readouterr()
    assert "ds.json is a part of a job: it lacks the model, the rows" in said.err
    assert "add to the command: model=./llama data.train=rows.jsonl" in said.err
    (row,) = [line for line in said.out.splitlines() if "fp16.enabled" in line]
    assert row.split(maxsplit=3) == ["dropped", "fp16.enabled", "true", "the command line says precision.compute=bf16"]
    assert main([*command, "model=./llama", "data.train=rows.jsonl"]) == 0
    assert "precision: bf16" in (folder / "job.yaml").read_text()


def test_a_hostfile_needs_no_conversion(folder, capsys):
    (folder / "hostfile").write_text("node1 slots=8\nnode2 slots=8\n")
    assert main(["convert", "hostfile"]) == 2
    assert "gangline init --hostfile hostfile" in capsys.readouterr().err
