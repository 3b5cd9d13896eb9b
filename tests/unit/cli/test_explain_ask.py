"""`gangline explain --ask` as it is typed: what it takes, and what it says without a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.cli.main import main
from gangline.cli.output import Terminal
from gangline.errors import UsageError


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


@pytest.mark.parametrize(
    ("words", "answers", "put"),
    [
        ([], ["2", "calm"], ("slow-network", "calm", None)),
        ([], ["slow network", None], ("slow-network", None, None)),
        (["--cluster", "two.yaml"], ["2"], ("slow-network", None, Path("two.yaml"))),
        ([], [None], None),
    ],
)
def test_what_is_asked_on_a_terminal(
    words: list[str],
    answers: list[str | None],
    put: tuple[str, str | None, Path | None] | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run is asked for only where no cluster is named; without an answer the error says what there is."""
    found: list[tuple[object, ...]] = []

    def put_questions(*asked: object, **_more: object) -> None:
        found.append(asked)
        raise UsageError("put", seen="put", fix="put")

    monkeypatch.setattr("gangline.cli.explain.is_live", lambda: True)
    monkeypatch.setattr("gangline.control.asked_symptom.put_questions", put_questions)
    monkeypatch.setattr(Terminal, "ask", lambda _console, _question: answers.pop(0))
    Path("two.yaml").write_text("hosts: [h0, h1]\n", encoding="utf-8")
    assert main(["explain", "--ask", *words]) == 2
    assert found == ([] if put is None else [put])
    assert answers == []
    assert ("--ask needs a symptom" in capsys.readouterr().err) == (put is None)
