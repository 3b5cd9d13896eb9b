"""`gangline explain --ask` as it is typed: what it takes, and what it says without a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.cli.main import main


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "explain needs something to explain"),
        (["--cluster", "cluster.yaml", "calm"], "--cluster names hosts to ask"),
        (["--ask"], "4  hangs-at-start"),
        (["--ask", "slow-networks"], "--ask slow-network"),
        (["--ask", "slow-network", "calm", "bold"], "--ask takes a symptom"),
        (["--ask", "slow-network", "calm", "--cluster", "cluster.yaml"], "--ask takes a symptom"),
        (["--ask", "slow-network", "calm"], "calm"),
    ],
)
def test_what_cannot_be_asked(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
