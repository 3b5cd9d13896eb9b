"""`disk`: whether files can really be written, synced and renamed in folders. It leaves nothing behind.

Request: {"folders": [PATH, ...]}. Answer: {"folders": {PATH: {"seconds"} or {"error"}}}
A folder that is not there yet is tried in the one that it would be in.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List

from gangline.agent.bounded import within
from gangline.agent.storage import nearest

FOLDER_S = 8.0
SAMPLE_BYTES = 1 << 20


def main(_argv: List[str]) -> int:
    """The verb."""
    paths = [str(path) for path in json.load(sys.stdin)["folders"]][:16]
    with ThreadPoolExecutor(max_workers=16) as pool:
        answers = dict(zip(paths, pool.map(_bounded, paths)))
    sys.stdout.write(json.dumps({"folders": answers}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a dead file server may hold a thread


def _bounded(path: str) -> Dict[str, Any]:
    try:
        return {"seconds": within(FOLDER_S, lambda: write_and_remove(path))}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def write_and_remove(path: str) -> float:
    """Seconds to write, sync, rename and remove a file of 1 MiB; raises OSError."""
    folder = nearest(os.path.realpath(path))
    name = f"{folder}/.gangline-{os.getpid()}-{os.urandom(6).hex()}"
    begun = time.monotonic()
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(b"\0" * SAMPLE_BYTES)
            stream.flush()
            os.fsync(stream.fileno())
        os.rename(name, name + ".renamed")  # noqa: PTH104 - beside os.open
        name += ".renamed"
    finally:
        os.unlink(name)  # noqa: PTH108 - beside os.open
    return time.monotonic() - begun


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
