"""The shape of a model is found in its folder, in the hub's cache, or in the catalogue; never by loading weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from gangline.decide.forecast import config_digest, find_shape, read_config, shape_unknown
from gangline.decide.what_if import estimated_steps
from gangline.errors import ModelError
from gangline.runs.job import DataJob, Job, ModelJob, SourceJob

JOB = Job(
    name="j",
    model=ModelJob(path="meta-llama/Llama-2-7b-hf"),
    data=DataJob(train=SourceJob(), sequence_length=100),
    batch=8,
    micro_batch=1,
)


def job(path: str, revision: str | None = None) -> Job:
    return dataclasses.replace(JOB, model=ModelJob(path=path, revision=revision))


def cached(root: Path, name: str, commit: str, **content: object) -> Path:
    folder = root / "hub" / f"models--{name.replace('/', '--')}"
    path = folder / "snapshots" / commit / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_a_folder_has_its_own_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    assert find_shape(job(str(tmp_path)), {}).config == {"model_type": "llama"}


def test_what_was_downloaded_before_comes_before_the_catalogue(tmp_path: Path) -> None:
    folder = cached(tmp_path, "meta-llama/Llama-2-7b-hf", "abc", marker=1)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc", encoding="utf-8")
    cached(tmp_path, "meta-llama/Llama-2-7b-hf", "def", marker=2)
    found = find_shape(JOB, {"HF_HOME": str(tmp_path)}).config
    assert found == {"marker": 1}


def test_another_revision_than_the_one_that_is_meant_is_not_taken(tmp_path: Path) -> None:
    cached(tmp_path, "o/m", "abc", marker=1)
    assert find_shape(job("o/m", "def"), {"HF_HOME": str(tmp_path)}).config is None
    found = find_shape(job("o/m"), {"HF_HUB_CACHE": str(tmp_path / "hub")}).config
    assert found == {"marker": 1}


def test_the_catalogue_knows_well_known_models(tmp_path: Path) -> None:
    found = find_shape(JOB, {"HF_HOME": str(tmp_path)}).config
    assert found is not None
    assert found["num_hidden_layers"] == 32


def test_an_unknown_model_is_answered_with_near_names_and_what_to_do(tmp_path: Path) -> None:
    assert find_shape(job("meta-llama/Llama-2-7b-hfx"), {"HF_HOME": str(tmp_path)}).config is None
    words = shape_unknown("meta-llama/Llama-2-7b-hfx")
    assert "meta-llama/Llama-2-7b-hf" in words
    assert "config.json" in words


@pytest.mark.parametrize("content", ["", "{", "[1]", "null"])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json cannot be read") as caught:
        read_config(path)
    assert caught.value.fix


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b" " * (5 << 20))
    with pytest.raises(ModelError) as caught:
        read_config(path)
    assert "5242880 bytes" in caught.value.seen


def test_the_name_of_a_configuration_follows_its_content_alone() -> None:
    assert config_digest({"a": 1, "b": 2}) == config_digest({"b": 2, "a": 1})
    assert config_digest({"a": 1}) != config_digest({"a": 2})


def test_the_length_of_a_run_is_guessed_from_the_size_of_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"x" * 32_000)  # 8,000 tokens: 80 samples of 100
    data = DataJob(train=SourceJob(files=(str(path),)), sequence_length=100)
    guess = estimated_steps(dataclasses.replace(JOB, data=data, epochs=2.0))
    assert guess is not None
    assert guess[0] == 20
    assert "guessed" in guess[1]
    assert estimated_steps(dataclasses.replace(JOB, epochs=None, steps=7)) == (7, "7 steps")
    assert estimated_steps(dataclasses.replace(JOB, data=dataclasses.replace(data, packing=False))) is None
    assert estimated_steps(dataclasses.replace(JOB, data=DataJob(train=SourceJob(hub="o/d")))) is None
