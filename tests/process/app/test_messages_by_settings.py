"""Who gets messages about a run: its request says, else the user's settings do, but for sweeps and Slurm's queue."""

from __future__ import annotations

import dataclasses

import pytest

from gangline import app
from gangline.control.user_command import CommandRecord, draft
from gangline.errors import SpecError, UsageError
from gangline.runs.job import Job, NotifyJob
from gangline.supervise.sinks import SinkAddresses


@pytest.fixture
def deps(world):
    return dataclasses.replace(world.deps, variables={"HOOK": "https://example.org/hook", "OTHER": "https://else.org"})


@pytest.fixture
def settings(world):
    world.home.mkdir()
    return world.home / "settings.yaml"


def urls(layout):
    there = SinkAddresses.of(layout)
    return None if there is None else there.urls


def test_settings_hold_where_a_job_does_not_say(world, deps, settings):
    settings.write_text("notify: {to: env:HOOK, events: failed}\n")
    layout = app.train(world.start(), console=world, deps=deps)
    assert urls(layout) == ("https://example.org/hook",)
    assert Job.load(layout.job).notify == NotifyJob(to=("env:HOOK",), events=("failed",))


@pytest.mark.parametrize(("word", "told"), [("notify=env:OTHER", ("https://else.org",)), ("notify=none", None)])
def test_a_job_has_the_first_word(world, deps, settings, word, told):
    settings.write_text("notify: env:HOOK\n")
    assert urls(app.train(world.start(word), console=world, deps=deps)) == told


def test_they_hold_for_a_script_of_ones_own_too(world, deps, settings):
    settings.write_text("notify: file:hook\n")
    (settings.parent / "hook").write_text("https://example.org/file\n")
    (settings.parent / "hook").chmod(0o600)
    (world.root / "mine").mkdir()
    (world.root / "mine" / "train.py").write_text("pass\n")
    at = {"home": world.home, "cluster_path": world.start().cluster, "console": world, "deps": deps}
    for notify, told in (
        (None, ("https://example.org/file",)),
        (NotifyJob(to=("env:OTHER",)), ("https://else.org",)),
        (NotifyJob(), None),
    ):
        layout = app.run(draft(("train.py",), folder=world.root / "mine", notify=notify), **at)
        assert urls(layout) == told
        assert CommandRecord.of(layout).notify == (notify or NotifyJob(to=(f"file:{settings.parent / 'hook'}",)))
    with pytest.raises(UsageError, match=r"the variable NOPE is not set"):
        app.run(draft(("train.py",), folder=world.root / "mine", notify=NotifyJob(to=("env:NOPE",))), **at)


@pytest.mark.parametrize("text", ["", "# notify: env:HOOK\n\n"])
def test_settings_that_say_nothing_hinder_nobody(world, deps, settings, text):
    settings.write_text(text)
    assert urls(app.train(world.start(), console=world, deps=deps)) is None


def test_a_run_of_a_sweep_tells_nobody_by_settings(world, deps, settings):
    settings.write_text("notify: env:HOOK\n")
    start = dataclasses.replace(world.start(), trial={"sweep": "calm-otter-7", "number": 1})
    assert urls(app.train(start, console=world, deps=deps)) is None


@pytest.mark.parametrize(
    ("text", "seen"), [("notfy: env:HOOK\n", "notfy"), ("notify: https://a.b/secret\n", "env: and the name")]
)
def test_a_mistake_in_settings_is_told_before_anything_is_written(world, deps, settings, text, seen):
    settings.write_text(text)
    with pytest.raises(SpecError, match=seen) as caught:
        app.train(world.start(), console=world, deps=deps)
    assert "settings.yaml:1" in str(caught.value)
    assert [path.name for path in world.home.iterdir()] == ["settings.yaml"]
