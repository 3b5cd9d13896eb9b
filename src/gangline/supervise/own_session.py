"""A process that goes on by itself: in a session of its own, with its output in a file."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def fork_again(go_on: Callable[[], NoReturn]) -> NoReturn:
    """In a fresh child: fork twice; a tool that ends a command and all its descendants must not find what goes on."""
    code = 1
    try:
        os.setsid()
        if os.fork() == 0:
            go_on()
        code = 0
    finally:
        os._exit(code)


def write_to(path: Path) -> None:
    """Write to this file from now on, read nothing, and outlive the terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
