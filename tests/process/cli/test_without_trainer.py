"""`pip install gangline`, without the trainer's packages: every verb works, or says in three parts what it lacks."""

import json

import pytest

from gangline.cli.main import VERBS
from tests.bare_python import bare_python, run_verbs

pytestmark = pytest.mark.timeout(300)

JOB = "model: meta-llama/Llama-2-7b-hf\nmethod: qlora\ndata: {train: rows.jsonl, sequence_length: 512}\nbatch: 8\n"
AXOLOTL = """\
base_model: meta-llama/Llama-2-7b-hf
adapter: lora
lora_r: 8
datasets: [{path: rows.jsonl, type: completion}]
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
"""
HOSTS = "pc1=rtx4090,pc2=rtx3090"

WORKS = {
    "plan": ["plan", "job.yaml", "--hosts", HOSTS],
    "check": ["check", "--only", "memory"],
    "ps": ["ps"],
    "top": ["top", "--once"],
    "plugins": ["plugins"],
    "prepare": ["prepare", "--status"],
    "schema": ["schema"],
    "bench": ["bench", "network", "--seconds", "4"],
    "init": ["init", "localhost", "--dry-run"],
    "discover": ["discover"],
    "explain": ["explain", "E-SW-01"],
    "setup": ["setup", "--dry-run"],
    "recipes": ["recipes"],
    "sweep": ["sweep", "ls"],
    "completion": ["completion", "bash"],
    "convert": ["convert", "foreign.yaml", "--world-size", "1", "--dry-run"],
}
LACKS_RUN = {
    verb: [verb, "calm-otter-7"]
    for verb in ("attach", "logs", "summary", "report-bug", "profile", "save", "stop", "resume", "export")
}
LACKS_RUN["diff"] = ["diff", "calm-otter-7", "brave-fox-1"]
REFUSES = {
    "train": (["train", "job.yaml"], "E-SW-01"),
    "run": (["run", "--", "train.py"], "E-SW-16"),
    "export-config": (["export-config", "hostfile", "--", "train.py"], "E-SW-16"),
    "chat": (["chat", "model", "--prompt", "hello"], "is not installed, which gangline's trainer needs"),
    "ui": (["ui"], "cannot be imported, which gangline ui needs"),
    "evaluate": (["evaluate", "model", "--tasks", "arc_easy"], "is not installed, which gangline's trainer needs"),
    "merge": (["merge", "model:1", "model:1", "--to", "both"], "is not installed, which gangline's trainer needs"),
    "serve": (["serve", "model"], "cannot be imported, which gangline serve needs"),
    "data": (["data", "job.yaml"], "this Python cannot look at tokens"),
    "demo": (["demo"], "is not installed, which gangline's trainer needs"),
    "plan": (
        ["plan", "job.yaml", "strategy=ddp", "--hosts", HOSTS, "--trace"],
        "is not installed, which gangline's trainer needs",
    ),
}


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return bare_python(tmp_path_factory.mktemp("bare") / "venv")


@pytest.fixture
def folder(tmp_path):
    tmp_path.joinpath("job.yaml").write_text(JOB)
    tmp_path.joinpath("rows.jsonl").write_text('{"text": "a"}\n')
    tmp_path.joinpath("foreign.yaml").write_text(AXOLOTL)
    tmp_path.joinpath("train.py").write_text("")
    tmp_path.joinpath("model").mkdir()
    tmp_path.joinpath("model", "config.json").write_text("{}")
    return tmp_path


def test_every_verb_was_tried():
    assert {*WORKS, *LACKS_RUN, *REFUSES} >= set(VERBS)


def test_what_needs_no_trainer_works(python, folder):
    answers, _ = run_verbs(python, list(WORKS.values()), folder=folder, home=folder / "home")
    assert {verb: answer for verb, answer in zip(WORKS, answers, strict=True) if answer[0] != 0} == {}
    assert "ddp" in answers[0][1]


def test_the_rest_says_in_three_parts_what_it_lacks(python, folder):
    verbs = [*LACKS_RUN.values(), *(words for words, _ in REFUSES.values())]
    said = [*(f"no such run: {words[1]!r}" for words in LACKS_RUN.values()), *(text for _, text in REFUSES.values())]
    answers, rest = run_verbs(python, verbs, folder=folder, home=folder / "home")
    assert "Traceback" not in rest + json.dumps(answers)
    for words, expected, (code, _, err) in zip(verbs, said, answers, strict=True):
        text = rest if words[0] == "chat" else err  # its worker has the terminal
        assert code in {2, 3}, (words, err)
        assert expected in text
        assert "  seen  " in text
        assert "  fix   " in text
    assert not list((folder / "home").glob("runs/*")), "nothing that could not start is a run"
