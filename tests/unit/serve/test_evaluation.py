"""Which tasks are asked for, and how scores are set beside those of another model."""

from pathlib import Path

import pytest

from gangline.errors import UsageError
from gangline.serve.evaluation import ScoreRequest, beside, read_tasks, score_rows


def score(value, *, stderr=None, task="arc", metric="acc", chosen="", better=True):
    about = {"task": task, "metric": metric, "filter": chosen, "higher_is_better": better}
    return {**about, "value": value, "stderr": stderr, "samples": 1200, "shots": 0}


def test_tasks_may_have_commas_between_them_and_files_get_their_whole_path(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("task: mine\n", encoding="utf-8")
    assert read_tasks(["arc_easy, hellaswag", "mine.yaml", "arc_easy"]) == (
        *("arc_easy", "hellaswag"),
        str(tmp_path / "mine.yaml"),
    )
    with pytest.raises(UsageError, match=r"--tasks other.yaml"):
        read_tasks(["other.yaml"])
    with pytest.raises(UsageError, match=r"no task is named"):
        read_tasks([" , "])


def test_every_model_gets_the_same_words():
    asked = ScoreRequest(tasks=("arc", "/here/mine.yaml"), limit=5, seed=3, chat=True)
    assert asked.words() == ["--task=arc", "--task=/here/mine.yaml", "--limit=5", "--seed=3", "--chat"]
    assert asked.files == ["/here/mine.yaml"]


def test_a_score_is_set_beside_the_same_score_of_the_other_model():
    now = [score(0.5, stderr=0.03), score(0.4, chosen="strict"), score(0.3, task="new"), score(None)]
    before = [score(0.4, chosen="strict"), score(0.6, stderr=0.04)]
    found = beside(now, before)
    assert [each["before"] for each in found] == [0.6, 0.4, None, 0.6]
    assert [each["change"] for each in found] == [pytest.approx(-0.1), 0.0, None, None]


def test_a_change_is_given_in_standard_errors_of_a_difference():
    header, rows = score_rows(beside([score(0.5, stderr=0.03)], [score(0.6, stderr=0.04)]))
    assert header == ["task", "score", "value", "before", "change", "samples"]
    assert rows == [
        ["arc", "acc (higher is better)", "0.5 ± 0.03", "0.6 ± 0.04", "-0.1 (2.0 standard errors)", "1,200"]
    ]


def test_scores_of_one_model_have_neither_before_nor_change():
    header, rows = score_rows([score(None, metric="perplexity", chosen="strict", better=False)])
    assert header == ["task", "score", "value", "samples"]
    assert rows == [["arc", "perplexity, strict (lower is better)", "not finite", "1,200"]]
