"""The keys of `gangline top`, on textual's terminal of tests."""

import asyncio
import threading
from dataclasses import replace

import pytest

from gangline.report.dashboard import WatchedRun, WatchedState, text_of
from gangline.runs.registry import RunRecord
from gangline.runs.state import ProcessId, RunState

pytest.importorskip("textual", reason="textual is not installed: pip install 'gangline[top]'")

from textual.widgets import Static

from gangline.report.dashboard_app import DashboardActions, DashboardApp, ScreenLines, TextScreen


class Desk:
    """What the keys were told to do."""

    def __init__(self):
        self.stopped = threading.Event()
        self.saves = 0
        self.looks = 0
        state = RunState(name="tiny", phase="running", supervisor=ProcessId.current())
        self.run = WatchedRun(record=RunRecord(id="calm-otter-7", state=state))
        ranks = [{"rank": rank, "host": "[bold]pc1", "micro_batches": 1} for rank in (0, 1)]
        self.run.history.add({"kind": "step", "step": 1, "steps": 9, "loss": 3.0, "step_s": 1.0, "ranks": ranks})
        actions = DashboardActions(log=self.log, stack=self.log, save=self.save, stop=self.stop, runs=self.runs)
        self.app = DashboardApp(self.state(), self.look, actions=actions, interval_s=0.05, plain=False)

    def state(self):
        return WatchedState(now=1_795_000_000.0, hosts=[], run=self.run)

    def look(self):
        self.looks += 1
        self.run = replace(self.run, record=replace(self.run.record, silent=f"look {self.looks}"))
        return self.state()

    def log(self, rank):
        return [f"the log of rank {rank}", "\x1b[31m[red]not markup[/red]"]

    def stop(self):
        self.stopped.set()
        return "calm-otter-7 saves and ends"

    def save(self):
        self.saves += 1
        return "calm-otter-7 saves after its next step"

    def runs(self):
        return ["calm-otter-7", "brave-fox-1", "brave-elk-2"]

    def press(self, *keys, then=lambda _app: None, size=(80, 24)):
        """Press keys, look at the screen; what the application returned."""

        async def drive():
            async with self.app.run_test(size=size) as pilot:
                for key in keys:
                    await pilot.press(*([key] if len(key) == 1 or key in {"enter", "escape"} else key))
                    await self.app.workers.wait_for_complete()
                    await pilot.pause()
                then(self.app)
            return self.app.return_value

        return asyncio.run(drive())


def texts(app):
    lines = [text_of(line) for shown in app.screen.query(ScreenLines) for line in shown.lines]
    return "\n".join([*lines, *(str(each.render()) for each in app.screen.query(Static))])


@pytest.mark.parametrize("width", [20, 40, 80, 200, 300])
def test_what_a_host_wrote_is_shown_as_text_at_every_width(width):
    seen = []
    Desk().press(then=lambda app: seen.append(texts(app)), size=(width, 24))
    assert "calm-otter-7" in seen[0]
    assert "[bold]pc1" in seen[0]


def test_it_looks_again_and_shows_what_is_new():
    desk, seen = Desk(), []

    async def drive():
        async with desk.app.run_test() as pilot:
            while desk.looks < 2:
                await pilot.pause(0.02)
            await desk.app.workers.wait_for_complete()
            await pilot.pause()
            seen.append(texts(desk.app))

    asyncio.run(drive())
    assert "look " in seen[0]


def test_the_log_of_a_rank_is_shown_without_its_control_sequences():
    seen = []

    def then(app):
        assert isinstance(app.screen, TextScreen)
        seen.append(texts(app))

    Desk().press("l", "1", "enter", then=then)
    assert "the log of rank 1" in seen[0]
    assert "[red]not markup[/red]" in seen[0]
    assert "\x1b" not in seen[0]


@pytest.mark.parametrize(("answer", "is_stopped"), [("yes", True), ("no", False), ("", False)])
def test_a_run_is_stopped_only_after_yes(answer, is_stopped):
    desk = Desk()
    desk.press("x", *([answer] if answer else []), "enter")
    assert desk.stopped.is_set() == is_stopped


def test_escape_stops_nothing():
    desk = Desk()
    desk.press("x", "escape")
    assert not desk.stopped.is_set()


def test_a_save_is_ordered_at_once_and_told():
    desk, told = Desk(), []
    desk.press("w", then=lambda app: told.extend(note.message for note in app._notifications))
    assert desk.saves == 1
    assert told == ["calm-otter-7 saves after its next step"]
    assert not desk.stopped.is_set()


def test_another_run_is_chosen_by_its_beginning():
    assert Desk().press("r", "brave-f", "enter") == "brave-fox-1"


def test_a_beginning_that_fits_two_runs_chooses_none():
    assert Desk().press("r", "brave", "enter") is None
