"""Which words a shell is offered."""

import json

import pytest

from gangline.catalog.gpu_specs import all_gpus, find_gpu
from gangline.cli.complete import FILES, candidates, short_name
from gangline.cli.main import VERBS
from gangline.cli.manual import ROOT, texts
from gangline.runs.files import write_json
from gangline.runs.layout import RunLayout


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path))
    for number, run_id in enumerate(["calm-otter-7", "bold-deer-3"]):
        layout = RunLayout(tmp_path, run_id)
        layout.folder.mkdir(parents=True)
        write_json(layout.state, {"name": "job", "phase": "running", "created": f"2026-01-0{number + 1}"})
        write_json(layout.cluster, {"hosts": [{"name": "pc1"}, {"name": "pc2"}]})
    return tmp_path


def words(*line):
    return [each.partition("\t")[0] for each in candidates(line)]


def test_first_the_verbs():
    assert words("") == list(VERBS)
    assert words("--debug", "tr") == ["train"]
    assert words("no-such-verb", "") == []


@pytest.mark.parametrize("verb", ["attach", "logs", "stop", "resume"])
def test_runs_come_newest_first_with_their_phase(verb):
    assert candidates([verb, ""])[:2] == ["bold-deer-3\tjob running", "calm-otter-7\tjob running"]
    assert words(verb, "c") == ["calm-otter-7"]


def test_a_damaged_run_is_offered_too(home):
    RunLayout(home, "bold-deer-3").state.write_text("{")
    assert words("attach", "b") == ["bold-deer-3"]


def test_a_run_or_a_file_or_a_finding():
    assert words("chat", "c") == ["calm-otter-7", FILES]
    assert words("export", "c") == ["calm-otter-7", FILES]
    assert "E-SW-01" in words("explain", "E-SW")


def test_hosts_are_those_of_the_run():
    assert words("stop", "calm-otter-7", "--host", "") == ["pc1", "pc2"]


def test_options_that_are_not_there_yet():
    assert words("stop", "x", "--n") == ["--now"]
    assert words("stop", "x", "--now", "--n") == []
    assert words("stop", "x", "--host", "pc1", "--ho") == ["--host"]


def test_the_keys_of_a_job_as_far_as_the_next_dot():
    assert words("train", "job.yaml", "met") == ["method.", "method="]
    assert "method.rank=" in words("train", "job.yaml", "method.r")
    assert words("train", "job.yaml", "method=q") == ["method=qlora"]
    assert words("train", "job.yaml", "steps=3", "report.tensorboard=") == [
        "report.tensorboard=true",
        "report.tensorboard=false",
    ]


def test_files_choices_and_the_catalogue():
    assert words("train", "") == [FILES]
    assert words("convert", "ax") == [FILES]
    assert words("train", "job.yaml", "--cluster", "") == [FILES]
    assert words("check", "--tier", "") == ["quick", "full", "burn"]
    assert words("schema", "c") == ["cluster"]
    assert "pc1=rtx4090" in words("plan", "job.yaml", "--hosts", "pc1=rtx40")
    assert "rtx3090,rtx4090" in words("plan", "job.yaml", "--hosts", "rtx3090,rtx40")
    assert words("plan", "job.yaml", "--link", "1g") == ["1gbit"]
    assert "meta-llama/Llama-2-7b-hf" in words("plan", "job.yaml", "--model", "meta-llama/Llama-2")


def test_the_planner_knows_every_gpu_by_the_name_that_is_offered():
    found = {gpu.name: find_gpu(short_name(gpu.name)) for gpu in all_gpus()}
    assert [name for name, gpu in found.items() if gpu is None or gpu.name != name] == []


def test_meanings_are_short():
    lines = [line for verb in VERBS for line in candidates([verb, "--"])] + candidates(["train", "job.yaml", ""])
    assert lines
    assert max(len(line.partition("\t")[2]) for line in lines) <= 100


@pytest.mark.parametrize("name", list(texts()))
def test_what_is_made_from_the_verbs_is_up_to_date(name):
    assert (ROOT / name).read_text(encoding="utf-8") == texts()[name], "run: python -m gangline.cli.manual"


def test_the_man_page_has_every_verb_and_option():
    page = (ROOT / "docs/gangline.1").read_text(encoding="utf-8").replace("\\-", "-")
    for verb, about in json.loads((ROOT / "src/gangline/cli/words.json").read_text(encoding="utf-8")).items():
        assert f".SS gangline {verb}" in page
        assert all(name in page for each in about["parameters"] for name in each["names"])
