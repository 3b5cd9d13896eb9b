"""The terminal of `gangline top`, with textual: shows the lines of report/dashboard.py, and takes keys.

Imported only where there is a terminal and textual is installed (gangline[top]).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, Static

from gangline.errors import GanglineError
from gangline.report.dashboard import Look, ShownLine, ShownStyle, WatchedState, ranks_of, screen
from gangline.report.text_table import clean

STYLES: dict[ShownStyle, Style] = {
    "": Style(),
    "title": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow"),
    "bad": Style(color="red", bold=True),
}
"""The terminal's own 16 colours; textual takes them off where NO_COLOR is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardActions:
    """What the keys do. log, stack: the lines to show for a rank."""

    log: Callable[[int], list[str]]
    stack: Callable[[int], list[str]]
    save: Callable[[], str]
    """Order the run to save and go on; what to say about it."""
    stop: Callable[[], str]
    """Order the run to save and end; what to say about it."""
    runs: Callable[[], list[str]]
    """Ids of all runs, the newest first."""


class DashboardApp(App[str]):
    """The whole terminal. Returns the id of another run that was chosen; None: the user left.

    first: what to show at once. look: reads everything anew, for some seconds at most. actions: None for a cluster.
    """

    CSS = """
    Screen { layers: base; }
    AskScreen, TextScreen { align: center middle; }
    .box { width: 90%; height: auto; max-height: 90%; border: round; padding: 0 1; background: $surface; }
    """
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        Binding("q", "quit", "quit"),
        Binding("l", "log", "log"),
        Binding("s", "stack", "stack"),
        Binding("w", "save", "save"),
        Binding("x", "stop", "stop"),
        Binding("r", "runs", "runs"),
    ]

    def __init__(
        self,
        first: WatchedState,
        look: Callable[[], WatchedState],
        *,
        actions: DashboardActions | None,
        interval_s: float,
        plain: bool,
    ) -> None:
        super().__init__(ansi_color=True)
        self._seen = first
        self._look = look
        self._actions = actions
        self._interval_s = interval_s
        self._plain = plain
        self._looking = False

    def compose(self) -> ComposeResult:
        """Lines that scroll, above the keys."""
        yield ScreenLines()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Show what is known, and begin to look."""
        self._show()
        self.set_interval(self._interval_s, self._begin_look)

    def on_resize(self) -> None:
        """Lines have the width of the terminal."""
        self._show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A cluster without a run has no ranks to ask and nothing to stop."""
        del parameters
        return self._actions is not None or action not in {"log", "stack", "save", "stop", "runs"}

    def _begin_look(self) -> None:
        """Look in a thread: hosts may take seconds, and keys must not wait for them."""
        if not self._looking:
            self._looking = True
            self.run_worker(self._look_once, thread=True, exit_on_error=False)

    def _look_once(self) -> None:
        try:
            seen = self._look()
        except GanglineError as error:
            self.call_from_thread(self._leave, error)
            return
        finally:
            self._looking = False
        self.call_from_thread(self._take, seen)

    def _leave(self, error: GanglineError) -> None:
        self.failure = error
        self.exit(None)

    failure: GanglineError | None = None
    """What ended the looking, if anything did: to be raised once the terminal is as before."""

    def _take(self, seen: WatchedState) -> None:
        self._seen = seen
        self._show()

    def _show(self) -> None:
        look = Look(width=max(1, self.size.width - 2), plain=self._plain)
        for shown in self.screen_stack[0].query(ScreenLines):
            shown.show(screen(self._seen, look))

    # Keys.

    def action_log(self) -> None:
        """Show the end of a rank's log."""
        if self._actions is not None:
            self._of_rank("log", self._actions.log)

    def action_stack(self) -> None:
        """Show where a rank stands."""
        if self._actions is not None:
            self._of_rank("stack", self._actions.stack)

    def action_save(self) -> None:
        """Order the run to save after its next step; it goes on, so nothing is asked."""
        if self._actions is not None:
            self._in_thread(self._actions.save, lambda said: self.notify(said, markup=False))

    def action_stop(self) -> None:
        """Order the run to stop, once that was confirmed."""
        if self._actions is None or self._seen.run is None:
            return
        question = f"Save and end {self._seen.run.record.id}? Type yes"
        self.push_screen(AskScreen(question), self._stop)

    def action_runs(self) -> None:
        """Choose another run."""
        if self._actions is not None:
            known = ", ".join(self._actions.runs()[:12])
            self.push_screen(AskScreen(f"Which run? {known}"), self._go_to)

    def _go_to(self, answer: str | None) -> None:
        if not answer or self._actions is None:
            return
        fitting = [name for name in self._actions.runs() if name.startswith(answer)]
        if len(fitting) == 1 or answer in fitting:
            self.exit(answer if answer in fitting else fitting[0])
        else:
            self.notify(f"{len(fitting)} runs begin with {clean(answer)}", markup=False)

    def _stop(self, answer: str | None) -> None:
        if answer == "yes" and self._actions is not None:
            stop = self._actions.stop
            self._in_thread(stop, lambda said: self.notify(said, markup=False))

    def _of_rank(self, name: str, ask: Callable[[int], list[str]]) -> None:
        ranks = [each.rank for each in ranks_of(self._seen.run)] if self._seen.run is not None else []
        if len(ranks) == 1:
            self._show_text(ask, ranks[0])
            return
        question = f"The {name} of which rank? {_range(ranks)}"
        self.push_screen(AskScreen(question), lambda answer: self._chosen(ask, answer))

    def _chosen(self, ask: Callable[[int], list[str]], answer: str | None) -> None:
        if answer and answer.isdecimal():
            self._show_text(ask, int(answer))

    def _show_text(self, ask: Callable[[int], list[str]], rank: int) -> None:
        self._in_thread(lambda: ask(rank), lambda lines: self.push_screen(TextScreen(lines)))

    def _in_thread(self, work: Callable[[], Any], show: Callable[[Any], Any]) -> None:
        def run() -> None:
            try:
                found = work()
            except GanglineError as error:
                self.call_from_thread(self.notify, clean(str(error)), severity="error", markup=False)
                return
            self.call_from_thread(show, found)

        self.run_worker(run, thread=True, exit_on_error=False)


class ScreenLines(ScrollView):
    """Lines of which only those are drawn that are in sight: 50 hosts with 8 cards each have some 500."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[ShownLine] = []

    def show(self, lines: list[ShownLine]) -> None:
        """Draw these instead."""
        self.lines = lines
        self.virtual_size = Size(max(1, self.app.size.width - 2), len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line in sight; the text of hosts is no markup."""
        place = y + self.scroll_offset.y
        line = self.lines[place] if place < len(self.lines) else []
        strip = Strip([Segment(text, STYLES[style]) for text, style in line])
        return strip.adjust_cell_length(self.size.width, Style())


def _range(ranks: Sequence[int]) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if ranks else "none has been seen yet"


class AskScreen(ModalScreen[str]):
    """A question with one line to answer; None: the user pressed Escape."""

    BINDINGS: ClassVar[list[Any]] = [Binding("escape", "dismiss(None)", "back")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        """The question above the line."""
        with VerticalScroll(classes="box"):
            yield Static(self._question, markup=False)
            yield Input()

    def on_mount(self) -> None:
        """The user types at once."""
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Give the answer."""
        self.dismiss(event.value.strip())


class TextScreen(ModalScreen[None]):
    """Lines to read and scroll, the last of them first on the screen."""

    BINDINGS: ClassVar[list[Any]] = [Binding("escape,q", "dismiss(None)", "back")]

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        """The lines as they are: no markup, no control sequences."""
        with VerticalScroll(classes="box"):
            yield Static("\n".join(map(clean, self._lines)), markup=False)
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """The end is what one wants to see."""
        box = self.query_one(VerticalScroll)
        box.focus()
        box.scroll_end(animate=False)
