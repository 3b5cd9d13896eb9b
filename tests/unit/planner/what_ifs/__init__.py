"""Questions that owners and buyers ask, put to `gangline plan` as they would type them, in this process.

`questions.yaml` has the questions with the arithmetic of their answers, `tests/golden/what_ifs` the screens of those that
are right. `python -m tests.unit.planner.what_ifs` says which ones are wrong, and why; with `--write` it writes the
screens anew, and takes questions that have become right off the list of missing ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from gangline.cli import plan as command
from gangline.cli.main import main
from gangline.decide.what_if import Prediction, plan_json, predict

HERE = Path(__file__).parent
GOLDEN = Path(__file__).parents[3] / "golden" / "what_ifs"
WIDTH = 100
"""Columns of the screen."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """One of questions.yaml; see there."""

    id: str
    asks: str
    plan: str
    because: str
    expect: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    was: str = ""

    def on(self, usual: Mapping[str, Any], job: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The whole job, with some keys changed."""
        found = dict(usual)
        for key, value in {**self.job, **(job or {})}.items():
            found[key] = {**found[key], **value} if key == "data" else value
        return found


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back."""

    exit_code: int
    screen: str
    """As printed, without names of folders that change."""
    prediction: Prediction | None
    """What was behind it; None where there was an error before."""

    @property
    def words(self) -> str:
        """The screen in one line, so that a break tears nothing apart."""
        return re.sub(r"\s+", " ", self.screen)

    @property
    def verdict(self) -> dict[str, Any]:
        """As --json tells it."""
        assert self.prediction is not None, self.screen
        found: dict[str, Any] = plan_json(self.prediction, ())["verdict"]
        return found


def read(name: str) -> Any:
    """A file beside this one."""
    return YAML(typ="safe").load((HERE / name).read_text(encoding="utf-8"))


def load() -> tuple[dict[str, Any], tuple[Question, ...]]:
    """What all jobs begin with, and the questions."""
    found = read("questions.yaml")
    return found["usual"], tuple(Question(**row) for row in found["questions"])


USUAL, QUESTIONS = load()
NOT_YET: dict[str, str] = read("not_yet.yaml") or {}
"""Questions whose answers are not right yet -> what is missing."""


def ask(job: Mapping[str, Any], words: str, folder: Path) -> Answer:
    """Run `gangline plan job.yaml WORDS` in an empty folder."""
    kept: list[Prediction] = []

    def keeping(*args: Any, **more: Any) -> Prediction:
        kept.append(predict(*args, **more))
        return kept[-1]

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        patch.setattr(command, "predict", keeping)
        with _inside(folder, patch):
            code = main(["plan", "job.yaml", *shlex.split(words)])
    screen = out.getvalue().replace(str(folder), "FOLDER")
    return Answer(exit_code=code, screen=screen, prediction=kept[0] if kept else None)


@contextlib.contextmanager
def _inside(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.chdir(folder)
    patch.setenv("COLUMNS", str(WIDTH))
    patch.setenv("GANGLINE_HOME", str(folder / "home"))
    patch.setenv("HF_HOME", str(folder / "hub"))
    patch.setenv("HF_HUB_OFFLINE", "1")
    patch.delenv("HF_HUB_CACHE", raising=False)
    yield


def golden(question: Question, answer: Answer) -> str:
    """The file of a question."""
    return f"# {question.asks}\n$ gangline plan job.yaml {question.plan}\n{answer.screen}exit code {answer.exit_code}\n"
