"""Runs recorded with gangline 0.1, from before records had versions: listed, explained, logged and followed."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from gangline.cli import main
from tests.recorded import KINDS, install


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def typed(*words: str) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main.main(list(words))
    return code, said.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_the_old_format_is_listed(home: Path, kind: str) -> None:
    run = install(kind, home)
    code, said = typed("ps", "--json")
    (row,) = json.loads(said)["runs"]
    end = kind.partition("-")[2]
    assert (code, row["id"], row["damage"]) == (0, run, None)
    assert row["phase"] == {"elsewhere": "running"}.get(end, end)
    assert (row["silent"] is not None) is (end == "elsewhere")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_the_old_format_is_explained(home: Path, kind: str) -> None:
    run = install(kind, home)
    code, said = typed("explain", run, "--json")
    told = json.loads(said)
    assert (code, told["run"], len(told["attempts"])) == (0, run, 1)
    if kind.endswith("failed"):
        assert told["attempts"][0]["cause"] or "SIGKILL" in said


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("elsewhere")])
def test_a_run_of_the_old_format_is_logged_and_attached_to(home: Path, kind: str) -> None:
    run = install(kind, home)
    code, said = typed("logs", run)
    assert (code, "pc2 rank 1" in said) == (0, True), said
    code, said = typed("attach", run)
    assert code == (1 if kind.endswith("failed") else 0) or (kind.endswith("failed") and code == 5), said
    assert "bug in gangline" not in said


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.endswith("elsewhere")])
def test_a_run_of_the_old_format_elsewhere_says_that_its_host_is_silent(home: Path, kind: str) -> None:
    run = install(kind, home)
    code, said = typed("logs", run)
    assert (code, "  fix   " in said) == (2, True), said
    code, said = typed("stop", run)
    assert (code, "pc1" in said) == (4, True), said


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_the_old_format_is_packed_into_an_archive_that_explains_it(
    home: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "a-value-of-nobody")
    run = install(kind, home)
    code, said = typed("report-bug", run, "--dry-run")
    assert (code, "nothing was written" in said) == (0, True), said
    assert not (tmp_path / f"bug-{run}.tar.gz").exists()
    code, said = typed("report-bug", run, "--json")
    told = json.loads(said)
    assert (code, told["archive"]) == (0, f"bug-{run}.tar.gz"), said
    assert f"runs/{run}/state.json" in told["files"]
    code, said = typed("report-bug", run)
    assert (code, "is there already" in said) == (2, True), said
    monkeypatch.setenv("GANGLINE_HOME", str(tmp_path / "another"))
    code, said = typed("explain", f"bug-{run}.tar.gz")
    assert (code, said.splitlines()[0].startswith(run)) == (0, True), said
    code, said = typed("explain", f"bug-{run}.tar.gz", "--json")
    assert (code, json.loads(said)["run"]) == (0, run)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.endswith("elsewhere")])
def test_a_run_of_the_old_format_is_summarised(home: Path, kind: str, tmp_path: Path) -> None:
    run, page = install(kind, home), tmp_path / "summary.html"
    code, said = typed("summary", run, "--html", str(page), "--markdown")
    assert (code, f"# {run}" in said, "Missing:" in said) == (0, True, False), said
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    code, said = typed("summary", run, "--json")
    told = json.loads(said)
    assert (code, told["run"], len(told["attempts"])) == (0, run, 1)
    assert kind.startswith("command") or {row["host"] for row in told["ranks"]} == {"pc1", "pc2"}
    code, said = typed("summary", run, "--html", str(tmp_path))
    assert (code, "is a folder" in said) == (2, True), said


def test_two_runs_of_the_old_format_are_compared(home: Path) -> None:
    one, other = install("ddp-finished", home), install("fsdp-finished", home)
    code, said = typed("diff", one, other, "--json")
    told = json.loads(said)
    strategies = [row["values"] for row in told["differences"]["division"] if row["key"] == "strategy"]
    assert (code, told["runs"], strategies) == (0, [one, other], [["ddp", "fsdp"]])
    assert told["differences"]["data"] == []
    assert told["losses"]["common_steps"] == 20
    code, said = typed("diff", one, "none-such-1")
    assert (code, "none-such-1" in said) == (2, True), said
