"""The logs of a run for the page: the end of one, and lines with some words in all of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from gangline.control.supervision import RunHandle
from gangline.errors import HostUnreachable, UsageError
from gangline.report.tail import LogFile, Tail, log_files
from gangline.report.text_table import clean, last_shown

KEPT_LINES = 3000
MOST_FOUND = 300
SEARCHED_BYTES = 256 << 20
"""Of one log, in one request; what comes later is not searched, and the page says so."""
LETTERS = 2000
MOST_KEPT = 8


class RunLogs:
    """The logs of one run. Those that were shown last are read on by offset."""

    def __init__(self, run: RunHandle) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._kept: dict[tuple[int, str], _LogEnd] = {}

    def document(self, attempt: int) -> dict[str, Any]:
        """The logs that there are, and the hosts that do not answer."""
        files, silent = self._files(attempt)
        missing = [f"{host}: {clean(error.what)}" for host, error in silent.items()]
        return {"attempt": attempt, "logs": [file.name for file in files], "missing": missing}

    def end(self, attempt: int, name: str, *, after: int | None) -> dict[str, Any]:
        """The last lines of a log; after: only those behind the line of this number. Raises UsageError.

        is_behind: the log is so long that its last lines are not read yet; the next call reads on.
        """
        with self._lock:
            kept = self._kept.get((attempt, name)) or _LogEnd(self._file(attempt, name))
            self._kept[attempt, name] = kept
            while len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
            kept.read()
            first = kept.count - len(kept.lines) + 1
            begin = first if after is None or after > kept.count else max(first, after + 1)
            shown = list(kept.lines)[begin - first :]
            told = {"log": name, "first": begin, "lines": shown, "count": kept.count, "left_out": first - 1}
            return {**told, "is_behind": kept.is_behind}

    def search(self, attempt: int, words: str, *, name: str | None = None) -> dict[str, Any]:
        """Lines that have these words, in upper or lower case, in one log or in all of them."""
        files, silent = self._files(attempt)
        chosen = [file for file in files if name is None or file.name == name]
        found: list[dict[str, Any]] = []
        missing = [f"{host}: {clean(error.what)}" for host, error in silent.items()]
        for file in chosen:
            try:
                tail = Tail(file.transport, file.path)
                found += _found_in(tail, file.name, words.lower(), MOST_FOUND - len(found))
                if tail.is_behind:
                    missing.append(f"{file.name}: nothing after its first {SEARCHED_BYTES >> 20} MiB was searched")
            except HostUnreachable as error:
                missing.append(f"{file.name}: {clean(error.what)}")
        is_all = len(found) < MOST_FOUND and not missing
        return {"words": words, "found": found, "is_all": is_all, "missing": missing}

    def _file(self, attempt: int, name: str) -> LogFile:
        files, _ = self._files(attempt)
        file = next((file for file in files if file.name == name), None)
        if file is None:
            raise UsageError("there is no such log", seen=repr(clean(name)[:80]), fix="choose one of the list")
        return file

    def _files(self, attempt: int) -> tuple[list[LogFile], dict[str, HostUnreachable]]:
        run, found = self._run, []
        silent: dict[str, HostUnreachable] = {}
        for console in (False, True):
            files, away = log_files(run.layout.run_id, run.cluster, run.transports, attempt=attempt, console=console)
            found += files
            silent |= away
        return found, silent


class _LogEnd:
    """The last lines of a log that grows."""

    def __init__(self, file: LogFile) -> None:
        self._tail = Tail(file.transport, file.path)
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.count = 0

    @property
    def is_behind(self) -> bool:
        """Whether the last reading stopped at its limit."""
        return self._tail.is_behind

    def read(self) -> None:
        """Take in what is new; raises HostUnreachable."""
        for line in self._tail.stream(limit_bytes=SEARCHED_BYTES):
            self.lines.append(_shown(line))
            self.count += 1


def _shown(line: str) -> str:
    return clean(last_shown(line))[:LETTERS]


def _found_in(tail: Tail, name: str, words: str, most: int) -> Iterator[dict[str, Any]]:
    if most <= 0:
        return
    for number, line in enumerate(tail.stream(limit_bytes=SEARCHED_BYTES), start=1):
        if words in line.lower():
            yield {"log": name, "line": number, "text": _shown(line)}
            most -= 1
            if most <= 0:
                return
