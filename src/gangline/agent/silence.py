"""How long each rank of the user's own program has printed nothing: its log is all that such a program shows of itself.

Both streams of a rank, and those of all that it starts, go to rank-<r>.log (gangline.agent.rank_start). A change of its
size is output.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, Optional

from gangline.agent.ranks import Ranks, tail

LINE_AFTER_S = 5.0
"""The last line of a log is read once nothing has come for so long: not after every line."""
LINE_BYTES = 4096
LINE_LETTERS = 200


class Silence:
    """The logs of this host's ranks, to be looked at about once a second.

    Ranks of our own worker tell more themselves: of them nothing is seen here.
    """

    def __init__(self, request: Dict[str, Any], ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_wanted = request.get("program") == "command"
        self._ranks = ranks
        self._clock = clock
        self._logs: Dict[int, "_Log"] = {}
        self.seen: Dict[str, Dict[str, Any]] = {}
        """rank -> whole seconds without output and since it was first seen, whether it has printed, its last line."""

    def look(self) -> None:
        """Look once."""
        if not self._is_wanted:
            return
        now = self._clock()
        for rank in self._ranks.processes:
            log = self._logs.setdefault(rank, _Log(self._ranks.folder / "rank-{}.log".format(rank), now))
            log.look(now)
        self.seen = {str(rank): self._logs[rank].row(now) for rank in sorted(self._logs)}


class _Log:
    """The log of one rank, first seen at `now`."""

    def __init__(self, path: Path, now: float) -> None:
        self._path = path
        self._since = self._changed_at = now
        self._size = 0
        self._line: Optional[str] = ""
        """The last line; None: not read since it changed."""

    def look(self, now: float) -> None:
        """See whether it has grown."""
        size = self._size_now()
        if size != self._size:
            self._size, self._changed_at, self._line = size, now, None
        if self._line is None and now - self._changed_at >= LINE_AFTER_S:
            self._line = self._last_line()

    def row(self, now: float) -> Dict[str, Any]:
        """What there is to say of it; whole seconds."""
        return {
            "silent_s": int(now - self._changed_at),
            "age_s": int(now - self._since),
            "printed": self._size > 0,
            "line": self._line or "",
        }

    def _size_now(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:  # it was taken away: that is no output
            return self._size

    def _last_line(self) -> str:
        try:
            lines = tail(self._path, num_bytes=LINE_BYTES)
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:LINE_LETTERS]
