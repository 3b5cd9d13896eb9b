"""Scores of a model by lm-evaluation-harness, one task per kind of output, beside the formulas by hand."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.recorded import install
from tests.train import cases_evaluate

pytest.importorskip("lm_eval", reason="gangline[evaluate] is not installed here")


@pytest.fixture(scope="module")
def made(_session_zygote, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return _session_zygote.pool(1).run(cases_evaluate.make, folder=str(folder))[0]


@pytest.fixture
def run(pool):
    return lambda case, folder, **arguments: pool(1).run(case, folder=folder, **arguments)[0]


@pytest.fixture
def evaluate(tmp_path, monkeypatch, quick_python):
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    program = str(quick_python.with_name("gangline"))

    def call(*words):
        return subprocess.run([program, "evaluate", *words], capture_output=True, text=True, timeout=240, check=False)

    return call


def test_the_scores_are_those_of_the_formulas(made, run):
    base, _, tasks = made
    found = run(cases_evaluate.scored, base, tasks=tasks)
    by_hand = run(cases_evaluate.by_hand, base)
    assert {name: row["value"] for name, row in found.items()} == pytest.approx(by_hand, rel=1e-5)
    assert [row["samples"] for row in found.values()] == [4] * 5
    assert found["said exact_match"]["stderr"] == pytest.approx((0.25 / 3) ** 0.5)


def test_the_same_seed_gives_the_same_standard_errors_and_a_limit_takes_fewer_samples(made, run):
    base, _, tasks = made
    first = run(cases_evaluate.scored, base, tasks=tasks[1:2], seed=3)
    assert first["last perplexity"]["stderr"] > 0
    assert run(cases_evaluate.scored, base, tasks=tasks[1:2], seed=3) == first
    assert run(cases_evaluate.scored, base, tasks=tasks[1:2], limit=2)["last perplexity"]["samples"] == 2


def test_the_base_of_an_adapter_has_the_scores_of_the_base(made, run):
    base, adapter, tasks = made
    expected = run(cases_evaluate.scored, base, tasks=tasks)
    assert run(cases_evaluate.scored, adapter, tasks=tasks, base=True) == expected
    assert run(cases_evaluate.scored, adapter, tasks=tasks) != expected
    assert run(cases_evaluate.no_base, base)[0] == f"{base} has no base model"


def test_a_task_that_cannot_be_loaded_is_named(made, run, tmp_path):
    base, _, tasks = made
    what, seen, fix = run(cases_evaluate.refused, base, tasks=["no_such_task"])
    assert (what, "no_such_task" in seen) == ("--tasks no_such_task: this task cannot be loaded", True)
    assert "`lm_eval ls tasks` lists the names" in fix
    lost = tmp_path / "lost.yaml"
    lost.write_text(Path(tasks[0]).read_text())
    what, seen, fix = run(cases_evaluate.refused, base, tasks=[str(lost)])
    assert (what, "rows.jsonl" in seen) == (f"--tasks {lost}: this task cannot be loaded", True)
    assert "relative to the folder of the file" in fix
    assert "two tasks choice" in run(cases_evaluate.refused, base, tasks=[tasks[0], tasks[0]])[0]


def test_a_chat_template_that_is_not_there_is_not_used(made, run):
    assert "not trained with a chat template" in run(cases_evaluate.no_template, made[0], tasks=made[2])


def test_an_adapter_is_compared_with_its_base(made, evaluate):
    _, adapter, tasks = made
    done = evaluate(adapter, "--tasks", ",".join(tasks[:2]), "--against", "base", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["model"], said["against"]) == (adapter, f"the base of {adapter}")
    last = next(row for row in said["scores"] if row["task"] == "last")
    assert last["change"] == pytest.approx(last["value"] - last["before"])
    assert last["change"] != 0


def test_the_scores_of_a_run_are_kept_in_its_folder(made, evaluate, tmp_path, quick_python):
    name = install("ddp-finished", tmp_path / "home", python=quick_python)
    done = evaluate(name, "--tasks", made[2][2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["task", "score", "value", "samples"]
    [kept] = (tmp_path / "home/runs" / name / "evaluations").iterdir()
    written = json.loads(kept.read_text())
    assert kept.name.startswith(f"step-{written['step']}-")
    assert [row["metric"] for row in written["scores"]] == ["word_perplexity", "bits_per_byte"]
