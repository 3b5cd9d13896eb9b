"""A prefork process, with ranks that need no torch: started in tests/process/worker/test_prefork.py.

    python -m tests.process.worker.prefork_process CONTROL FILES MODE

The words of a position are FILES and what the rank does: `end:<code>`, `stay` until a signal ends it, or `hear`: end with 5
once SIGUSR2 has come.
"""

import json
import os
import signal
import sys
from pathlib import Path

from gangline.worker.prefork import PreforkServer, RankPosition, read_position
from gangline.worker.rank_files import hold


def rank(words):
    files, mode = words
    told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    here = Path(files, f"here-{os.environ['RANK']}")
    here.with_suffix(".part").write_text(json.dumps({"pid": os.getpid(), "parent": os.getppid(), **told}))
    here.with_suffix(".part").rename(here)
    kind, _, code = mode.partition(":")
    if kind == "end":
        return int(code)
    if kind == "hear":
        signal.sigwait({signal.SIGUSR2})
        return 5
    while True:
        signal.pause()


def main():
    hold()
    control, files, mode = sys.argv[1:]
    position = read_position(Path(control), 1) or RankPosition(
        number=1, words=(files, mode), rank=int(os.environ["RANK"]), files=Path(files)
    )
    sys.exit(PreforkServer(Path(control), run=rank).serve(position))


if __name__ == "__main__":
    main()
