"""A recipe runs in small: the same file, with a model, rows and lengths of a test in place of its own."""

import json

import pytest

import gangline
from gangline.recipes import FOLDER

pytestmark = pytest.mark.train

SMALL = {
    "model.path": "./model",
    "model.start": "random",
    "data.train": "rows.jsonl",
    "data.sequence_length": 64,
    "batch": 8,
    "micro_batch": 4,
    "activation_checkpointing": False,
    "evaluation.max_samples": 8,
}


@pytest.mark.timeout(320)
def test_instructions_with_other_columns_stop_early(tmp_path, monkeypatch):
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    rows = [{"instruction": f"What is {n} + 1?", "context": "Arithmetic.", "response": str(n + 1)} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    gangline.untrained_model("model", texts="rows.jsonl")
    run = gangline.train(FOLDER / "instructions-dolly-full.yaml", overrides={**SMALL, "epochs": 0.5})
    run.wait(timeout_s=300)
    assert run.phase == "finished"
    assert run.metrics()[-1]["loss"] > 0
    assert run.evaluations()
