"""Callbacks of plug-ins: they see every figure, ask for a save or the end, and never end a run by an error."""

from pathlib import Path

import pytest

from gangline.callbacks import CALLBACKS, Action, Callback, Callbacks
from gangline.config.load import load_job
from gangline.errors import SpecError
from gangline.exporters import ExportedRun

RUN = ExportedRun(run_id="calm-otter-7", attempt=1, folder=Path(), job={})


class Watcher:
    def __init__(self, _options, _run):
        self.seen = []

    def on_step(self, step, values):
        self.seen.append((step, values["train/loss"]))
        return Action.save if step == 2 else None

    def on_evaluation(self, step, values):
        return Action.finish


class Broken(Watcher):
    def on_step(self, step, values):
        raise ZeroDivisionError("no good")


class Strange(Watcher):
    def on_step(self, step, values):
        return "stop"


@pytest.fixture
def opened(monkeypatch):
    rows = {name: Callback(open=kind) for name, kind in {"w": Watcher, "b": Broken, "s": Strange}.items()}
    monkeypatch.setattr(CALLBACKS, "built_in", rows)
    failures = []
    return lambda *names: (
        Callbacks({name: {} for name in names}, RUN, on_failure=lambda *what: failures.append(what)),
        failures,
    )


def test_what_a_callback_asks_for_is_taken_once(opened):
    callbacks, _ = opened("w")
    callbacks.on_step(1, {"train/loss": 3.0})
    assert callbacks.take(Action.save) is None
    callbacks.on_step(2, {"train/loss": 2.0})
    callbacks.on_evaluation(2, {"evaluation/loss": 2.0})
    assert [callbacks.take(Action.save), callbacks.take(Action.save)] == ["w", None]
    assert callbacks.take(Action.finish) == "w"


@pytest.mark.parametrize(("name", "words"), [("b", "ZeroDivisionError: no good"), ("s", "answered 'stop'; expected")])
def test_a_callback_that_fails_is_off_and_named_once(opened, name, words):
    callbacks, failures = opened("w", name)
    for step in (1, 2):
        callbacks.on_step(step, {"train/loss": 1.0})
    assert [each[0] for each in failures] == [name]
    assert words in failures[0][1]
    assert callbacks.take(Action.save) == "w", "the others go on"


def test_a_job_names_installed_callbacks_only(tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").touch()
    job = {"model": "a/b", "data": {"train": "rows.jsonl"}, "batch": 1, "callbacks": {"enough": 1.5}}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match="there is no such callback"):
        load_job(job)


def test_a_row_without_a_function_is_refused():
    with pytest.raises(TypeError, match="open is no function"):
        Callback(open=None)
