"""`shared`: whether a folder is the same one on all hosts. The controller has it done in turns, on every host at once.

Request: {"folder": PATH, "probe": ID, "mine": NAME, "do": WORD}
    write    make this host's marker                     {}
    look     the markers that are seen here              {"seen": [NAME, ...]}
    rename   rename this host's marker                   {}
    renamed  wait until a renamed marker is seen here    {"seen": [NAME, ...]}
    remove   remove every marker of this probe           {}
Answers are {"error": TEXT} where the folder does not let us. A marker is .gangline-shared-ID-NAME.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List

from gangline.agent.bounded import within

TURN_S = 8.0
VISIBLE_S = 3.0
"""A file server may show a rename later to who has just looked; much later, and a checkpoint seems not to be there."""
NAME = re.compile(r"[A-Za-z0-9]{1,64}")
RENAMED = ".renamed"


def main(_argv: List[str]) -> int:
    """The verb."""
    request = json.load(sys.stdin)
    try:
        answer: Dict[str, Any] = within(TURN_S, lambda: TURNS[str(request["do"])](Markers(request)))
    except OSError as error:
        answer = {"error": error.strerror or str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a dead file server may hold a thread


class Markers:
    """The markers of one probe in one folder; raises ValueError for names that could lead elsewhere."""

    def __init__(self, request: Dict[str, Any]) -> None:
        probe, mine = str(request["probe"]), str(request["mine"])
        if not NAME.fullmatch(probe) or not NAME.fullmatch(mine):
            raise ValueError("names of markers are letters and digits")
        self.folder = Path(str(request["folder"])).expanduser()
        self.start = f".gangline-shared-{probe}-"
        self.own = self.folder / (self.start + mine)

    def names(self) -> List[str]:
        """The hosts whose markers are seen, renamed or not, as they are written now; raises OSError."""
        found = [path.name for path in self.folder.iterdir()]
        return sorted(name[len(self.start) :] for name in found if name.startswith(self.start))


def _write(markers: Markers) -> Dict[str, Any]:
    descriptor = os.open(markers.own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(b"made by `gangline check`, and removed by it\n")
        stream.flush()
        os.fsync(stream.fileno())
    return {}


def _look(markers: Markers) -> Dict[str, Any]:
    return {"seen": [name for name in markers.names() if not name.endswith(RENAMED)]}


def _rename(markers: Markers) -> Dict[str, Any]:
    markers.own.rename(markers.own.with_name(markers.own.name + RENAMED))
    return {}


def _renamed(markers: Markers) -> Dict[str, Any]:
    deadline = time.monotonic() + VISIBLE_S
    while True:
        seen = [name[: -len(RENAMED)] for name in markers.names() if name.endswith(RENAMED)]
        if seen or time.monotonic() > deadline:
            return {"seen": seen}
        time.sleep(0.1)


def _remove(markers: Markers) -> Dict[str, Any]:
    for name in markers.names():
        try:
            markers.own.with_name(markers.start + name).unlink()
        except FileNotFoundError:  # another host was faster
            continue
    return {}


TURNS: Dict[str, Callable[[Markers], Dict[str, Any]]] = {
    "write": _write,
    "look": _look,
    "rename": _rename,
    "renamed": _renamed,
    "remove": _remove,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
