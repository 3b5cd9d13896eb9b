"""What of a model on the hub is brought before its weights are read."""

import json
import platform
from pathlib import Path

import pytest

from gangline.errors import ModelError
from gangline.runs.job import ModelJob
from gangline.worker.data import model_folder
from gangline.worker.data.model_folder import ONE_WEIGHTS_FILE, WEIGHTS_INDEX, weights_folder

COMMIT = "0123456789abcdef"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Stands for the hub, which tests have no way to: notes what is asked for. index: what its index file says."""
    asked = []

    def serve(*, index):
        folder = tmp_path / COMMIT
        folder.mkdir()
        if index is not None:
            (folder / WEIGHTS_INDEX).write_text(index)

        def download(name, *, revision, allow_patterns):
            asked.append((name, revision, allow_patterns))
            return str(folder)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return asked

    return serve


def test_of_a_model_in_several_files_those_of_its_index_and_no_other_form(hub):
    named = {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    asked = hub(index=json.dumps({"weight_map": named}))
    assert weights_folder(ModelJob(path="me/tiny", revision="v1")).name == COMMIT
    assert [patterns for _, _, patterns in asked] == [
        ["config.json", WEIGHTS_INDEX],
        ["one.safetensors", "two.safetensors"],
    ]
    assert [revision for _, revision, _ in asked] == ["v1", COMMIT]  # a branch may move in between


def test_of_one_without_an_index_the_one_file(hub):
    asked = hub(index=None)
    weights_folder(ModelJob(path="me/tiny"))
    assert asked[1:] == [("me/tiny", COMMIT, [ONE_WEIGHTS_FILE])]


def test_an_index_that_says_nothing_is_left_to_who_reads_it(hub):
    asked = hub(index="{")
    assert (weights_folder(ModelJob(path="me/tiny")) / WEIGHTS_INDEX).read_text() == "{"
    assert len(asked) == 1


def test_a_folder_is_taken_as_it_is(tmp_path, hub):
    asked = hub(index=None)
    assert weights_folder(ModelJob(path=str(tmp_path))) == tmp_path
    assert asked == []


def test_what_the_hub_does_not_give_is_said(monkeypatch):
    def download(*_, **__):
        raise OSError("no route to the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match="neither a folder nor a model that the hub gives") as raised:
        weights_folder(ModelJob(path="me/tiny"))
    assert raised.value.seen == f"on {platform.node()}: OSError: no route to the hub"


def test_the_names_of_the_files_are_those_that_fingerprints_know():
    assert any(Path(ONE_WEIGHTS_FILE).match(pattern) for pattern in model_folder.WEIGHT_FILES)
