"""What `gangline train` keeps of its command line, so that a summary can tell how to repeat it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.cli import main, train
from gangline.context import StartOptions
from gangline.errors import UsageError
from gangline.runs.layout import RunLayout
from gangline.runs.typed_command import TypedCommand


def test_the_words_have_the_cluster_file_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    Path("job.yaml").write_text("batch: 8\n", encoding="utf-8")
    Path("cluster.yaml").write_text("hosts: []\n", encoding="utf-8")
    asked: list[StartOptions] = []

    def refuse(start: StartOptions, **_: object) -> RunLayout:
        asked.append(start)
        raise UsageError("enough", fix="look")

    monkeypatch.setattr(train.app, "train", refuse)
    assert main.main(["train", "job.yaml", "steps=3", "--force"]) == 2
    typed = asked[0].typed
    assert typed is not None
    assert typed.words[:4] == ("gangline", "train", "job.yaml", "steps=3")
    assert typed.words[4] == "--cluster"
    assert typed.words[5].endswith("cluster.yaml")
    assert typed.words[6:] == ("--force",)
    assert (typed.folder, typed.job_text) == (str(tmp_path), "batch: 8\n")


def test_it_is_read_back_and_may_be_missing(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path, "calm-otter-7")
    layout.folder.mkdir(parents=True)
    assert TypedCommand.of(layout) is None
    typed = TypedCommand(words=("a",), folder="/", job_file="j", job_text="t", gangline="1")
    typed.save(layout.typed)
    assert TypedCommand.of(layout) == typed
