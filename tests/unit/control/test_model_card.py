"""The model card of an export: what the hub reads, what people read, and nothing that is private."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gangline.control.model_card import card_head, card_text, without_folders, write_card, write_merge_card
from gangline.report.run_summary import RunRecords, read_records
from gangline.runs.job import DataJob, Job, MethodJob, ModelJob, SourceJob
from gangline.runs.layout import EXPORT_NOTE
from gangline.runs.typed_command import TypedCommand
from tests.unit.planner.outcomes import plan
from tests.unit.report.stories import Past

SECRET = "hf_" + "c" * 34
TYPED = TypedCommand(
    words=("gangline", "train", "/home/alice/jobs/tea.yaml", "steps=400"),
    folder="/home/alice/jobs",
    job_file="/home/alice/jobs/tea.yaml",
    job_text=f"model: kettles/base\ndata: {{train: /srv/rows/tea.jsonl}}\nenv: {{HF_TOKEN: {SECRET}}}\n",
    gangline="0.2.0",
)
NOTE = {"run": "calm-otter-7", "step": 400, "base_model": "kettles/base", "method": "lora", "merged": False}
SCORE = {"task": "tea", "metric": "acc", "filter": "", "value": 0.75, "stderr": None, "higher_is_better": True}


def job(**source: Any) -> Job:
    return Job(
        name="tea",
        model=ModelJob(path="kettles/base"),
        data=DataJob(train=SourceJob(**(source or {"files": ("/srv/rows/tea.jsonl",)}))),
        batch=8,
        micro_batch=1,
        method=MethodJob(kind="lora", rank=4, alpha=8.0, targets=("all-linear",)),
    )


@pytest.fixture
def run(tmp_path: Path) -> RunRecords:
    past = Past(tmp_path)
    past.state("finished")
    for step in range(1, 5):
        ranks = [{"host": host, "rank": rank, "compute_s": 0.5, "data_s": 0.0, "wait_s": 0.1} for rank, host in HOSTS]
        rows = {"tokens": 100, "step_s": 1.0, "tokens_per_s": 100.0, "ranks": ranks}
        past.line(past.head.metrics, {"kind": "step", "attempt": 1, "step": step, "loss": 3.0 - step / 2, **rows})
    TYPED.save(past.layout.typed)
    job().save(past.layout.job)
    plan().save(past.layout.plan)
    past.layout.inputs.write_text(json.dumps({"train": "9f" * 32, "model": "5c" * 32, "evaluation": None}))
    past.layout.evaluations.mkdir()
    scores = {"scores": [{**SCORE, "samples": 40}], "lm_eval": "0.4", "seed": 0, "against": "/home/alice/before"}
    (past.layout.evaluations / "step-400-20261128T120000Z.json").write_text(json.dumps(scores))
    return read_records(past.view, records=past.layout, remote=None, own=None, can_resume=True)


HOSTS = [(0, "pc1"), (1, "pc2")]


def test_a_card_says_what_was_trained_on_what_how_it_went_and_how_to_repeat_it(run: RunRecords) -> None:
    text = card_text(run, NOTE, has_curve=True)
    for part in (
        "An adapter (lora) over `kettles/base`. Trained with gangline; this is step 400 of run `calm-otter-7`.",
        "tea.jsonl",
        "9f" * 32,
        "| host-1 | 75 % | 75 |",
        "| host-2 | 25 % | 25 |",
        "![loss per trained token by step](loss.svg)",
        "| tea | acc (higher is better) | 0.75 | 40 |",
        "\npip install 'gangline[train]==0.2.0'\ngangline train tea.yaml steps=400\n",
        "model: kettles/base\n",
    ):
        assert part in text


def test_nothing_private_is_in_a_card(run: RunRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "of-the-shell-9")
    monkeypatch.setattr("getpass.getuser", lambda: "carol")
    monkeypatch.setattr("platform.node", lambda: "workbench.lan")
    typed = dataclasses.replace(TYPED, words=(*TYPED.words, "note=of-the-shell-9", "rows/carol/x", "workbench"))
    text = card_text(dataclasses.replace(run, typed=typed), NOTE, has_curve=False)
    for private in ("/home", "alice", "/srv", "pc1", "pc2", SECRET, "of-the-shell-9", "carol", "workbench"):
        assert private not in text


def test_the_head_is_what_the_hub_reads(run: RunRecords) -> None:
    assert card_head(run, NOTE) == [
        "---",
        'library_name: "peft"',
        'pipeline_tag: "text-generation"',
        'tags: ["gangline", "lora"]',
        'base_model: "kettles/base"',
        'base_model_relation: "adapter"',
        "---",
    ]


def test_a_merged_model_and_data_of_the_hub_are_named_as_such(run: RunRecords) -> None:
    of_hub = dataclasses.replace(run, job=job(hub="kettles/tea-rows"))
    head = card_head(of_hub, {**NOTE, "merged": True})
    assert {'library_name: "transformers"', 'base_model_relation: "finetune"', 'datasets: ["kettles/tea-rows"]'} <= {
        *head
    }


def test_a_base_that_is_a_folder_is_no_model_of_the_hub(run: RunRecords) -> None:
    note = {**NOTE, "base_model": "/home/alice/llama"}
    assert not any("base_model" in line for line in card_head(run, note))
    assert "over `llama`" in card_text(run, note, has_curve=False)


def test_the_curve_is_a_picture_of_its_own(run: RunRecords, tmp_path: Path) -> None:
    (tmp_path / EXPORT_NOTE).write_text(json.dumps(NOTE))
    write_card(tmp_path, run)
    root = ElementTree.fromstring((tmp_path / "loss.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{http://www.w3.org/2000/svg}polyline")) == 1
    assert "(loss.svg)" in (tmp_path / "README.md").read_text()


def test_a_run_without_records_has_a_card_without_figures(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.state("finished")
    (tmp_path / EXPORT_NOTE).write_text(json.dumps(NOTE))
    write_card(tmp_path, read_records(past.view, records=past.layout, remote=None, own=None, can_resume=True))
    assert not (tmp_path / "loss.svg").exists()
    assert "The command that started the run is not recorded." in (tmp_path / "README.md").read_text()


def test_the_card_of_merged_adapters_names_each_with_its_weight(tmp_path: Path) -> None:
    parts = [{"run": f"calm-otter-{n}", "step": n, "weight": w, "blake2b": "9f" * 32} for n, w in ((7, 0.7), (8, -0.3))]
    how = {"method": "ties", "density": 0.5, "rank": None, "seed": 0}
    (tmp_path / EXPORT_NOTE).write_text(json.dumps({**NOTE, "adapters": parts, "merge": how}))
    write_merge_card(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert 'base_model: "kettles/base"\nbase_model_relation: "adapter"\n---\n' in text
    assert f"| calm-otter-8 | 8 | -0.3 | {'9f' * 32} |" in text
    assert "ties, density 0.5, seed 0." in text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("train: /srv/rows/tea.jsonl", "train: tea.jsonl"),
        ("model=/home/alice/llama/", "model=llama"),
        ("file:///srv/x.txt ~/jobs/a.yaml ~bob/b", "x.txt a.yaml b"),
        ("kettles/base https://example.org/a/b and/or 3 / 4", "kettles/base https://example.org/a/b and/or 3 / 4"),
        ("train: '/home/alice lee/rows x.jsonl' \"~/a b/\"", "train: 'rows x.jsonl' \"a b\""),
        ("nfs:/export/alice/x PATHS=/home/alice/a:/home/alice/b", "nfs:x PATHS=a:b"),
        ("http://[::1]:80/a http://host:80/a/b", "http://[::1]:80/a http://host:80/a/b"),
        ("./rows/tea.jsonl ../x/y", "./rows/tea.jsonl ../x/y"),
    ],
)
def test_folders_are_left_out_and_names_stay(text: str, left: str) -> None:
    assert without_folders(text) == left
