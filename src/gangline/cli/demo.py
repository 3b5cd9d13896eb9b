"""`gangline demo`: the whole story on this one computer."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gangline.cli.output import Terminal, is_live
from gangline.context import default_home
from gangline.demo.story import DemoContext, run_demo
from gangline.report.follow import Update, View, raise_failure
from gangline.report.live import speaks_braille, summary, terminal_width, watch_run


def command() -> None:
    """Train, stop, resume, evaluate, tune, export and ask a small model: no GPU, no network, about two minutes."""
    home = default_home()
    run_demo(DemoContext(home=home, folder=home / "demo", console=Terminal(), follow=_follow))


def _follow(view: View, *, from_start: bool, on_update: Callable[[Update], None]) -> None:
    watched = watch_run(view, sys.stderr, live=is_live(), from_start=from_start, on_update=on_update)
    lines = summary(view, watched, width=terminal_width(), plain=not speaks_braille(sys.stderr))
    for line in lines[: lines.index("", lines.index("") + 1) if lines.count("") > 1 else None]:
        sys.stderr.write(line + "\n")
    sys.stderr.flush()
    raise_failure(watched.run)
