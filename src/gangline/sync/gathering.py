"""How far pip is with the packages for a kind of host, for people."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gangline.sync.tell import Tell, shown
from gangline.units import format_bytes

BEAT_S = 1.0


class Gathering:
    """How far pip is, told every second: one package may take minutes, in which it says nothing."""

    def __init__(self, kind: str, folder: Path, *, num_packages: int, tell: Tell) -> None:
        self._kind = kind
        self._folder = folder
        self._num_packages = num_packages
        self._tell = tell
        self._seen: list[str] = []
        self._begun_s = time.monotonic()

    def hear(self, line: str) -> None:
        """Take the next line of pip."""
        if found := re.match(r"\s*(?:Collecting|Processing|Requirement already satisfied:) ([A-Za-z0-9._/+-]+)", line):
            name = found[1].rpartition("/")[2].partition("-")[0] if "/" in found[1] else found[1]
            if name not in self._seen:
                self._seen.append(name)
            self._tick()

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Tell it until the end."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(BEAT_S):
                self._tick()

        self._tick()
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _tick(self) -> None:
        number = min(len(self._seen), self._num_packages)
        last = f"{number} of {self._num_packages}, {shown(self._seen[-1])}" if self._seen else "asking pip"
        # pip downloads into folders of their own; a file beside them is the copy for its cache
        size = sum(size_of(path) for path in self._folder.iterdir() if path.is_dir())
        loaded = f", {format_bytes(size)}" if size else ""
        self._tell.tick(f"packages for {self._kind}: {last}{loaded}, {time.monotonic() - self._begun_s:.0f} s")


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder that others may be writing to."""
    total = 0
    for parent, _folders, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it has just been taken away
                total += (Path(parent) / name).stat().st_size
    return total
