"""The process of a tracker: reads metrics.jsonl of a run and delivers its figures.

Rank 0 starts it (`exporters.Exporters`), and does not wait for it: metrics.jsonl is written anyway, so it is the queue.
`trackers/<name>.json` in the folder of the run says up to which byte the tracker has it; where a service was away, or
a process was killed, the next one goes on from there, also in a later attempt.

Its one word is a file with the exporter, its options and the run. stdin: a line of JSON at the end of the attempt, with
the seconds that are left and whether it has failed. stdout: a line of JSON for each change, `{"error": TEXT}`, with ""
once it has what it had missed. What libraries print goes to stderr, which is `trackers/<name>.log`. The process ends
with rank 0, whatever becomes of that.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from gangline.exporters import EXPORTERS, HASTE_S, LATER, ExportedRun, Point, Tracker, named_figures

PIECE_BYTES = 1 << 20
"""Of metrics.jsonl that is delivered at a time: all that is kept in memory."""
LOOK_S = 1.0
PAUSES_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Between tries after an error; the last one from then on."""


class Sender:
    """Delivers the lines of metrics.jsonl to a tracker, in a thread of its own."""

    def __init__(self, opens: Callable[[], Tracker], metrics: Path, note: Path, *, tell: Callable[[str], None]) -> None:
        """tell: called with each trouble in words, and with "" once what was missed has been delivered."""
        self._opens = opens
        self._metrics = metrics
        self._note = note
        self._tell = tell
        self._tracker: Tracker | None = None
        self._done = _noted(note)
        self._ending = threading.Event()
        self._has_failed = False
        self._lock = threading.Lock()
        self._busy_since: float | None = None
        self._is_told = False
        self.thread = threading.Thread(target=self._run, name="sender", daemon=True)

    @property
    def in_trouble(self) -> bool:
        """Whether a trouble was told that is not over."""
        return self._is_told

    @property
    def left(self) -> int:
        """Bytes of metrics.jsonl that are not delivered."""
        return max(0, _size(self._metrics) - self._done)

    def end(self, *, failed: bool) -> None:
        """Deliver what is there now, and close the tracker. failed: the attempt has."""
        self._has_failed = failed
        self._ending.set()

    def look(self, silent_s: float) -> None:
        """Tell of a call that does not come back within so many seconds."""
        since = self._busy_since
        if since is not None and time.monotonic() - since > silent_s:
            self._trouble(f"no answer for {silent_s:.0f} s; it gets what it has missed once it answers")

    def _run(self) -> None:
        failures = 0
        while True:
            is_last = self._ending.is_set()
            try:
                more = self._deliver()
                failures = 0
                if not more and is_last:
                    self._close()
                    return
                if not more:
                    self._well()
                    self._ending.wait(LOOK_S)
            except Exception as error:  # noqa: BLE001 - of somebody else's code: told, and tried again
                self._tracker, self._busy_since = None, None
                self._trouble(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
                if is_last:
                    return
                self._ending.wait(PAUSES_S[min(failures, len(PAUSES_S) - 1)])
                failures += 1

    def _deliver(self) -> bool:
        """Deliver the next piece; whether there was one."""
        if self._tracker is None:
            with self._watched():
                self._tracker = self._opens()
        if _size(self._metrics) < self._done:
            self._done = 0  # another file than the one that was read
        points, end = read_points(self._metrics, self._done)
        if end == self._done:
            return False
        if points:
            with self._watched():
                self._tracker.send(points)
        self._done = end
        with contextlib.suppress(OSError):  # a full disk: after a kill some points come twice
            fresh = self._note.with_name(f".{self._note.name}.tmp")
            fresh.write_text(json.dumps({"bytes": end}) + "\n")
            fresh.replace(self._note)
        return True

    def _close(self) -> None:
        if self._tracker is not None:
            with self._watched():
                self._tracker.close(failed=self._has_failed)
        self._well()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        self._busy_since = time.monotonic()
        yield
        self._busy_since = None

    def _trouble(self, words: str) -> None:
        with self._lock:
            if not self._is_told:
                self._is_told = True
                self._tell(words)

    def _well(self) -> None:
        with self._lock:
            if self._is_told:
                self._is_told = False
                self._tell("")


def read_points(metrics: Path, start: int) -> tuple[list[Point], int]:
    """The points of the whole lines from a byte of metrics.jsonl on, of at most PIECE_BYTES; and where they end.

    A line that is no JSON, as a full disk leaves one, has no points. A line longer than that is skipped, too.
    """
    try:
        with metrics.open("rb") as stream:
            stream.seek(start)
            piece = stream.read(PIECE_BYTES)
    except FileNotFoundError:
        return [], start
    whole = piece[: piece.rfind(b"\n") + 1]
    if not whole and len(piece) == PIECE_BYTES:
        return [], start + len(piece)
    return [point for line in whole.splitlines() if (point := _point(line)) is not None], start + len(whole)


def _point(text: bytes) -> Point | None:
    try:
        line = json.loads(text)
        values = named_figures(line)
        time_of = datetime.fromisoformat(line["time"].replace("Z", "+00:00"))
        return Point(step=int(line["step"]), time=time_of, values=values) if values else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _noted(note: Path) -> int:
    try:
        return int(json.loads(note.read_text())["bytes"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def main() -> NoReturn:
    """Deliver until rank 0 says `close` or is gone."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # they are for the rank, which says `close`
        signal.signal(signum, signal.SIG_IGN)
    os.nice(10)
    words = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    parent = os.getppid()
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))

    def tell(error: str) -> None:
        with contextlib.suppress(OSError):
            words.write(json.dumps({"error": error}) + "\n")

    run = order["run"]
    told = ExportedRun(**{**run, "folder": Path(run["folder"]), "metrics": Path(run["metrics"])})
    assert told.metrics is not None
    note = told.folder / "trackers" / f"{order['name']}.json"
    with _alone(note):
        sender = Sender(_opener(order["name"], order["options"], told), told.metrics, note, tell=tell)
        sender.thread.start()
        while not _is_over(parent) and sender.thread.is_alive():
            sender.look(order["silent_s"])
        close_s, failed = _last_word()
        sender.end(failed=failed)
        sender.thread.join(min(close_s, order["haste_s"]) if sender.in_trouble else close_s)
        if sender.left:
            tell(f"the last {sender.left} bytes of metrics.jsonl did not reach it; {LATER}")
        elif sender.thread.is_alive():
            tell("it was given all figures, and did not close in time: the last of them may be lost")
    sys.stderr.flush()
    os._exit(0)  # whatever threads a library has left


def _opener(name: str, options: Mapping[str, Any], run: ExportedRun) -> Callable[[], Tracker]:
    def opens() -> Tracker:
        exporter = EXPORTERS[name]
        tracker: Tracker = exporter.open(exporter.options(**options), run)
        return tracker

    return opens


def _last_word(source: int = 0) -> tuple[float, bool]:
    """What rank 0 says at the end: the seconds that are left, and whether the attempt has failed.

    It has, where rank 0 is gone without a word; source may stay open then: a child of rank 0 can have its other end.
    """
    try:
        ready, _, _ = select.select([source], [], [], 0)
        word = json.loads(os.read(source, 1 << 12)) if ready else {}
        return float(word["close_s"]), bool(word["failed"])
    except (ValueError, KeyError, TypeError, OSError):
        return HASTE_S, True


@contextlib.contextmanager
def _alone(note: Path) -> Iterator[None]:
    """The process of an attempt before may still end."""
    with note.with_suffix(".lock").open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _is_over(parent: int) -> bool:
    """Wait a moment for the word of rank 0, which may be gone without one."""
    ready, _, _ = select.select([0], [], [], LOOK_S)
    return bool(ready) or os.getppid() != parent


if __name__ == "__main__":
    main()
