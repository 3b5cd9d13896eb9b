"""What the tests of the main path share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.process.app.world import World

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world with a model folder and a text."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "a.txt").write_text("a text\n" * 100, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return World(root=tmp_path)
